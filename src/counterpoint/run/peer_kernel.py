"""A Triton kernel of a user's own that talks to its peers: its memory, its epoch, its launch.

What the library's own fused kernels have, for a kernel that is no step of a plan: symmetric memory
in two halves, an epoch that a replayed graph counts on, no more programs than are resident at once,
and waits that end in an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.gpu.device_limits import refused_in
from counterpoint.group.ranks import check_group
from counterpoint.group.workspace import workspace_of
from counterpoint.run.bounds import bounded, breach_of
from counterpoint.run.lanes_cuda import lanes_of, not_signalled
from counterpoint.run.launch import INTERPRETED, Grid, Launch, aligned

NEEDED = ("bases_ptr", "half_bytes", "state_ptr", "fault_ptr", "rank", "tag", "timeout_ns")
SUPPLIED = (*NEEDED, "flags_at", "words_at", "WORLD")
MAX_LAUNCHES = 256  # kinds of arguments that are remembered
OP = "PeerKernel"


class Layout(NamedTuple):
    """Where the parts of one half of the memory begin: payload, flags, low-latency words.

    Args:
        payload_bytes, num_flags, num_words: of each part.
    """

    payload_bytes: int = 0
    num_flags: int = 0
    num_words: int = 0

    @property
    def flags_at(self) -> int:
        """Bytes from the half's beginning to its flags."""
        return _rounded(self.payload_bytes, 16)

    @property
    def words_at(self) -> int:
        """Bytes from the half's beginning to its words."""
        return _rounded(self.flags_at + 4 * self.num_flags, 16)

    @property
    def half_bytes(self) -> int:
        """Bytes of a half."""
        return _rounded(self.words_at + 4 * self.num_words, 256)

    def empty(self, memory: Tensor) -> None:
        """Make all words of both halves EMPTY.

        Args:
            memory: uint8 [2 * half_bytes], of one rank.
        """
        for half in memory.view(2, self.half_bytes):
            words = half[self.words_at : self.words_at + 4 * self.num_words]
            words.view(torch.float32).fill_(-0.0)

    def arguments(self, addresses: Sequence[int], device: torch.device) -> dict[str, Any]:
        """Where a kernel finds what, by name.

        Args:
            addresses: where each rank's memory begins.
            device: of the kernel.
        """
        return {
            "bases_ptr": torch.tensor(addresses, dtype=torch.int64).to(device),
            "half_bytes": self.half_bytes, "flags_at": self.flags_at, "words_at": self.words_at,
            "WORLD": len(addresses),
        }  # fmt: skip

    def checked_arguments(self, buffers: Sequence[Tensor], kernel: str) -> dict[str, Any]:
        """The same for a kernel of that name in the interpreter: what it touches is checked."""
        parts = [half + at for half in (0, self.half_bytes)
                 for at in (0, self.flags_at, self.words_at)]  # fmt: skip
        num_bytes = self.payload_bytes, 4 * self.num_flags, 4 * self.num_words
        bases, apart = bounded(kernel, self._asdict(), buffers, parts, num_bytes)
        return {
            "bases_ptr": bases, "half_bytes": 3 * apart, "flags_at": apart, "words_at": 2 * apart,
            "WORLD": len(buffers),
        }  # fmt: skip


