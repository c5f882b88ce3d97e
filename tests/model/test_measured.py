"""The model against committed measurements: rows of benchmarks/results/overlap-4x-h200.jsonl."""

from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest

from benchmarks.rows import results
from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import SHIPPED, shipped
from counterpoint.costs import Costs
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build, families
from counterpoint.presets import preset
from counterpoint.problem import Problem

# 4xH200, bf16, 2026-11; stands in until a measured machine is shipped
COSTS = Costs(
    gemm_flop_per_s=870e12, gemm_settled=1.25, gemm_settling_s=0.25e-3,
    hbm_bytes_per_s=3.8e12, kernel_s=1.5e-6, copy_bytes_per_s=390e9, copy_overhead_s=6e-6,
    barrier_s=3.2e-6, collective_bytes_per_s=316e9, all_gather_s=30e-6, reduce_scatter_s=22e-6,
    collective_small_s=10e-6,
    direct_bytes_per_s=300e9, direct_s=6e-6,
    matmul_beside_copy=1.2, copy_beside_matmul=1.08, host_call_s=40e-6, host_step_s=15e-6,
)  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Machine:
    if (SHIPPED / "nvidia-h200-4.json").exists():
        found = shipped("NVIDIA H200", 4)
        assert found is not None
        return found
    return replace(preset("h200-4"), measured=COSTS)


@pytest.fixture(scope="module")
def measured_s() -> dict[Problem, dict[str, float]]:
    """Seconds of one call in a graph, by problem and plan."""
    found: dict[Problem, dict[str, float]] = defaultdict(dict)
    for row in results("overlap")[4]:
        spec = row["arm"]
        if row["mode"] == "graph" and spec.split()[0] in families(row["op"]) and "pull" not in spec:
            problem = Problem(row["op"], row["m"], row["n"], row["k"], row["ranks"], row["dtype"])
            found[problem][spec] = row["median_s"]
    return found


def test_predictions_are_near_what_was_measured(
    machine: Machine, measured_s: dict[Problem, dict[str, float]]
):
    errors = {
        (spec, str(problem)): predicted_s(build(problem, spec, machine), machine) / seconds - 1
        for problem, plans in measured_s.items()
        for spec, seconds in plans.items()
    }
    assert len(errors) >= 150
    found = {spec.split()[0] for spec, _ in errors}
    assert found == set(families("all_gather_matmul")), "few rows, which fused has, are elsewhere"
    assert median(abs(e) for e in errors.values()) <= 0.10
    worst = max(errors, key=lambda key: abs(errors[key]))
    assert abs(errors[worst]) <= 0.25, worst


def test_what_is_chosen_was_near_the_fastest(
    machine: Machine, measured_s: dict[Problem, dict[str, float]]
):
    lost: list[float] = []
    for problem, plans in measured_s.items():
        spec = by_model(problem, machine).spec
        assert plans[spec] <= plans["serial"], f"{problem}: {spec}"
        lost.append(plans[spec] / min(plans.values()) - 1)
    assert median(lost) <= 0.05
    assert max(lost) <= 0.15


def test_the_datasheet_alone_is_not_far_off(measured_s: dict[Problem, dict[str, float]]):
    machine = preset("h200-4")
    errors = [
        abs(predicted_s(build(problem, spec, machine), machine) / seconds - 1)
        for problem, plans in measured_s.items()
        for spec, seconds in plans.items()
    ]
    assert median(errors) <= 0.10
    assert max(errors) <= 0.30


def test_known_tiles_reach_the_first_guess(
    machine: Machine, measured_s: dict[Problem, dict[str, float]]
):
    """Without them the fastest plan of this shape was sorted out before it was simulated."""
    problem = Problem("all_gather_matmul", 2048, 7168, 8192, 4)
    # what cuBLAS takes on an H200 for 1 to 4 shards
    columns = {512: 112, 1024: 256, 1536: 168, 2048: 176}
    tiles = {(rows, 7168, 8192): (128, width) for rows, width in columns.items()}
    choice = by_model(problem, machine, tiles=tiles)
    simulated = {c.spec for c in choice.table if c.basis == "simulated"}
    plans = measured_s[problem]
    assert min(plans, key=plans.__getitem__) in simulated
    assert plans[choice.spec] <= min(plans.values()) * 1.05
