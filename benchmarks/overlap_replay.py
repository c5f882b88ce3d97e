"""Tensor parallelism over two GPUs, replayed on one: for a machine that has no second one.

One GPU runs what a rank computes of each plan, step by step, by itself and beside copies
(replay.py). Its links are those of the machine file of two H200s; the simulator puts both on the
lanes of a plan. Compute measured, links modelled. The rows:

    ideal          the longer of the whole matmul, measured, and of copies at the links' rate
    auto           the plan that the model picks: its "pick"
    serial, ...    every plan that the model weighs

The arms are those of overlap.py, which checks their results, and needs two GPUs.
"""

from itertools import product
from statistics import geometric_mean

from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.overlap import HEAD, case_of, problem_of, shapes_of
from benchmarks.replay import (
    ROUNDS,
    OneRank,
    Traffic,
    lane_of,
    microseconds,
    operands_of,
    program_of,
    replayed,
    timed,
)
from benchmarks.rows import Row, Timed
from benchmarks.tables import Column, arm, ms, of_most, table
from counterpoint.choose.by_model import by_model, candidates, parts_s
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.measure.timing import soak
from counterpoint.model.estimate import predicted_s
from counterpoint.ops.auto import known_tiles
from counterpoint.plan.bind import Program
from counterpoint.plan.families import build
from counterpoint.problem import Problem

RANKS = 2
LINKS = f"h200-{RANKS}"  # the machine whose links are taken, as measured
GATHER, SCATTER, SUM = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SHAPES = (
    (SCATTER, 8192, 8192, 3584), (SCATTER, 8192, 16384, 6656), (GATHER, 2048, 7168, 8192),
    (SUM, 8192, 8192, 3584),
)  # fmt: skip
PREFILL = ((4096, 14336), (8192, 28672))  # of Llama-3 8B and 70B: hidden size, F
PREFILL_ROWS = (256, 2048, 16384)
SHARES = (2, 8)  # of F, on a rank
SOAK_S = 0.5


def cases(_: int) -> list[Case]:
    """Those that have the most to hide, or the hardest; and down projections of a prefill."""
    prefill = product(PREFILL, SHARES, PREFILL_ROWS)
    found = [(SUM, m, hidden, f // share) for (hidden, f), share, m in prefill]
    return [case_of(*shape) for shape in dict.fromkeys((*SHAPES, *found))]


def own(shape: tuple[int, ...], _: int) -> list[Case]:
    """Sizes of one's own, for all three operators."""
    m, n, k = shape
    return [case_of(op, m, n, k) for op in (GATHER, SCATTER, SUM)]


def programs_of(problem: Problem, machine: Machine) -> dict[str, Program]:
    """What the rank that counts does of each plan that is weighed and can be replayed.

    The matmul of a fused kernel cannot be run by itself. In a pair there is one order of peers.
    """
    specs = [spec for each in candidates(problem, machine) for spec in each]
    kept = [s for s in ("serial", *specs) if not s.startswith("fused") and " xor" not in s]
    return {spec: program_of(build(problem, spec, machine), machine) for spec in kept}


def rows(case: Case, bench: Bench) -> list[Row]:
    """Of each plan, at settled clocks."""
    soak(SOAK_S, bench.device)
    machine, traffic = machine_of("overlap_replay", LINKS), Traffic(bench.device)
    problem = problem_of(case, RANKS)
    programs, memory = programs_of(problem, machine), OneRank(bench.device)
    for program in programs.values():  # the room of the largest, before anything points into it
        memory.reserve(program.plan)
    operands = operands_of([program.plan for program in programs.values()], bench.normal)
    lanes = {spec: lane_of(program, memory, operands) for spec, program in programs.items()}
    found, more = timed(lanes, bench.rounds or ROUNDS, traffic), traffic.more(machine)
    tiles = known_tiles(problem, bench.device)
    made: dict[str, Row] = {
        spec: {"median_s": replayed(program, found[spec], machine, more),
               "predicted_s": predicted_s(program.plan, machine, tiles=tiles),
               "steps": microseconds(found[spec])}
        for spec, program in programs.items()
    }  # fmt: skip
    pick = by_model(problem, machine, tiles=tiles).spec
    if pick in made:
        made["auto"] = made[pick] | {"pick": pick}
    matmul_s = sum(alone for name, (alone, _) in found["serial"].items() if "matmul" in name)
    bounds_s = [matmul_s, parts_s(problem, machine)[1]]
    made["ideal"] = {"median_s": max(bounds_s), "bounds_s": bounds_s}
    shared = {"mode": "graph", "of_ranks": RANKS, "links": LINKS, "copies": traffic.between}
    return [{"arm": name, **shared, **row} for name, row in made.items()]


# ---- what is said of the rows


def _sharded(case: Timed) -> str:
    """The best of the plans that sum, or gather, shard by shard; "": none is weighed."""
    arms = [arm for arm in case.main if arm.startswith(("shard_p2p", "graded"))]
    return case.fastest(arms) if arms else ""


def _best(case: Timed) -> str:
    return f"{ms(case.s(best))} {best}" if (best := _sharded(case)) else "-"


def _over_ideal(case: Timed) -> str:
    return f"{case.s(best) / case.s('ideal'):.3f}" if (best := _sharded(case)) else "-"


COLUMNS = (
    *HEAD, arm("ideal", ms), arm("serial", ms),
    Column("best by shards", _best),
    arm("auto", ms, bold=True), Column("its plan", lambda c: c.main["auto"]["pick"]),
    Column("serial / auto", lambda c: f"**{c.s('serial') / c.s('auto'):.2f}**"),
    Column("best by shards / ideal", _over_ideal),
    Column("auto / ideal", lambda c: f"**{c.s('auto') / c.s('ideal'):.3f}**"),
)  # fmt: skip


def replay_table(rows: list[Row]) -> str:
    """Every case."""
    found = shapes_of(rows)
    note = (
        f"Milliseconds of a rank of {RANKS}, compute measured, links and NCCL modelled. Ideal is "
        "the longer of the whole matmul and of copies at the rate of the links."
    )
    if sums := [c.s("serial") / c.s("auto") for c in found if c.head["op"] == SUM]:
        note += (f" serial / auto of {SUM}, geometric mean of {len(sums)}: "
                 f"{geometric_mean(sums):.2f}, least {min(sums):.2f}.")  # fmt: skip
    return table(COLUMNS, found, note)


OVERLAP_REPLAY = Benchmark(
    "overlap_replay", cases, rows=rows, unit="ms", ranks=1, own=own,
    short=lambda case: case["op"] == GATHER,
    sections=(
        Section("docs/results/tensor_parallel.md", "overlap-replay", of_most(replay_table)),
    ),
)  # fmt: skip
