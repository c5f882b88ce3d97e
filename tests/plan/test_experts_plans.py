"""Plans of experts: proved for any ranks, experts and groups; what is no such plan is refused."""

from typing import Any

import pytest
from plan_cases import COMBINE, DISPATCH, EXPERTS, prove
from plan_mutants import with_step

from counterpoint.errors import InputError, PlanError
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.grading import expert_groups
from counterpoint.plan.makespan import combine_s, dispatch_s
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan, Region
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem

MAKESPANS = {DISPATCH: dispatch_s, COMBINE: combine_s}


def problem_of(op: str, ranks: int, experts: int) -> Problem:
    return Problem(op, ranks * experts * 2, 5, 7, ranks, experts=experts)


@pytest.mark.parametrize("experts", [1, 2, 5])
@pytest.mark.parametrize("op", EXPERTS)
def test_any_number_of_experts(op: str, experts: int):
    for ranks in (2, 3):
        for sizes in ("", "/".join("1" * experts), f"{experts}"):
            assert prove(problem_of(op, ranks, experts), f"grouped {sizes}").family == "grouped"


@pytest.mark.parametrize("op", EXPERTS)
def test_a_weight_is_read_once_and_a_group_by_one_launch(op: str):
    plan = build(problem_of(op, 4, 5), "grouped 2/3")
    for rank in range(4):
        matmuls = [b for b in bind(plan, rank).steps if b.step.kind == "matmul"]
        rows = [part.reads[1][3:5] for b in matmuls for part in b.parts]
        assert rows == [(7 * e, 7 * e + 7) for e in range(5)]
        assert [b.step.arg("batch", -1) for b in matmuls] == [0, 0, 1, 1, 1]


def test_groups_are_sized_for_the_machine():
    machine = preset("h200-8")
    large = Problem(DISPATCH, 32768, 4096, 7168, 8, experts=32)
    first, *_, last = groups = expert_groups(large, machine, dispatch_s)
    assert first < last, "the first copies are hidden by nothing"
    assert build(large, "grouped", machine).spec.split()[1] == "/".join(map(str, groups))
    for experts in (1, 2, 31, 100, 256):
        for op, makespan_s in MAKESPANS.items():
            problem = Problem(op, 16 * experts, 512, 512, 8, experts=experts)
            groups = expert_groups(problem, machine, makespan_s)
            assert sum(groups) == experts and min(groups) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts must be 1 or more, got 0"),
        ({"op": "all_gather_matmul"}, "experts must be 0: the op has none, got 3"),
        ({"experts": -1}, r"experts must be a whole number from 0 to 2\*\*20, got -1"),
        ({"rows": (6, 12)}, r"rows must be equal, and a multiple of the 3 experts of a rank, got"),
        ({"m": 20}, r"rows must be equal, and a multiple of the 3 experts of a rank, got \(10, 10"),
        ({"bias": True}, "bias must be False: the op adds none"),
        ({"splits": (2, 3)}, "splits must be empty"),
    ],
)
def test_a_problem_that_is_none(changes: dict[str, Any], message: str):
    good: dict[str, Any] = {"op": DISPATCH, "m": 18, "n": 5, "k": 7, "ranks": 2, "experts": 3}
    with pytest.raises(InputError, match=message):
        Problem(**(good | changes))


def test_a_problem_prints_and_counts():
    problem = Problem(DISPATCH, 48, 5, 7, 4, experts=3)
    assert str(problem) == "all_to_all_matmul M48 N5 K7 experts 3 bfloat16 on 4 ranks"
    assert (problem.flop, problem.link_bytes) == (2 * 48 * 5 * 7, 3 * 12 * 7 * 2)
    assert Problem(COMBINE, 48, 5, 7, 4, experts=3).link_bytes == 3 * 12 * 5 * 2


def refused(plan: Plan, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        validate(plan)


def test_what_is_no_batch():
    plan = build(problem_of(DISPATCH, 2, 3), "grouped 1/2")
    at = {step.name: i for i, step in enumerate(plan.steps)}
    matmul = plan.steps[at["matmul_2"]]
    one_launch = "step matmul_2: its batch is one launch: only its first step waits"
    refused(with_step(plan, at["matmul_2"], after=("push_1",)), one_launch)
    refused(with_step(plan, at["matmul_2"], waits=plan.steps[at["matmul_1"]].waits), one_launch)
    refused(with_step(plan, at["matmul_1"], args=(("batch", 0),)), "its batch is one launch")
    chained = with_step(plan, at["matmul_2"], reads=(Region("y", chunk=(1, 3)), matmul.reads[1]))
    refused(chained, "no step of it reads what another")
    args = (("batch", 1),)
    refused(with_step(plan, at["keep_1"], args=args), "step keep_1: a copy is in no batch")


def test_a_matmul_takes_one_experts_weight():
    plan = build(problem_of(DISPATCH, 2, 3), "serial")
    i = [step.name for step in plan.steps].index("matmul_1")
    x, _ = plan.steps[i].reads
    refused(with_step(plan, i, reads=(x, Region("w", rows=(8, 15)))), "than one expert's weight")
    # another expert's is a value that the op does not define
    refused(with_step(plan, i, reads=(x, Region("w", rows=(0, 7)))), "the op defines")


@pytest.mark.parametrize("op", EXPERTS)
@pytest.mark.parametrize("known", ["equal", "device"])
def test_one_kernel_counts_its_tiles_in_32_bits(op: str, known: str):
    """What is larger has other plans, and no kernel that wraps."""
    family = operation_of(op).family("fused")
    assert family is not None
    for m, n, fits in (
        (8192, 2**30, True), (8192, 2**31, False), (2**22, 2**25, False), (2**22, 2**22, True),
        (2**31, 8, False),
    ):  # fmt: skip
        p = Problem(op, m, n, 64, 2, experts=4, counts=known)
        assert (family.refusal(p) == "") == fits, (m, n)
        assert (operation_of(op).without_serial(p)[0] == "fused") == (fits and known == "device")
