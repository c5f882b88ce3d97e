"""What the model needs of CPU ranks: the same questions, all ranks busy at once, as in a call.

Ranks may outnumber cores, and those of an island share its NIC: what is measured is the part of
each while all are at work. An SM stands for the thread that computes.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist

from counterpoint.group.notice_board import Awaited
from counterpoint.group.pads_cpu import await_words, pads_of, wrapped
from counterpoint.group.workspace import workspace_of
from counterpoint.machine import DeviceSpec, LinkSpec, Machine
from counterpoint.measure import record
from counterpoint.measure.exchanges import MIB, Row, exchange, exchanges, slowest_s
from counterpoint.model.calibrate_cpu import fit_cpu
from counterpoint.plan.bind import Arrival

MATMULS = ((1024, 96, 1536), (384, 96, 1536), (768, 1536, 96), (256, 1536, 96))  # rows, n, k
SIZES = (MIB // 2, 4 * MIB)
CPU = torch.device("cpu")
BESIDE = 3  # exchanges with each other island, beside matmuls

Call = Callable[[], object]


def characterize_cpu(
    *, group: dist.ProcessGroup, rounds: int = 7, progress: Callable[[str], None] = lambda _: None
) -> tuple[Machine, list[Row]]:
    """Measure the CPU ranks of `group`; all of them call this, and do so at the same time.

    Returns:
        The machine of one island with measured costs, and the rows they were fitted to; equal on
        all ranks.
    """
    bench = _Bench(group, rounds)
    rows: list[Row] = []
    for question in (bench.matmuls, bench.copies, bench.memory, bench.signals, bench.collectives,
                     bench.exchanges, bench.beside):  # fmt: skip
        progress(question.__name__)
        rows += question()
    facts = {"table": "characterize", "ranks": group.size()} | record.environment()
    size = bench.workspace.islands.size
    machine = fit_cpu(rows, _sheet(size, f"torch {torch.__version__}, {facts['date']}"))
    return machine, [row | facts for row in rows]


def _sheet(ranks: int, versions: str) -> Machine:
    """CPU ranks before they are measured: their rates are those of any CPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = DeviceSpec(
        name=f"{platform.machine()} core", num_sms=1, max_blocks_per_sm=1, bf16_flop_per_s=1e11,
        fp32_flop_per_s=5e10, hbm_bytes_per_s=1e10, hbm_bytes=float(memory), l2_bytes=MIB,
    )  # fmt: skip
    link = LinkSpec(name="shared memory", bytes_per_s=1e10)
    source = f"measured on {ranks} CPU ranks of an island, {versions}"
    return Machine(name=f"cpu-{ranks}", device=device, link=link, num_devices=ranks,
                   gemm_tile=(16, 16), source=source)  # fmt: skip


class _Bench:
    """The questions, each a method that returns rows."""

    def __init__(self, group: dist.ProcessGroup, rounds: int) -> None:
        self.group, self.rounds = group, rounds
        self.workspace = workspace_of(group, CPU)
        self.workspace.open_pads()
        self.memory_of_peers = self.workspace.allocate(max(SIZES))

    def timed(self, call: Call, of: int = 1) -> float:
        """Seconds of one call, all ranks at it, of as many as a multiple of `of`."""
        return slowest_s(call, self.workspace, self.rounds, of)

    def matmuls(self) -> list[Row]:
        return [
            {"question": "matmul", "rows": m, "n": n, "k": k,
             "seconds": self.timed(_multiply(m, n, k))}
            for m, n, k in MATMULS
        ]  # fmt: skip

    def copies(self) -> list[Row]:
        """To the next rank of the island; alone, to itself."""
        islands = self.workspace.islands
        peer = islands.mine[(islands.rank + 1) % islands.size]
        memory = self.memory_of_peers.peer(peer)

        def push(size: int) -> Call:
            target, source = memory[:size].view(torch.float32), torch.ones(size // 4)
            return lambda: target.copy_(source)

        return [{"question": "copy", "num_bytes": size, "seconds": self.timed(push(size))}
                for size in SIZES]  # fmt: skip

    def memory(self) -> list[Row]:
        """A kernel that sums two, as a reduce does."""

        def add(size: int) -> Call:
            a, b, c = (torch.ones(size // 4) for _ in "abc")
            return lambda: torch.add(a, b, out=c)

        rows: list[Row] = [
            {"question": "memory", "num_bytes": 3 * size, "seconds": self.timed(add(size))}
            for size in SIZES
        ]
        return [*rows, {"question": "kernel", "seconds": self.timed(add(64))}]

    def signals(self) -> list[Row]:
        workspace, awaited = self.workspace, Awaited("characterize", "signal", "barrier")
        pads, rank = pads_of(workspace), workspace.rank
        waits = [Arrival(1 + r, r) for r in workspace.islands.mine if r != rank]

        def barrier() -> None:
            workspace.epoch = wrapped(workspace.epoch + 1)
            for _, peer in waits:
                pads[peer][1 + rank] = workspace.epoch
            await_words(workspace, waits, workspace.epoch, awaited)

        return [{"question": "barrier", "seconds": self.timed(barrier)}]

    def collectives(self) -> list[Row]:
        """Of the library, all ranks together, by whatever is between them."""
        rows: list[Row] = []
        ranks = self.group.size()
        for size in SIZES:
            part = torch.ones(size // 4 // ranks)
            parts = [torch.empty_like(part) for _ in range(ranks)]
            calls: dict[str, Call] = {
                "all_gather": partial(dist.all_gather, parts, part, self.group),
                "reduce_scatter": partial(dist.reduce_scatter, part, parts, group=self.group),
            }
            received = part.numel() * 4 * (ranks - 1)
            rows += ({"question": "collective", "kind": kind, "num_bytes": received,
                      "seconds": self.timed(call)} for kind, call in calls.items())  # fmt: skip
        return rows

    def exchanges(self) -> list[Row]:
        return exchanges(self.workspace, self.rounds)

    def beside(self) -> list[Row]:
        """Matmuls while blocks are exchanged: each of them the one that takes longer."""
        far = self.workspace.islands.number - 1
        rows: list[Row] = []
        for shape in MATMULS[:: len(MATMULS) // 2] if far else ():
            multiply, swap = _multiply(*shape), exchange(self.workspace, MIB)
            swaps = BESIDE * far
            one_s, swaps_s = self.timed(multiply), self.timed(swap, far) * swaps
            for which, part in (("matmul", 1.2), ("copy", 0.85)):
                times = max(1, round(part * swaps_s / one_s))
                both_s = self.timed(_both(multiply, times, swap, swaps))
                alone = {"matmul": times * one_s, "copy": swaps_s}
                other = {"matmul": swaps_s, "copy": times * one_s}
                rows.append({"question": "beside", "which": which, "seconds": both_s,
                             "alone_s": alone[which], "other_s": other[which]})  # fmt: skip
        return rows


def _multiply(rows: int, n: int, k: int) -> Call:
    x, w, y = torch.randn(rows, k), torch.randn(k, n), torch.empty(rows, n)
    return lambda: torch.mm(x, w, out=y)


def _both(multiply: Call, times: int, swap: Call, swaps: int) -> Call:
    """Exchanges on a thread of their own, as on a lane."""

    def lane(call: Call, count: int) -> None:
        for _ in range(count):
            call()

    def run() -> None:
        other = Thread(target=lane, args=(swap, swaps))
        other.start()
        lane(multiply, times)
        other.join()

    return run
