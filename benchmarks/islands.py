"""Operators between islands of CPU ranks, in network namespaces: bytes on the NIC, times, faults.

    make islands              # all, 25 minutes on 2 cores: rows, then docs/islands.md from them

gloo   its all-gather, then a matmul; a matmul, then its reduce-scatter or all-reduce; of experts
       see islands_experts.py
flat   our plan, each rank an island of its own
ours   islands of neighbours: what goes to another island goes once"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks import island_bags, islands_experts
from benchmarks.namespaces import CALLS, ISLANDS, RATES, Job, begin, can_run, run, timed
from benchmarks.rows import RESULTS, Row, rows_of
from counterpoint.measure.characterize_cpu import characterize_cpu
from counterpoint.measure.record import environment
from counterpoint.model.calibrate_cpu import fit_cpu


def operator(rank: int, ranks: int, op: str, m: int, n: int, k: int, how: str) -> dict[str, Any]:
    """One operator in fp32, checked against gloo's way.

    Args:
        op: all_gather_matmul, whose m are rows of each rank, or one whose m are all rows.
        how: "gloo", or the spec of a plan.
    """
    torch.manual_seed(rank)
    x, w = torch.randn(m, k), torch.randn(k, n)

    def gathered() -> Tensor:
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x)
        return torch.cat(parts) @ w

    def scattered() -> Tensor:
        parts = [part.contiguous() for part in (x @ w).chunk(ranks)]
        mine = torch.empty_like(parts[rank])
        dist.reduce_scatter(mine, parts)
        return mine

    def reduced() -> Tensor:
        total = x @ w
        dist.all_reduce(total)
        return total

    by_gloo = {"all_gather_matmul": gathered, "matmul_reduce_scatter": scattered,
               "matmul_all_reduce": reduced}[op]  # fmt: skip
    call = by_gloo if how == "gloo" else lambda: getattr(cp, op)(x, w, plan=how)
    torch.testing.assert_close(call(), by_gloo(), rtol=1e-4, atol=1e-2)
    seconds, sent = timed(call, CALLS)
    return {"seconds": seconds, "sent": sent}


def estimated(
    rank: int, ranks: int, calls: Sequence[tuple[str, int, int, int]], spec: str
) -> dict[str, Any]:
    """Operators timed twice, and these ranks as a machine: what its parts take, before and after.

    Its constants are of matmuls, copies and exchanges: no operator's time is among them.
    """
    assert dist.group.WORLD is not None
    times: list[list[float]] = [[] for _ in calls]
    machine, rows = characterize_cpu(group=dist.group.WORLD, rounds=3)
    for _ in range(2):
        for i, call in enumerate(calls):
            times[i].append(operator(rank, ranks, *call, how=spec)["seconds"])
        machine, more = characterize_cpu(group=dist.group.WORLD, rounds=2)
        rows += more
    return {"machine": fit_cpu(rows, machine).to_json(), "seconds": [*map(fmean, times)]}


def until_a_fault(rank: int, ranks: int, op: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Calls one operator again and again: the error that ends it, and how long its call took.

    Its rank begins when a first call has been made, where that is left to it.

    Args:
        op: or "experts", a layer of m tokens of k features.
    """
    x, w = torch.randn(m, k), torch.randn(k, n)
    layer, calls = islands_experts.Layer(rank, ranks, m, k, 2, 2), 0
    while True:
        start_s = time.perf_counter()
        try:
            if op == "experts":
                layer.by_routes("islands")
            else:
                getattr(cp, op)(x, w, plan="islands chunks=2")
            calls += 1
            begin()
        except cp.CounterpointError as error:
            took_s = time.perf_counter() - start_s
            return {"error": f"{type(error).__name__}: {error}", "seconds": took_s, "calls": calls}


OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
BLOCK = (512, 64, 2048)  # rows of a rank, and the shorter and the longer side of its matmul
FILE = RESULTS / "islands-cpu.jsonl"
SPEC, ESTIMATES = "islands chunks=4", "islands estimates"
BOUND_S = 4.0
FAULTS = ("kill", "stop", "cut")


def speeds() -> Iterator[Row]:
    """A row for each operator, way and network."""
    for (islands, size), rate, op in product(ISLANDS, RATES, OPERATORS):
        shape = shape_of(problem_of(op, islands, size))
        for way in ("gloo", "flat", "ours"):
            spec = "gloo" if way == "gloo" else SPEC
            job = Job("benchmarks.islands:operator", islands=islands, size=size, rate=rate,
                      args=(op, *shape, spec), flat=way == "flat")  # fmt: skip
            found = run(job)[0]
            about = {"op": op, "arm": way, "islands": islands, "size": size, "rate": rate}
            yield {"table": "islands", **about, "shape": [*shape],
                   "median_s": found["seconds"], "sent": found["sent"]}  # fmt: skip


def estimates() -> Iterator[Row]:
    """A row for each operator, plan and network, with what the model says of ranks like these."""
    for (islands, size), rate, way in product(ISLANDS, RATES, ("flat", "ours")):
        problems = [problem_of(op, islands, size) for op in OPERATORS]
        calls = [(p.op, *shape_of(p)) for p in problems]
        job = Job("benchmarks.islands:estimated", islands=islands, size=size, rate=rate,
                  args=(calls, SPEC), flat=way == "flat", timeout_s=400.0)  # fmt: skip
        found = run(job)[0]
        for p, seconds in zip(problems, found["seconds"], strict=True):
            grid = replace(p, islands=p.ranks if way == "flat" else islands)
            about = {"op": p.op, "arm": way, "islands": islands, "size": size, "rate": rate}
            estimate_s = cp.estimate(cp.build(grid, SPEC), found["machine"]).end_s
            yield {"table": ESTIMATES, **about, "shape": [*shape_of(p)],
                   "median_s": seconds, "estimate_s": estimate_s}  # fmt: skip


