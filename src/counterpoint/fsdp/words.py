"""Words between the ranks of a shard group: who has come how far, counted in stream order.

A word is posted to a peer's pad and waited for on the own pad; it holds an epoch, which only grows.
On GPUs the epochs are in device memory: a captured step counts on when it is replayed. A wait that
is too long, or whose peer has died, ends as those of all operators do: see kernels/signal.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from counterpoint.group.notice_board import Awaited, Late
from counterpoint.group.pads_cpu import wrapped
from counterpoint.group.workspace import Workspace
from counterpoint.kernels.signal import signal_kernel
from counterpoint.run import lanes_cuda
from counterpoint.run.launch_cuda import MIN_LANES

OP = "overlap"
# what a word says of memory that is filled and read in turn: the rank that posts it no longer reads
# what was there before, or has filled it anew
FREE, FILLED = "free", "filled"
SHARDS, INBOX, SLOT = "shards", "inbox", "slot"  # that memory; slots are counted: "slot 0"
STEPS = {
    (SHARDS, FREE): "end the gathers before",
    (SHARDS, FILLED): "publish its shards",
    (SLOT, FREE): "end the gather before",
    (SLOT, FILLED): "publish its shards",
    (INBOX, FREE): "sum the gradients before",
    (INBOX, FILLED): "push its gradients",
}


class Signal(NamedTuple):
    """What a rank does at one place of a stream, in this order.

    Args:
        area: memory that is filled and read in turn; its epoch counts how often it was filled.
        advance: count one on.
        post: let all peers know FREE or FILLED of this epoch; "": nothing.
        wait: until ranks have posted it; "": for nothing.
        ranks: those; empty: all peers.
    """

    area: str
    advance: bool = False
    post: str = ""
    wait: str = ""
    ranks: tuple[int, ...] = ()


class Pads:
    """Where words lie on the pad of each rank: one of each kind and area from each rank."""

    def __init__(self, areas: Sequence[str], ranks: int) -> None:
        self.areas, self.ranks = {area: i for i, area in enumerate(areas)}, ranks
        self.num_bytes = 4 * 2 * len(areas) * ranks

    def at(self, area: str, kind: str, rank: int) -> int:
        """The number of the word that `rank` posts."""
        return (2 * self.areas[area] + (kind == FILLED)) * self.ranks + rank


class CpuWords:
    """Of CPU ranks, whose host waits."""

    def __init__(self, workspace: Workspace, areas: Sequence[str]) -> None:
        self.workspace, self.rank = workspace, workspace.rank
        self.places = Pads(areas, workspace.board.ranks)
        memory = self.memory = workspace.allocate(self.places.num_bytes)
        self.pads = [memory.peer(r).view(torch.int32).numpy() for r in range(memory.world_size)]
        self.peers = tuple(r for r in range(memory.world_size) if r != self.rank)
        self.epoch = dict.fromkeys(areas, 0)

    def __call__(self, signal: Signal, stream: Any) -> None:
        """Do it.

        Raises:
            PeerTimeoutError: a rank is dead, or too late.
        """
        self.epoch[signal.area] += signal.advance
        count = self.epoch[signal.area]
        if signal.post:
            at = self.places.at(signal.area, signal.post, self.rank)
            for r in self.peers:
                self.pads[r][at] = np.int32(wrapped(count))
        if signal.wait:
            step = STEPS[signal.area.partition(" ")[0], signal.wait]
            late = Late(self.workspace.board, Awaited(OP, step, f"{signal.area} {signal.wait}"))
            for r in signal.ranks or self.peers:
                at = self.places.at(signal.area, signal.wait, r)
                while wrapped(int(self.pads[self.rank][at]) - count) < 0:
                    late.wait(r)
            late.end()


class CudaWords:
    """Of GPUs: one warp posts and waits on the stream."""

    def __init__(self, workspace: Workspace, areas: Sequence[str]) -> None:
        self.workspace, self.rank = workspace, workspace.rank
        workspace.open_pads()
        lanes = self.lanes = lanes_cuda.lanes_of(workspace)
        ranks = workspace.board.ranks
        self.places = Pads(areas, ranks)
        self.memory = workspace.allocate(self.places.num_bytes)
        self.peers = tuple(r for r in range(ranks) if r != self.rank)
        self.epoch = {area: lanes.words_and_stop(2) for area in areas}
        self._launches: dict[Signal, Callable[[int], None]] = {}
        torch.cuda.synchronize(workspace.device)
        for advance in (False, True):  # compiled before a rank waits for another
            self._compiled(Signal(areas[0], advance))

    def __call__(self, signal: Signal, stream: Any) -> None:
        """Do it, behind what the stream does before."""
        launch = self._launches.get(signal)
        if launch is None:
            launch = self._launches[signal] = self._compiled(signal)
        launch(stream.cuda_stream)

    def _compiled(self, signal: Signal) -> Callable[[int], None]:
        lanes, pads = self.lanes, self.memory.buffer_ptrs
        ranks = (signal.ranks or self.peers) if signal.wait else ()
        posts = [pads[r] + self._at(signal, signal.post, self.rank)
                 for r in self.peers if signal.post]  # fmt: skip
        waits = [pads[self.rank] + self._at(signal, signal.wait, r) for r in ranks]
        tag = lanes.register(OP, "in place", ((f"{signal.area} {signal.wait}", ranks),))
        kernel: Any = signal_kernel
        arguments = (
            lanes.tables.of(posts), len(posts), lanes.tables.of(waits), len(waits),
            self.epoch[signal.area], lanes.fault, tag, int(self.workspace.timeout_s * 1e9),
            signal.advance, MIN_LANES,
        )  # fmt: skip
        launch = kernel.warmup(*arguments, grid=(1,), num_warps=1)[(1, 1, 1)]
        return lambda stream: launch(*arguments, stream=stream)

    def _at(self, signal: Signal, kind: str, rank: int) -> int:
        """Bytes from the start of a pad to a word."""
        return 4 * self.places.at(signal.area, kind, rank)


def words_of(workspace: Workspace, areas: Sequence[str]) -> CpuWords | CudaWords:
    """The words of a group, about these areas; all its ranks call this."""
    kind = CudaWords if workspace.device.type == "cuda" else CpuWords
    return kind(workspace, areas)
