"""Plans of experts: proved for any ranks, experts and groups; what is no such plan is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_mutants import with_step
from plan_simulator import simulate

from counterpoint.errors import InputError, PlanError
from counterpoint.plan.bind import bind
from counterpoint.plan.families import FAMILIES, build
from counterpoint.plan.grading import expert_groups
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan, Region
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import EXPERTS, DType, Op, Problem

THERE, BACK = EXPERTS


def problem_of(op: Op, ranks: int, experts: int, count: int = 2, dtype: DType = "bfloat16"):
    return Problem(op, ranks * experts * count, 5, 7, ranks, dtype, experts=experts)


def prove(problem: Problem, spec: str) -> Plan:
    plan = build(problem, spec)
    validate(plan)
    assert build(problem, plan.spec) == plan
    assert Plan.from_json(to_json(plan)) == plan
    return plan


def peers_of(ranks: int) -> tuple[str, ...]:
    return ("ring",) if ranks & (ranks - 1) else ("ring", "xor")


@pytest.mark.parametrize("experts", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", EXPERTS)
def test_every_family_is_right(op: Op, ranks: int, experts: int):
    sizes = ["", " 1" if experts == 1 else f" {experts - 1}/1", f" {'/'.join('1' * experts)}"]
    for count in (1, 3):
        problem = problem_of(op, ranks, experts, count)
        prove(problem, "serial")
        for peers in peers_of(ranks):
            for groups in sizes:
                plan = prove(problem, f"grouped{groups} {peers}")
                assert plan.family == ("grouped" if ranks > 1 else "serial")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, str]:
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    count, (n, k) = draw(st.integers(0, 4)), draw(st.tuples(st.integers(1, 99), st.integers(1, 99)))
    dtype: DType = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    op: Op = draw(st.sampled_from(EXPERTS))
    problem = Problem(op, ranks * experts * count, n, k, ranks, dtype, experts=experts)
    cuts = draw(st.sets(st.integers(1, experts)))
    edges = sorted(cuts | {0, experts})
    sizes = "/".join(str(b - a) for a, b in zip(edges, edges[1:], strict=False))
    return problem, f"grouped {sizes} {draw(st.sampled_from(peers_of(ranks)))}"


@settings(max_examples=40, deadline=None)
@given(cases())
def test_any_groups_are_right(case: tuple[Problem, str]):
    plan = prove(*case)
    if plan.problem.m:
        assert simulate(plan, seed=plan.problem.n)


def test_one_rank_is_plain_matmuls():
    for op in EXPERTS:
        for family in FAMILIES[op]:
            plan = build(problem_of(op, 1, 3), family)
            assert [step.kind for step in plan.steps] == ["matmul"] * 3 and plan.spec == "serial"


@pytest.mark.parametrize("op", EXPERTS)
def test_a_weight_is_read_once_and_a_group_by_one_launch(op: Op):
    plan = build(problem_of(op, 4, 5), "grouped 2/3")
    for rank in range(4):
        matmuls = [b for b in bind(plan, rank).steps if b.step.kind == "matmul"]
        rows = [part.reads[1][3:5] for b in matmuls for part in b.parts]
        assert rows == [(7 * e, 7 * e + 7) for e in range(5)]
        assert [b.step.arg("batch", -1) for b in matmuls] == [0, 0, 1, 1, 1]


def test_groups_are_sized_for_the_machine():
    machine = preset("h200-8")
    large = Problem(THERE, 32768, 4096, 7168, 8, experts=32)
    first, *_, last = expert_groups(large, machine)
    assert first < last, "the first copies are hidden by nothing"
    assert build(large, "grouped", machine).spec.split()[1] == "/".join(
        map(str, expert_groups(large, machine))
    )
    for experts in (1, 2, 31, 100, 256):
        for op in EXPERTS:
            groups = expert_groups(Problem(op, 16 * experts, 512, 512, 8, experts=experts), machine)
            assert sum(groups) == experts and min(groups) > 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("graded", "auto or one of serial, grouped, got 'graded'"),
        ("grouped 2/2", "a spec whose sizes add up to 5; '2/2' do not, got"),
        ("grouped 5 push", "a spec of words that grouped knows; 'push' is none"),
        ("serial 5", "a spec of words that serial knows; '5' is none"),
        ("grouped 5 xor", "for a power of two of ranks where it says xor"),
        ("serial direct", "plan must be for an operator without experts"),
    ],
)
@pytest.mark.parametrize("op", EXPERTS)
def test_a_spec_that_does_not_fit(op: Op, spec: str, message: str):
    with pytest.raises(InputError, match=message):
        build(problem_of(op, 3, 5), spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts must be 1 or more, got 0"),
        ({"op": "all_gather_matmul"}, "experts must be 0: the op has none, got 3"),
        ({"experts": -1}, "experts must be 1 or more, got -1"),
        ({"rows": (6, 12)}, r"rows must be equal, and a multiple of the 3 experts of a rank, got"),
        ({"m": 20}, r"rows must be equal, and a multiple of the 3 experts of a rank, got \(10, 10"),
        ({"bias": True}, "bias must be False: experts add none"),
        ({"splits": (2, 3)}, "splits must be empty"),
    ],
)
def test_a_problem_that_is_none(changes: dict[str, Any], message: str):
    good: dict[str, Any] = {"op": THERE, "m": 18, "n": 5, "k": 7, "ranks": 2, "experts": 3}
    with pytest.raises(InputError, match=message):
        Problem(**(good | changes))


def test_a_problem_prints_and_counts():
    problem = Problem(THERE, 48, 5, 7, 4, experts=3)
    assert str(problem) == "all_to_all_matmul M48 N5 K7 experts 3 bfloat16 on 4 ranks"
    assert (problem.flop, problem.link_bytes) == (2 * 48 * 5 * 7, 3 * 12 * 7 * 2)
    assert Problem(BACK, 48, 5, 7, 4, experts=3).link_bytes == 3 * 12 * 5 * 2


def refused(plan: Plan, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        validate(plan)


def test_what_is_no_batch():
    plan = build(problem_of(THERE, 2, 3), "grouped 1/2")
    at = {step.name: i for i, step in enumerate(plan.steps)}
    matmul = plan.steps[at["matmul_2"]]
    one_launch = "step matmul_2: its batch is one launch: only its first step waits"
    refused(with_step(plan, at["matmul_2"], after=("push_1",)), one_launch)
    refused(with_step(plan, at["matmul_2"], waits=plan.steps[at["matmul_1"]].waits), one_launch)
    refused(with_step(plan, at["matmul_1"], args=(("batch", 0),)), "its batch is one launch")
    chained = with_step(plan, at["matmul_2"], reads=(Region("y", piece=(1, 3)), matmul.reads[1]))
    refused(chained, "no step of it reads what another")
    args = (("batch", 1),)
    refused(with_step(plan, at["keep_1"], args=args), "step keep_1: a copy is in no batch")


def test_a_matmul_takes_one_experts_weight():
    plan = build(problem_of(THERE, 2, 3), "serial")
    i = [step.name for step in plan.steps].index("matmul_1")
    x, _ = plan.steps[i].reads
    refused(with_step(plan, i, reads=(x, Region("w", rows=(8, 15)))), "than one expert's weight")
    # another expert's is a value that the op does not define
    refused(with_step(plan, i, reads=(x, Region("w", rows=(0, 7)))), "the op defines")
