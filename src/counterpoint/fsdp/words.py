"""Words between the ranks of a shard group: who has come how far, counted in stream order.

A word is posted to a peer's pad and waited for on the own pad; it holds an epoch, which only grows.
On GPUs the epochs are in device memory: a captured step counts on when it is replayed. A wait that
is too long, or whose peer has died, ends as those of all operators do: see kernels/signal.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from counterpoint.runtime import driver, lanes_cuda
from counterpoint.runtime.driver import Copy
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


class CpuWords:
    """Of CPU ranks, whose host waits."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.rank = workspace, workspace.rank
        memory = workspace.allocate(4 * len(KINDS) * workspace.board.ranks)
        self.memory = memory
        self.pads = [memory.peer(r).view(torch.int32).numpy() for r in range(memory.world_size)]
        self.peers = [r for r in range(memory.world_size) if r != self.rank]
        self.epoch = dict.fromkeys(EPOCHS, 0)

    def advance(self, epoch: str, stream: Any) -> None:
        """Count one on."""
        self.epoch[epoch] += 1

    def post(self, epoch: str, kind: str, stream: Any) -> None:
        """Let all peers know that this rank has come to the epoch."""
        at = KINDS.index(kind) * len(self.pads) + self.rank
        for r in self.peers:
            self.pads[r][at] = np.int32(wrapped(self.epoch[epoch]))

    def wait(self, epoch: str, kind: str, ranks: Sequence[int], stream: Any) -> None:
        """Wait until those ranks have come to the epoch.

        Raises:
            PeerTimeoutError: one is dead, or too late.
        """
        late = Late(self.workspace.board, Awaited(OP, STEPS[kind.partition(" ")[0]], kind))
        for r in ranks:
            at = KINDS.index(kind) * len(self.pads) + r
            while wrapped(int(self.pads[self.rank][at]) - self.epoch[epoch]) < 0:
                late.wait(r)
        late.end()


class CudaWords:
    """Of GPUs: a warp waits on the stream, a copy behind copies posts."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.rank = workspace, workspace.rank
        workspace.open_pads()
        lanes = self.lanes = lanes_cuda.lanes_of(workspace)
        ranks = workspace.board.ranks
        self.memory = workspace.allocate(4 * len(KINDS) * ranks)
        self.peers = [r for r in range(ranks) if r != self.rank]
        self.epoch = {name: lanes.words_and_stop(2) for name in EPOCHS}
        self.launches: dict[Any, Callable[[int], None]] = {}
        self.posts: dict[Any, list[Copy]] = {}
        torch.cuda.synchronize(workspace.device)
        for epoch in EPOCHS:  # compiled before a rank waits for another
            self._launch(epoch, "", (), advance=False)
            self._launch(epoch, "", (), advance=True)

    def advance(self, epoch: str, stream: Any) -> None:
        """Count one on."""
        self._launch(epoch, "", (), advance=True)(stream.cuda_stream)

    def post(self, epoch: str, kind: str, stream: Any) -> None:
        """Let all peers know that this rank has come to the epoch, behind what the stream does."""
        copies = self.posts.get((epoch, kind))
        if copies is None:
            at = 4 * (KINDS.index(kind) * len(self.memory.buffers) + self.rank)
            source = self.epoch[epoch].data_ptr()
            pads = self.memory.buffer_ptrs
            copies = [Copy(pads[r] + at, 4, source, 4, 4, 1) for r in self.peers]
            self.posts[epoch, kind] = copies
        for copy in copies:
            driver.copy_async(copy, stream.cuda_stream)

    def wait(self, epoch: str, kind: str, ranks: Sequence[int], stream: Any) -> None:
        """Let the stream wait until those ranks have come to the epoch."""
        self._launch(epoch, kind, tuple(ranks), advance=False)(stream.cuda_stream)

    def _launch(
        self, epoch: str, kind: str, ranks: tuple[int, ...], *, advance: bool
    ) -> Callable[[int], None]:
        key = epoch, kind, ranks, advance
        if key not in self.launches:
            self.launches[key] = self._compiled(*key)
        return self.launches[key]

    def _compiled(
        self, epoch: str, kind: str, ranks: tuple[int, ...], advance: bool
    ) -> Callable[[int], None]:
        from counterpoint.kernels.signal import signal_kernel
        from counterpoint.runtime.launch_cuda import MIN_LANES

        lanes, first = self.lanes, KINDS.index(kind) * len(self.memory.buffers) if kind else 0
        pad = self.memory.buffer_ptrs[self.rank]
        awaited = lanes.tables.of([pad + 4 * (first + r) for r in ranks])
        tag = lanes.register(OP, "in place", ((kind, ranks),))
        timeout_ns = int(self.workspace.timeout_s * 1e9)
        kernel: Any = signal_kernel
        arguments = (lanes.tables.of([]), 0, awaited, len(ranks), self.epoch[epoch], lanes.fault,
                     tag, timeout_ns, advance, MIN_LANES)  # fmt: skip
        launch = kernel.warmup(*arguments, grid=(1,), num_warps=1)[(1, 1, 1)]
        return lambda stream: launch(*arguments, stream=stream)


def words_of(workspace: Workspace) -> CpuWords | CudaWords:
    """The words of a group; all its ranks call this."""
    return CudaWords(workspace) if workspace.device.type == "cuda" else CpuWords(workspace)
