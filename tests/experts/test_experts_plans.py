"""Plans of experts: proved for any ranks, experts and groups; what is no such plan is refused."""

from collections import Counter
from typing import Any

import pytest
from plan_cases import COMBINE, DISPATCH, EXPERTS, prove
from plan_mutants import with_step

from counterpoint.costs import NO_TILES
from counterpoint.errors import InputError, PlanError
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build, parse
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan, Region
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.schedules.grading import expert_groups
from counterpoint.schedules.makespan import combine_s, dispatch_s

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


@pytest.mark.drawn(10)
@pytest.mark.parametrize("machine", ["h200-4", "mi300x-4"])
@pytest.mark.parametrize("counts", ["equal", "host"])
@pytest.mark.parametrize(("experts", "spec"), [(1, "grouped 1 chunks=4"), (3, "grouped 2/1"),
                                               (2, "grouped 1/1 chunks=2")])  # fmt: skip
@pytest.mark.parametrize("op", EXPERTS)
def test_each_exchange_is_with_all_peers_and_finer(
    op: str, experts: int, spec: str, counts: Any, machine: str
):
    """Of a combine in chunks each weight is still read once, of a dispatch once for each chunk."""
    problem = Problem(op, 4 * experts * 12, 256, 7, 4, experts=experts, counts=counts)
    plan = build(problem, spec, machine)
    validate(plan)
    assert Plan.from_json(plan.to_json()) == plan
    chunks = int(spec.partition("chunks=")[2] or 1)
    exchanges = chunks * (spec.count("/") + 1)
    for rank in range(4):
        sent: dict[str, Counter[int]] = {}
        weights = Counter[tuple[int, int]]()
        for bound in bind(plan, rank).steps:
            name = bound.step.name.partition("_to_")[0]
            for part in bound.parts:
                if name.startswith("push"):
                    rows, cols = part.write.shape
                    sent.setdefault(name, Counter())[part.write.rank] += rows * cols
            if bound.step.kind == "matmul":
                w = bound.parts[0].reads[1]
                weights.update((row, col) for row in range(w.r0, w.r1) for col in range(w.c0, w.c1))
        assert len(sent) == exchanges >= 2
        # as much to each peer, at each exchange
        assert all(len(each) == 3 and len(set(each.values())) == 1 for each in sent.values())
        assert len(weights) == 7 * experts * 256
        assert set(weights.values()) == {chunks if op == DISPATCH else 1}


def test_what_the_host_lays_out_stands_only_as_it_is_built():
    """Where counts differ, also of plans for a mesh; and the host has to know them."""
    problem = Problem(DISPATCH, 4 * 2 * 4, 8, 8, 4, experts=2, counts="host")
    for machine in ("h200-4", "mi300x-4"):
        plan = build(problem, "grouped 1/1 chunks=2", machine)
        validate(plan)
        i = next(i for i, step in enumerate(plan.steps) if step.name.startswith("push_1"))
        assert plan.steps[i].reads[-1] == Region("counts")
        refused(with_step(plan, i, reads=plan.steps[i].reads[:-1]), "whose counts differ, stands")
    device = Problem(DISPATCH, 4 * 2 * 4, 8, 8, 4, experts=2, counts="device")
    with pytest.raises(InputError, match="plan must be for counts known to the host"):
        build(device, "grouped")


@pytest.mark.parametrize("name", ["h200-8", "mi300x-8"])
@pytest.mark.parametrize("op", EXPERTS)
def test_closed_forms_are_near_simulations(name: str, op: str):
    """So groups are sized right; on a mesh copies to all peers are under way at once."""
    machine = preset(name)
    for m, k, experts, tail in ((32768, 7168, 32, ""), (32768, 4096, 16, ""),
                                (8192, 4096, 1, ""), (32768, 4096, 1, "chunks=4")):  # fmt: skip
        n = 4096 if op == DISPATCH else 7168
        problem = Problem(op, m, n, k, 8, experts=experts)
        spec = f"grouped ring {tail}"
        family, options = parse(problem, spec)
        assert family.guess_s is not None
        guess_s = family.guess_s(problem, options, machine, NO_TILES)
        seconds = predicted_s(build(problem, spec, machine), machine)
        assert 0.8 < guess_s / seconds < 1.05, (problem, spec)


def test_groups_are_sized_for_the_machine():
    machine = preset("h200-8")
    large = Problem(DISPATCH, 32768, 4096, 7168, 8, experts=32)
    first, *_, last = groups = expert_groups(large, machine, dispatch_s)
    # links that all work at once bring the first experts sooner
    assert expert_groups(large, preset("mi300x-8"), dispatch_s)[0] <= first
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
