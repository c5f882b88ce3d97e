"""The memory that all calls of a group share: symmetric arena, scratch, signal pad.

It grows only from facts that are equal on all ranks, to what the largest plan so far needs, and
is then reused by every call: the barrier that opens each call keeps calls apart. Memory that a
captured CUDA graph points into is kept as long as the workspace; other memory is freed when it is
outgrown, after all ranks have left it.
"""

import atexit
import os
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.group.islands import islands_of, name_of_mine
from counterpoint.group.notice_board import Awaited, NoticeBoard, leave_first, refuse_first
from counterpoint.group.ranks import group_of, timeout_of
from counterpoint.group.store import mark_told
from counterpoint.group.symmetric import SymmetricMemory, allocate
from counterpoint.plan.bind import Box
from counterpoint.plan.extents import extent
from counterpoint.plan.steps import OWN_PROTOCOL, Buffer, Plan
from counterpoint.problem import Problem

NUM_SLOTS = 4096  # words of a signal pad
MAX_CODE = 1024  # compiled programs that a workspace remembers
MAX_KNOWN = 8 * MAX_CODE  # ways in which tensors of their calls lie
ALIGN_BYTES = 256
GRANULE_BYTES = 2 << 20
BOUND = "COUNTERPOINT_TIMEOUT_S"
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1e-3, 10**6  # more than a week is none

T = TypeVar("T")
SETUP = Awaited("counterpoint", "come to set up the group's memory", "workspace")

# the user's tensors by buffer name, each 2-D; of a plan of experts, w is [experts, K, N]
Operands = dict[str, Tensor]
Place = Callable[[Operands], Tensor]  # a box as a tensor, when the operands are known
Action = Callable[[Operands], object]  # a step; what it returns is nothing's


def bound_of(group: dist.ProcessGroup, device: torch.device) -> tuple[float, str]:
    """Bound in seconds of every wait for a rank that is alive, and whose it is, in words.

    COUNTERPOINT_TIMEOUT_S where it is set, else the timeout of the process group.

    Raises:
        InputError: the variable is not a number above 0, or more than MOST_TIMEOUT_S.
    """
    text = os.environ.get(BOUND)
    if text is None:
        return timeout_of(group, device), "the timeout of its process group"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_TIMEOUT_S <= seconds <= MOST_TIMEOUT_S:
        want = f"seconds from {LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S}"
        raise InputError("environment", BOUND, want=want, got=text)
    return seconds, BOUND


