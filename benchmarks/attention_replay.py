"""Context parallelism over two GPUs, replayed on one: for a machine that has no second one.

One GPU runs what a rank computes, step by step, by itself and beside copies (replay.py). Its links
are those of the machine file of two H200s, where copies and NCCL were measured; the simulator puts
both on the lanes of a plan. Compute measured, links modelled.

    serial         two NCCL all-gathers, of k and of v, then torch's attention by its own choice
    serial packed  one all-gather of both side by side
    serial cudnn   as serial, by cuDNN's attention, where nothing is causal
    plan serial    ours: the all-gathers, and cuDNN's attention of blocks, merged
    auto, ...      ours; by heads in the backward alone

The arms are those of attention.py, which checks their results, and needs two GPUs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import log
from statistics import geometric_mean
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import counterpoint as cp
from benchmarks import attention
from benchmarks.attention import BOTH, SERIAL, SPECS, fastest_serial, problem_of
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.replay import (
    ROUNDS,
    Lane,
    OneRank,
    Traffic,
    lane_of,
    microseconds,
    program_of,
    replayed,
    timed,
)
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, ms, of_most, table
from counterpoint.costs import Collective
from counterpoint.group.workspace import Operands
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.measure.timing import soak
from counterpoint.plan.bind import Program
from counterpoint.plan.families import build
from counterpoint.problem import Problem

RANKS = 2
FORWARD, BACKWARD = "all_gather_attention", "all_gather_attention_backward"
LINKS = f"h200-{RANKS}"  # the machine whose links are taken, as measured
BY_HEADS = ("by_heads ring chunks=2", "by_heads ring chunks=8")  # of the backward alone
SOAK_S = 0.3


def cases(_: int) -> list[Case]:
    """Those of two GPUs."""
    return attention.cases(RANKS)


def rows(case: Case, bench: Bench) -> list[Row]:
    """Of each arm, at settled clocks."""
    soak(SOAK_S, bench.device)
    machine, traffic = machine_of("attention_replay", LINKS), Traffic(bench.device)
    ops = (FORWARD, BACKWARD) if case["what"] == BOTH else (FORWARD,)
    # the backward's plan is chosen by itself, as a call of auto does
    picks = {op: cp.choose(problem_of(case, RANKS, op), machine).spec for op in ops}
    wanted = {"plan serial": dict.fromkeys(ops, "serial"), "auto": picks}
    wanted |= {spec: {FORWARD: spec, BACKWARD: SPECS[0]} for spec in SPECS}
    if case["what"] == BOTH and not case["causal"]:
        wanted |= {spec: {FORWARD: SPECS[0], BACKWARD: spec} for spec in BY_HEADS}
    programs = {
        f"{op} {specs[op]}": program_of(build(problem_of(case, RANKS, op), specs[op]), machine)
        for specs in wanted.values() for op in ops
    }  # fmt: skip
    lanes = _plan_lanes(programs, bench) | library_lanes(case, bench)
    found = timed(lanes, bench.rounds or ROUNDS, traffic)
    more = traffic.more(machine)
    made: list[Row] = []
    for name, specs in wanted.items():
        each = {op: (programs[f"{op} {specs[op]}"], found[f"{op} {specs[op]}"]) for op in ops}
        seconds = sum(replayed(*both, machine, more) for both in each.values())
        steps = {op: microseconds(times) for op, (_, times) in each.items()}
        room = max(program.plan.workspace_bytes for program, _ in each.values())
        made.append({"arm": name, "mode": "graph", "median_s": seconds, "steps": steps,
                     "plans": list(specs.values()), "workspace_bytes": room})  # fmt: skip
    made += [
        {"arm": name, "mode": "graph", "steps": microseconds(found[name]),
         "median_s": sum(alone for alone, _ in found[name].values())
         + gathers_s(case, machine, packed=name == "serial packed")}
        for name in SERIAL if name in found
    ]  # fmt: skip
    gathered_bytes = 2 * 2 * case["tokens"] * case["kv_heads"] * case["dim"]
    shared = {"of_ranks": RANKS, "links": LINKS, "copies": traffic.between,
              "gathered_bytes": gathered_bytes}  # fmt: skip
    return [shared | row for row in made]


def gathers_s(case: Case | Row, machine: Machine, *, packed: bool) -> float:
    """Seconds of NCCL for a call of a library's arm: nothing hides them.

    Args:
        packed: k and v are gathered, and their gradients scattered, at once.
    """
    received = case["tokens"] // RANKS * case["kv_heads"] * case["dim"] * 2 * (RANKS - 1)
    kinds: tuple[Collective, ...] = ("all_gather",)
    kinds += ("reduce_scatter",) if case["what"] == BOTH else ()
    times, size = (1, 2 * received) if packed else (2, received)
    return sum(times * machine.costs.collective_s(kind, size) for kind in kinds)


def _plan_lanes(programs: Mapping[str, Program], bench: Bench) -> dict[str, Lane]:
    """What a rank computes of each plan; its peer's keys lie there already."""
    (rank,) = {program.rank for program in programs.values()}
    memory = OneRank(bench.device, rank)
    for program in programs.values():  # the room of the largest, before anything points into it
        memory.reserve(program.plan)
    return {name: lane_of(program, memory, operands_of(program.plan.problem, bench))
            for name, program in programs.items()}  # fmt: skip


