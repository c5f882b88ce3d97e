"""What controls make of a pipeline's plan: still free of races, and what each one is there for."""

import random
from dataclasses import replace

import pytest

from counterpoint.errors import InputError, PlanError
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Lane, Plan, Signal, Step
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.rewrites import URGENT, Touch, plan_of, rewritten

RANKS = 3
SETTINGS = (
    OFF, SEQUENTIAL, Controls(priority=True), Controls(blocks_per_sm=2), Controls(carve_out=True),
    Controls(delay_s=5e-6), Controls(chunks=4, along="n"), Controls(transport="copy_engine"),
    Controls(transport="zero_cta", max_ctas=8, delay_s=1e-6, chunks=2),
    Controls(green_sms=96, num_sms=100),
)  # fmt: skip


def drawn(seed: int) -> list[Touch]:
    """Stages on bytes 0 to 60, which they share in every way."""
    draw = random.Random(seed)

    def some() -> list[tuple[int, int]]:
        starts = [draw.randrange(60) for _ in range(draw.randint(1, 3))]
        return [(start, start + draw.randint(0, 12)) for start in starts]

    return [
        Touch(f"{op or 'compute'} {i}", op, some(), some())
        for i, op in enumerate(draw.choice(["", "all_reduce", "all_to_all"]) for _ in range(8))
    ]


def double_buffered() -> list[Touch]:
    """Four products, each exchanged beside the next one; source and target have two halves."""
    stages: list[Touch] = []
    for i in range(4):
        sent, got = (100 * (i % 2), 100 * (i % 2) + 100), (1000 + i % 2 * 100, 1100 + i % 2 * 100)
        stages.append(Touch(f"gemm {i}", "", [(5000, 5010)], [sent]))
        stages.append(Touch(f"all_to_all {i}", "all_to_all", [sent], [got]))
    return stages


@pytest.mark.parametrize("seed", range(6))
def test_whatever_controls_make_is_free_of_races(seed: int):
    plan = plan_of(drawn(seed), RANKS)
    for controls in SETTINGS:
        made = rewritten(plan, controls)
        validate(made)
        assert Plan.from_json(made.to_json()) == made
        assert made.spec == f"pipeline {controls.spec}"
        # every stage is there once, in the order written, with what it touches
        stages = [step for step in made.steps if not step.arg("delay_ns")]
        assert [(s.name, s.reads, s.writes) for s in stages] == [
            (s.name, s.reads, s.writes) for s in plan.steps
        ]


@pytest.mark.parametrize("controls", SETTINGS, ids=lambda c: c.spec)
def test_no_edge_can_be_left_out(controls: Controls):
    made = rewritten(plan_of(double_buffered(), RANKS), controls)
    edges = [step.name for step in made.steps if step.after]
    assert edges or controls == SEQUENTIAL
    for name in edges:
        steps = (replace(s, after=()) if s.name == name else s for s in made.steps)
        with pytest.raises(PlanError, match="race: "):
            validate(replace(made, steps=tuple(steps)))


def test_a_later_stage_that_runs_too_early_is_a_race():
    plan = plan_of(double_buffered(), RANKS)
    steps = list(plan.steps)
    # the third product, before the first one has been sent
    steps.insert(1, replace(steps.pop(4), after=()))
    moved = replace(plan, steps=tuple(steps))
    with pytest.raises(PlanError, match="race: 'gemm 2' on rank 0 and 'all_to_all 0' on rank 0"):
        validate(moved)


