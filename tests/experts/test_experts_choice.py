"""What auto takes for experts: one table of the libraries, one kernel and plans of copies."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks

import counterpoint as cp
from counterpoint.choose.by_model import by_model
from counterpoint.machine_of import shipped
from counterpoint.measure.tune import tune
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem

RANKS = 4
MACHINE = shipped("NVIDIA H200", RANKS)
OPS = ("all_to_all_matmul", "matmul_all_to_all")
# rows of a rank, k, n and experts of a rank
SIZES = [(32768, 7168, 4096, 32), (8192, 7168, 4096, 32), (2048, 7168, 4096, 32),
         (8192, 4096, 28672, 1), (64, 256, 256, 2)]  # fmt: skip


def problem_of(op: str, sizes: tuple[int, int, int, int], counts: Any = "equal") -> Problem:
    rows, k, n, experts = sizes
    return Problem(op, rows, n, k, RANKS, experts=experts, counts=counts)


def test_all_families_are_taken_somewhere():
    assert MACHINE is not None
    found = {by_model(problem_of(op, sizes), MACHINE).plan.family for op in OPS for sizes in SIZES}
    assert found == {"serial", "fused", "grouped"}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_counts_that_differ_take_as_long_or_longer(op: str, sizes: Any):
    """Tiles are half full at the end of each expert; and the host lays copies out, in no graph."""
    assert MACHINE is not None
    choice = by_model(problem_of(op, sizes, "host"), MACHINE)
    times = {c.spec: c.seconds for c in choice.table}
    equal = {c.spec: c.seconds for c in by_model(problem_of(op, sizes), MACHINE).table}
    assert set(times) == set(equal) > {"serial", "fused", "grouped ring"}
    assert times["fused"] >= equal["fused"] and times["serial"] == equal["serial"]
    assert all(times[spec] > equal[spec] for spec in times if "grouped" in spec)
    plan = build(problem_of(op, sizes, "host"), "grouped", MACHINE)
    assert predicted_s(plan, MACHINE) == predicted_s(plan, MACHINE, eager=True)


@pytest.mark.parametrize("op", OPS)
def test_where_one_kernel_does_not_run_counts_that_differ_are_overlapped_too(op: str):
    machine = preset("h200-6")
    n, k = (4096, 7168) if op == OPS[0] else (7168, 2048)
    choice = by_model(Problem(op, 24 * 6 * 1024, n, k, 6, experts=24, counts="host"), machine)
    assert choice.plan.family == "grouped" and choice.serial_s > 1.15 * choice.seconds
    assert max(span.end_s for span in choice.timeline.spans) == pytest.approx(choice.seconds)


def test_on_a_mesh_experts_are_exchanged_in_groups_and_a_single_one_in_chunks():
    mesh = preset("mi300x-8")
    mesh = replace(mesh, measured=mesh.costs)
    for op in OPS:
        n, k = (4096, 7168) if op == OPS[0] else (7168, 2048)
        many = by_model(Problem(op, 32768, n, k, 8, experts=32), mesh)  # DeepSeek-V3
        assert many.plan.family == "grouped" and many.serial_s > 1.5 * many.seconds
        assert not any("chunks" in c.spec for c in many.table)
        n, k = (28672, 4096) if op == OPS[0] else (4096, 14336)
        one = by_model(Problem(op, 32768, n, k, 8, experts=1), mesh)  # Mixtral-8x7B
        times = {c.spec: c.seconds for c in one.table}
        assert times["grouped ring chunks=4"] < 0.97 * times["grouped ring"]
    assert by_model(Problem(OPS[0], 32768, 28672, 4096, 8, experts=1), mesh).spec == (
        "grouped ring chunks=8"
    )


@pytest.mark.parametrize("counts", ["device", "device_routed"])
@pytest.mark.parametrize("by", ["model", "rule"])
@pytest.mark.parametrize("op", OPS)
def test_the_libraries_would_wait_for_the_host(op: str, by: Any, counts: Any, draw: Draw):
    for sizes in draw(SIZES, 2):
        choice = cp.choose(problem_of(op, sizes, counts), MACHINE, by=by)
        assert choice.spec == "fused" and choice.plan.family == "fused"
        (serial,) = (c for c in choice.table if c.spec == "serial")
        assert serial.verdict == "waits for the host to read the counts, which its time leaves out"
        assert "waits for the host" in choice.explain() and choice.timeline.spans
    rows, k, n, experts = SIZES[0]
    wide = Problem(op, rows, n, k, RANKS, "float32", experts=experts, counts=counts)
    assert cp.choose(wide, MACHINE, by=by).spec == "serial"


@pytest.mark.parametrize("op", OPS)
def test_one_kernel_expects_fewer_rows_of_tokens_on_the_way(op: str):
    """With more experts of a token on a rank, fewer; a combine sends them behind its matmul."""
    assert MACHINE is not None
    p = problem_of(op, (8192, 256, 256, 32), "device_routed")
    times = [predicted_s(build(replace(p, top_k=k), "fused"), MACHINE) for k in (1, 4, 16, 64)]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("counts", ["equal", "host", "device", "device_routed"])
@pytest.mark.parametrize("op", OPS)
def test_one_kernel_is_a_plan_that_is_proved_and_priced(op: str, counts: Any):
    assert MACHINE is not None
    problem = problem_of(op, SIZES[1], counts)
    for family in ("serial", "fused"):
        plan = build(problem, family)
        validate(plan)
        assert plan.spec == family and build(problem, plan.spec) == plan
        assert cp.Plan.from_json(plan.to_json()) == plan
        assert cp.estimate(plan, MACHINE).spans
    with pytest.raises(cp.InputError, match="counts must be one of equal, got 'host'"):
        Problem("all_gather_matmul", 8, 8, 8, 2, counts="host")


@on_ranks(2)
def test_plans_of_a_user_and_tuning(rank: int, ranks: int):
    """A Plan, and what tuning finds, are taken as a spec is; a larger plan serves fewer rows."""
    counts = torch.tensor([[3, 1, 2, 2], [0, 4, 1, 3]])
    x, w = torch.randn(8, 6), torch.randn(2, 6, 5)
    want = cp.all_to_all_matmul(x, w, counts=counts, plan="serial")
    found: list[bool] = []
    for m in (256, 4096):
        problem = Problem("all_to_all_matmul", m, 5, 6, 2, "float32", experts=2, counts="host")
        plan = build(problem, "serial")
        found.append(torch.equal(cp.all_to_all_matmul(x, w, counts=counts, plan=plan), want))
    even = torch.full((2, 4), 2)
    plan = build(Problem("all_to_all_matmul", 8, 5, 6, 2, "float32", experts=2), "grouped 1/1")
    want = cp.all_to_all_matmul(x, w, counts=even, plan="serial")
    found.append(torch.equal(cp.all_to_all_matmul(x, w, counts=even, plan=plan), want))
    for counted in ("equal", "host"):
        for op in OPS:
            problem = Problem(op, 64, 16, 8, 2, "float16", experts=2, counts=counted)  # type: ignore[arg-type]
            choice = tune(problem, rounds=2, specs=("serial", "grouped 1/1 ring chunks=2"))
            found.append(choice.basis == "measurement" and choice.seconds > 0)
    assert found == [True] * 7
