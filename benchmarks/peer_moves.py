"""Moves between ranks that write to each other's memory: by copy engines, by a kernel, on CPUs.

Peers in ring order, the next rank first: no two ranks push to the same one at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from benchmarks.kernel_exchange import exchange_kernel
from counterpoint.gpu import driver
from counterpoint.gpu.driver import Copy
from counterpoint.group.symmetric import allocate
from counterpoint.group.workspace import Workspace, forget
from counterpoint.plan.bind import Arrival
from counterpoint.run import launch_cuda
from counterpoint.run.lanes_cuda import CudaLanes

WORD_BYTES = 4
BLOCK = 2048  # words that a program stores at a time
PROGRAMS = 64  # of the kernel: about half the SMs of an H200 reach its links' rate
NUM_WARPS = 4
Move = Callable[[], None]
Run = Callable[[torch.cuda.Stream], None]


class Peers(ABC):
    """Memory that peers write to; each subclass has a way to do that.

    Args:
        group: its ranks; all of them make one.
        device: of this rank.
        num_bytes: of source and target.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        self.group, self.device = group, device
        self.ranks, self.rank = group.size(), group.rank()
        self.others = ring(self.rank, self.ranks)
        self.memory = allocate(num_bytes, group, device)
        self.target = self.memory.local()
        self.source = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @abstractmethod
    def move(self, part_bytes: int, *, scatters: bool, meets: bool) -> Move:
        """See `Transport.all_gather` and `all_to_all`."""

    @abstractmethod
    def check(self) -> None:
        """See `Transport.check`."""

    @abstractmethod
    def close(self) -> None:
        """See `Transport.close`."""


class _OnGpu(Peers):
    """Signals on pads, and an epoch, of its own."""

    name: str

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        super().__init__(group, device, num_bytes)
        self.workspace = Workspace(group, device)
        self.workspace.open_pads()
        self.lanes = self.workspace.lanes = CudaLanes(self.workspace)
        launch_cuda.compile_signals(self.lanes)
        # those of all moves: a graph may outlive the move that it has captured
        self.tables = [
            *map(self.lanes.posted_words, ([], self.posts, self.meets_at)),
            *map(self.lanes.awaited_words, ([], self.arrivals, self.met_by)),
        ]
        self.prepare()
        self.workspace.gather(None)  # all have compiled before one waits

    def prepare(self) -> None:
        """What has to be there before the first move."""

    def check(self) -> None:
        torch.cuda.synchronize(self.device)
        self.workspace.check()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.workspace.gather(None)  # no rank frees what another one still uses
        forget(self.workspace)

    def meeting(self) -> tuple[Run, int]:
        """What brings all ranks together before a move, and the move's number."""
        awaited = tuple(
            (name, tuple(self.others)) for name in ("meeting of the ranks", "arrival of the parts")
        )
        tag = self.lanes.register("transport", self.name, awaited)
        opens = launch_cuda.signal(self.lanes, self.meets_at, self.met_by, tag, opens=True)
        return lambda stream: opens(stream.cuda_stream), tag

    @property
    def meets_at(self) -> list[Arrival]:
        """The words that say to the peers that this rank is there."""
        return [Arrival(self.rank, peer) for peer in self.others]

    @property
    def met_by(self) -> list[Arrival]:
        """The words that say so of the peers."""
        return [Arrival(peer, peer) for peer in self.others]

    @property
    def arrivals(self) -> list[Arrival]:
        """The words that say that a peer's part is there."""
        return [Arrival(self.ranks + peer, peer) for peer in self.others]

    @property
    def posts(self) -> list[Arrival]:
        """The words that say so to the peers, in ring order."""
        return [Arrival(self.ranks + self.rank, peer) for peer in self.others]


