"""What goes between islands: blocks to some ranks, and blocks from some, in one exchange.

A transport of its own has to do no more than `Wire.exchange`. It is called by one lane of each
rank, in the same order on all of them, and has to

    be in order with what the lane did before and does after it, on GPUs in stream order;
    end only when all of `sent` may be written to again, and all of `kept` is there;
    end in an error that names a rank, within the bound of every wait, where the other end is gone.

On GPUs that is NCCL's grouped send and receive, on a communicator of its own, so that no collective
of the user's comes between; on CPU ranks gloo's.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.group.notice_board import DEAD_S, LOOK_EVERY_S, Awaited, Late
from counterpoint.group.store import store_of
from counterpoint.group.workspace import Workspace
from counterpoint.run.lanes_cuda import lanes_of

Messages = Sequence[tuple[Tensor, int]]  # each with a rank of the group


class Wire(Protocol):
    """A transport between islands."""

    def exchange(self, sent: Messages, kept: Messages, awaited: Awaited) -> None:
        """Send blocks and receive others, all at a time; tensors without gaps.

        Args:
            sent: with whom each is for; where it is empty nothing goes there.
            kept: with who sends it, as many bytes.
            awaited: for errors.

        Raises:
            PeerTimeoutError: the other end is gone, or too late.
        """
        ...


def wire_of(workspace: Workspace) -> Wire:
    """The one transport of a workspace; collective at its first call.

    Raises:
        InputError: a graph is being captured, and it is not there yet.
    """
    if workspace.wire is None:
        workspace.refuse_growth("none: this is the group's first exchange between islands")
        workspace.wire = Gloo(workspace) if workspace.device.type == "cpu" else Nccl(workspace)
    return workspace.wire


class Nccl:
    """On the current stream. The watchdog sees in words of the host which exchange does not end.

    Attributes:
        communicator: what is between the ranks, for exchanges alone.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._ranks = dist.get_process_group_ranks(workspace.group)
        self._known: dict[tuple[Awaited, *tuple[int, ...]], int] = {}
        # how many exchanges there were, and which one is the last; of those begun, of those ended
        self._count = torch.zeros(2, dtype=torch.int64, device=workspace.device)
        self._words = torch.zeros(2, 2, dtype=torch.int64).pin_memory()
        self._begun, self._ended = self._words.numpy()
        self._under_way, self._since_s = 0, 0.0
        self.communicator = _communicator_of(workspace)
        lanes_of(workspace).watchdog.watch(self._late, self.end)
        self._connect()

    def end(self) -> None:
        """End what does not end by itself, and let no workspace find its communicator again."""
        with suppress(InputError):  # the group is gone, and what was kept for it
            _, kept = _kept.get(self._workspace.group, ("", None))
            if kept is self.communicator:
                del _kept[self._workspace.group]
        self.communicator.abort()

    def _connect(self) -> None:
        """Meet all rails: connections are made at a first exchange, which may be in no graph."""
        size, ranks, rank = self._workspace.islands.size, len(self._ranks), self._workspace.rank
        word = torch.zeros(2, device=self._workspace.device)
        awaited = Awaited("counterpoint", "connect islands", "wire")
        for d in range(size, ranks, size):
            sent, kept = (word[:1], (rank + d) % ranks), (word[1:], (rank - d) % ranks)
            self.exchange([sent], [kept], awaited)

    def exchange(self, sent: Messages, kept: Messages, awaited: Awaited) -> None:
        whom = (awaited, *(rank for _, rank in (*sent, *kept)))
        self._count[:1].add_(1)
        self._count[1:].fill_(self._known.setdefault(whom, len(self._known)))
        self._words[0].copy_(self._count, non_blocking=True)
        kept, sent = _of_something(kept), _of_something(sent)
        if kept or sent:
            communicator, device = self.communicator, self._workspace.device
            communicator._start_coalescing(device)
            for block, rank in kept:
                communicator.recv([block], rank, 0)
            for block, rank in sent:
                communicator.send([block], rank, 0)
            communicator._end_coalescing(device).wait()
        self._words[1].copy_(self._count, non_blocking=True)

    def _late(self) -> CounterpointError | None:
        """What says that an exchange does not end, once it has had its time."""
        (number, known), now_s = map(int, self._begun), time.monotonic()
        if number == self._ended[0] or number != self._under_way:
            self._under_way, self._since_s = number, now_s
            return None
        timeout_s = self._workspace.timeout_s
        if self._workspace.board.died():
            timeout_s = min(timeout_s, DEAD_S)
        if now_s - self._since_s <= timeout_s:
            return None
        (op, _, step), *others = list(self._known)[known]
        return not_exchanged(self._workspace, op, others, step, f"within {timeout_s:g} s")


