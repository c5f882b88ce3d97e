"""Every slip in a plan is refused by validate, or the plan is still right; nothing in between.

Those that are accepted fall into the classes of `STILL_RIGHT`, and are run by a simulator that
shares no reasoning with validate.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import islice, product
from random import Random
from typing import Any, NamedTuple

import pytest
from plan_cases import (
    AG,
    AG_BACKWARD,
    AG_WGRAD,
    AR,
    ATTENTION,
    BAGS,
    COMBINE,
    DISPATCH,
    NORM,
    OPS,
    RS,
    RS_BACKWARD,
    make_problem,
)
from plan_mutants import mutants
from plan_simulator import Stuck, simulate

from counterpoint.errors import CounterpointError
from counterpoint.plan.attended import ATTENTION as KINDS
from counterpoint.plan.bind import Program
from counterpoint.plan.families import build, families
from counterpoint.plan.happens_before import HappensBefore
from counterpoint.plan.steps import Plan, Region
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem

SCHEDULES = 8
ON_DEVICE = "device_routed"


class Case(NamedTuple):
    """A plan: its op and spec, rows of each rank, and what else its problem has."""

    op: str
    spec: str
    rows: tuple[int, ...]
    bias: bool = False
    splits: tuple[int, ...] = ()
    n: int = 5
    experts: int = 0
    k: int = 7
    counts: str = "equal"
    out: bool = False
    causal: bool = False
    islands: int = 1
    scales: str = ""
    activation: str = ""
    head_dim: int = 0

    def __str__(self) -> str:
        return f"{self.op} {self.spec} {'/'.join(map(str, self.rows))}"


# equal rows let a swapped peer pass every check of shapes; unequal ones tell blocks apart
CASES = [
    Case(AG, "serial", (3, 0, 2), bias=True),
    Case(AG, "serial", (2, 2)),
    Case(AG, "shard_p2p ring", (3, 2), bias=True),
    Case(AG, "shard_p2p xor", (2, 3, 1, 2)),
    Case(AG, "direct", (2, 2)),
    Case(AG, "direct", (2, 2, 2, 2), bias=True),
    Case(AG, "direct", (2, 2), splits=(3, 3)),
    Case(AG, "graded 1/2 ring", (2, 0, 3)),
    Case(AG, "graded 2/1/1 ring", (2, 2, 2, 2), bias=True),
    Case(AG, "graded 1/1/2 xor", (2, 2, 2, 2), bias=True),
    Case(AG, "graded 2/1 ring chunks=2", (2, 2, 2)),
    Case(AG, "uniform_fused_2d ring", (2, 2, 2), bias=True),
    Case(AG, "uniform_fused_2d xor", (3, 2)),
    Case(AG, "uniform_fused_1d ring", (3, 4, 2), bias=True),
    Case(AG, "uniform_fused_1d xor", (4, 4)),
    Case(AG, "uniform_unfused_1d ring", (4, 4), bias=True),
    Case(AG, "hetero_fused_1d ring", (3, 4, 2), bias=True),
    Case(AG, "hetero_fused_1d xor", (4, 4)),
    Case(AG, "hetero_unfused_1d xor", (4, 4)),
    Case(AG, "hetero_fused_2d ring", (2, 2, 2), bias=True),
    Case(RS, "uniform_fused_1d ring", (3, 4, 2), bias=True),
    Case(RS, "uniform_unfused_1d xor", (4, 4)),
    Case(RS, "hetero_fused_1d xor", (4, 4), bias=True),
    Case(RS, "hetero_unfused_1d ring", (3, 4, 2)),
    Case(RS, "uniform_fused_2d ring", (2, 2, 2), bias=True),
    Case(RS, "hetero_fused_2d xor", (2, 2)),
    Case(AG, "serial", (3, 0, 2), n=16, k=16, scales="row", bias=True),
    Case(AG, "graded 2/1 ring", (2, 2, 2), n=16, k=16, scales="row", bias=True),
    Case(AG, "shard_p2p ring chunks=2", (2, 3), n=16, k=16, scales="row"),
    Case(AG, "uniform_fused_1d xor", (2, 2), n=16, k=16, scales="row"),
    Case(AG, "islands chunks=2", (2, 2), n=16, k=16, scales="row", islands=2),
    Case(RS, "hetero_fused_1d xor", (4, 4), n=16, k=16, scales="row"),
    Case(AR, "serial", (2, 2), n=16, k=16, scales="tensor"),
    Case(AG, "serial", (3, 0, 2), bias=True, activation="gelu"),
    Case(AG, "direct", (2, 2), splits=(3, 3), activation="silu_mul"),
    Case(AG, "graded 1/2 ring", (2, 0, 3), splits=(3, 3), activation="silu_mul"),
    Case(AG, "shard_p2p ring chunks=2", (2, 2), splits=(2, 2), activation="relu_mul"),
    Case(AG, "uniform_fused_1d xor", (4, 4), splits=(3, 3), activation="silu_mul"),
    Case(AG, "hetero_unfused_1d ring", (4, 4), bias=True, activation="silu"),
    Case(AG, "uniform_fused_2d ring", (2, 2, 2), bias=True, activation="gelu_tanh"),
    Case(AG, "hetero_fused_2d ring", (2, 2, 2), activation="relu"),
    Case(AG, "islands chunks=1", (2, 2), islands=2, splits=(3, 3), activation="silu_mul"),
    Case(AG, "islands chunks=1", (3, 2, 1, 2), bias=True, islands=2),
    Case(AG, "islands chunks=2", (4, 4), islands=2),
    Case(AG, "islands chunks=2", (4, 4, 4, 4), islands=2, splits=(2, 3)),
    Case(RS, "running_sum chunks=2", (4, 4), bias=True),
    Case(RS, "running_sum chunks=2", (3, 0, 2), splits=(3, 4)),
    Case(RS, "running_sum chunks=1", (2, 2, 2)),
    Case(AR, "running_sum chunks=2", (4, 4), bias=True),
    Case(AR, "running_sum chunks=1", (2, 2, 2)),
    Case(RS, "islands chunks=2", (4, 4, 4, 4), bias=True, islands=2),
    Case(RS, "islands chunks=1", (2, 2, 2), islands=3),
    Case(AR, "islands chunks=1", (2, 2, 2, 2), bias=True, islands=2),
    Case(AR, "islands chunks=2", (2, 2), islands=2),
    Case(AG_WGRAD, "islands chunks=2", (3, 2, 1, 2), islands=2),
    Case(AG_WGRAD, "islands chunks=2", (2, 2), islands=2, splits=(2, 3)),
    Case(AG_BACKWARD, "islands chunks=2", (2, 2), islands=2),
    Case(AG_BACKWARD, "islands chunks=1", (2, 2, 2, 2), islands=2, splits=(2, 3)),
    Case(RS_BACKWARD, "islands chunks=1", (2, 0, 3), islands=3),
    Case(RS_BACKWARD, "islands chunks=2", (4, 4, 4, 4), islands=2),
    Case(RS, "serial", (2, 2, 2, 2), islands=2),
    Case(RS, "serial", (2, 2, 2), bias=True),
    Case(RS, "serial", (2, 3)),
    Case(RS, "direct", (2, 2)),
    Case(RS, "direct", (2, 2, 2, 2), bias=True),
    Case(RS, "fused", (2, 2), bias=True),
    Case(RS, "fused scatter 16x16x2 warps=1", (1, 1, 1, 1)),
    Case(AR, "serial", (2, 2, 2), bias=True),
    Case(AR, "serial", (3, 2)),
    Case(AR, "direct", (2, 2)),
    Case(AR, "direct", (1, 1, 1, 1), bias=True, n=6),
    Case(AR, "fused one_shot", (3, 2), bias=True),
    Case(AR, "fused two_shot 16x16x2 warps=1", (1, 1, 1, 1)),
    Case(AR, "shard_p2p ring", (2, 2, 2), bias=True),
    Case(AR, "shard_p2p xor chunks=2", (2, 2)),
    Case(RS, "shard_p2p ring", (2, 2, 2), bias=True),
    Case(RS, "shard_p2p xor", (2, 3), bias=True),
    Case(RS, "graded 2/1/1 xor", (2, 3, 1, 2)),
    Case(RS, "graded 1/3 ring chunks=2", (2, 2, 2, 2), bias=True),
    Case(RS, "shard_p2p ring chunks=2", (2, 0, 3)),
    Case(AG, "serial", (2, 2), splits=(3, 3)),
    Case(AG, "graded 1/2 ring", (2, 0, 3), splits=(2, 3)),
    Case(AG, "graded 2/1 ring", (2, 2, 2), splits=(3, 3)),
    Case(RS, "direct", (2, 2), splits=(3, 4)),
    Case(RS, "graded 1/2 ring", (2, 0, 3), splits=(3, 4)),
    Case(RS, "shard_p2p ring chunks=2", (2, 2), splits=(4, 3)),
    Case(AG_WGRAD, "sliced ring chunks=2", (3, 0, 2), splits=(3, 2)),
    Case(AG_BACKWARD, "serial", (2, 2), splits=(2, 3)),
    Case(AG_BACKWARD, "side_by_side ring", (2, 2, 2), splits=(3, 3)),
    Case(AG_WGRAD, "serial", (2, 2, 2)),
    Case(AG_WGRAD, "sliced ring chunks=2", (3, 0, 2)),
    Case(AG_WGRAD, "sliced xor chunks=3", (2, 2), n=7),
    Case(AG_BACKWARD, "serial", (2, 2, 2)),
    Case(AG_BACKWARD, "side_by_side ring", (2, 2, 2)),
    Case(AG_BACKWARD, "side_by_side xor chunks=2", (2, 2), n=7),
    Case(RS_BACKWARD, "serial", (2, 3)),
    Case(RS_BACKWARD, "shard_p2p ring chunks=2", (2, 2, 2)),
    Case(RS_BACKWARD, "graded 1/2 ring", (3, 2, 0)),
    Case(RS_BACKWARD, "graded 2/2 xor", (2, 2, 2, 2), n=7),
    Case(DISPATCH, "serial", (2, 2, 2), experts=2),
    Case(DISPATCH, "grouped 1/1 ring", (2, 2, 2), experts=2),
    Case(DISPATCH, "grouped 1/2 xor", (6, 6), experts=3),
    Case(DISPATCH, "grouped 1 ring", (2, 2, 2, 2), experts=1),
    Case(DISPATCH, "grouped 1 xor chunks=2", (8, 8), experts=1),
    Case(DISPATCH, "grouped 1/1 ring chunks=2", (24, 24), experts=2),
    Case(COMBINE, "grouped 1 ring chunks=2", (4, 4), experts=1),
    Case(COMBINE, "grouped 1/1 xor chunks=2", (4, 4), experts=2),
    Case(DISPATCH, "grouped 1/1 ring chunks=2", (8, 8), experts=2, counts="host"),
    Case(COMBINE, "grouped 2 ring chunks=2", (8, 8), experts=2, counts="host"),
    Case(DISPATCH, "islands", (1, 1, 1, 1), experts=1, islands=2),
    Case(DISPATCH, "islands", (2, 2), experts=2, islands=2),
    Case(COMBINE, "islands", (1, 1, 1, 1), experts=1, islands=2),
    Case(COMBINE, "islands", (2, 2), experts=2, islands=2, counts="routed"),
    Case(DISPATCH, "islands", (2, 2, 2, 2), n=8, k=8, experts=1, islands=2, counts=ON_DEVICE),
    Case(COMBINE, "islands", (1, 1, 1), n=8, k=8, experts=1, islands=3, counts=ON_DEVICE),
    Case(DISPATCH, "routed 1/1 ring", (4, 4, 4), experts=2, counts="routed"),
    Case(COMBINE, "routed 1/1 xor", (4, 4), experts=2, counts="routed"),
    Case(COMBINE, "serial", (3, 3), experts=3),
    Case(COMBINE, "grouped 2/1 ring", (6, 6, 6), experts=3),
    Case(COMBINE, "grouped 1/1 xor", (4, 4), experts=2),
    Case(DISPATCH, "serial", (4, 4), experts=2, counts="host"),
    Case(COMBINE, "serial", (4, 4), experts=2, counts="device"),
    Case(DISPATCH, "fused", (2, 2), experts=2, n=8, k=8),
    Case(DISPATCH, "fused", (2, 2), experts=2, n=8, k=8, counts="host"),
    Case(BAGS, "serial", (3, 2)),
    Case(BAGS, "serial", (2, 2, 2)),
    Case(BAGS, "fused", (3, 2)),
    Case(BAGS, "fused", (2, 2), out=True),
    Case(BAGS, "fused_after_barrier", (3, 2), out=True),
    Case(BAGS, "islands chunks=1", (2, 2), islands=2),
    Case(BAGS, "islands chunks=2", (3, 2, 2, 4), islands=2),
    Case(COMBINE, "fused", (2, 2, 2, 2), experts=2, n=8, k=8),
    Case(NORM, "serial", (2, 2)),
    Case(NORM, "direct", (2, 2), n=4),
    Case(NORM, "fused one_shot", (1, 1), n=4),
    Case(NORM, "fused two_shot", (1, 1), n=4),
    Case(ATTENTION[0], "serial", (2, 2, 2), n=4, k=2, causal=True),
    Case(ATTENTION[0], "serial", (3, 3), n=4, k=2),
    Case(ATTENTION[0], "shard_p2p ring", (2, 2, 2), n=4, k=2, causal=True),
    Case(ATTENTION[0], "shard_p2p xor chunks=2", (4, 4), n=4, k=2, causal=True),
    Case(ATTENTION[1], "serial", (2, 2), n=4, k=2, causal=True),
    Case(ATTENTION[1], "shard_p2p ring", (2, 2), n=4, k=2, causal=True),
    Case(ATTENTION[1], "by_heads ring chunks=3", (2, 2), n=6, k=3, head_dim=1),
]

STILL_RIGHT = {
    "swap over lanes": "each lane keeps its order, and launched in tuple order nothing waits for "
    "what comes later",
    "swap on a lane": "neither uses what the other writes, and no edge to another step relied on "
    "which of them ends first",
    "barrier on compute": "compute waits for the barrier earlier than it has to, nothing else",
    "later signal": "two copies of one lane exchange signals: the reader of the earlier waits for "
    "the later as well, and the reader of the later comes behind it on its lane",
    "step on its own": "its edges order it with everything it shares memory with; the order of "
    "the lane it left added nothing",
    "scratch as symmetric": "memory that peers could reach, and do not",
    "slots as blocks": "rows are equal on all ranks, so a slot has the size of a block",
    "chunks by rank": "the same cells stored rank-major: more copies and matmuls, equal results",
    "edge of a turn": "a matmul begins with an exchange, so that this has its SMs first; it uses "
    "nothing of the exchange before",
    "edge of a join": "`>>` orders a plan behind all that was before, also what went to peers",
    "blocks by chunk": "the same cells stored chunk-major, which every step that names them knows",
    "room for own blocks": "packed rows keep a place for those of this rank, which nobody uses",
    "no room for own blocks": "a block of this rank's was kept that nobody uses, or rows are equal "
    "and each peer's slot has the size of its block",
    "rows where they lie": "the matmul reads what was packed for it where it lay before",
    "other launches": "matmuls that nothing comes between are one launch or several",
    "another order of sums": "what attentions by other keys give is added up in any order",
    "blocks of a whole": "a buffer that is not split has no blocks of ranks to hold",
    "wider product": "an intermediate result in fp32 where the problem's dtype would do",
}


@dataclass(frozen=True)
class Result:
    case: str
    plan: Plan
    what: str
    refused: bool
    plausible: bool  # well formed, binds, its signals pair and it cannot deadlock
    mutant: Plan | None  # left out where it is refused for its form: they are many

    @property
    def kept(self) -> Plan:
        """The mutant, of which there is one."""
        assert self.mutant is not None
        return self.mutant


def plan_of(case: Case) -> Plan:
    options: dict[str, Any] = {"rows": case.rows, "bias": case.bias, "splits": case.splits,
                               "experts": case.experts, "counts": case.counts,
                               "out": case.out, "causal": case.causal,
                               "islands": case.islands, "scales": case.scales,
                               "activation": case.activation,
                               "head_dim": case.head_dim}  # fmt: skip
    n = sum(case.splits) if case.splits and case.op != RS else case.n
    problem = make_problem(case.op, sum(case.rows), n, case.k, len(case.rows), **options)
    return build(problem, case.spec)


class Noted(HappensBefore):
    """Notes that there is an order: signals pair and nothing waits in a circle."""

    found = 0

    def __init__(self, programs: tuple[Program, ...], calls: int) -> None:
        super().__init__(programs, calls)
        Noted.found += 1


def accepts(plan: Plan) -> bool:
    # an error of another type than the library's own is a bug of validate and fails the test
    try:
        validate(plan)
    except CounterpointError:
        return False
    return True


def results(thorough: bool) -> list[Result]:
    """Of all cases, or every tenth of the first case of each family and kind of counts."""
    found: list[Result] = []
    first = {(case.op, case.spec.split()[0], case.counts): case for case in reversed(CASES)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("counterpoint.plan.validate.HappensBefore", Noted)
        for case in CASES if thorough else first.values():
            plan = plan_of(case)
            for what, mutant in islice(mutants(plan), 0, None, 1 if thorough else 10):
                before, refused = Noted.found, not accepts(mutant)
                plausible = Noted.found > before
                kept = mutant if plausible or not refused else None
                name = f"{case.op} {plan.spec}"
                found.append(Result(name, plan, what, refused, plausible, kept))
    return found


def class_of(plan: Plan, what: str, mutant: Plan) -> str:
    """The class of `STILL_RIGHT` that a mutant belongs to, by its form alone; '' for none."""
    kind, _, rest = what.partition(": ")
    names = rest.split()
    lane = {step.name: step.lane for step in plan.steps}
    buffers = {b.name: b for b in plan.buffers}
    steps = {step.name: step for step in plan.steps}
    if kind == "edge":
        first, second = steps[names[3]], steps[names[0]]
        used = any(_overlap(r, q) for r, q in product(first.writes, second.reads))
        if (first.kind, second.kind) == ("exchange", "matmul") and not used:
            return "edge of a turn"
    if kind == "edge" and plan.problem.op == RS_BACKWARD:
        left = {r.buffer for r in first.writes if not r.at}
        return "" if left & {r.buffer for r in second.reads} else "edge of a join"
    if kind == "swap":
        a, b = steps[names[0]], steps[names[2]]
        if a.lane != b.lane:
            return "swap over lanes"
        written = any(_overlap(r, q) for r, q in product(a.writes, b.reads))
        if a.kind in KINDS and a.kind == b.kind and a.accumulates and b.accumulates:
            return "another order of sums"
        return "" if a.name in b.after or written else "swap on a lane"
    if kind == "slots":
        copies = steps[names[0]].kind == steps[names[2]].kind == "copy"
        return "later signal" if copies and lane[names[0]] == lane[names[2]] else ""
    if kind == "batch":
        return "other launches"
    if kind == "buffer":
        # between islands of experts, a block lies in each buffer that it comes through
        passed = plan.family == "islands" and bool(plan.problem.experts) and names[1] == "reads"
        packed = names[1:] in (["reads", "packed", "x"], ["reads", "packed_scale", "x_scale"])
        return "rows where they lie" if packed or passed else ""
    if kind == "lane":
        to_compute = names[2] == "compute" and lane[names[0]] == "signal"
        return "barrier on compute" if to_compute else "step on its own"
    if kind == "memory":
        name, field, value = names
        even = len(set(plan.problem.rows)) == 1
        match field, value:
            case "space", "symmetric" if buffers[name].space == "scratch":
                return "scratch as symmetric"
            case "holds", _ if not buffers[name].split:
                return "blocks of a whole"
            case "holds", "peers":
                return "no room for own blocks"
            case "holds", "all" if buffers[name].holds == "peers":
                return "room for own blocks"
            case "holds", "slots" | "all" if even and buffers[name].holds != "own":
                return "slots as blocks"
            case "chunks", "1":
                return "chunks by rank"
            case "chunks", _ if buffers[name].chunks == 1:
                return "blocks by chunk"
            case "dtype", "float32" if name == "own" or (
                name == "product" and not plan.problem.bias
            ):
                return "wider product"
    return ""


def _overlap(r: Region, q: Region) -> bool:
    """Whether two regions are of one memory, and name no other blocks of it."""
    apart = r.shards and q.shards and not {*r.shards} & {*q.shards}
    return (r.buffer, r.at) == (q.buffer, q.at) and not apart


def at_least_95_of_100_mutants_are_refused(found: list[Result], thorough: bool) -> None:
    count = len(found)
    refused = sum(r.refused for r in found)
    plausible = [r for r in found if r.plausible]
    caught = sum(r.refused for r in plausible)
    print(f"{count} mutants, {refused} refused ({refused / count:.2%})")
    print(f"{len(plausible)} of them plausible, {caught} refused ({caught / len(plausible):.2%})")
    assert count > (5000 if thorough else 2500)
    assert refused / count >= 0.95
    # of those that only the proofs about memory and values can tell from a right plan; that the
    # others are right is for the tests below
    assert len(plausible) > (1000 if thorough else 300)
    assert caught / len(plausible) >= 0.85


def at_least_95_of_100_mutants_between_islands_are_refused(
    found: list[Result], thorough: bool
) -> None:
    """Of each operator by itself; what is accepted of them is of the table, as of all others."""
    refused: dict[str, list[bool]] = {}
    for r in found:
        if r.plan.peers == "grid":
            refused.setdefault(r.plan.problem.op, []).append(r.refused)
    assert set(refused) == {op for op in OPS if "islands" in families(op)}
    for op, each in refused.items():
        print(f"{op} between islands: {len(each)} mutants, {sum(each) / len(each):.2%} refused")
    assert all(len(each) > (500 if thorough else 12) for each in refused.values())
    assert all(sum(each) / len(each) >= 0.95 for each in refused.values())


def every_kind_of_mutation_occurs_and_is_refused_at_times(
    found: list[Result], thorough: bool
) -> None:
    made = Counter(r.what.partition(": ")[0] for r in found)
    refused = Counter(r.what.partition(": ")[0] for r in found if r.refused)
    assert set(made) == set(refused)
    known = {"step", "edge", "wait", "post", "signal", "slot", "slots", "signal peer", "at",
             "shard", "chunk", "cols", "rows", "buffer", "read", "pair", "arg", "bias", "swap",
             "lane", "memory", "batch", "write", "setting", "spins", "activation"}  # fmt: skip
    assert known == set(made) if thorough else known >= set(made)
    never_accepted = {"step", "wait", "post", "signal", "slot", "signal peer",
                      "at", "shard", "chunk", "cols", "rows", "read", "pair", "arg",
                      "bias", "write", "setting", "spins", "activation"}  # fmt: skip
    assert all(made[kind] == refused[kind] for kind in never_accepted)
    assert not thorough or made["edge"] - refused["edge"] == 5


def a_kernel_of_ours_stands_only_as_its_family_has_it(found: list[Result], thorough: bool) -> None:
    """So does a plan whose counts differ: its boxes are those of equal counts."""
    ours = [
        r for r in found
        if any(s.kind == "fused" or s.arg("transport") for s in r.plan.steps)
        or r.plan.problem.counts != "equal"
    ]  # fmt: skip
    assert {(r.plan.problem.op, r.plan.family) for r in ours} == {
        (op, family) for op in OPS for family in families(op)
        if family in ("direct", "fused", "fused_after_barrier")
    } | {
        (BAGS, "serial"), (BAGS, "islands"), (COMBINE, "islands"), (DISPATCH, "islands"),
        (DISPATCH, "routed"),
        (NORM, "serial"),
        (COMBINE, "routed"),
        *product((DISPATCH, COMBINE), ("serial", "grouped")),
    }  # fmt: skip
    assert len(ours) > (1500 if thorough else 120)
    assert [f"{r.case}: {r.what}" for r in ours if not r.refused] == []


def test_lookups_between_islands_are_proved_by_what_they_read_and_write():
    """As other steps are: not by standing where their family has them, which is checked before."""
    tables, rows = ((4,), (3, 2), (7,), (1,)), (3, 2, 1, 4)
    plan = build(Problem(BAGS, sum(rows), rows=rows, tables=tables, islands=2), "islands chunks=2")
    every = [*mutants(plan)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("counterpoint.plan.form._not_as_built", lambda plan: "")
        accepted = [(what, mutant) for what, mutant in every if accepts(mutant)]
    for what, mutant in accepted:
        assert all(simulate(mutant, seed) for seed in range(SCHEDULES)), what
    # settings of kernels are no part of the proof, and pooled rows are where "bags" has them
    found = {what for what, _ in accepted if not what.startswith("arg: lookup")}
    assert len(found) < 0.05 * len(every)
    kinds = {what.partition(": ")[0] for what in found}
    assert kinds <= {"memory", "swap", "lane", "slots", "buffer"}


@pytest.mark.parametrize(
    ("op", "right"),
    [(DISPATCH, {"swap: give_1 and keep"}), (COMBINE, {"memory: got holds peers"})],
)
def test_what_stands_around_the_kernel_of_an_island_is_proved(op: str, right: set[str]):
    """By what it reads and writes, not by standing as built; the kernel is, and has its operands.

    Two mutants are right: steps of two lanes change places, and no step uses an own block of `got`.
    """
    rows = (2, 2, 2, 2)
    facts = {"experts": 1, "counts": ON_DEVICE, "islands": 2}
    plan = build(make_problem(op, sum(rows), 8, 8, 4, **facts), "islands")
    (kernel,) = (step for step in plan.steps if step.spins)
    its_own = ("routes", "memory: moved", "memory: arrived")
    every = [
        (what, mutant) for what, mutant in mutants(plan)
        if kernel in mutant.steps and not any(words in what for words in its_own)
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("counterpoint.plan.form._not_as_built", lambda plan: "")
        accepted = [(what, mutant) for what, mutant in every if accepts(mutant)]
    for what, mutant in accepted:
        assert all(simulate(mutant, seed) for seed in range(SCHEDULES)), what
    assert {what for what, _ in accepted} == right and len(every) > 100


def accepted_mutants_are_those_of_the_table(found: list[Result], thorough: bool) -> None:
    accepted = [r for r in found if not r.refused]
    classes = [class_of(r.plan, r.what, r.kept) for r in accepted]
    strange = [r for r, name in zip(accepted, classes, strict=True) if not name]
    assert [f"{r.case}: {r.what}" for r in strange] == []
    assert set(classes) == set(STILL_RIGHT) or not thorough


def accepted_mutants_compute_the_op_in_every_schedule(found: list[Result], thorough: bool) -> None:
    for r in found:
        if not r.refused:
            for seed in range(SCHEDULES if thorough else 3):
                assert simulate(r.kept, seed), f"{r.case}: {r.what}, schedule {seed}"


def accepted_double_mutants_compute_the_op_in_every_schedule(
    found: list[Result], thorough: bool
) -> None:
    """Two slips may make up for one another; what validate then accepts has to be right."""
    random = Random(0)
    accepted = 0
    right = [r for r in found if not r.refused]
    wrong = [r for r in found if r.refused and r.plausible]
    few = 1 if thorough else 10
    for first in random.sample(right, 60 // few) + random.sample(wrong, 120 // few):
        for what, second in islice(mutants(first.kept), random.randrange(20), None, 20):
            if accepts(second):
                accepted += 1
                for seed in range(SCHEDULES if thorough else 3):
                    place = f"{first.case}: {first.what}, {what}, schedule {seed}"
                    assert simulate(second, seed), place
    assert accepted > (20 if thorough else 2)


@pytest.mark.drawn(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_simulator_agrees_on_plans_that_are_right(case: Case):
    plan = plan_of(case)
    validate(plan)
    assert all(simulate(plan, seed) for seed in range(20))


def the_simulator_sees_what_is_wrong(found: list[Result], thorough: bool) -> None:
    """Without this, that it agrees would say nothing."""
    kinds = {"step", "edge", "signal", "at", "shard", "pair", "buffer", "bias"}
    wrong = [r for r in found
             if r.plausible and r.refused and r.what.partition(": ")[0] in kinds]  # fmt: skip
    seen, tried = 0, Random(0).sample(wrong, 1500 if thorough else 120)
    for r in tried:
        try:
            seen += not all(simulate(r.kept, seed) for seed in range(SCHEDULES))
        except Stuck:
            seen += 1
    print(f"{seen} of {len(tried)} refused mutants computed something else")
    assert seen / len(tried) > 0.9


def test_cases_hold_every_family_of_every_op():
    specs = {(case.op, case.spec.split()[0]) for case in CASES}
    assert specs == {(op, family) for op in OPS for family in families(op)}
    assert {"ring", "xor"} <= {word for case in CASES for word in case.spec.split()}
    assert {len(case.rows) for case in CASES} == {2, 3, 4}


def test_mutants(thorough: bool):
    """One test, so that one process makes the mutants, once."""
    found = results(thorough)
    at_least_95_of_100_mutants_are_refused(found, thorough)
    at_least_95_of_100_mutants_between_islands_are_refused(found, thorough)
    every_kind_of_mutation_occurs_and_is_refused_at_times(found, thorough)
    a_kernel_of_ours_stands_only_as_its_family_has_it(found, thorough)
    accepted_mutants_are_those_of_the_table(found, thorough)
    accepted_mutants_compute_the_op_in_every_schedule(found, thorough)
    accepted_double_mutants_compute_the_op_in_every_schedule(found, thorough)
    the_simulator_sees_what_is_wrong(found, thorough)