def operands_of(p: Problem, bench: Bench) -> Operands:
    """Own rows of all that a plan reads or writes: random, with the log-sum-exp of such scores."""
    rows, heads = p.rows[0], p.n // p.head_dim
    found: Operands = {name: bench.normal(rows, p.k if name[-1] in "kv" else p.n)
                       for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")}  # fmt: skip
    found["lse"] = torch.full((rows, heads), log(p.m) + 0.5, device=bench.device)
    return found


def library_lanes(case: Case, bench: Bench) -> dict[str, Lane]:
    """Torch's attention of own queries to keys that have been gathered, and its gradients."""
    tokens, dim, kv_heads = case["tokens"], case["dim"], case["kv_heads"]
    backward, causal = case["what"] == BOTH, case["causal"]
    q, dy = (bench.normal(tokens // RANKS, case["heads"], dim) for _ in range(2))
    k, v = (bench.normal(tokens, kv_heads, dim) for _ in range(2))
    packed = torch.stack([k, v], 1)
    for leaf in (q, k, v, packed):
        leaf.requires_grad_(backward)
    # of the rank that counts; where it is causal all have equal work
    rank = cast(Bench, SimpleNamespace(ranks=RANKS, rank=RANKS - 1))

    def of_two() -> Tensor:
        return attention.serial(q, k, v, causal, rank)

    def of_one() -> Tensor:
        return attention.serial(q, packed[:, 0], packed[:, 1], causal, rank)

    def by_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return of_two()

    def run(way: Callable[[], Tensor], *leaves: Tensor) -> object:
        y = way()
        return torch.autograd.grad(y, leaves, dy) if backward else y

    ways: dict[str, Lane] = {
        "serial": {"attend": partial(run, of_two, q, k, v)},
        "serial packed": {"attend": partial(run, of_one, q, packed)},
    }
    if not causal and bench.on_gpu:
        ways["serial cudnn"] = {"attend": partial(run, by_cudnn, q, k, v)}
    return ways


# ---- what is said of the rows


def _memory(case: Timed) -> str:
    found = case.main["auto"]["workspace_bytes"], case.head["gathered_bytes"]
    return ", ".join(f"{n / 2**20:.0f}" for n in found)


COLUMNS = (
    *attention.COLUMNS[:2],
    Column("fastest serial", lambda c: f"{ms(c.s(fastest_serial(c)))} {fastest_serial(c)}"),
    arm("plan serial", ms), arm("auto", ms, bold=True),
    Column("its plans", lambda c: " / ".join(c.main["auto"]["plans"])),
    *(arm(spec, ms) for spec in (*SPECS, *BY_HEADS)),
    Column("serial / auto", lambda c: f"{c.s('serial') / c.s('auto'):.2f}"),
    Column("fastest serial / auto", lambda c: f"**{c.s(fastest_serial(c)) / c.s('auto'):.2f}**"),
    Column("MiB: workspace, gathered k and v", _memory),
)  # fmt: skip


def replay_table(rows: list[Row]) -> str:
    """Every case."""
    found = taken(rows, "heads", "kv_heads", "tokens", "causal", "what")
    mean = geometric_mean(c.s(fastest_serial(c)) / c.s("auto") for c in found)
    note = (f"Milliseconds. Compute measured, links modelled. Fastest serial / auto, geometric "
            f"mean: {mean:.2f}.")  # fmt: skip
    return table(COLUMNS, found, note)


ATTENTION_REPLAY = Benchmark(
    "attention_replay", cases, rows=rows, unit="ms", ranks=1,
    short=lambda case: case.name == attention.SHORT,
    sections=(Section("docs/results/attention.md", "attention-replay", of_most(replay_table)),),
)  # fmt: skip
