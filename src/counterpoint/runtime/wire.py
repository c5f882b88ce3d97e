"""What goes between islands: a block to one rank, and a block from another, in one exchange.

A transport of its own has to do no more than `Wire.exchange`. It is called by one lane of each
rank, in the same order on all of them, and has to

    be in order with what the lane did before and does after it, on GPUs in stream order;
    end only when all of `sent` may be written to again, and all of `kept` is there;
    end in an error that names a rank, within the bound of every wait, where the other end is gone.

On GPUs that is NCCL's grouped send and receive, on a communicator of its own, so that no collective
of the user's comes between; on CPU ranks gloo's.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, PeerTimeoutError
from counterpoint.runtime.notice_board import Awaited, Late
from counterpoint.runtime.workspace import Workspace


class Wire(Protocol):
    """A transport between islands."""

    def exchange(
        self, sent: Tensor, to: int, kept: Tensor, source: int, awaited: Awaited
    ) -> None:  # fmt: skip
        """Send one block and receive another; tensors without gaps.

        Args:
            sent: for rank `to` of the group.
            kept: what rank `source` sends, of as many bytes.
            awaited: for errors.

        Raises:
            PeerTimeoutError: the other end is gone, or too late.
        """
        ...


def wire_of(workspace: Workspace) -> Wire:
    """The one transport of a workspace; collective at its first call."""
    if workspace.wire is None:
        workspace.wire = _Gloo(workspace) if workspace.device.type == "cpu" else _Nccl(workspace)
    return workspace.wire


class _Nccl:
    """On the current stream. Its waits end by NCCL's watchdog, as those of its collectives do."""

    def __init__(self, workspace: Workspace) -> None:
        ranks = dist.get_process_group_ranks(workspace.group)
        self._ranks = ranks
        self._group: Any = dist.new_group(ranks, use_local_synchronization=True)

    def exchange(
        self, sent: Tensor, to: int, kept: Tensor, source: int, awaited: Awaited
    ) -> None:  # fmt: skip
        ops = [
            dist.P2POp(dist.isend, sent, self._ranks[to], self._group),
            dist.P2POp(dist.irecv, kept, self._ranks[source], self._group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


class _Gloo:
    """A thread waits for gloo, which cannot be told to end; the lane looks at the notice board."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._ranks = dist.get_process_group_ranks(workspace.group)

    def exchange(
        self, sent: Tensor, to: int, kept: Tensor, source: int, awaited: Awaited
    ) -> None:  # fmt: skip
        group, board = self._workspace.group, self._workspace.board
        try:
            works = [
                (dist.isend(sent, self._ranks[to], group), to),
                (dist.irecv(kept, self._ranks[source], group), source),
            ]
        except RuntimeError as error:
            raise board.fail(self._broken(error, source, awaited)) from None
        waited = _Waited(works, timedelta(seconds=board.timeout_s))
        late = Late(board, awaited)
        while not waited.done.is_set():
            late.wait(source, waited.done)
        late.end()
        if waited.failed is not None:
            raise board.fail(self._broken(*waited.failed, awaited))

    def _broken(self, error: BaseException, rank: int, awaited: Awaited) -> CounterpointError:
        """What gloo's error says; or why the other end went, where it has said so."""
        if (verdict := self._workspace.board.heard()) is not None:
            return verdict
        name, (op, _, step) = self._workspace.islands.named(rank), awaited
        text = str(error).partition(". Original reason")[0].splitlines()[0]
        return PeerTimeoutError(
            f"{op}: {name} did not take part in exchange {step!r}: {text}; the group is unusable, "
            "restart its ranks (COUNTERPOINT_TIMEOUT_S is the bound)",
            rank=rank,
            step=step,
        )


class _Waited:
    """Works of gloo that a thread waits for: done, or the first that failed and whom it is with."""

    def __init__(self, works: Sequence[tuple[Any, int]], timeout: timedelta) -> None:
        self.done, self.failed = threading.Event(), None
        self._works, self._timeout = works, timeout
        threading.Thread(target=self._wait, name="counterpoint-wire", daemon=True).start()

    def _wait(self) -> None:
        for work, rank in self._works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                self.failed = self.failed or (error, rank)
        self.done.set()
