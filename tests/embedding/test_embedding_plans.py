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


@pytest.mark.parametrize("sizes", SIZES)
def test_plans_that_a_graph_replays_are_right(sizes: str):
    """Into outputs of peers, every rank waits for every other first; without peers none does."""
    p = problem_of(sizes, out=True)
    plan, behind = cp.build(p, "fused"), cp.build(p, "fused_after_barrier")
    cp.validate(behind)
    assert cp.Plan.from_json(behind.to_json()) == behind
    if p.ranks == 1:
        assert behind == plan
        return
    first, *rest = behind.steps
    assert first.kind == "barrier" and tuple(rest) == plan.steps
    for rank in range(p.ranks):
        met = {arrival.rank for arrival in cp.bind(behind, rank).steps[0].waits}
        assert met == set(range(p.ranks)) - {rank}
    cp.validate(cp.build(replace(p, out=False), "fused_after_barrier"))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize(("islands", "size"), [(2, 1), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_plans_between_islands_are_right(islands: int, size: int, chunks: int):
    ranks = islands * size
    ragged = ((8, 3), (), (5, 16, 16), (1,), (2,), ())
    for tables in (((8,),) * ranks, ragged[:ranks]):
        for rows in ((4,) * ranks, (3, 0, 5, 2, 7, 1)[:ranks], (0,) * ranks):
            p = cp.Problem(BAGS, sum(rows), rows=rows, tables=tables, islands=islands)
            plan = cp.build(p, f"islands chunks={chunks}")
            cp.validate(plan)
            cp.validate(cp.build(p, "serial"))
            assert cp.Plan.from_json(plan.to_json()) == plan


def test_what_goes_to_an_island_is_its_bags_of_own_columns():
    """No byte more, whatever others' columns are; and memory is that of one's own island."""
    tables, rows = ((8, 3), (), (5, 16), (1,)), (3, 0, 5, 2)
    p = cp.Problem(BAGS, sum(rows), rows=rows, tables=tables, islands=2, dtype="float32")
    plan = cp.build(p, "islands chunks=2")
    for rank, (columns, theirs, own) in enumerate([(11, 7, 3), (0, 7, 3), (21, 3, 7), (1, 3, 7)]):
        gives = [b.parts[0] for b in cp.bind(plan, rank).steps if b.step.kind == "exchange"]
        sent = sum(read.shape[0] * read.shape[1] for (read,), _, _ in gives)
        got = sum(write.shape[0] * write.shape[1] for _, write, _ in gives)
        rail = sum(tables[(rank + 2) % 4])
        assert (len(gives), sent, got) == (2, theirs * columns, own * rail)
    widest = 21 * 4
    assert plan.workspace_bytes == (10 + 7 + 7) * widest
    with pytest.raises(cp.InputError, match="plan must be for results in new tensors"):
        cp.build(replace(p, out=True), "islands")


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
