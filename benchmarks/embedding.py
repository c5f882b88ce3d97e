"""Embedding bags and their all-to-all in one kernel, against lookups and NCCL.

    torchrun --nproc-per-node=4 benchmarks/embedding.py --out FILE.jsonl

The baseline is the faster of torch.nn.EmbeddingBag for each table and of our own batched lookup,
each with all_to_all_single and the faster of torch.cat and a permute. It is not FBGEMM, which is
not installed here.
"""

import argparse
import faulthandler
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist
from embedding_floors import gathers, stores
from torch import Tensor
from torch.nn import functional

from counterpoint.cli.launch import nccl_group
from counterpoint.errors import CounterpointError
from counterpoint.measure import record
from counterpoint.measure.timing import host_s, relative_error, rotate
from counterpoint.ops.embedding_bag_all_to_all import embedding_bag_all_to_all
from counterpoint.ops.embedding_check import OP
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.resources.order import Delay
from counterpoint.runtime.embedding_layout import Facts, Layout, Way, way_for
from counterpoint.runtime.launch_embedding import Lookup
from counterpoint.runtime.workspace import workspace_of

# MLPerf DLRM-DCNv2: rows and pooling of each table
MLPERF_ROWS = (40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282,
               10, 2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108,
               36)  # fmt: skip
MLPERF_POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_D = 128
BATCHES = (4096, 16384, 65536)
# tables of a GPU, their columns, pooling: tables of a million rows
UNIFORM = [(t, d, pooling) for t, d in ((8, 128), (16, 256), (64, 64))
           for pooling in (1, 5, 20, 100)]  # fmt: skip
ROWS = 1_000_000
COLD_BYTES = 120 << 20  # of rows, between two uses of one set of indices
MAX_SETS = 8
CHECKED = 64  # bags that are compared with fp64, beside all bits with those of the lookup
ROUNDS = 11
SOAKED = ("fused copy", "fused", "fused", "ours serial", "fused", "ours serial", "fused copy")
BACKLOG_CYCLES = 4_000_000  # the host has 64 bags to launch


@dataclass
class Case:
    """One rank's tables and sets of indices."""

    name: str
    layout: Layout
    pooling: tuple[int, ...]  # of own tables
    tables: list[Tensor]
    sets: list[Tensor]
    offsets: Tensor


