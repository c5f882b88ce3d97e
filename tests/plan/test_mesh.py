"""Plans for a full mesh: copies to several peers at a time have a lane for each of them."""

from dataclasses import replace

import pytest
import torch
from on_ranks import on_ranks
from plan_cases import AG, AG_BACKWARD, OPS, RS, make_problem, specs
from plan_simulator import simulate

import counterpoint as cp
from counterpoint.errors import InputError
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem
from counterpoint.schedules.finer import NAMES
from counterpoint.schedules.mesh import lane_for_each_peer


def peers_of(plan: Plan) -> dict[str, set[int]]:
    """Whom each lane copies to; 0 is nobody."""
    found: dict[str, set[int]] = {}
    for step in plan.steps:
        if step.kind == "copy":
            found.setdefault(step.lane, set()).update(sum(r.at) for r in step.writes)
    return found


@pytest.mark.drawn(10)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_plans_are_right_and_copy_to_one_peer_at_a_time(op: str, ranks: int):
    problem = make_problem(op, 4 * ranks * ranks, 8, 6, ranks)
    for spec in specs(problem):
        try:
            plan = build(problem, spec, f"mi300x-{ranks}")
        except InputError:  # no plan of so many ranks
            continue
        validate(plan)
        assert simulate(plan, seed=ranks), spec
        copies = [step for step in plan.steps if step.kind == "copy"]
        assert all(len({r.at for r in step.writes if any(r.at)}) <= 1 for step in copies), spec
        assert Plan.from_json(plan.to_json()) == plan


# rows that no number of chunks divides, a rank without rows, all on one, and none at all
UNEVEN = ((3, 4, 2), (3, 0, 7, 1), (5, 0), (0, 6, 0, 0), (0, 0, 0))


@pytest.mark.parametrize("rows", UNEVEN, ids=str)
@pytest.mark.parametrize("op", [AG, RS])
def test_uneven_rows_are_cut_in_chunks_of_their_own(op: str, rows: tuple[int, ...]):
    ranks, bias = len(rows), rows[0] == 3
    problem = Problem(op, sum(rows), 5, 13, ranks, rows=rows, bias=bias)
    for name in NAMES:
        for machine in (f"h200-{ranks}", f"mi300x-{ranks}"):
            plan = build(problem, f"{name} ring", machine)
            validate(plan)
            assert simulate(plan, seed=ranks), plan


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", [AG, RS])
def test_each_peer_has_a_lane(op: str, name: str):
    problem = Problem(op, 64, 8, 8, 4)
    switch, mesh = build(problem, f"{name} xor"), build(problem, f"{name} xor", "mi300x-4")
    assert set(peers_of(switch)) == {"copy"}
    local = {"copy": {0}} if 0 in peers_of(switch)["copy"] else {}
    assert peers_of(mesh) == {"copy_1": {1}, "copy_2": {2}, "copy_3": {3}} | local
    assert mesh == lane_for_each_peer(switch)
    # what is computed waits for the same signals, and for what is copied on its own rank
    for a, b in zip(*([s for s in p.steps if s.lane == "compute"] for p in (switch, mesh)),
                    strict=True):  # fmt: skip
        assert (a.name, a.waits, a.reads, a.writes) == (b.name, b.waits, b.reads, b.writes)
        assert set(a.after) == set(b.after)


def test_plans_that_copy_to_one_peer_after_another_stay():
    for op, spec in ((AG, "shard_p2p ring"), (RS, "graded 2/1/1 ring"), (AG, "serial"),
                     (AG_BACKWARD, "side_by_side ring chunks=2")):  # fmt: skip
        problem = Problem(op, 64, 8, 8, 4)
        assert build(problem, spec, "mi300x-4") == build(problem, spec)


def test_a_lane_that_is_left_out_is_refused():
    """The proof sees each lane: without its edge a copy may come before the call is open."""
    plan = build(Problem(AG, 64, 8, 8, 4), "uniform_fused_1d ring", "mi300x-4")
    steps = tuple(replace(s, after=()) if s.name == "push_0_to_2" else s for s in plan.steps)
    with pytest.raises(cp.PlanError, match="push_0_to_2"):
        validate(replace(plan, steps=steps))


@on_ranks(4)
def test_they_run_on_ranks(rank: int, ranks: int):
    torch.manual_seed(rank)
    x, w = torch.randn(8, 16), torch.randn(16, 12)
    for name in NAMES:
        problem = cp.Problem(AG, 8 * ranks, 12, 16, ranks, "float32")
        plan = cp.build(problem, f"{name} ring", machine="mi300x-4")
        got = cp.all_gather_matmul(x, w, plan=plan)
        torch.testing.assert_close(got, cp.all_gather_matmul(x, w, plan="serial"))
        problem = cp.Problem(RS, 32, 12, 16, ranks, "float32")
        rows = torch.randn(32, 16)
        plan = cp.build(problem, f"{name} xor", machine="mi300x-4")
        got = cp.matmul_reduce_scatter(rows, w, plan=plan)
        torch.testing.assert_close(got, cp.matmul_reduce_scatter(rows, w, plan="serial"))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, 4)
def test_uneven_rows_run_on_ranks(rank: int, ranks: int, name: str) -> list[str]:
    rows, found = (7, 0, 3, 9)[:ranks], list[str]()
    generator = torch.Generator().manual_seed(ranks)

    def drawn(*shape: int) -> torch.Tensor:  # small integers: sums are exact
        return torch.randint(-4, 5, shape, generator=generator).double()

    w, shards = drawn(13, 5), [drawn(own, 13) for own in rows]
    wholes, ws = ([drawn(*shape) for _ in rows] for shape in ((sum(rows), 13), (13, 5)))
    total = torch.stack([x @ v for x, v in zip(wholes, ws, strict=True)]).sum(0)
    for op, call, x, weight, want in (
        (AG, cp.all_gather_matmul, shards[rank], w, torch.cat(shards) @ w),
        (RS, cp.matmul_reduce_scatter, wholes[rank], ws[rank], total.split(rows)[rank]),
    ):  # fmt: skip
        problem = cp.Problem(op, sum(rows), 5, 13, ranks, "float32", rows)
        plan = cp.build(problem, f"{name} ring", machine=f"mi300x-{ranks}")
        got = call(x.float(), weight.float(), rows=rows, plan=plan)
        found += [] if torch.equal(got.double(), want) else [op]
    return found
