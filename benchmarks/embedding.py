"""Embedding bags and their all-to-all in one kernel, against lookups and the library's all-to-all.

Baselines: a torch.nn.EmbeddingBag for each table ("bags"), or our own lookup of all tables at once
(`plan="serial"`), each with all_to_all_single and torch.cat or a permute. It is not FBGEMM, which
is not installed here. "fused" has outputs of its own, "fused copy" copies its result. The floors,
"gather" and "store", only read the same rows and only store as many bytes: see embedding_floors.py.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import counterpoint as cp
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.embedding_floors import gathers, stores
from benchmarks.pictures import bars, place, shown
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, by_machine, measured, ms, table, us
from counterpoint.measure.timing import relative_error

# MLPerf DLRM-DCNv2: rows and pooling of each table
MLPERF_ROWS = (40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282,
               10, 2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108,
               36)  # fmt: skip
MLPERF_POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_D = 128
BATCHES = (4096, 16384, 65536)
LARGE = 16384  # bags of a batch from which on the share of the floor is meant
ROWS = 1_000_000  # of a uniform table
MAX_SETS = 8
CHECKED = 64  # bags that are compared with fp64, beside all bits with those of the lookup
ROUNDING = 4e-3  # of bf16, rounded once
HOST = ("bags cat", "lookup cat", "ours serial", "fused", "fused copy", "auto")


def case_of(tables: int, d: int, pooling: int, batch: int) -> Case:
    """As many tables of a million rows on each GPU."""
    name = f"{tables} tables, D {d}, pooling {pooling}, batch {batch}"
    return Case(name, {"batch": batch, "d": d, "each": tables, "pooling": pooling})


def cases(_: int) -> list[Case]:
    """The grid, and MLPerf's tables."""
    grid_ = [case_of(t, d, pooling, batch) for t, d in ((8, 128), (16, 256), (64, 64))
             for pooling in (1, 5, 20, 100) for batch in BATCHES]  # fmt: skip
    return grid_ + [
        Case(
            f"MLPerf DCNv2, batch {batch}", {"batch": batch, "d": MLPERF_D, "each": 0, "pooling": 0}
        )
        for batch in BATCHES
    ]


def shards(ranks: int) -> list[list[int]]:
    """MLPerf's tables by rank: the one with most work to the rank that has least so far."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for number in sorted(range(len(MLPERF_POOLING)), key=lambda t: -MLPERF_POOLING[t]):
        rank = load.index(min(load))
        found[rank].append(number)
        load[rank] += MLPERF_POOLING[number]
    return [sorted(numbers) for numbers in found]


class Bags(NamedTuple):
    """One rank's tables and sets of indices."""

    batch: int  # of all ranks
    dims: list[tuple[int, ...]]  # columns of the tables of each rank
    pooling: tuple[int, ...]  # of own tables
    tables: list[Tensor]
    sets: list[Tensor]
    offsets: Tensor


def made(case: Case, bench: Bench) -> Bags:
    """Indices at random, uniform over the rows, as many in each bag of a table."""
    d, batch, device = case["d"], case["batch"], bench.device
    if case["each"]:
        rows, pooling = [ROWS] * case["each"], (case["pooling"],) * case["each"]
        dims = [(d,) * case["each"]] * bench.ranks
    else:
        owners = shards(bench.ranks)
        rows = [MLPERF_ROWS[t] for t in owners[bench.rank]]
        pooling = tuple(MLPERF_POOLING[t] for t in owners[bench.rank])
        dims = [(d,) * len(own) for own in owners]
    tables = [bench.empty(n if bench.on_gpu else min(n, 100), d).uniform_(-1, 1) for n in rows]
    touched = 2 * batch * d * sum(pooling)
    sets = [
        torch.cat([torch.randint(0, len(t), (batch * p,), generator=bench.draw, device=device)
                   for p, t in zip(pooling, tables, strict=True)])
        for _ in range(max(2, bench.sets(touched, MAX_SETS)))
    ]  # fmt: skip
    counts = torch.tensor(pooling, dtype=torch.int64, device=device).repeat_interleave(batch)
    return Bags(
        batch, dims, pooling, tables, sets, torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    )


def by_torch(b: Bags, bench: Bench) -> dict[str, Call | str]:
    """An EmbeddingBag for each table, all_to_all_single, and the rows put side by side."""
    own, columns = b.batch // bench.ranks, [sum(dims) for dims in b.dims]
    sent = bench.empty(b.batch, columns[bench.rank])
    got = bench.empty(own * sum(columns))
    sizes = [own * c for c in columns]
    edges = b.offsets[:: b.batch].tolist()
    starts = [torch.arange(b.batch + 1, device=bench.device) * p for p in b.pooling]

    def pooled(i: int) -> None:
        indices = b.sets[i % len(b.sets)]
        rows = [
            functional.embedding_bag(
                indices[edges[t] : edges[t + 1]],
                weight,
                starts[t],
                mode="sum",
                include_last_offset=True,
            )
            for t, weight in enumerate(b.tables)
        ]
        torch.cat(rows, 1, out=sent)
        splits = [own * columns[bench.rank]] * bench.ranks
        dist.all_to_all_single(got, sent.view(-1), sizes, splits, group=bench.group)

    def cat(i: int) -> Tensor:
        pooled(i)
        return torch.cat([part.view(own, -1) for part in got.split(sizes)], 1)

    def permute(i: int) -> Tensor:
        pooled(i)
        return got.view(bench.ranks, own, -1).permute(1, 0, 2).reshape(own, -1)

    if len(set(columns)) > 1:
        return {"bags cat": cat, "bags permute": "a permute wants equal columns on all ranks"}
    return {"bags cat": cat, "bags permute": permute}


