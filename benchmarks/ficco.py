"""Plans finer than shards on a full mesh: what each takes, by a replay on one GPU.

    counterpoint bench ficco --cases fit         # scenarios that rules may be fitted to
    counterpoint bench ficco --cases losses      # what chunks and copies beside them cost
    counterpoint bench ficco --cases held-out    # scored once

The mesh is one of eight GPUs with the links of an MI300X and the SMs of an H200. What a rank
computes is measured here, chunk by chunk (replay.py); copies are priced by the mesh's links; the
simulator puts both on the lanes of a plan. Compute measured, links modelled.
Source: FiCCO, arXiv 2512.10236.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from math import ceil

import torch
from torch import Tensor

from benchmarks.declare import Bench, Case
from benchmarks.mesh_scenarios import FITTED, HELD_OUT, RANKS, scenarios
from benchmarks.replay import (
    COPY_BYTES,
    ROUNDS,
    Lane,
    OneRank,
    Step,
    Traffic,
    lane_of,
    operands_of,
    program_of,
    timed,
)
from benchmarks.rows import Row
from counterpoint.choose.by_model import refusal
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.measure.timing import soak
from counterpoint.model.estimate import replayed_s
from counterpoint.model.work import Work
from counterpoint.ops.auto import matmul_tile
from counterpoint.plan.bind import Program
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.schedules import finer

LOSSES = "losses"
# rows, n, k: four long ones, four of few rows, four that are narrow or shallow
MATMULS = (
    (8192, 7168, 8192), (8192, 8192, 3584), (16384, 3584, 4096), (28672, 2048, 8192),
    (512, 7168, 8192), (2048, 7168, 8192), (2048, 8192, 3584), (1024, 13312, 16384),
    (8192, 1280, 8192), (8192, 8192, 1024), (32768, 768, 4096), (4096, 4096, 512),
)  # fmt: skip
CHUNKS = (2, 4, 8, 16, 64)
COPIES = (256 << 10, 1 << 20, 4 << 20, 32 << 20)  # bytes
COPIES_S = 3e-3  # of copies beside a matmul
LOSSES_S, PEAK = 0.5e-3, 700e12  # at least, of matmuls in a row; flop/s
FINER = finer.NAMES
PARTS = {"fit": FITTED, "held-out": HELD_OUT}
SOAK_S = 0.2
MESH_COPY = 0.86  # of a link's rate that a copy reaches: as on H200, for want of a mesh


@cache
def mesh() -> Machine:
    """Eight GPUs: SMs as measured on H200, links of an MI300X."""
    compute, links = machine_of("ficco", "h200-8"), preset(f"mi300x-{RANKS}")
    of_links = links.costs
    costs = replace(
        compute.costs,
        copy_bytes_per_s=MESH_COPY * links.link.bytes_per_s,
        collective_bytes_per_s=of_links.collective_bytes_per_s,
        direct_bytes_per_s=of_links.direct_bytes_per_s,
    )
    source = "SMs as measured on H200, links as the datasheet of MI300X states them"
    return replace(compute, name="mesh-8", link=links.link, measured=costs, source=source)


def plans_of(problem: Problem) -> list[Plan]:
    """All that a chooser weighs, serial first; of orders of peers one: links are alike."""
    found: list[Plan] = []
    for spec in problem.operation.candidates(problem):
        family = problem.operation.family(spec.split()[0])
        assert family is not None, "an operation names its own"
        if family.refusal(problem) or spec.endswith("xor"):
            continue
        plan = build(problem, spec, mesh())
        if spec == "serial" or not refusal(plan, mesh()):
            found.append(plan)
    return found


def cases(_: int) -> list[Case]:
    """Each scenario of each part."""
    found: list[Case] = []
    for part, models in PARTS.items():
        for number, each in enumerate(scenarios(models)):
            p = each.problem
            facts = {
                "question": part, "kind": each.kind, "scenario": each.name, "number": number,
                "op": p.op, "m": p.m, "n": p.n, "k": p.k, "of_ranks": p.ranks,
            }  # fmt: skip
            found.append(Case(f"{part} {each.name}", facts))
    for number, (m, n, k) in enumerate(MATMULS):
        facts = {"question": LOSSES, "m": m, "n": n, "k": k, "number": number}
        found.append(Case(f"{LOSSES} {m}, {n}, {k}", facts))
    return found


def rows(case: Case, bench: Bench) -> list[Row]:
    """Of one question, at settled clocks."""
    if case["number"] % 8 == 0:
        soak(SOAK_S, bench.device)
    measure = losses if case["question"] == LOSSES else replay
    return measure(case, bench, Traffic(bench.device))


def replay(case: Case, bench: Bench, traffic: Traffic) -> list[Row]:
    """What one rank computes of each plan, by itself and beside copies."""
    problem = Problem(case["op"], case["m"], case["n"], case["k"], case["of_ranks"])
    plans = plans_of(problem)
    memory, operands = OneRank(bench.device), operands_of(plans, bench.normal)
    programs = {plan.spec: program_of(plan, mesh()) for plan in plans}
    for program in programs.values():  # the room of the largest, before anything points into it
        memory.reserve(program.plan)
    lanes = {spec: lane_of(program, memory, operands) for spec, program in programs.items()}
    found = timed(lanes, bench.rounds or ROUNDS, traffic)
    steps = {
        spec: {name: [round(alone * 1e6, 2), round(beside / alone, 3)]
               for name, (alone, beside) in times.items()}
        for spec, times in found.items()
    }  # fmt: skip
    whole_s = sum(alone for alone, _ in found["serial"].values())
    return [{"arm": "whole", "median_s": whole_s, "steps": steps, "copies": traffic.between,
             "tiles": tiles_of(programs.values(), bench.device),
             "traffic_bytes_per_s": traffic.bytes_per_s()}]  # fmt: skip


def tiles_of(programs: Iterable[Program], device: torch.device) -> list[list[int]]:
    """(rows, n, k, and the tile's two sides) of matmuls of whose tile the library tells."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for program in programs:
        if program.plan.family == "graded":
            continue  # none of the best on a mesh
        for bound in program.steps:
            for part in bound.parts if bound.step.kind == "matmul" else ():
                shape = *part.write.shape, part.reads[0].shape[1]
                if program.plan.buffer(part.write.buffer).dtype == program.plan.problem.dtype:
                    tile = matmul_tile(*shape, torch.bfloat16, device, columns=True)
                    found[shape] = [*shape, *tile] if tile else []
    return [each for each in found.values() if each]


def losses(case: Case, bench: Bench, traffic: Traffic) -> list[Row]:
    """A matmul in chunks, beside copies of each size; and copies beside it."""
    x, w = bench.normal(case["m"], case["k"]), bench.normal(case["n"], case["k"]).t()
    chunked = {f"{along} {chunks}": in_chunks(x, w, along, chunks, bench)
               for along in ("rows", "columns", "K") for chunks in (1, *CHUNKS)
               if chunks > 1 or along == "rows"}  # fmt: skip
    whole = chunked["rows 1"]
    often = ceil(LOSSES_S * PEAK / (2 * case["m"] * case["n"] * case["k"]))  # times in a row

    def in_a_row(step: Step) -> Lane:
        return {str(i): step for i in range(often)}

    def each_s(lane: Mapping[str, tuple[float, float]]) -> list[float]:
        return [sum(both) / often for both in zip(*lane.values(), strict=True)]

    times = timed({name: in_a_row(step) for name, step in chunked.items()},
                  bench.rounds or ROUNDS, traffic)  # fmt: skip
    found: list[Row] = []
    for name, lane in times.items():
        along, chunks = name.split()
        alone_s, beside_s = each_s(lane)
        found.append({"arm": name, "along": along, "chunks": int(chunks), "median_s": alone_s,
                      "beside_s": beside_s, "copy_bytes": COPY_BYTES})  # fmt: skip
    whole_s, _ = each_s(times["rows 1"])
    for size in COPIES:
        alone_s, beside_s = each_s(timed({"": in_a_row(whole)}, ROUNDS, traffic, size)[""])
        count = max(2, ceil(COPIES_S / (traffic.seconds(16, size) / 16)))
        copies_s = traffic.seconds(count, size)
        matmuls = ceil(2 * copies_s / whole_s)

        def busy(times: int = matmuls) -> None:
            for _ in range(times):
                whole()

        found.append({"arm": f"copies of {size}", "median_s": alone_s, "beside_s": beside_s,
                      "copy_bytes": size, "copies": traffic.between, "copy_s": copies_s / count,
                      "copy_beside_s": traffic.seconds(count, size, busy) / count})  # fmt: skip
    return found


def in_chunks(x: Tensor, w: Tensor, along: str, chunks: int, bench: Bench) -> Step:
    """x w in chunks of rows, of columns, or of K, whose products are added in fp32."""
    if along == "K":
        total, wide = bench.empty(x.shape[0], w.shape[1], dtype=torch.float32), torch.float32
        parts = list(zip(x.chunk(chunks, 1), w.chunk(chunks), strict=True))

        def add() -> None:
            torch.mm(*parts[0], wide, out=total)
            for part in parts[1:]:
                torch.addmm(total, *part, wide, out=total)

        return add
    xs, ws = (x.chunk(chunks), [w]) if along == "rows" else ([x], w.chunk(chunks, 1))
    outs = [(a, b, bench.empty(a.shape[0], b.shape[1])) for a in xs for b in ws]

    def multiply() -> None:
        for a, b, out in outs:
            torch.mm(a, b, out=out)

    return multiply


def replayed(
    row: Row, where: Machine | None = None, *, contention: float = 1.0
) -> dict[str, float]:  # fmt: skip
    """Seconds of each plan of a scenario, by what a row has of its steps.

    What copies cost a step is taken to grow with their traffic, up to that of the mesh.

    Args:
        where: a mesh with other links; `mesh()` unless given.
        contention: factor on what copies cost a step.
    """
    problem = Problem(row["op"], row["m"], row["n"], row["k"], row["of_ranks"])
    more = contention * 2 * mesh().costs.copy_bytes_per_s / row["traffic_bytes_per_s"]
    found: dict[str, float] = {}
    for spec, steps in row["steps"].items():
        works = {name: Work(us * 1e-6, 1 + more * max(beside - 1, 0.0))
                 for name, (us, beside) in steps.items()}  # fmt: skip
        found[spec] = replayed_s(program(problem, spec), where or mesh(), works)
    return found


@cache
def program(problem: Problem, spec: str) -> Program:
    """What the rank that counts does of a plan."""
    return program_of(build(problem, spec, mesh()), mesh())
