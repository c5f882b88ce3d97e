"""Plans of embedding bags: right for all tables and bags, and refused if they are anything else."""

from dataclasses import replace

import pytest
from plan_cases import BAGS

import counterpoint as cp
from counterpoint.errors import PlanError

SIZES = {
    "equal": (((8, 4),) * 4, (3,) * 4),
    "ragged": (((8, 3), (), (5, 16, 16), (1,)), (5, 9, 0, 3)),
    "two": (((4,), (8, 8)), (1, 6)),
    "alone": (((8, 3),), (5,)),
    "nothing": (((8,), (4,)), (0, 0)),
}


def problem_of(sizes: str, *, out: bool = False) -> cp.Problem:
    tables, rows = SIZES[sizes]
    return cp.Problem(BAGS, sum(rows), rows=rows, tables=tables, out=out)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("spec", ["serial", "fused"])
@pytest.mark.parametrize("sizes", SIZES)
def test_plans_are_right(sizes: str, spec: str, out: bool):
    plan = cp.build(problem_of(sizes, out=out), spec)
    cp.validate(plan)
    assert cp.Plan.from_json(plan.to_json()) == plan
    assert cp.build(plan.problem, plan.spec) == plan
    assert [step.spins for step in plan.steps].count(True) == (plan.spec == "fused")
    if sizes == "alone":
        assert [step.name for step in plan.steps] == ["lookup"] and plan.spec == "serial"


def test_rows_that_come_elsewhere_are_seen():
    """By what cells hold: an all-to-all that sends before the lookup has written."""
    plan = cp.build(problem_of("two"), "serial")
    turned = replace(plan, steps=plan.steps[::-1])
    with pytest.raises(PlanError):
        cp.validate(turned)


def test_own_columns_are_another_place_on_each_rank():
    plan = cp.build(problem_of("ragged"), "fused")
    boxes = [cp.bind(plan, rank).steps[0].parts[0].write for rank in range(4)]
    assert [(box.c0, box.c1) for box in boxes] == [(0, 11), (11, 11), (11, 48), (48, 49)]
    looked = cp.build(problem_of("ragged"), "serial")
    boxes = [cp.bind(looked, rank).steps[0].parts[0].write for rank in range(4)]
    assert [(box.c0, box.c1) for box in boxes] == [(0, 11), (0, 0), (0, 37), (0, 1)]
    assert looked.buffer("pooled").shape == (17, 37)


def test_memory_is_that_of_the_widest_rank():
    p = problem_of("two")
    assert cp.build(p, "serial").workspace_bytes == 7 * 16 * 2
    assert cp.build(p, "fused").workspace_bytes == 2 * (6 * 20 * 2 + 2 * 4)
    assert cp.build(replace(p, out=True), "fused").workspace_bytes == 2 * 2 * 4


def test_steps_are_shown():
    text = str(cp.build(problem_of("two"), "fused"))
    assert "bags own cols -> rows own cols, rows@1 own cols, y, flags@1[0]" in text
    assert "under_15=4096x2x4 under_50=2048x4x4 else=2048x8x4" in text