def arms(case: Case, bench: Bench) -> Arms:
    """All ways to the output, and the floors."""
    b = made(case, bench)
    columns = sum(sum(dims) for dims in b.dims)
    out = cp.PooledOutputs(
        columns, b.tables[0].dtype, b.batch, group=bench.group, device=bench.device
    )

    def ours(plan: str, into: cp.PooledOutputs | None) -> Call:
        return lambda i: cp.embedding_bag_all_to_all(
            b.tables, b.sets[i % len(b.sets)], b.offsets, group=bench.group, out=into, plan=plan,
            include_last_offset=True, batch=[b.batch // bench.ranks] * bench.ranks, dims=b.dims,
        )  # fmt: skip

    calls = by_torch(b, bench) | {"ours serial": ours("serial", None), "auto": ours("auto", out)}
    calls |= {"fused": ours("fused", out), "fused copy": ours("fused", None)}
    floors = gathers(b.tables, b.sets, b.offsets[:: b.batch].contiguous(), bench)
    floors |= stores(b.dims, b.batch // bench.ranks, bench)
    first = b.batch // bench.ranks * bench.rank
    some, want = wanted(b, bench)
    bits = ours("serial", None)(0).clone()

    def check(name: str, y: Tensor) -> list[float]:
        off = relative_error(y[some - first], want) if len(want) else 0.0
        differs = not name.startswith("bags") and not torch.equal(y, bits)
        return [off, float(differs)]

    work = bench.gathered(2 * b.batch * case["d"] * sum(b.pooling))
    return Arms(calls | floors, check, baseline="ours serial", parts=tuple(floors), floor=ROUNDING,
                outputs=[out.view(turn) for turn in range(out.turns)], sets=len(b.sets),
                nan_bytes=out.turn_bytes,
                facts={"tables": [len(dims) for dims in b.dims], "row_bytes": max(work),
                       "indices": bench.gathered(b.sets[0].numel())})  # fmt: skip


def wanted(b: Bags, bench: Bench) -> tuple[Tensor, Tensor]:
    """Some of this rank's bags, and their rows of all tables in fp64."""
    chosen = random.Random(0).sample(range(b.batch), min(CHECKED, b.batch))
    some = torch.tensor(sorted(chosen), device=bench.device)
    parts: list[Tensor] = []
    for t, (weight, pooling) in enumerate(zip(b.tables, b.pooling, strict=True)):
        places = b.offsets[t * b.batch + some][:, None] + torch.arange(pooling, device=bench.device)
        parts.append(weight[b.sets[0][places]].double().sum(1))
    mine = torch.cat(parts, 1)
    everyone = [mine if r == bench.rank else mine.new_empty(len(some), sum(b.dims[r]))
                for r in range(bench.ranks)]  # fmt: skip
    for r, rows in enumerate(everyone):  # of other widths: each in turn
        dist.broadcast(rows, dist.get_global_rank(bench.group, r), group=bench.group)
    own = some // (b.batch // bench.ranks) == bench.rank
    return some[own], torch.cat(everyone, 1)[own]


# ---- what is said of the rows


class Said(NamedTuple):
    """One case of a table, in seconds: the fastest baseline, ours, and the floors."""

    case: Timed
    serial: str
    serial_s: float
    fused_s: float
    copy_s: float
    gather_s: float
    store_s: float

    @property
    def floor_s(self) -> float:
        """The longer of the two."""
        return max(self.gather_s, self.store_s)


def said(rows: Sequence[Row]) -> list[Said]:
    """The cases of rows."""
    found: list[Said] = []
    for case in taken([row for row in rows if row["table"] == "embedding"], "case"):
        names = list(case.main)
        serial = case.fastest(n for n in names if n.endswith((" cat", " permute", " serial")))
        # what a lookup reads it also writes: where it takes less, only reading does too
        gather = case.fastest(n for n in names if n.startswith("gather") or n == "lookup")
        store = case.fastest(n for n in names if n.startswith("store"))
        times = (case.s(name) for name in (serial, "fused", "fused copy", gather, store))
        found.append(Said(case, serial, *times))
    return found


def summary(found: Sequence[Said]) -> str:
    """Means over all cases, and where the floor is meant."""
    ours, copy = [c.serial_s / c.fused_s for c in found], [c.serial_s / c.copy_s for c in found]
    large = [c.floor_s / c.fused_s for c in found if c.case.head["batch"] >= LARGE]
    floor = (
        f" Without a copy it reaches {fmean(large):.0%} of the floor from {LARGE} bags on."
        if large else ""
    )  # fmt: skip
    return (
        f"Speedup of the kernel, which *auto* takes, over the fastest baseline, geometric mean of "
        f"{len(found)} cases: {geometric_mean(ours):.2f} ({min(ours):.2f} to {max(ours):.2f}) "
        f"without a copy, {geometric_mean(copy):.2f} ({min(copy):.2f} to {max(copy):.2f}) with one."
        f"{floor}"
    )


def by_pooling(found: Sequence[Said]) -> str:
    """The mean of each pooling: what of the time is communication differs with it."""
    lines: list[tuple[list[str], list[Row]]] = []
    for pooling in sorted({c.case.head["pooling"] for c in found}, key=lambda p: p or 1 << 30):
        some = [c for c in found if c.case.head["pooling"] == pooling]
        r = [c.serial_s / c.fused_s for c in some]
        means = (geometric_mean(r), min(r), max(r))
        cells = [f"{pooling or 'MLPerf'}", f"{len(r)}", *(f"{mean:.2f}" for mean in means)]
        lines.append((cells, [row for c in some for row in c.case.rows]))
    return measured(["pooling", "cases", "baseline / fused, mean", "least", "most"], lines)


def every_case(rows: list[Row]) -> str:
    """Milliseconds."""
    found = said(rows)
    lines = [
        (
            [
                c.case.head["case"],
                ms(c.case.s(c.case.fastest(("bags cat", "bags permute")))),
                ms(c.serial_s),
                c.serial,
                f"**{ms(c.fused_s)}**",
                f"{c.serial_s / c.fused_s:.2f}",
                ms(c.copy_s),
                ms(c.gather_s),
                ms(c.store_s),
                f"{c.floor_s / c.fused_s:.0%}",
            ],
            c.case.rows,
        )
        for c in found
    ]
    head = ["case", "torch bags", "best baseline", "which", "fused", "baseline / fused",
            "with a copy", "only reading", "only storing", "of the floor"]  # fmt: skip
    note = (
        "Indices are int64, tables are those of one GPU. Times are milliseconds of the slowest "
        "rank, with indices in rotation. All arms ran in one randomised rotation."
    )
    return "\n\n".join((summary(found), by_pooling(found), measured(head, lines, note)))


def host(rows: list[Row]) -> str:
    """Microseconds of the host for a call."""

    def column(name: str) -> Column:
        return Column(name, lambda c: us(c.main[name]["host_s"], 0) if _has_host(c, name) else "-")

    some = [case for case in taken(rows, "case") if _has_host(case, "fused")]
    text = table([Column("case", lambda c: c.head["case"]), *map(column, HOST)], some)
    return f"Microseconds of the host for an eager call:\n\n{text}" if text else ""


def _has_host(case: Timed, name: str) -> bool:
    return bool(name in case and case.main[name].get("host_s"))


def pictures(measured: Mapping[int, list[Row]], images: Path) -> None:
    """Serial, ours and the floor of each case of the largest batch, of the most GPUs."""
    rows = next(iter(measured.values()))
    found = said(rows)
    batch = max(c.case.head["batch"] for c in found)
    some = [c for c in found if c.case.head["batch"] == batch]
    floor = "floor: rows only read, or only stored"
    means = [geometric_mean(c.serial_s / s for c, s in each) for each in (
        [(c, c.copy_s) for c in some], [(c, c.fused_s) for c in some])]  # fmt: skip
    bars(
        {
            c.case.head["case"].partition(", batch")[0].replace("D ", "width "): {
                "the fastest baseline": c.serial_s,
                "counterpoint": c.copy_s,
                "counterpoint, result stays in symmetric memory": c.fused_s,
                floor: c.floor_s,
            }
            for c in some
        },
        images / "embedding.svg",
        title=f"Embedding tables: {means[0]:.2f}x in the mean, {means[1]:.2f}x without a last copy",
        source=f"{place(rows)}; batch {batch}, lookup and all-to-all, eager",
        mark=floor,
    )


def _picture(_: Mapping[int, list[Row]]) -> str:
    return shown("embedding", "Speedup of embedding lookup and all-to-all, by tables and pooling")


EMBEDDING = Benchmark(
    "embedding", cases, arms, unit="ms", calls=0, rounds=11, every_eager=True, eager=HOST,
    soak_s=0.1, backlog_cycles=4_000_000,  # the host has 64 bags to launch
    short=lambda case: case.name in ("8 tables, D 128, pooling 5, batch 4096",
                                     "8 tables, D 128, pooling 20, batch 16384"),
    moved=lambda case, ranks: 2 * case["d"] * case["each"] * case["batch"] * (ranks - 1) // ranks,
    pictures=pictures,
    sections=(
        Section("docs/results/embeddings.md", "embedding", by_machine(every_case)),
        Section("docs/results/embeddings.md", "embedding-host", by_machine(host)),
        Section("docs/results/embeddings.md", "embedding-picture", _picture),
    ),
)  # fmt: skip
