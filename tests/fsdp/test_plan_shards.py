"""Plans of gathers and scatters of shards: proved, in ring order, and priced."""

from collections import Counter
from dataclasses import replace

import pytest

import counterpoint as cp
from counterpoint.fsdp import plan_gather_shards, plan_scatter_shards
from counterpoint.fsdp.plan_shards import (
    GATHER,
    SCATTER,
    gather_plan,
    peers_in_order,
    predicted,
    scatter_plan,
)
from counterpoint.plan.steps import Region
from counterpoint.presets import preset

PLANS = {GATHER: plan_gather_shards, SCATTER: plan_scatter_shards}


@pytest.mark.parametrize("rows", [(), (3, 0, 2, 1)], ids=["equal", "uneven"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", PLANS)
def test_both_ways_are_proved(op: str, ranks: int, rows: tuple[int, ...]):
    if rows and ranks != len(rows):
        ranks = len(rows)
    problem = cp.Problem(op, m=sum(rows) or 2 * ranks, n=5, ranks=ranks, rows=rows)
    cp.validate(PLANS[op].serial(problem))
    if ranks > 1:
        cp.validate(PLANS[op].in_place(problem))
    if ranks > 1 and op == GATHER:
        cp.validate(plan_gather_shards.in_turn(problem))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_two_ranks_copy_from_or_to_one_at_a_time(ranks: int):
    for plan in (gather_plan(ranks), gather_plan(ranks, kept=False), scatter_plan(ranks)):
        orders = [peers_in_order(plan, rank) for rank in range(ranks)]
        for rank, order in enumerate(orders):
            assert Counter(order) == Counter(r for r in range(ranks) if r != rank)
        for at_a_time in zip(*orders, strict=True):
            assert len({*at_a_time}) == ranks


def test_a_slip_is_refused():
    """A wait that is missing, an order that is, a block of somebody else, a slot of another."""
    gather, scatter, turn = gather_plan(3, 4), scatter_plan(3, 4), gather_plan(3, 4, kept=False)
    slips = [
        (gather, "pull_1", {"waits": ()}), (gather, "own", {"after": ()}),
        (gather, "pull_2", {"writes": (Region("y", shards=((2,),)),)}),
        (gather, "publish", {"posts": ()}), (scatter, "sum", {"waits": ()}),
        (turn, "pull_1", {"waits": ()}), (turn, "pull_1", {"after": ()}),
        (turn, "pull_2", {"reads": (Region("y", at=(1,), shards=((2,),)),)}),
        (scatter, "sum", {"after": ()}), (scatter, "push_1", {"after": ()}),
        (scatter, "push_1", {"reads": (Region("gradient", shards=((2,),)),)}),
    ]  # fmt: skip
    for plan, name, change in slips:
        steps = tuple(replace(s, **change) if s.name == name else s for s in plan.steps)
        with pytest.raises(cp.PlanError):
            cp.validate(replace(plan, steps=steps))


def test_neither_is_an_operator_that_is_called_by_name():
    for op in PLANS:
        with pytest.raises(cp.InputError):
            cp.build(cp.Problem(op, m=2, n=8, ranks=2), "serial")


@pytest.mark.parametrize(("machine", "ranks"), [("h100-2", 2), ("h200-4", 4), ("b200-8", 8)])
def test_in_place_is_predicted_to_take_less_of_blocks_of_a_model(machine: str, ranks: int):
    block, found = 218_112_000 // ranks, preset(machine)
    in_place = predicted(ranks, block, block, 9, found)
    assert not in_place.slower
    assert in_place.torchs_gather_s / in_place.gather_s > 1.2
    assert in_place.torchs_scatter_s / in_place.scatter_s > 1.5
    assert "torch's" in str(in_place)
    frozen = predicted(ranks, block, 0, 9, found)
    assert frozen.scatter_s == frozen.torchs_scatter_s == 0 and "scatter" not in str(frozen)
    timeline = cp.estimate(gather_plan(ranks, block), machine)
    assert {span.kind for span in timeline.spans} >= {"copy", "move", "barrier"}