class PeerKernel:
    """Your Triton kernel, with all that it needs to talk to the same kernel on its peers.

    Collective to make: all ranks of `group` make it, with equal sizes, and later call it in the
    same order. It owns symmetric memory in two halves, which calls use in turn. Each half holds a
    payload, flags and low-latency words, in this order, and each part may be empty.

    The kernel names the arguments that it is given here. It must have all of these:

        bases_ptr: int64 [ranks], where each rank's memory begins; for `peer_ptr`.
        half_bytes: int, where the second half begins.
        state_ptr: int32 [6]: epoch, programs that have ended, and at `state_ptr + 2` the stop word
            of `wait` and `take_words`.
        fault_ptr, tag: for `end_of_call`, which each program calls last.
        rank: int, of this process in the group.
        timeout_ns: int, COUNTERPOINT_TIMEOUT_S, for `wait` and `take_words`.

    It may have these:

        flags_at, words_at: int, bytes from the beginning of a half to its flags, and to its words.
        WORLD: constexpr, ranks of the group.

    On CPU ranks (TRITON_INTERPRET=1) a call returns when it is done, and raises by itself, also
    where a program touches symmetric memory outside a part of it, which no GPU checks. On a GPU
    it is enqueued on the current stream, behind the group's earlier calls. It captures in a CUDA
    graph after one call of the same kind. `release` of the group ends its use.

    Args:
        kernel: made by `triton.jit`.
        device: "cpu", or this rank's CUDA device.
        payload_bytes: of a half; zero-filled at first, then what calls leave.
        num_flags: int32 words of a half that `post` writes to; nothing else may.
        num_words: int32 words of a half for `put_words`; EMPTY at first, and each that is put must
            be taken in the same call.
        group: whose ranks talk; the default group if None.
        num_warps: an option of Triton.
        num_stages: an option of Triton.

    Raises:
        InputError: a size is negative, all are 0, or they differ between ranks; the kernel lacks
            one of the arguments above; a graph is being captured.
        UnsupportedError: CPU ranks without TRITON_INTERPRET=1, or GPUs with it; GPUs that run no
            kernels of this library, or that are not peers.
        PeerTimeoutError: a rank did not come.
    """

    def __init__(
        self, kernel: Any, *, device: torch.device | str, payload_bytes: int = 0,
        num_flags: int = 0, num_words: int = 0, group: dist.ProcessGroup | None = None,
        num_warps: int = 4, num_stages: int = 3,
    ) -> None:  # fmt: skip
        self.name: str = getattr(kernel, "__name__", "kernel")
        self.layout = Layout(payload_bytes, num_flags, num_words)
        self._kernel, self._device = kernel, _checked_device(torch.device(device))
        _check_sizes(self.layout)
        _check_names(kernel, self.name)
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        workspace = workspace_of(check_group(OP, group), self._device)
        workspace.check()
        workspace.refuse_growth("none: it makes its memory when it is made")
        if refused := refused_in(workspace):
            raise UnsupportedError(f"{OP}: {refused}")
        every = workspace.gather((self.name, *self.layout))
        for r, other in enumerate(every):
            if other != every[0]:
                want = f"equal on all ranks, {every[0]} as on rank 0"
                raise InputError(OP, "sizes", want=want, got=f"{other} on rank {r}")
        workspace.open_pads()  # by them a late rank is looked at
        self._workspace = workspace
        # and on CPU a word by which peers end this rank's waits
        num_bytes = 2 * self.layout.half_bytes + (4 if self._device.type == "cpu" else 0)
        self._memory = workspace.allocate(num_bytes, OP)
        self._fixed = self._arguments()
        self._launches: dict[object, Launch] = {}

    def _arguments(self) -> dict[str, Any]:
        """What the kernel is given; no rank returns before all words of all are empty."""
        workspace, memory, device = self._workspace, self._memory, self._device
        own = memory.local()
        self.layout.empty(own[: 2 * self.layout.half_bytes])
        ranks = range(memory.world_size)
        if device.type == "cuda":
            given = self.layout.arguments(memory.buffer_ptrs, device)
            lanes = lanes_of(workspace)
            state = lanes.words_and_stop(4)
            fault, tag = lanes.fault, lanes.register(OP, "fused", ((self.name, tuple(ranks)),))
            torch.cuda.synchronize(device)
        else:
            given = self.layout.checked_arguments(memory.buffers, self.name)
            state, fault, tag = torch.zeros(6, dtype=torch.int32), torch.zeros(1).long(), 0
            state[4:].view(torch.int64)[0] = own[-4:].data_ptr()
        workspace.gather(None)
        given |= {"state_ptr": state, "fault_ptr": fault, "rank": workspace.rank, "tag": tag}
        given["timeout_ns"] = int(workspace.timeout_s * 1e9)
        return {name: value for name, value in given.items() if name in self._kernel.arg_names}

    def __call__(self, work: int, /, **arguments: Any) -> None:
        """Launch it on the current stream.

        Args:
            work: items that its programs share, equal on all ranks: tiles, blocks, rows. Where more
                programs than fit the GPU at once would be needed, fewer are launched: a program
                takes item `tl.program_id(0)`, then every `tl.num_programs(0)`-th. Some SMs are left
                to collectives of other groups.
            arguments: all others of the kernel, by name. Tensors lie on the kernel's device, and
                live until the call has run. A new dtype, alignment or number is compiled anew, and
                peers wait meanwhile.

        Raises:
            InputError: an argument is missing, is none of the kernel's or lies elsewhere; `work`
                is < 1. A peer has called something else, or has another `work`: then the group is
                unusable.
            UnsupportedError: the kernel does not compile, or no block of it fits the GPU.
            PeerTimeoutError: a peer did not answer, in this call or an earlier one; the group is
                unusable.
        """
        self._call(Grid(work), work, arguments)

    def for_each(self, work: int, /, **arguments: Any) -> None:
        """Launch it with a program for each item, however many fit the GPU at once.

        Only for a kernel in which a program waits when no other one is left, as `is_last` tells it:
        any other one hangs where its programs do not all fit. All else is as in a call.

        Args:
            work: programs, equal on all ranks.
            arguments: as in a call.

        Raises:
            InputError: as in a call.
            UnsupportedError: as in a call.
            PeerTimeoutError: as in a call.
        """
        self._call(Grid(work, each=True), work, arguments)

    def _call(self, grid: Grid, work: int, arguments: Mapping[str, Any]) -> None:
        workspace = self._workspace
        kind = (grid, *((name, _kind(value)) for name, value in arguments.items()))
        launch = self._launches.get(kind)
        if launch is None:
            self._check(work, arguments)
        what = "programs" if grid.each else "items"
        with workspace.board.whole():
            workspace.board.note_op(f"{OP} {self.name} of {work} {what}")
            if launch is None:
                launch = self._launches[kind] = self._compiled(grid, arguments)
            self._launch(launch, arguments)

    def _launch(self, launch: Launch, arguments: Mapping[str, Any]) -> None:
        workspace = self._workspace
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        if self._device.type == "cuda":
            lanes = lanes_of(workspace)
            if torch.cuda.is_current_stream_capturing():
                workspace.keep(self)
                lanes.follow_in_capture(spins=True)
            else:
                lanes.follow(spins=True)
            launch(*tensors)
            return
        try:
            launch(*tensors)
        except BaseException as error:
            breach = breach_of(error)
            self._end_of_all(breach or error)
            if breach is not None:
                raise breach from None
            raise
        workspace.board.compare()
        if self._memory.local()[-4:].any():
            workspace.board.raise_what_is_wrong()
        if word := int(self._fixed["fault_ptr"][0]):
            ranks = [r for r in range(workspace.board.ranks) if word >> 32 + r % 32 & 1]
            raise workspace.board.fail(not_signalled(workspace, OP, "fused", self.name, ranks))

    def _end_of_all(self, error: BaseException) -> None:
        """Tell all ranks what has ended a kernel here, and end what theirs wait for."""
        board = self._workspace.board
        if isinstance(error, CounterpointError):
            board.fail(error)
        board.end(error)
        for buffer in self._memory.buffers:
            buffer[-4:] = 1

    def _compiled(self, grid: Grid, arguments: Mapping[str, Any]) -> Launch:
        """The launch for arguments like these; ranks meet at the first one."""
        first = not self._launches
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        given = {n: value for n, value in arguments.items() if isinstance(value, Tensor)}
        numbers = {n: value for n, value in arguments.items() if n not in given}
        launch = Launch(
            self._kernel, tuple(given), self._fixed | numbers, grid, self._device, OP,
            self._options,
        )  # fmt: skip
        if self._device.type == "cpu":
            return launch
        problem = ""
        try:
            launch.compile(*given.values())
        except UnsupportedError as error:
            if not first:
                raise self._workspace.board.fail(error) from None
            problem = str(error)
        # a rank that still compiles is late for all, and one that cannot must not be waited for
        if first and (problems := [p for p in self._workspace.gather(problem) if p]):
            raise UnsupportedError(problems[0])
        return launch

    def _check(self, work: int, arguments: Mapping[str, Any]) -> None:
        if type(work) is not int or work < 1:
            raise InputError(self.name, "work", want="an int >= 1", got=work)
        wanted = {name for name in self._kernel.arg_names if name not in SUPPLIED}
        if wrong := wanted ^ set(arguments):
            want = f"those of the kernel that {OP} does not supply, {sorted(wanted)}"
            got = f"{sorted(arguments)}"
            raise InputError(self.name, "arguments", want=want, got=got, fix=f"see {sorted(wrong)}")
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.device != self._device:
                raise InputError(self.name, name, want=f"on {self._device}", got=value.device)


