"""Words between the ranks of a shard group: who has come how far, counted in stream order.

A word is posted to a peer's pad and waited for on the own pad; it holds an epoch, which only grows.
On GPUs the epochs are in device memory: a captured step counts on when it is replayed. A wait that
is too long, or whose peer has died, ends as those of all operators do: see kernels/signal.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from counterpoint.kernels.signal import signal_kernel
from counterpoint.runtime import lanes_cuda
from counterpoint.runtime.launch_cuda import MIN_LANES
from counterpoint.runtime.notice_board import Awaited, Late
from counterpoint.runtime.pads_cpu import wrapped
from counterpoint.runtime.workspace import Workspace

OP = "overlap"
# what a word says of the rank that posts it; the last two are of an inbox each
ENTERED, PUBLISHED, PUSHED, SUMMED = "entered", "published", "pushed", "summed"
KINDS = (ENTERED, PUBLISHED, f"{PUSHED} 0", f"{PUSHED} 1", f"{SUMMED} 0", f"{SUMMED} 1")
EPOCHS = ("publish", "inbox 0", "inbox 1")
STEPS = {
    ENTERED: "end the gathers before",
    PUBLISHED: "publish its shards",
    PUSHED: "push its gradients",
    SUMMED: "sum the gradients before",
}


class Signal(NamedTuple):
    """What a rank does at one place of a stream, in this order.

    Args:
        epoch: of EPOCHS.
        advance: count one on.
        post: let all peers know that this rank has come to the epoch: of KINDS, or "".
        wait: until ranks have come to it: of KINDS, or "".
        ranks: those; empty: all peers.
    """

    epoch: str
    advance: bool = False
    post: str = ""
    wait: str = ""
    ranks: tuple[int, ...] = ()


class CpuWords:
    """Of CPU ranks, whose host waits."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.rank = workspace, workspace.rank
        memory = self.memory = workspace.allocate(4 * len(KINDS) * workspace.board.ranks)
        self.pads = [memory.peer(r).view(torch.int32).numpy() for r in range(memory.world_size)]
        self.peers = tuple(r for r in range(memory.world_size) if r != self.rank)
        self.epoch: dict[str, int] = dict.fromkeys(EPOCHS, 0)

    def __call__(self, signal: Signal, stream: Any) -> None:
        """Do it.

        Raises:
            PeerTimeoutError: a rank is dead, or too late.
        """
        self.epoch[signal.epoch] += signal.advance
        count = self.epoch[signal.epoch]
        if signal.post:
            at = KINDS.index(signal.post) * len(self.pads) + self.rank
            for r in self.peers:
                self.pads[r][at] = np.int32(wrapped(count))
        if signal.wait:
            step = STEPS[signal.wait.partition(" ")[0]]
            late = Late(self.workspace.board, Awaited(OP, step, signal.wait))
            for r in signal.ranks or self.peers:
                at = KINDS.index(signal.wait) * len(self.pads) + r
                while wrapped(int(self.pads[self.rank][at]) - count) < 0:
                    late.wait(r)
            late.end()


class CudaWords:
    """Of GPUs: one warp posts and waits on the stream."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.rank = workspace, workspace.rank
        workspace.open_pads()
        lanes = self.lanes = lanes_cuda.lanes_of(workspace)
        ranks = workspace.board.ranks
        self.memory = workspace.allocate(4 * len(KINDS) * ranks)
        self.peers = tuple(r for r in range(ranks) if r != self.rank)
        self.epoch = {name: lanes.words_and_stop(2) for name in EPOCHS}
        self._launches: dict[Signal, Callable[[int], None]] = {}
        torch.cuda.synchronize(workspace.device)
        for advance in (False, True):  # compiled before a rank waits for another
            self._compiled(Signal(EPOCHS[0], advance))

    def __call__(self, signal: Signal, stream: Any) -> None:
        """Do it, behind what the stream does before."""
        launch = self._launches.get(signal)
        if launch is None:
            launch = self._launches[signal] = self._compiled(signal)
        launch(stream.cuda_stream)

    def _compiled(self, signal: Signal) -> Callable[[int], None]:
        lanes, pads = self.lanes, self.memory.buffer_ptrs
        ranks = (signal.ranks or self.peers) if signal.wait else ()
        posts = self._words(signal.post, self.peers if signal.post else (), pads, own=True)
        waits = self._words(signal.wait, ranks, [pads[self.rank]] * len(pads), own=False)
        tag = lanes.register(OP, "in place", ((signal.wait, ranks),))
        kernel: Any = signal_kernel
        arguments = (
            lanes.tables.of(posts), len(posts), lanes.tables.of(waits), len(waits),
            self.epoch[signal.epoch], lanes.fault, tag, int(self.workspace.timeout_s * 1e9),
            signal.advance, MIN_LANES,
        )  # fmt: skip
        launch = kernel.warmup(*arguments, grid=(1,), num_warps=1)[(1, 1, 1)]
        return lambda stream: launch(*arguments, stream=stream)

    def _words(
        self, kind: str, ranks: Sequence[int], pads: Sequence[int], *, own: bool
    ) -> list[int]:
        """Addresses on the pads of ranks: each that rank's own word, or this rank's."""
        if not kind:
            return []
        first = KINDS.index(kind) * len(pads)
        return [pads[r] + 4 * (first + (self.rank if own else r)) for r in ranks]


def words_of(workspace: Workspace) -> CpuWords | CudaWords:
    """The words of a group; all its ranks call this."""
    return CudaWords(workspace) if workspace.device.type == "cuda" else CpuWords(workspace)
