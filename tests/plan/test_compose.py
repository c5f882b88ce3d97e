"""Plans side by side, in order, and as parts: what comes out, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
from plan_simulator import simulate

from counterpoint.errors import PlanError
from counterpoint.plan.compose import part
from counterpoint.plan.families import build
from counterpoint.plan.names import COMPUTE, COPY, OWN, SIGNAL
from counterpoint.plan.operation import operation_of
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Signal, Step
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Order
from counterpoint.tensor_parallel import plan_matmul_reduce_scatter
from counterpoint.tensor_parallel.plan_all_gather_matmul_backward import scatter_problem
from counterpoint.tensor_parallel.plan_all_gather_matmul_wgrad import wgrad
from counterpoint.tensor_parallel.plan_matmul_reduce_scatter_backward import gather_problem

BACKWARD = Problem("matmul_reduce_scatter_backward", 6, 5, 4, 3)
LANES = (COMPUTE, SIGNAL, COPY)
NAMES = {"x": "dy", "y": "dx", "w": "wt"}
FULL = Buffer("full", (6, 5), "bfloat16", "symmetric", split=True)


def gathered(spec: str = "graded 2/1 ring", **options: Any) -> Plan:
    """dx, and all rows of dy in `full`."""
    return part(build(gather_problem(BACKWARD), spec), BACKWARD, buffers=NAMES, **options)


def mine(*steps: Step, buffers: tuple[Buffer, ...] = (FULL,), peers: Any = "ring") -> Plan:
    operands = operation_of(BACKWARD.op).operands(BACKWARD)
    return Plan(BACKWARD, "mine", "", peers, (*operands, *buffers), LANES, steps)


DW = mine(wgrad(Region("x"), Region("full")))


def step_of(plan: Plan, name: str) -> Step:
    return next(step for step in plan.steps if step.name == name)


def slots_of(plan: Plan) -> list[int]:
    return sorted(s.slot for step in plan.steps for s in step.posts)


def refused(message: str) -> Any:
    return pytest.raises(PlanError, match=f"^plan {re.escape(message)}")


# --- in order


def test_in_order_the_second_reads_what_the_first_left():
    plan = gathered() >> DW
    validate(plan)
    assert all(simulate(plan, seed) for seed in range(5))
    assert plan.spec == "(graded 2/1 ring >> mine)"
    assert [b.name for b in plan.buffers] == ["dy", "wt", "dx", "full", "x", "dw"]
    assert Plan.from_json(to_json(plan)) == plan
    # behind all lanes of the first: behind its own by the order of the lane
    assert step_of(plan, "wgrad").after == ("push_2",)


def test_only_the_first_step_of_each_lane_is_joined():
    move = Step("move", "compute", "move", (Region("full"),), (Region("copy"),))
    own = Region("copy", shards=OWN)
    pair = Step("pair", "copy", "copy", (own,), (own,), after=("move",))
    last = Step("last", "copy", "copy", (own,), (own,))
    more = replace(FULL, name="copy", space="scratch")
    plan = gathered() >> mine(move, pair, last, buffers=(FULL, more))
    assert [step_of(plan, name).after for name in ("move", "pair", "last")] == [
        ("push_2",), ("move",), ()
    ]  # fmt: skip


def test_one_barrier_opens_both():
    order = Order("ring", 3)
    meet = order.barrier("meet", "signal", 0, after=("first",))
    first = Step("first", "compute", "move", (Region("dy"),), (Region("full", shards=OWN),))
    behind = Step("behind", "signal", "barrier", waits=(order.wait(3, 1),))
    post = Step("post", "compute", "barrier", after=("meet",), posts=(order.post(3, 1),))
    plan = gathered() >> mine(first, meet, behind, post)
    names = [step.name for step in plan.steps]
    assert "meet" not in names and names[-3:] == ["first", "behind", "post"]
    # what came after the second barrier comes after the first, and after what came before it
    assert step_of(plan, "behind").after == ("first",)
    assert step_of(plan, "post").after == ()
    assert step_of(plan, "post").posts == (Signal(3 + gathered().num_slots, (1,)),)
    assert len(set(slots_of(plan))) == len(slots_of(plan))


def test_the_barrier_of_the_second_opens_where_the_first_has_none():
    scatter = Problem("all_gather_matmul_backward", 6, 4, 5, 3)
    dw = build(scatter, "serial").steps
    operands = operation_of(scatter.op).operands(scatter)
    full = Buffer("full", (6, 5), "bfloat16", "scratch", split=True)
    serial = Plan(scatter, "dw", "", "ring", (*operands, full), LANES, (dw[0], dw[2]))
    graded = plan_matmul_reduce_scatter.graded(scatter_problem(scatter), (3,), "ring")
    dx = part(graded, scatter, buffers=NAMES)
    for plan in (serial >> dx, serial | dx, dx >> serial, dx | serial):
        validate(plan)
        assert all(simulate(plan, seed) for seed in range(5))
        assert [s.name for s in plan.steps if s.name.endswith("open")] == ["open"]
        assert slots_of(plan) == slots_of(dx)


def test_in_order_goes_on():
    spare = replace(FULL, name="spare", space="scratch")
    fill = Step("fill", "compute", "move", (Region("full"),), (Region("spare"),))
    buffers = (FULL, spare)
    plan = gathered() >> mine(fill, buffers=buffers)
    plan = plan >> mine(wgrad(Region("x"), Region("spare")), buffers=buffers)
    validate(plan)
    assert plan.spec == "((graded 2/1 ring >> mine) >> mine)"


# --- side by side


def test_side_by_side_steps_stand_by_depth_and_ties_are_the_first_plan_s():
    p = gathered("shard_p2p ring", prefix="p_")
    other = replace(FULL, name="other")
    again = {"x": "dy", "y": "dx", "w": "wt", "full": "other"}
    shard = build(gather_problem(BACKWARD), "shard_p2p ring")
    q = part(shard, BACKWARD, buffers=again, prefix="q_")
    plan = p | q
    assert plan.buffer("other") == other
    lanes = {lane: [s.name for s in plan.steps if s.lane == lane] for lane in
             ("signal", "compute", "copy")}  # fmt: skip
    assert lanes == {
        "signal": ["open"],
        "compute": ["p_matmul_0", "q_matmul_0", "p_matmul_1", "p_matmul_2",
                    "q_matmul_1", "q_matmul_2"],
        "copy": ["p_push_1", "p_push_2", "q_push_1", "q_push_2"],
    }  # fmt: skip
    # its lane is behind the barrier already
    assert step_of(plan, "q_push_1").after == step_of(plan, "q_matmul_1").after == ()
    assert step_of(plan, "p_push_1").after == step_of(plan, "p_matmul_1").after == ("open",)
    assert len(set(slots_of(plan))) == len(slots_of(plan)) == 2 + 4


def test_side_by_side_a_plan_that_reads_too_early_is_refused():
    with pytest.raises(PlanError, match="step wgrad: uses symmetric memory before or beside the"):
        validate(gathered() | DW)
    # open, it may be used, but is not yet filled; on a lane of its own no more so
    lanes = (*LANES, Lane("other", "sm"))
    for lane in ("compute", "other"):
        late = replace(DW.steps[0], lane=lane, after=("open",))
        opening = Order("ring", 3).barrier("open", "signal", 0)
        dw = replace(DW, steps=(opening, late), lanes=lanes)
        with pytest.raises(PlanError, match=r"race: .*'wgrad' on rank .* read and write 'full'"):
            validate(gathered() | dw)
        plan = gathered() >> dw
        validate(plan)
        assert all(simulate(plan, seed) for seed in range(5))


def test_depth_follows_signals_and_barriers_that_cross():
    order = Order("ring", 3)
    a = Step("a", "compute", "barrier", (), (), ("open",), (order.wait(9, 1),), (order.post(8, 1),))
    b = Step("b", "signal", "barrier", (), (), ("open",), (order.wait(8, 1),), (order.post(9, 1),))
    plan = gathered() | mine(order.barrier("open", "signal", 0), a, b)
    assert [step.name for step in plan.steps if step.name in "ab"] == ["a", "b"]
    # a copy posts when it has ended: each of these would wait for the other
    own = Region("full", shards=OWN)
    copies = tuple(
        Step(f"copy_{i}", "copy", "copy", (own,), (own,), waits=(order.wait(9 - i, 1),),
             posts=(order.post(8 + i, 1),)) for i in range(2)
    )  # fmt: skip
    with refused("(graded 2/1 ring | mine): its steps wait for one another in a circle"):
        _ = gathered() | mine(order.barrier("open", "signal", 0), *copies)


# --- parts


def test_a_part_has_other_names():
    plan = gathered("graded 1/2 ring", prefix="dx_")
    assert [step.name for step in plan.steps] == [
        "open", "dx_matmul_0", "dx_push_1", "dx_push_2", "dx_matmul_1"
    ]  # fmt: skip
    assert step_of(plan, "dx_matmul_1").after == ("open",)
    assert step_of(plan, "dx_matmul_1").reads == (
        Region("full", shards=((2,), (1,))), Region("wt")
    )  # fmt: skip
    assert plan.problem == BACKWARD
    operands = {b.name: b for b in operation_of(BACKWARD.op).operands(BACKWARD)}
    assert all(plan.buffer(name) == operands[name] for name in ("dy", "wt", "dx"))


def test_a_part_that_does_not_fit_is_refused():
    plan = build(gather_problem(BACKWARD), "shard_p2p ring")
    other = replace(BACKWARD, rows=(1, 2, 3))
    want = "a part has the rows of its problem, (1, 2, 3), got (2, 2, 2)"
    with refused(f"shard_p2p ring: {want}"):
        part(plan, other, buffers=NAMES)
    with refused("shard_p2p ring: no buffer 'z'"):
        part(plan, BACKWARD, buffers={"z": "dy"})
    with refused("shard_p2p ring: two buffers would have one name: full, w, y, full"):
        part(plan, BACKWARD, buffers={"x": "full"})


@pytest.mark.parametrize("sign", ["|", ">>"])
def test_plans_that_do_not_fit_one_another_are_refused(sign: str):
    p = gathered()

    def joined(q: Plan) -> Plan:
        return p | q if sign == "|" else p >> q

    both = f"(graded 2/1 ring {sign} mine): "
    other = replace(BACKWARD, dtype="float16")
    with refused(f"{both}one is for {BACKWARD}, the other for {other}"):
        joined(replace(DW, problem=other))
    with refused(f"{both}one pairs ranks by ring, the other by xor"):
        joined(replace(DW, peers="xor"))
    with refused(f"{both}both have a step 'keep', 'push_1'"):
        steps = tuple(replace(DW.steps[0], name=name) for name in ("push_1", "fine", "keep"))
        joined(replace(DW, steps=steps))
    with refused(f"{both}both have a buffer 'full', and differ: Buffer(name='full', shape=(6, 5)"):
        joined(mine(*DW.steps, buffers=(replace(FULL, space="scratch"),)))
    with refused(f"{both}both have a lane 'copy', and differ: Lane(name='copy', engine='copy', pr"):
        joined(replace(DW, lanes=(COMPUTE, SIGNAL, replace(COPY, priority=0))))
    with pytest.raises(TypeError):
        joined(3)  # type: ignore[arg-type]