def test_a_plan_is_the_same_wherever_tensors_lie():
    """Each buffer elsewhere, and in another order, as on another rank."""
    stages = double_buffered()

    def elsewhere(spans):
        moves = {0: 7_000, 1: 90, 5: 20_000}
        return [(a + moves[a // 1000], b + moves[a // 1000]) for a, b in spans]

    moved = [s._replace(reads=elsewhere(s.reads), writes=elsewhere(s.writes)) for s in stages]
    assert plan_of(moved, RANKS) == plan_of(stages, RANKS)


def test_bytes_that_stages_touch_together_are_one_buffer():
    stages = [
        Touch("a", "", [], [(10, 20)]), Touch("b", "all_gather", [(15, 18)], [(40, 44)]),
        Touch("c", "", [(18, 25), (30, 30)], [(25, 30)]),
    ]  # fmt: skip
    plan = plan_of(stages, RANKS)
    assert [(b.name, b.shape) for b in plan.buffers] == [
        ("memory 0", (1, 15)), ("memory 1", (1, 4)), ("memory 2", (1, 5)),
    ]  # fmt: skip
    assert [r.cols for r in plan.steps[2].reads] == [(8, 15)]  # nothing of no byte
    assert plan.steps[1].after == ("a",) and plan.steps[2].after == ()


def test_stages_of_one_name_are_told_apart():
    plan = plan_of([Touch("sum", "", [], [(0, 1)])] * 2, RANKS)
    assert [step.name for step in plan.steps] == ["sum", "sum (1)"]


def test_a_sequence_is_one_lane():
    plan = rewritten(plan_of(double_buffered(), RANKS), SEQUENTIAL)
    assert plan.lanes == (Lane("compute", "sm"),)
    assert {(s.lane, s.after) for s in plan.steps} == {("compute", ())}


def test_settings_of_lanes():
    plan = plan_of(double_buffered(), RANKS)

    def lanes(**controls: object) -> dict[str, Lane]:
        made = rewritten(plan, Controls(**controls))  # type: ignore[arg-type]
        assert [replace(s, args=()) for s in made.steps] == [
            replace(s, args=()) for s in plan.steps
        ]
        return {lane.name: lane for lane in made.lanes}

    compute, comm = Lane("compute", "sm"), Lane("comm", "sm")
    urgent = replace(comm, priority=URGENT)
    assert lanes(priority=True) == {"compute": compute, "comm": urgent}
    assert lanes(transport="copy_engine") == {"compute": compute, "comm": urgent}
    assert lanes(transport="zero_cta") == {"compute": compute, "comm": comm}
    assert lanes(blocks_per_sm=3)["compute"] == replace(compute, blocks_per_sm=3)
    assert lanes(green_sms=64)["compute"] == replace(compute, num_sms=64)


def test_args_of_steps():
    plan = plan_of(double_buffered(), RANKS)
    controls = Controls(chunks=4, along="n", transport="zero_cta", max_ctas=8)
    for step in rewritten(plan, controls).steps:
        if step.lane == "compute":
            assert dict(step.args) == {"chunks": 4, "along": "n"}
        else:
            assert dict(step.args) == {
                "collective": "all_to_all", "transport": "zero_cta", "max_ctas": 8,
            }  # fmt: skip


def test_what_computes_behind_a_collective_is_held_back():
    """After what it waits for: else the delay would pass while that runs."""
    plan = plan_of(double_buffered(), RANKS)
    made = rewritten(plan, Controls(delay_s=5e-6, chunks=2))
    waits = [step for step in made.steps if step.arg("delay_ns")]
    assert [step.name for step in waits] == [f"delay before gemm {i}" for i in (1, 2, 3)]
    for step in waits:
        assert step.args == (("delay_ns", 5000),) and step.lane == "compute"
        held = next(s for s in plan.steps if step.name.endswith(s.name))
        assert step.after == held.after
    assert [s.after for s in made.steps if s.name.startswith("gemm")] == [()] * 4


def test_opaque_steps_stand_in_pipelines_only():
    opaque = Step("theirs", "compute", "opaque")
    plan = build(Problem("all_gather_matmul", 8, 4, 4, 2), "serial")
    with pytest.raises(PlanError, match="an opaque step stands in a pipeline"):
        validate(replace(plan, steps=(*plan.steps, opaque)))
    pipeline = plan_of(double_buffered(), RANKS)
    signals = replace(pipeline.steps[0], posts=(Signal(0, (1,)),))
    with pytest.raises(PlanError, match=r"an opaque step .* signals nobody"):
        validate(replace(pipeline, steps=(signals, *pipeline.steps[1:])))
    with pytest.raises(InputError, match=r"see Pipeline\.plan"):
        build(pipeline.problem, "serial")


def test_a_step_of_several_regions_is_bound_to_all_of_them():
    (bound,) = bind(plan_of([Touch("a", "", [(0, 4)], [(8, 9), (20, 30)])], RANKS), 1).steps
    assert [(p.reads[0].shape, p.write.shape) for p in bound.parts] == [
        ((1, 4), (1, 1)), ((1, 4), (1, 10)),
    ]  # fmt: skip