class Workspace:
    """What one group has on one device. Collective to make.

    `fault` is set once a peer has not answered: the group is unusable from then on, and every
    later call raises it. `code` caches what has been compiled for this memory; each rank may forget
    some of it. `agreed` is what ranks have found together: equal on all of them, as only what all
    take part in adds to it, and kept as long as the workspace.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if dist.get_backend(group) == "fake":
            what = "counterpoint: torch's fake process group has no other ranks to call"
            raise UnsupportedError(f"{what}; take fake tensors with it, for shapes alone")
        self._group = weakref.ref(group)  # it ends when torch destroys it, and with it this
        self.group_id = id(group)
        self.device = device
        self.rank = dist.get_rank(group)
        self._pads: SymmetricMemory | None = None
        self.arena: SymmetricMemory | None = None
        self.scratch: Tensor | None = None
        self.captured = False
        self.epoch = 0  # of CPU ranks; on a GPU it lives in device memory
        self.lanes: Any = None  # what a GPU's executor keeps here: streams, epoch, fault words
        self.fused: Any = None  # what kernels that talk to their peers keep here
        self.wire: Any = None  # what goes between islands, see wire.py
        self.code: dict[Hashable, Any] = {}
        # of all that was compiled, and its spec: what calls are counted by, see ops/plans.py
        self.plans: dict[tuple[Problem, str], Any] = {}
        self.symmetric: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()  # all that there is
        self.known: dict[Hashable, Any] = {}  # of `code`, by what an eager call sees at once
        self.agreed: dict[Hashable, Any] = {}
        self.knowledge: Any = None  # what the choosers keep here: equal on all ranks
        self.kernels_refused: str | None = None  # see device_limits.refused_in
        self._kept: list[object] = []
        self.board = NoticeBoard(group, device.type, *bound_of(group, device))
        try:
            self.islands = islands_of(self.gather(name_of_mine()), self.rank)
            self.board.names[:] = [self.islands.named(r) for r in range(self.board.ranks)]
        except BaseException as error:
            self.board.end(error, calls=-1)
            raise

    @property
    def group(self) -> dist.ProcessGroup:
        """Whose memory this is.

        Raises:
            InputError: it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise InputError("counterpoint", "group", want="alive", got="destroyed")
        return group

    @property
    def fault(self) -> CounterpointError | None:
        """What made the group unusable: a new copy each time.

        One that has been raised holds the frames it went through, and so the memory of the group.
        """
        return copy(self.board.fault)

    @property
    def timeout_s(self) -> float:
        """Bound of every wait on a peer."""
        return self.board.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.board.timeout_s = seconds

    def reserve(self, plan: Plan) -> None:
        """Have room for `plan`. Collective and synchronous when memory has to grow.

        Raises:
            InputError: memory has to grow while a graph is being captured.
            PeerTimeoutError: memory has to grow, and a rank did not come to it.
            UnsupportedError: the plan uses more signals than a pad has.
        """
        if plan.num_slots > NUM_SLOTS:
            want = f"has {plan.num_slots} signals, a pad holds {NUM_SLOTS}"
            raise UnsupportedError(f"plan {plan.spec}: {want}")
        if plan.num_slots or self.device.type == "cpu":  # there, each plan has them at hand
            self.open_pads()
        symmetric = _arena_bytes(plan, "symmetric")
        scratch = _arena_bytes(plan, "scratch")
        has_symmetric = self.arena.num_bytes if self.arena else 0
        has_scratch = self.scratch.numel() if self.scratch is not None else 0
        if symmetric <= has_symmetric and scratch <= has_scratch:
            return
        has, needs = has_symmetric + has_scratch, symmetric + scratch
        self.refuse_growth(f"{has} bytes, the plan needs {needs}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.captured:
            self._kept += [self.arena, self.scratch]
            self.captured = False
        self.drop_code()
        if symmetric > has_symmetric:
            self.arena = self.allocate(symmetric)
        if scratch > has_scratch:
            self.scratch = None
            self.scratch = torch.empty(scratch, dtype=torch.uint8, device=self.device)

    def open_pads(self) -> None:
        """Have signal pads. Collective and synchronous at its first call.

        Raises:
            InputError: a graph is being captured.
        """
        if self._pads is None:
            self.refuse_growth("none: this is the group's first call of such a plan")
            self._pads = self.allocate(4 * NUM_SLOTS)

    @property
    def pads(self) -> SymmetricMemory:
        """The signal pads of all ranks: NUM_SLOTS words each."""
        assert self._pads is not None, "reserve() comes before signals"
        return self._pads

    def refuse_growth(self, got: str) -> None:
        """Raise where memory would have to grow while a graph is captured."""
        if self.device.type == "cuda":
            refuse_capture(got)

    def allocate(self, num_bytes: int, wants_all: str = "") -> SymmetricMemory:
        """Symmetric memory of this rank's island; see `symmetric.allocate`.

        Args:
            wants_all: what needs the memory of all ranks, for the error where some are elsewhere.

        Raises:
            UnsupportedError: they are.
            PeerTimeoutError: a rank did not come to it.
        """
        if wants_all and self.islands.number > 1:
            what = f"memory that all ranks reach, and they are on {self.islands.number} islands"
            raise UnsupportedError(f"{wants_all}: needs {what}: see `counterpoint doctor --group`")
        made = allocate(num_bytes, self.group, self.device, self.gather, self.islands.mine)
        self.symmetric.add(made)
        return made

    def gather(self, value: T, awaited: Awaited = SETUP) -> list[T]:
        """What all ranks say, in rank order: no rank returns before each has come to it.

        Args:
            value: picklable.
            awaited: for errors.

        Raises:
            PeerTimeoutError: a rank did not come.
            InputError: a rank has refused the call, or made another one.
        """
        return self.board.gather(value, awaited)

    def remember(self, key: Hashable, code: Any) -> None:
        """Keep a compiled program; the oldest is forgotten when there are many."""
        if len(self.code) >= MAX_CODE:
            self.code.pop(next(iter(self.code)))
            self.known.clear()
        self.code[key] = code

    def take(self, plan: Plan, taken: T) -> T:
        """Keep what calls of a plan are counted by; the oldest is forgotten when there are many."""
        if len(self.plans) >= MAX_CODE:
            self.plans.pop(next(iter(self.plans)))
        self.plans[plan.problem, plan.spec] = taken
        return taken

    def know(self, key: Hashable, ready: Any) -> None:
        """Keep what an eager call finds by how its tensors lie; all is forgotten if it is much."""
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known[key] = ready

    def keep(self, *held: object) -> None:
        """Hold on, as long as the workspace lives, to what a graph in capture points into."""
        self._kept += [new for new in held if not any(new is old for old in self._kept)]

    def release(self) -> None:
        """Let go of what points back at it: without this, memory waits for the collector."""
        self.drop_code()
        self.agreed.clear()
        self._kept.clear()
        if self.lanes is not None:
            self.lanes.watchdog.end()
        self.lanes = self.fused = self.wire = None
        self.board.leave()

    def drop_code(self) -> None:
        """Forget what has been compiled: it points into memory that is about to go."""
        self.code.clear()
        self.known.clear()
        if self.lanes is not None:
            self.lanes.replays.clear()

    def num_bytes(self) -> tuple[int, int]:
        """(symmetric, scratch) bytes of this rank now, the signal pad left out."""
        arena = self.arena.num_bytes if self.arena else 0
        arena += self.fused.num_bytes if self.fused else 0
        return arena, self.scratch.numel() if self.scratch is not None else 0

    def check(self) -> None:
        """Raise the fault of this group, if it has one.

        Raises:
            PeerTimeoutError: a peer did not answer in an earlier call.
            InputError: an earlier call has dropped rows, by counts on the device.
        """
        self.board.check()


class Places:
    """Where the boxes of one plan lie: in the workspace, or in the operands of a call.

    Args:
        rank: this one among those of the plan, where these are one island of several.
    """

    def __init__(self, workspace: Workspace, plan: Plan, rank: int | None = None) -> None:
        self.workspace = workspace
        self.plan = plan
        self.rank = workspace.rank if rank is None else rank
        self.offsets: dict[str, int] = {}
        self.constants: Operands = {}  # boxes that `name` has given names
        used = {"symmetric": 0, "scratch": 0}
        for buffer in plan.buffers:
            if buffer.space in used:
                self.offsets[buffer.name] = used[buffer.space]
                used[buffer.space] += _aligned(plan.buffer_bytes(buffer))

    def fixed(self, box: Box) -> Tensor | None:
        """The tensor of a box in the workspace; None for a box of an operand."""
        buffer = self.plan.buffer(box.buffer)
        if buffer.space in ("input", "output"):
            return None
        assert buffer.space not in OWN_PROTOCOL, "see run/fused.py"
        if buffer.space == "scratch":
            memory = self.workspace.scratch
        else:
            arena = self.workspace.arena
            assert arena is not None, "reserve() comes before places"
            memory = arena.peer(box.rank)
        assert memory is not None
        shape = self._shape(buffer, box.rank)
        dtype = getattr(torch, buffer.dtype)
        start = self.offsets[buffer.name]
        num_bytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        whole = memory[start : start + num_bytes].view(dtype)
        if self.plan.problem.tables:  # columns of one rank's tables, without gaps
            cols = box.c1 - box.c0
            return whole[box.r0 * cols : box.r1 * cols].view(box.r1 - box.r0, cols)
        return whole.view(shape)[box.slot, box.r0 : box.r1, box.c0 : box.c1]

    def name(self, box: Box) -> str | None:
        """Under which name the operands of a call have the box, if they do.

        That is a whole operand, or a box of the workspace, which then is one of `constants`.
        """
        fixed = self.fixed(box)
        if fixed is not None:
            name = str(tuple(box))
            self.constants[name] = fixed
            return name
        whole = box.shape == self._shape(self.plan.buffer(box.buffer), box.rank)[1:]
        return box.buffer if whole and not self._stacked(box.buffer) else None

    def of(self, box: Box) -> Place:
        """The box as a function of the operands."""
        fixed = self.fixed(box)
        name, rows, cols = box.buffer, slice(box.r0, box.r1), slice(box.c0, box.c1)
        if fixed is not None:
            if name != "rows":
                return lambda _: fixed
            # of experts: a call that keeps the rows that come passes where to put them
            return lambda operands: operands[name][rows, cols] if name in operands else fixed
        if self._stacked(name):
            expert, start = divmod(box.r0, self.plan.problem.k)
            inside = slice(start, start + box.r1 - box.r0)
            return lambda operands: operands[name][expert, inside, cols]
        if box.shape == self._shape(self.plan.buffer(name), box.rank)[1:]:
            return lambda operands: operands[name]
        return lambda operands: operands[name][rows, cols]

    def several(self, first: Box, count: int) -> Place:
        """`count` boxes like `first`, one behind the other, as [count, rows, columns]."""
        if self._stacked(first.buffer):
            expert = first.r0 // self.plan.problem.k
            cols = slice(first.c0, first.c1)
            return lambda operands: operands[first.buffer][expert : expert + count, :, cols]
        rows = first.r1 - first.r0
        place = self.of(first._replace(r1=first.r0 + count * rows))
        return lambda operands: place(operands).view(count, rows, first.c1 - first.c0)

    def apart(self, first: Box, count: int, step: int) -> Place:
        """`count` boxes like `first`, each `step` rows behind the one before, as `several`."""
        rows, cols = first.shape
        place = self.of(first._replace(r1=first.r1 + (count - 1) * step))

        def boxes(operands: Operands) -> Tensor:
            whole = place(operands)
            down, across = whole.stride()
            return whole.as_strided((count, rows, cols), (step * down, down, across))

        return boxes

    def _stacked(self, name: str) -> bool:
        """Whether a buffer is the weights of experts, which lie as the user has them."""
        return self.plan.problem.experts > 0 and name == "w"

    def _shape(self, buffer: Buffer, rank: int) -> tuple[int, int, int]:
        """(slots, rows, columns) as `rank` stores the buffer."""
        slots = self.plan.problem.ranks if buffer.holds == "slots" else 1
        return slots, extent(self.plan, buffer, rank), buffer.shape[1]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _arena_bytes(plan: Plan, space: str) -> int:
    used = sum(_aligned(plan.buffer_bytes(b)) for b in plan.buffers if b.space == space)
    return -(-used // GRANULE_BYTES) * GRANULE_BYTES


workspaces: dict[tuple[str, torch.device], Workspace] = {}
# of groups whose making an interrupt or the like has ended on this rank
_left: "weakref.WeakKeyDictionary[Any, CounterpointError]" = weakref.WeakKeyDictionary()


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """The one workspace of `group` on `device`; collective at its first call.

    Raises:
        UnsupportedError: this process is a copy of the rank: of a loader's worker, say.
    """
    found = workspace_if_any(group, device)
    if found is None:
        _refuse_copies()
        for other in [*workspaces.values()]:
            if not _is_registered(other):  # its group was destroyed, and something still holds it
                forget(other)
        found = workspaces[group.group_name, device] = _made(group, device)
        weakref.finalize(group, _forget_destroyed, weakref.ref(found)).atexit = False
    return found


def _made(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """A new workspace. Where an error of others ends that, the other ranks hear of it.

    They may have theirs by then, so this rank makes none again: it says the same at each call.
    """
    if (left := _left.get(group)) is not None:
        refuse_first(copy(left), group, device.type)
        raise copy(left)
    try:
        return Workspace(group, device)
    except BaseException as error:
        if not isinstance(error, CounterpointError):
            mark_told(error)
            left = leave_first(error, group, device.type)
            if dist.get_world_size(group) > 1:
                _left[group] = left
                refuse_first(left, group, device.type)  # where it had not come to the meeting
        raise


def workspace_if_any(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    """The workspace of `group` on `device`, where it has one by now."""
    found = workspaces.get((group.group_name, device))
    # a group that was destroyed and made again has the same name, and none of the old memory
    return found if found is not None and found.group_id == id(group) else None


def _is_registered(workspace: Workspace) -> bool:
    """Whether torch still knows the group of a workspace."""
    group = workspace._group()  # pyright: ignore[reportPrivateUsage]
    with suppress(InputError):
        return group is not None and group_of(group.group_name) is group
    return False


def _forget_destroyed(found: "weakref.ref[Workspace]") -> None:
    """Free what a group had that is no more; its peers are told that this rank has left."""
    workspace = found()
    if workspace is not None:
        if workspace.device.type == "cuda":
            with suppress(RuntimeError):  # of a GPU that is in no state for it
                torch.cuda.synchronize(workspace.device)
        forget(workspace)


def _refuse_copies() -> None:
    """Raise in a process that was copied from a rank: it has the rank's sockets and memory."""
    if _copied and dist.is_initialized() and dist.group.WORLD is _copied[0]:
        raise UnsupportedError(COPY)


COPY = (
    "counterpoint: this process is a copy (a fork) of a rank, as a loader's worker is, and no rank "
    "of the group: call operators in the rank itself, or start workers by spawn"
)
_copied: list[object] = []  # in a copy: the default group of the rank that it was copied from


def _in_copy() -> None:
    """Let a copy of a rank change nothing that the rank shares with its peers."""
    if not dist.is_available() or not dist.is_initialized():
        return
    _copied[:] = [dist.group.WORLD]
    for workspace in workspaces.values():
        workspace.board.end_in_copy(UnsupportedError(COPY))


os.register_at_fork(after_in_child=_in_copy)


def refuse_capture(got: str) -> None:
    """Raise where memory has to be made while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        fix = "call the op once at this size before capturing"
        want = "warm when a graph is captured"
        raise InputError("counterpoint", "workspace", want=want, got=got, fix=fix)


# a group that outlives the interpreter's end can abort the process: gloo's threads are still there
@atexit.register
def release_all() -> None:
    """Forget every workspace of this process, when it is about to end."""
    for workspace in list(workspaces.values()):
        forget(workspace)


def forget(workspace: Workspace) -> None:
    """Drop a workspace and free its memory."""
    workspace.release()
    for key, known in list(workspaces.items()):
        if known is workspace:
            del workspaces[key]


def workspaces_of(group: dist.ProcessGroup | None) -> list[Workspace]:
    """The workspaces that `group` has in this process."""
    return [w for w in workspaces.values() if w.group_id == id(group)]
