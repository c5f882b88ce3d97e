"""Plans of batch-invariant problems: all that are built are proved, and sum in one order."""

from dataclasses import replace
from typing import Any

import pytest

from counterpoint import InputError, PlanError, Problem, build, choose, validate
from counterpoint.choose.known import problem_key
from counterpoint.plan.bind import bind
from counterpoint.plan.families import families
from counterpoint.plan.steps import Plan
from counterpoint.schedules.invariant import varies
from counterpoint.tensor_parallel.plan_fused_sum import own_rows

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def problem(op: str, ranks: int, m: int = 48, *, invariant: bool = True, **options: Any) -> Problem:
    return Problem(op, m, 256, 512, ranks, invariant=invariant, **options)


def plans(op: str, ranks: int) -> list[Plan]:
    p, found = problem(op, ranks), list[Plan]()
    for name in families(op):
        family = p.operation.family(name)
        varying = name == "running_sum" or (op == "all_gather_matmul" and name.endswith("2d"))
        if family and not family.refusal(p) and not varying:
            found.append(build(p, name))
    return found


@pytest.mark.drawn(6)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("op", OPS)
def test_families_are_proved_and_sum_in_the_order_of_ranks(op: str, ranks: int):
    found = plans(op, ranks)
    assert len(found) >= (2 if op == "matmul_all_reduce" else 7)
    for plan in found:
        validate(plan)
        assert build(plan.problem, plan.spec) == plan
        for rank in range(ranks):
            for bound in bind(plan, rank).steps:
                for part in bound.parts if bound.step.kind == "reduce" else ():
                    slots = {b.name for b in plan.buffers if b.holds == "slots"}
                    senders = [b.slot if b.buffer in slots else b.rank for b in part.reads]
                    assert senders == [*range(ranks)]


def test_without_it_the_own_partial_is_last():
    plan = build(problem("matmul_reduce_scatter", 4, invariant=False), "shard_p2p")
    (part,) = bind(plan, 1).steps[-1].parts
    assert [box.slot for box in part.reads] == [0, 3, 2, 0], "nearest first, then the own"


@pytest.mark.parametrize("name", ["uniform_fused_2d", "hetero_fused_2d"])
def test_slices_of_k_are_refused(name: str):
    p = problem("all_gather_matmul", 4)
    for asked, spec in ((p, name), (replace(p, invariant=False), f"{name} invariant")):
        with pytest.raises(InputError, match=r"batch-invariant.*; it multiplies slices of K"):
            build(asked, spec)
    sliced = replace(build(replace(p, invariant=False), name), problem=p)
    with pytest.raises(PlanError, match="is not batch-invariant: it multiplies slices of K"):
        validate(sliced)


def test_the_word_alone_is_no_plan():
    with pytest.raises(InputError, match=r"plan must be a plan before 'invariant', such as 'auto"):
        build(replace(problem("all_gather_matmul", 4), invariant=False), "invariant")


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_that_go_around_are_refused(op: str, ranks: int):
    """Of two ranks, too: the second product is not rounded before it is added."""
    with pytest.raises(InputError, match="it adds products to a sum that is rounded: bits depend"):
        build(problem(op, ranks), "running_sum")
    choice = choose(Problem(op, 8192, 8192, 4096, 2, invariant=True), "h200-2")
    refused = [c.verdict for c in choice.table if c.spec == "running_sum chunks=2"]
    assert refused == ["not batch-invariant: it adds products to a sum that is rounded"]


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums_of_islands_are_refused(op: str):
    with pytest.raises(InputError, match="it sums some ranks before the others"):
        build(problem(op, 4, islands=2), "islands")
    assert build(problem(op, 4, islands=2), "serial invariant").family == "serial"


def test_a_gather_between_islands_is_none_the_worse():
    validate(build(problem("all_gather_matmul", 4, islands=2), "islands"))


def test_the_word_makes_the_problem_so():
    p = problem("matmul_all_reduce", 2, invariant=False)
    plan = build(p, "shard_p2p xor invariant")
    assert plan == build(replace(p, invariant=True), "shard_p2p xor")
    assert plan.spec == "shard_p2p xor" and Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InputError, match="'invariant' is none"):
        build(p, "shard_p2p invariant xor")


@pytest.mark.parametrize(
    "options", [{"op": "all_gather_attention", "head_dim": 64}, {"op": "embedding_bag_all_to_all"}]
)
def test_other_operators_have_no_such_plans(options: dict[str, Any]):
    op = options.pop("op")
    tables = {"tables": ((8,), (8,)), "n": 0, "k": 0} if "embedding" in op else {"n": 512, "k": 64}
    with pytest.raises(InputError, match="invariant must be False: the op has no batch-invariant"):
        Problem(op, m=48, ranks=2, invariant=True, **tables, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_bias_is_not_the_plans(op: str):
    with pytest.raises(InputError, match="bias must be False"):
        problem(op, 2, bias=True)


def test_a_single_row_travels_as_one_of_two_does():
    """Rounded: else a row by itself would have other bits."""
    single, plain = (problem("matmul_all_reduce", 2, 1, invariant=i) for i in (True, False))
    assert [own_rows(single, m) for m in (1, 2, 3)] == [2, 2, 4]
    assert [own_rows(plain, m) for m in (1, 2, 3)] == [1, 2, 4]


@pytest.mark.parametrize("by", ["model", "rule"])
@pytest.mark.parametrize("op", OPS)
def test_a_choice_is_among_them(op: str, by: Any):
    for m in (8, 64, 1024, 8192):
        p = Problem(op, m, 8192, 4096, 8, invariant=True)
        for machine in ("h200-8", "mi300x-8"):
            choice = choose(p, machine, by=by)
            assert not varies(choice.plan), choice.spec


def test_explain_says_why_not_the_others():
    choice = choose(Problem("all_gather_matmul", 8192, 8192, 4096, 8, invariant=True), "h200-8")
    rows = [row for row in choice.explain().splitlines() if row.startswith("uniform_fused_2d")]
    assert rows and rows[0].endswith("not batch-invariant: it multiplies slices of K")
    assert "K4096 batch-invariant bfloat16 on 8 ranks" in choice.explain()


def test_what_is_tuned_for_one_is_not_for_the_other():
    p = problem("matmul_all_reduce", 2)
    assert problem_key(p) != problem_key(replace(p, invariant=False))