def shape_of(p: cp.Problem) -> tuple[int, int, int]:
    """M, N and K of a call of one rank."""
    return p.rows[0] if p.op == "all_gather_matmul" else p.m, p.n, p.k


def problem_of(op: str, islands: int, size: int) -> cp.Problem:
    """A block of `BLOCK` for each rank: gathered, it is the longer side that is contracted."""
    rows, short, long = BLOCK
    n, k = (short, long) if op == "all_gather_matmul" else (long, short)
    ranks = islands * size
    return cp.Problem(op, rows * ranks, n, k, ranks, "float32", islands=islands)


def faults(trials: int, seed: int) -> Iterator[Row]:
    """A row for each trial: an island is killed, stopped or cut off at a random moment."""
    draw = random.Random(seed)
    for trial in range(trials):
        fault, op = FAULTS[trial % len(FAULTS)], draw.choice((*OPERATORS, "experts"))
        after_s = draw.uniform(0.0, 2.0)
        job = Job(
            "benchmarks.islands:until_a_fault",
            args=(op, 64, 32, 256),
            fault=fault,
            env={"COUNTERPOINT_TIMEOUT_S": str(BOUND_S)},
            after_s=after_s,
            timeout_s=60.0,
            begins=True,
        )
        found = run(job)
        left = found if fault == "cut" else found[:2]
        yield {
            "table": "islands faults",
            "fault": fault,
            "op": op,
            "after_s": round(after_s, 3),
            "bound_s": BOUND_S,
            "left": len(left),
            "ended": sum(map(bool, left)),
            "slowest_s": max((each["seconds"] for each in left if each), default=None),
            "named": sum("(island " in each["error"] for each in left if each),
            "errors": [each and each["error"][:160] for each in left],
        }


def table(rows: Sequence[Row]) -> str:
    """Bytes and speedups of ours over the other two ways."""
    from benchmarks.tables import grid

    times = {(r["islands"], r["size"], r["rate"], r["op"], r["arm"]): r for r in rows
             if r["table"] == "islands"}  # fmt: skip
    lines: list[list[str]] = []
    for islands, size, rate, op in dict.fromkeys(key[:4] for key in times):
        ours = times[islands, size, rate, op, "ours"]
        cells = [f"{islands} x {size}, {rate[:-4]} {rate[-4].upper()}bit/s", f"`{op}`"]
        for way, name in product(("gloo", "flat"), ("sent", "median_s")):
            other = times.get((islands, size, rate, op, way), {})
            cells.append(f"{other[name] / ours[name]:.2f}" if name in other else "-")
        lines.append(cells)
    head = ["islands x ranks", "operator", "bytes, gloo / ours", "speedup over gloo",
            "bytes, flat / ours", "speedup over flat"]  # fmt: skip
    trials = [r for r in rows if r["table"] == "islands faults"]
    slowest = max(r["slowest_s"] or 0.0 for r in trials)
    left, ended, named = (sum(r[name] for r in trials) for name in ("left", "ended", "named"))
    when = dict.fromkeys(f"{r['commit']} ({r['date']})" for r in (*times.values(), *trials))
    place = f"CPU ranks on 2 cores, commit {', '.join(when)}.{off(rows)}"
    return (
        f"{grid(head, lines)}\n\n{place} In {len(trials)} trials an island was killed, stopped or "
        f"cut off: of {left} ranks that were left {ended} ended with an error, {named} of them "
        f"naming an island, the slowest after {slowest:.1f} s at a bound of {BOUND_S:g} s."
    )


def off(rows: Sequence[Row]) -> str:
    """How far the model is off, of plans."""
    found = [abs(r["estimate_s"] / r["median_s"] - 1) for r in rows if r["table"] == ESTIMATES]
    if not found:
        return ""
    return (f" Estimates of plans are off by {median(found):.0%} in the median, "
            f"{max(found):.0%} at most.")  # fmt: skip


# of what is measured, in this order; each may be measured alone
PARTS = ("speeds", "estimates", "bags", "experts", "faults")


def part_of(row: Row) -> str:
    """Which of PARTS it is of."""
    if row["table"] == "islands":
        return "experts" if row["op"].startswith("experts") else "speeds"
    return {ESTIMATES: "estimates", island_bags.TABLE: "bags"}.get(row["table"], "faults")


def sections() -> dict[str, str]:
    """The marked sections of docs/islands.md, where there are rows."""
    rows = rows_of(FILE) if FILE.exists() else []
    bags = [row for row in rows if row["table"] == island_bags.TABLE]
    found = {"islands": table(rows)} if rows else {}
    return found | ({"islands-bags": island_bags.table(bags)} if bags else {})


def main() -> None:
    """Measure all of it, or one part whose rows take the place of those that there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--trials", type=int, default=60, help="of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, help="of these rows; others are kept")
    given = parser.parse_args()
    if why := can_run():
        raise SystemExit(f"islands: network namespaces cannot be made here: {why}")
    facts = environment()
    about = {name: facts[name] for name in ("commit", "date", "torch")}
    experts, ends = islands_experts.rows(), faults(given.trials, given.seed)
    made = (speeds(), estimates(), island_bags.rows(), experts, ends)
    parts = dict(zip(PARTS, made, strict=True))
    kept: list[Row] = []
    if given.only:
        parts = {given.only: parts[given.only]}
        kept = [row for row in rows_of(given.out) if part_of(row) != given.only]
    with given.out.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in kept)
        for rows in parts.values():
            for row in rows:
                print({k: v for k, v in row.items() if k != "errors"}, flush=True)
                out.write(json.dumps(row | about) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