def _kind(value: Any) -> object:
    """What of an argument the compiled code depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, aligned(value)
    return type(value), value


def _checked_device(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{OP}: kernels run on cpu and cuda, not on {device.type}")
    if (device.type == "cpu") != INTERPRETED:
        needs = "with" if device.type == "cpu" else "without"
        raise UnsupportedError(
            f"{OP}: on {device.type} a kernel runs {needs} TRITON_INTERPRET=1, to be set before "
            "triton is imported"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"{OP}: torch sees no GPU")
    # "cuda" is the current one
    return torch.empty(0, device=device).device


def _check_sizes(layout: Layout) -> None:
    for name, value in layout._asdict().items():
        if type(value) is not int or value < 0:
            raise InputError(OP, name, want="an int >= 0", got=value)
    if not any(layout):
        want = "> 0 in one of its parts: payload_bytes, num_flags, num_words"
        raise InputError(OP, "memory", want=want, got=0)


def _check_names(kernel: Any, name: str) -> None:
    names = getattr(kernel, "arg_names", None)
    if names is None:
        raise InputError(OP, "kernel", want="a function with triton.jit", got=type(kernel).__name__)
    if missing := [each for each in NEEDED if each not in names]:
        want = f"one with the arguments {', '.join(NEEDED)}"
        raise InputError(OP, "kernel", want=want, got=f"{name} without {', '.join(missing)}")


def _rounded(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
