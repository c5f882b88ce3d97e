"""Embedding bags between islands of CPU ranks: by chunks against a lookup, then gloo's all-to-all.

    python -m benchmarks.islands --only bags      # its rows, in place of those that there were

gloo     torch's embedding_bag of each table, gloo's all-to-all, a concat
pooling  the first of it alone; exchange: the second
direct   our plan, each rank an island of its own: chunks go to each rank of the other island
ours     by rails, then inside the island; `chunks` of what goes to the other island"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

import counterpoint as cp
from benchmarks.namespaces import Job, nic_bytes, run
from benchmarks.rows import Row

TABLE = "islands bags"
ROUNDS = 7
TABLES, ROWS, COLUMNS = 2, 50_000, 128  # of each rank, fp32
BAGS = 12_288  # of all ranks
CHUNKS = (1, 2, 4, 8)
# indices of a bag, by which pooling takes about as long as the exchange
POOLING = {"400mbit": 100, "1gbit": 40}


def arms(rank: int, ranks: int, pooling: int) -> dict[str, Callable[[], Tensor]]:
    """The calls that are timed, on random tables and indices of this rank."""
    torch.manual_seed(rank)
    tables = [torch.randn(ROWS, COLUMNS) for _ in range(TABLES)]
    indices = torch.randint(ROWS, (TABLES * BAGS * pooling,))
    offsets = torch.arange(0, len(indices) + 1, pooling)
    of_table, ends = indices.view(TABLES, -1), offsets[: BAGS + 1]
    dims, batch = [[COLUMNS] * TABLES] * ranks, [BAGS // ranks] * ranks

    def pooled() -> Tensor:
        each = zip(of_table, tables, strict=True)
        return torch.cat([embedding_bag(i, t, ends, mode="sum", include_last_offset=True)
                          for i, t in each], 1)  # fmt: skip

    def exchanged(sent: Tensor) -> Tensor:
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return torch.cat(got.view(ranks, BAGS // ranks, -1).unbind(), 1)

    def ours(chunks: int) -> Tensor:
        return cp.embedding_bag_all_to_all(
            tables, indices, offsets, include_last_offset=True, dims=dims, batch=batch,
            dtype=torch.float32, plan=f"islands chunks={chunks}",
        )  # fmt: skip

    sent = pooled()
    found: dict[str, Callable[[], Tensor]] = {
        "gloo": lambda: exchanged(pooled()), "pooling": pooled, "exchange": lambda: exchanged(sent),
    }  # fmt: skip
    return found | {f"chunks={n}": partial(ours, n) for n in CHUNKS}


@torch.no_grad()
def timed(rank: int, ranks: int, pooling: int, names: Sequence[str]) -> dict[str, Any]:
    """Median seconds of some arms, the slowest rank's of each round, and bytes over the NIC."""
    every = arms(rank, ranks, pooling)
    want, calls = every["gloo"](), {name: every[name] for name in names or every}
    for name, call in calls.items():
        if name.startswith("chunks"):
            torch.testing.assert_close(call(), want, rtol=1e-5, atol=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    sent = dict.fromkeys(calls, 0)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            dist.barrier()
            before, start_s = nic_bytes(), time.perf_counter()
            call()
            took = torch.tensor([time.perf_counter() - start_s])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
            sent[name] += nic_bytes() - before
    return {
        name: {"median_s": median(each), "seconds": each, "sent": sent[name] / ROUNDS}
        for name, each in seconds.items()
    }


def rows() -> Iterator[Row]:
    """A row for each arm and network."""
    for size in (2, 3):
        for rate, pooling in POOLING.items():
            about = {
                "table": TABLE, "islands": 2, "size": size, "rate": rate, "pooling": pooling,
                "bags": BAGS, "tables": [TABLES, ROWS, COLUMNS],
            }  # fmt: skip
            for flat, names in ((False, ()), (True, ("chunks=4",))):
                job = Job("benchmarks.island_bags:timed", size=size, rate=rate, flat=flat,
                          args=(pooling, names))  # fmt: skip
                for arm, found in run(job)[0].items():
                    yield about | {"arm": "direct " * flat + arm} | found


def table(rows: Sequence[Row]) -> str:
    """Speedups of each number of chunks, and the share of the shorter side that is hidden."""
    from benchmarks.tables import grid

    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for r in rows:
        cases.setdefault((r["size"], r["rate"], r["pooling"]), {})[r["arm"]] = r
    lines: list[list[str]] = []
    for (size, rate, pooling), arm in cases.items():
        s = {name: r["median_s"] for name, r in arm.items()}
        ours = [s["gloo"] / s[f"chunks={n}"] for n in CHUNKS]
        best_s = min(s[f"chunks={n}"] for n in CHUNKS)
        hidden = (s["pooling"] + s["exchange"] - best_s) / min(s["pooling"], s["exchange"])
        lines.append([
            f"2 x {size}, {rate[:-4]} {rate[-4].upper()}bit/s, {pooling} indices",
            f"{s['pooling'] * 1e3:.0f} + {s['exchange'] * 1e3:.0f} ms", f"{s['gloo'] * 1e3:.0f} ms",
            ", ".join(f"{x:.2f}" for x in ours), f"{s['gloo'] / s['direct chunks=4']:.2f}",
            f"{hidden:.0%}",
        ])  # fmt: skip
    speedup = f"speedup, {', '.join(map(str, CHUNKS))} chunks"
    head = ["islands x ranks, of a bag", "pooling + exchange", "gloo", speedup, "without rails, 4",
            "hidden"]  # fmt: skip
    first = rows[0]
    return (
        f"{grid(head, lines)}\n\nCPU ranks on 2 cores, commit {first['commit']} "
        f"({first['date']}); each has {TABLES} tables of {ROWS:,} rows of {COLUMNS} numbers of "
        f"fp32, for {BAGS:,} bags in all. Hidden: of the shorter of pooling and exchange, by the "
        "best number of chunks. Without rails: each rank an island of its own."
    )