class ByCopies(_OnGpu):
    """DMA copies, each with a copy of the epoch behind it, the own part on a stream beside.

    Where a batch can be submitted it is one, and the words of all peers follow it: a batch has no
    order, so that it is ready as a whole.
    """

    name = "copy_engine"

    def prepare(self) -> None:
        self.own, self.edge = torch.cuda.Stream(self.device), torch.cuda.Event()

    def move(self, part_bytes: int, *, scatters: bool, meets: bool) -> Move:
        pushes = [self.push(peer, part_bytes, scatters) for peer in self.others]
        own = self.push(self.rank, part_bytes, scatters)
        words = self.lanes.post_copies(self.posts)
        opens, tag = self.meeting()
        closes = launch_cuda.signal(self.lanes, (), self.arrivals, tag + 1, opens=False)

        def move() -> None:
            stream = torch.cuda.current_stream(self.device)
            self.edge.record(stream)
            self.own.wait_event(self.edge)
            driver.copy_async(own, self.own.cuda_stream)
            if meets:
                opens(stream)
            handle = stream.cuda_stream
            if driver.batches(handle, capturing=torch.cuda.is_current_stream_capturing()):
                driver.copy_batch_async(pushes, handle)
                driver.copy_batch_async(words, handle)
            else:
                for push, word in zip(pushes, words, strict=True):
                    driver.copy_async(push, handle)
                    driver.copy_async(word, handle)
            if meets:
                closes(handle)
            self.edge.record(self.own)
            stream.wait_event(self.edge)

        return move

    def push(self, to: int, part_bytes: int, scatters: bool) -> Copy:
        """This rank's part for `to`."""
        source = self.source.data_ptr() + (to * part_bytes if scatters else 0)
        target = self.memory.buffer_ptrs[to] + self.rank * part_bytes
        return Copy(target, part_bytes, source, part_bytes, part_bytes, 1)


class ByKernel(_OnGpu):
    """Stores of a Triton kernel, a kernel of signals behind it."""

    name = "sm"

    def prepare(self) -> None:
        self.bases = torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64).to(self.device)
        # parts and strides that 16 divides, and others: a variant of the kernel each
        for part, stride in ((16, 0), (4, 0), (4, 4)):
            compiled: Any = self.kernel.warmup(
                *self.arguments(part, stride), grid=(1,), num_warps=NUM_WARPS
            )
            _ = compiled[(1, 1, 1)]  # loads it
        torch.cuda.synchronize(self.device)

    @property
    def kernel(self) -> Any:
        """Its constexpr arguments are plain values for the caller."""
        return exchange_kernel

    def arguments(self, part: int, stride: int) -> tuple[Any, ...]:
        """Of the kernel, for parts of so many words, that far from each other."""
        words = self.source.view(torch.int32)
        return words, self.bases, self.rank, self.ranks, part, stride, BLOCK

    def move(self, part_bytes: int, *, scatters: bool, meets: bool) -> Move:
        opens, tag = self.meeting()
        waits = self.arrivals if meets else ()
        closes = launch_cuda.signal(self.lanes, self.posts, waits, tag + 1, opens=False)
        part = part_bytes // WORD_BYTES
        arguments = self.arguments(part, part if scatters else 0)
        grid = (_programs(part_bytes, self.ranks),)

        def move() -> None:
            stream = torch.cuda.current_stream(self.device)
            if meets:
                opens(stream)
            self.kernel[grid](*arguments, num_warps=NUM_WARPS)
            closes(stream.cuda_stream)

        return move


class ByCpuCopies(Peers):
    """Torch's copies to shared memory, the group's own barrier before and behind."""

    def move(self, part_bytes: int, *, scatters: bool, meets: bool) -> Move:
        def move() -> None:
            if meets:
                dist.barrier(self.group)
            self.store(part_bytes, scatters)
            if meets:
                dist.barrier(self.group)

        return move

    def check(self) -> None:
        """The group's own timeout bounds its barriers."""

    def close(self) -> None:
        """Shared memory goes with its tensors."""

    def store(self, part_bytes: int, scatters: bool) -> None:
        """This rank's part for every rank, itself last."""
        for to in (*self.others, self.rank):
            start = to * part_bytes if scatters else 0
            part = self.source[start : start + part_bytes]
            self.memory.peer(to)[self.rank * part_bytes :][:part_bytes].copy_(part)


class ByTriton(ByCpuCopies):
    """The kernel where Triton's interpreter is on, else torch's copies."""

    def store(self, part_bytes: int, scatters: bool) -> None:
        """As the kernel does, one program after another."""
        if not triton.knobs.runtime.interpret:  # pyright: ignore  (not in its stub)
            super().store(part_bytes, scatters)
            return
        kernel: Any = exchange_kernel
        bases = torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64)
        part = part_bytes // WORD_BYTES
        kernel[(_programs(part_bytes, self.ranks),)](
            self.source.view(torch.int32), bases, self.rank, self.ranks, part,
            part if scatters else 0, BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


def _programs(part_bytes: int, ranks: int) -> int:
    return min(PROGRAMS, -(-part_bytes // (WORD_BYTES * BLOCK)) * ranks)


def ring(rank: int, ranks: int) -> list[int]:
    """The peers of `rank`, the next one first: at each step all ranks have different ones."""
    return [(rank + d) % ranks for d in range(1, ranks)]