def shards(ranks: int) -> list[list[int]]:
    """MLPerf's tables by rank: the one with most work to the rank that has least so far."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for table in sorted(range(len(MLPERF_POOLING)), key=lambda t: -MLPERF_POOLING[t]):
        rank = load.index(min(load))
        found[rank].append(table)
        load[rank] += MLPERF_POOLING[table]
    return [sorted(tables) for tables in found]


def made(
    name: str, dims: list[tuple[int, ...]], batch: int, tables: list[Tensor],
    pooling: tuple[int, ...], group: dist.ProcessGroup, seed: int,
) -> Case:  # fmt: skip
    """Indices at random, uniform over the rows, as many in each bag of a table."""
    device, ranks = tables[0].device, group.size()
    layout = Layout(tuple(dims), (batch // ranks,) * ranks, tables[0].dtype)
    draw = torch.Generator(device).manual_seed(1000 * seed + group.rank())
    touched = sum(batch * p * t.shape[1] * 2 for p, t in zip(pooling, tables, strict=True))
    sets = [
        torch.cat([torch.randint(0, len(t), (batch * p,), generator=draw, device=device)
                   for p, t in zip(pooling, tables, strict=True)])
        for _ in range(max(2, min(MAX_SETS, math.ceil(COLD_BYTES / touched))))
    ]  # fmt: skip
    counts = torch.tensor(pooling, device=device).repeat_interleave(batch)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Case(name, layout, pooling, tables, sets, offsets)


def arms_of(
    case: Case, group: dist.ProcessGroup, out: PooledOutputs
) -> dict[str, Callable[[int], Tensor]]:
    """All ways to the output, by the number of the set."""
    layout, tables, rank, ranks = case.layout, case.tables, group.rank(), group.size()
    device, batch = tables[0].device, layout.num_bags
    own, each = layout.batch[rank], [sum(d) for d in layout.dims]
    sent = torch.empty(batch, each[rank], dtype=layout.dtype, device=device)
    got = torch.empty(own * layout.columns, dtype=layout.dtype, device=device)
    sizes = [own * c for c in each]
    facts = Facts(layout, False, None, torch.int64, torch.int64)
    lookup = Lookup(facts, rank, device, way_of(case))
    edges = case.offsets[::batch].tolist()
    starts = [torch.arange(batch + 1, device=device) * p for p in case.pooling]

    def bags(i: int) -> Tensor:
        indices = case.sets[i % len(case.sets)]
        pooled = [
            functional.embedding_bag(
                indices[edges[t] : edges[t + 1]], table, starts[t], mode="sum",
                include_last_offset=True,
            )
            for t, table in enumerate(tables)
        ]  # fmt: skip
        return torch.cat(pooled, 1, out=sent)

    def looked_up(i: int) -> Tensor:
        lookup(tables, case.sets[i % len(case.sets)], case.offsets, None, sent)
        return sent

    def exchange() -> None:
        splits = [b * each[rank] for b in layout.batch]
        dist.all_to_all_single(got, sent.view(-1), sizes, splits, group=group)

    def cat() -> Tensor:
        parts = zip(got.split(sizes), each, strict=True)
        return torch.cat([part.view(own, c) for part, c in parts], 1)

    def permute() -> Tensor:
        return got.view(ranks, own, each[0]).permute(1, 0, 2).reshape(own, -1)

    def serial(
        pool: Callable[[int], Tensor], join: Callable[[], Tensor]
    ) -> Callable[[int], Tensor]:
        def run(i: int) -> Tensor:
            pool(i)
            exchange()
            return join()

        return run

    def ours(plan: str, into: PooledOutputs | None) -> Callable[[int], Tensor]:
        def run(i: int) -> Tensor:
            return embedding_bag_all_to_all(
                tables, case.sets[i % len(case.sets)], case.offsets, group=group, out=into,
                include_last_offset=True, batch=layout.batch, dims=layout.dims, plan=plan,
            )  # fmt: skip

        return run

    arms = {"bags cat": serial(bags, cat), "lookup cat": serial(looked_up, cat)}
    if len(set(each)) == 1:
        arms |= {
            "bags permute": serial(bags, permute),
            "lookup permute": serial(looked_up, permute),
        }
    arms |= {"fused": ours("fused", out), "fused copy": ours("fused", None)}
    # as a user has them
    arms |= {"ours serial": ours("serial", out), "ours auto": ours("auto", out)}
    return arms | {"lookup": looked_up}


def emptied(out: PooledOutputs, group: dist.ProcessGroup) -> None:
    """NaN in all turns: what a kernel does not write is seen. All ranks call it."""
    for turn in range(out.turns):
        out.view(turn).fill_(torch.nan)
    torch.cuda.empty_cache()
    torch.full((out.turn_bytes // 2,), torch.nan, dtype=torch.bfloat16, device=out.device)
    torch.cuda.synchronize(out.device)
    dist.barrier(group)  # before a peer writes


def checked(
    case: Case, arms: dict[str, Callable[[int], Tensor]], group: dist.ProcessGroup,
    out: PooledOutputs,
) -> dict[str, float]:  # fmt: skip
    """Errors of some bags against fp64; all bits of ours against those of our lookup.

    Raises:
        CounterpointError: one is off; nothing is timed.
    """
    layout, rank, device = case.layout, group.rank(), case.tables[0].device
    draw, batch = random.Random(0), layout.num_bags
    some = torch.tensor(sorted(draw.sample(range(batch), min(CHECKED, batch))), device=device)
    parts: list[Tensor] = []
    for t, (table, pooling) in enumerate(zip(case.tables, case.pooling, strict=True)):
        first = case.offsets[t * batch + some]
        places = first[:, None] + torch.arange(pooling, device=device)
        parts.append(table[case.sets[0][places]].double().sum(1))
    mine = torch.cat(parts, 1)
    everyone = [mine.new_empty(len(some), sum(d)) for d in layout.dims]
    # of other widths: each in turn
    for r, want in enumerate(everyone):
        if r == rank:
            want.copy_(mine)
        dist.broadcast(want, dist.get_global_rank(group, r), group=group)
    start, stop = layout.starts[rank : rank + 2]
    own = (some >= start) & (some < stop)
    want = torch.cat(everyone, 1)[own]
    errors: dict[str, float] = {}
    same = True
    bits = arms["lookup cat"](0).clone()
    for name, arm in arms.items():
        if name != "lookup":
            emptied(out, group)
            y = arm(0)
            errors[name] = relative_error(y[some[own] - start], want) if len(want) else 0.0
            same = same and (
                not name.startswith(("lookup", "fused", "ours")) or torch.equal(y, bits)
            )
    worst = torch.tensor([*errors.values(), float(not same)], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    *found, differ = worst.tolist()
    errors = dict(zip(errors, found, strict=True))
    for name, error in errors.items():
        if differ or not error <= 4e-3:  # of bf16, rounded once
            raise CounterpointError(f"{case.name}, {name}: error {error:.1e}, {differ=}")
    return errors


def measured(case: Case, group: dist.ProcessGroup, *, host: bool) -> list[dict[str, Any]]:
    """Rows of all arms and floors, in one rotation; equal on all ranks."""
    device, rank = case.tables[0].device, group.rank()
    layout = case.layout
    out = PooledOutputs(layout.columns, layout.dtype, layout.batch, group=group)
    arms = arms_of(case, group, out)
    errors = checked(case, arms, group, out)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    edges = case.offsets[:: layout.num_bags].contiguous()
    timed: dict[str, Callable[[int], object]] = dict(arms)
    timed |= gathers(case.tables, case.sets, edges, sms)
    starts = torch.tensor(layout.starts, dtype=torch.int32, device=device)
    timed |= stores(layout, rank, out.bases, starts, sms)
    calls = dict.fromkeys(timed, 0)

    def turn(name: str) -> Callable[[], object]:
        def run() -> object:
            calls[name] += 1
            return timed[name](calls[name])

        return run

    times = rotate(
        {name: turn(name) for name in timed}, group=group, device=device, rounds=ROUNDS,
        soak_s=0.1, backlog_cycles=BACKLOG_CYCLES,
    )  # fmt: skip
    serial = min((n for n in times if n.endswith((" cat", " permute"))),
                 key=lambda n: times[n].median_s)  # fmt: skip
    spread = torch.tensor([max(case.pooling), -min(case.pooling)], device=device)
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=group)
    most, least = spread.tolist()
    work = torch.tensor(
        sum(layout.num_bags * p * t.shape[1] * 2
            for p, t in zip(case.pooling, case.tables, strict=True)), device=device,
    )  # fmt: skip
    dist.all_reduce(work, op=dist.ReduceOp.MAX, group=group)
    indices = [0] * group.size()
    dist.all_gather_object(indices, case.sets[0].numel(), group=group)
    facts = {
        "table": "embedding", "case": case.name, "batch": layout.num_bags, "ranks": group.size(),
        "d": case.tables[0].shape[1], "tables": [len(d) for d in layout.dims],
        "pooling": most if most == -least else 0, "sets": len(case.sets),
        "indices": indices, "row_bytes": int(work), "best_serial": serial,
    } | record.environment()  # fmt: skip
    taken = kernel_of(case, group)
    rows: list[dict[str, Any]] = []
    for name, t in times.items():
        row: dict[str, Any] = (taken if name == "fused" else {}) | {
            "arm": name, "median_s": t.median_s, "p20_s": t.quantile_s(2), "p80_s": t.quantile_s(8),
            "skew_s": t.skew_s, "serial_over_arm": t.ratio_of(times[serial]),
            "error": errors.get(name),
        }  # fmt: skip
        if host and name in ("bags cat", "lookup cat", "fused", "fused copy", "ours serial"):
            row["host_s"] = host_s(turn(name), group=group)
        rows.append(row | facts)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank frees what another one still writes to
    return rows


def way_of(case: Case) -> Way:
    """What this rank takes."""
    return way_for(case.sets[0].numel(), case.layout.num_bags * len(case.tables))


def kernel_of(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """The fused kernel that this rank has launched: way, programs, registers, spills."""
    facts = Facts(case.layout, False, None, torch.int64, torch.int64)
    way = way_of(case)
    ready = workspace_of(group, case.tables[0].device).code[OP, facts, True]
    (launched,) = ready.senders[way].launches.values()
    return {"way": f"{way.tile_bytes}x{way.unroll}x{way.num_warps}", "programs": launched.programs,
            "registers": launched.registers, "spills": launched.spills}  # fmt: skip


def tables_of(rows: list[int], d: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(n, d, dtype=torch.bfloat16, device=device).uniform_(-1, 1) for n in rows]


def said(rows: list[dict[str, Any]]) -> str:
    """One line: the best serial, ours, the floors."""
    s = {r["arm"]: r["median_s"] * 1e3 for r in rows}
    best, gather = rows[0]["best_serial"], min(s[a] for a in s if a.startswith("gather"))
    store = min(s[a] for a in s if a.startswith("store"))
    return (
        f"{best} {s[best]:.3f} ms, fused {s['fused']:.3f} ({1 - s['fused'] / s[best]:.0%} less), "
        f"with a copy {s['fused copy']:.3f}; lookup {s['lookup']:.3f}, gather {gather:.3f}, "
        f"store {store:.3f}: {max(gather, store) / s['fused']:.0%} of the floor"
    )


def soak(calls: int, case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """Calls under random delays, both ways by turns, each compared on the device."""
    device, draw = case.tables[0].device, random.Random(group.rank())
    layout, delay = case.layout, Delay(device)
    out = PooledOutputs(layout.columns, layout.dtype, layout.batch, group=group)
    arms = arms_of(case, group, out)
    want = [arms["lookup cat"](i).clone() for i in range(len(case.sets))]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    start_s = time.monotonic()
    for i in range(calls):
        if draw.random() < 0.05:
            delay(draw.choice((1e-5, 1e-4, 5e-4)))
        y = arms[SOAKED[i % len(SOAKED)]](i)
        if draw.random() < 0.02:
            delay(1e-4)
        wrong += (y != want[i % len(want)]).any()
        if i % 500 == 0:
            torch.cuda.synchronize(device)  # the queue stays short
    torch.cuda.synchronize(device)
    dist.all_reduce(wrong, group=group)
    return {"table": "embedding soak", "calls": calls, "wrong": int(wrong), "ranks": group.size(),
            "seconds": time.monotonic() - start_s} | record.environment()  # fmt: skip


def main() -> None:
    """Time the grid; rank 0 writes rows and says a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=("smoke", "full"), default="full")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--soak", type=int, default=0, help="calls under random delays")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(200, exit=True)
    start_s, less = time.monotonic(), list[float]()
    smoke = args.suite == "smoke"
    with nccl_group() as (group, device):
        rank, ranks = group.rank(), group.size()

        def go(case: Case, *, host: bool = False) -> None:
            rows = measured(case, group, host=host)
            if rank == 0:
                record.append(args.out, rows)
                s = {r["arm"]: r["median_s"] for r in rows}
                less.append(s["fused"] / s[rows[0]["best_serial"]])
                print(f"{time.monotonic() - start_s:4.0f} s  {case.name}: {said(rows)}", flush=True)

        kept: tuple[tuple[int, int], list[Tensor]] | None = None
        for t, d, pooling in UNIFORM[:2] if smoke else UNIFORM:
            if kept is None or kept[0] != (t, d):
                kept = None  # before there are others
                kept = (t, d), tables_of([ROWS] * t, d, device)
            for batch in BATCHES[:1] if smoke else BATCHES:
                name = f"{t} tables, D {d}, pooling {pooling}, batch {batch}"
                dims = [(d,) * t] * ranks
                case = made(name, dims, batch, kept[1], (pooling,) * t, group, len(less))
                go(case, host=pooling == 5 and batch == 4096)
                if args.soak and pooling == 5 and batch == 4096 and t == 8:
                    row = soak(args.soak, case, group)
                    if rank == 0:
                        print(row, flush=True)
                        record.append(args.out, [row])
        kept = None
        if not smoke:
            owners = shards(ranks)
            tables = tables_of([MLPERF_ROWS[t] for t in owners[rank]], MLPERF_D, device)
            pooling = tuple(MLPERF_POOLING[t] for t in owners[rank])
            dims = [(MLPERF_D,) * len(o) for o in owners]
            for batch in BATCHES:
                name = f"MLPerf DCNv2, batch {batch}"
                go(made(name, dims, batch, tables, pooling, group, 99))
        if rank == 0:
            mean = geometric_mean(less)
            text = f"{1 - mean:.1%} less time on average, {1 - min(less):.1%} at best"
            print(f"{len(less)} cases: {text}, {1 - max(less):.1%} at worst", flush=True)


if __name__ == "__main__":
    main()