# Of each group the communicator, and its name. A workspace that comes after another finds it:
# freeing one waits for all graphs that have captured it, and each has memory of its own.
_kept: WeakKeyDictionary[dist.ProcessGroup, tuple[str, Any]] = WeakKeyDictionary()


def _communicator_of(workspace: Workspace) -> Any:
    """NCCL's for exchanges alone: the last workspace's, unless a rank has ended it. Collective.

    It is in none of torch's tables: `new_group` names a group by how many a rank has, which ranks
    may differ in, and splits the default communicator, to which all ranks would have to come.
    """
    group = workspace.group
    name, found = _kept.get(group, ("", None))
    names, new = zip(*workspace.gather((name, uuid4().hex)), strict=True)
    if len({*names}) > 1 or not name:
        name, rank, ranks = f"counterpoint/exchange/{new[0]}", workspace.rank, len(new)
        store = dist.distributed_c10d.PrefixStore(f"{name}/", store_of(group))
        # SMs that a matmul leaves are an exchange's first
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        options.group_name = cast(Any, name)
        found = dist.ProcessGroup(store, rank, ranks)
        backend = dist.ProcessGroupNCCL(store, rank, ranks, options)
        found._register_backend(workspace.device, dist.ProcessGroup.BackendType.NCCL, backend)
        _kept[group] = name, found
    return found


class Gloo:
    """A thread waits for gloo, which cannot be told to end; the lane looks at the notice board."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._ranks = dist.get_process_group_ranks(workspace.group)

    def exchange(self, sent: Messages, kept: Messages, awaited: Awaited) -> None:
        group, board, works = self._workspace.group, self._workspace.board, list[_Work]()
        # Receives first: gloo tells the other end that it may send, in line with what is sent;
        # behind a block of ours, one direction would go after the other.
        both = ((dist.irecv, kept), (dist.isend, sent))
        for op, block, rank in [(op, *each) for op, some in both for each in _of_something(some)]:
            try:
                works.append((op(block, self._ranks[rank], group), rank))
            except RuntimeError as error:
                raise board.fail(self._broken(error, rank, awaited)) from None
        # a little longer than the wait below, which can say more
        waited = _Waited(works, timedelta(seconds=board.timeout_s + 1))
        late = Late(board, awaited)
        while not waited.done.is_set():
            late.wait(waited.rank, waited.done)
        late.end()
        if waited.failed is not None:
            raise board.fail(self._broken(*waited.failed, awaited))

    def _broken(self, error: BaseException, rank: int, awaited: Awaited) -> CounterpointError:
        """What gloo's error says; or why the other end went, where it has said so."""
        if (verdict := self._workspace.board.heard()) is not None:
            return verdict
        time.sleep(LOOK_EVERY_S)  # a process that ends is not dead yet when its connections are
        text = str(error).partition(". ")[0].splitlines()[0]
        why = f"{self._workspace.board.state(rank)}: {text}"
        return not_exchanged(self._workspace, awaited.op, [rank], awaited.step, why)


def not_exchanged(
    workspace: Workspace, op: str, ranks: Sequence[int], step: str, why: str
) -> PeerTimeoutError:  # fmt: skip
    """The error of an exchange that does not end, and whom it is with."""
    names = " or ".join(workspace.islands.named(rank) for rank in sorted({*ranks}))
    return PeerTimeoutError(
        f"{op}: {names} did not take part in exchange {step!r}: {why}; the group is unusable, "
        f"restart its ranks ({workspace.board.bound} is the bound)",
        rank=ranks[0],
        step=step,
    )


_Work = tuple[Any, int]  # of gloo, and whom it is with


def _of_something(messages: Messages) -> Messages:
    """Without those of no element."""
    return [each for each in messages if each[0].numel()]


class _Waited:
    """Works of gloo that a thread waits for: done, or the first that failed and whom it is with.

    Attributes:
        rank: whose is waited for.
    """

    def __init__(self, works: Sequence[_Work], timeout: timedelta) -> None:
        self.done, self.failed, self.rank = threading.Event(), None, works[0][1] if works else 0
        self._works, self._timeout = works, timeout
        threading.Thread(target=self._wait, name="counterpoint-wire", daemon=True).start()

    def _wait(self) -> None:
        for work, rank in self._works:
            self.rank = rank
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                self.failed = self.failed or (error, rank)
        self.done.set()
