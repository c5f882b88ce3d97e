"""Problems and specs of every operator, and the proof of a plan, for tests that hold for all."""

import re

import pytest

from counterpoint.errors import InputError
from counterpoint.operators import op_names
from counterpoint.plan.families import build
from counterpoint.plan.operation import operation_of
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem

OPS = op_names()
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
AG_WGRAD = "all_gather_matmul_wgrad"
AG_BACKWARD, RS_BACKWARD = "all_gather_matmul_backward", "matmul_reduce_scatter_backward"
DISPATCH, COMBINE = "all_to_all_matmul", "matmul_all_to_all"
EXPERTS = (DISPATCH, COMBINE)
BAGS = "embedding_bag_all_to_all"
ATTENTION = ("all_gather_attention", "all_gather_attention_backward")
BIASED = (AG, RS, AR)
NORM = "all_reduce_norm"
PLAIN = tuple(op for op in OPS if op not in (*EXPERTS, BAGS, *ATTENTION, NORM))
BY_ROWS = tuple(op for op in PLAIN if operation_of(op).shares_rows)


def make_problem(op: str, m: int, n: int, k: int, ranks: int, **options: object) -> Problem:
    """A problem of any operator; of experts, four on each rank unless it says how many.

    Of an attention, n is the next multiple of k. Of embedding bags, ranks have one table of n
    columns and two of half as many and 3, in turn. A norm contracts nothing.
    """
    if op == NORM:
        k = 0
    if op in EXPERTS:
        options.setdefault("experts", 4)
    if op in ATTENTION:
        n = -(-n // max(k, 1)) * k
    if op == BAGS:
        each = (max(n, 1),), (max(n // 2, 1), 3)
        options["tables"] = tuple(each[rank % 2] for rank in range(ranks))
        options["indices"] = tuple(2 * m * (1 + rank % 2) for rank in range(ranks))
        n = k = 0
    return Problem(op, m, n, k, ranks, **options)  # type: ignore[arg-type]


def peers_of(ranks: int) -> tuple[str, ...]:
    return ("ring",) if ranks & (ranks - 1) else ("ring", "xor")


def specs(problem: Problem) -> list[str]:
    """Specs of each family of the operator, with each word that it takes."""
    total = problem.experts or problem.ranks
    first = "scatter" if operation_of(problem.op).shares_rows else "one_shot"
    found: list[str] = []
    for family in operation_of(problem.op).families:
        tails = [""]
        if "sizes" in family.takes:
            tails = [f"{total}"]
            tails += [f"{(total + 1) // 2}/{total // 2}"] if total > 1 else []
            # the group that comes in chunks is the first of some operators, of others the last
            in_chunks = "chunks" in family.takes and total > 2
            tails += [f"1/{total - 2}/1 chunks=2"] if in_chunks else []
            tails += ["chunks=3"] if problem.experts and "chunks" in family.takes else []
        elif "chunks" in family.takes:
            tails += ["chunks=3"]
        if "shots" in family.takes:
            tile = f"{max(16, problem.ranks)}x16x3 " * ("tile" in family.takes)
            tails += [f"{first} {tile}warps=2"]
            # ranks share a row of 4-byte words evenly
            shared = problem.op != NORM or problem.n * problem.item_bytes % (4 * problem.ranks) == 0
            tails += ["two_shot"] if first != "scatter" and shared else []
        peers = peers_of(problem.ranks) if "peers" in family.takes else ("",)
        found += [" ".join(f"{family.name} {p} {tail}".split()) for p in peers for tail in tails]
    return found


def prove(problem: Problem, spec: str) -> Plan:
    """The plan of a spec: proved, made again from its own spec, and read back.

    A step names each predecessor once.
    """
    plan = build(problem, spec)
    validate(plan)
    assert build(problem, plan.spec) == plan
    assert Plan.from_json(to_json(plan)) == plan
    assert all(len({*step.after}) == len(step.after) for step in plan.steps)
    return plan


def prove_or_refuse(problem: Problem, spec: str) -> Plan | None:
    """Its proof where its family takes the problem; else the refusal says what is wanted."""
    family = operation_of(problem.op).family(spec.split()[0])
    assert family is not None
    want = family.refusal(problem)
    if not want or (problem.ranks == 1 and not family.alone):
        return prove(problem, spec)
    with pytest.raises(InputError, match=re.escape(f"plan must be for {want}, got {spec!r}")):
        build(problem, spec)
    return None
