"""Serial with a collective of our own: proved like every plan, and refused where it cannot be."""

from dataclasses import replace

import pytest

from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import shipped
from counterpoint.errors import InputError, PlanError
from counterpoint.model.estimate import predicted_s
from counterpoint.model.work import FUSED_INTAKE
from counterpoint.plan.direct import (
    DIRECT,
    FUSED,
    FUSED_ROWS,
    MAX_BYTES,
    SPECS,
    fused_rounds,
    refusal,
)
from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Op, Problem

AG: Op = "all_gather_matmul"
RS: Op = "matmul_reduce_scatter"
CASES = [(AG, DIRECT), (RS, DIRECT), (RS, FUSED)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("op", "spec"), CASES)
def test_it_is_proved_and_made_again(op: Op, spec: str, ranks: int):
    for bias in (False, True):
        problem = Problem(op, 8 * ranks, 32, 16, ranks, bias=bias)
        plan = build(problem, spec)
        assert plan.spec == spec and build(problem, plan.spec) == plan
        assert Plan.from_json(to_json(plan)) == plan
        validate(plan)
        (collective,) = (s for s in plan.steps if s.kind == "collective")
        assert collective.arg("transport") == "words"
        fused = {s.kind for s in plan.steps if s.arg("kernel") == "fused"}
        assert fused == ({"matmul", "collective"} if spec == FUSED else set())


def test_it_costs_what_the_constants_say():
    machine = preset("h200-4")
    for op, spec in CASES:
        problem = Problem(op, 64, 8192, 1024, 4)
        serial, ours = (predicted_s(build(problem, s), machine) for s in ("serial", spec))
        costs = machine.costs
        cols = problem.k if op == AG else problem.n
        received = 48 * cols * 2
        ours_s = costs.direct_s + received / costs.direct_bytes_per_s
        if spec == FUSED:
            # a matmul of our own: 128 tiles of 64 columns, one on an SM, which takes in 64 of w's
            # and 64 rows of x; its start is that of both
            own_s = (64 + 64) * 1024 * 2 / (FUSED_INTAKE * costs.hbm_bytes_per_s / 132)
            own_s, library_own_s = (
                costs.kernel_s + own_s,
                costs.matmul_s(64, 8192, 1024, 2, machine.sms),
            )
            ours_s += own_s * costs.settling(own_s) - costs.kernel_s
            ours_s -= library_own_s * costs.settling(library_own_s)
        library_s = costs.collective_s("all_gather" if op == AG else "reduce_scatter", received)
        assert serial - ours == pytest.approx(library_s - ours_s)
        assert by_model(problem, machine).spec == (DIRECT if op == AG else FUSED)


def test_tiles_that_do_not_run_at_once_make_a_fused_kernel_slow():
    """4xH200: 5120 columns are 160 tiles of 32 on 132 SMs, 27.8 us against 18.1 in two kernels."""
    machine = shipped("NVIDIA H200", 4)
    assert machine is not None
    times = {}
    for n in (132 * 32, 5120, 8192, 16384):
        problem = Problem(RS, 64, n, 3200, 4)
        assert fused_rounds(problem, 132) == (2 if n in (5120, 16384) else 1)
        times[n] = [predicted_s(build(problem, spec), machine) for spec in (DIRECT, FUSED)]
    assert times[5120][1] > 1.4 * times[5120][0]
    assert times[5120][1] == pytest.approx(27.8e-6, rel=0.1)
    assert times[8192][1] < times[8192][0]


def test_its_words_count_as_memory():
    problem = Problem(RS, 64, 8192, 1024, 4)
    words = 2 * 64 * 8192 * 2
    assert build(problem, "serial").num_bytes("symmetric") == 0
    assert build(problem, DIRECT).num_bytes("symmetric") == words
    assert build(problem, FUSED).num_bytes("symmetric") == words
    assert build(problem, DIRECT).num_bytes("scratch") == words // 2
    # what it may not have it does not take
    limited = replace(problem, scratch_bytes_limit=words)
    assert by_model(limited, preset("h200-4")).spec not in SPECS


@pytest.mark.parametrize(
    ("problem", "spec", "want"),
    [
        (Problem(RS, 6, 64, 64, 3), DIRECT, "a power of two up to 32"),
        (Problem(RS, 64, 64, 64, 64), DIRECT, "a power of two up to 32"),
        (Problem(AG, 5, 64, 64, 2, rows=(2, 3)), DIRECT, "equal rows on all ranks"),
        (Problem(RS, 2, 7, 64, 2), DIRECT, "parts of a multiple of 4 bytes"),
        (Problem(AG, 8192, 64, 8192, 2), DIRECT, f"at most {MAX_BYTES} bytes to send"),
        (Problem(RS, FUSED_ROWS + 2, 64, 64, 2), FUSED, f"{FUSED_ROWS} rows or fewer"),
        (Problem(RS, 64, 64, 64, 2, dtype="float32"), FUSED, "of 16-bit numbers"),
        (Problem(AG, 2, 64, 64, 2), FUSED, "matmul_reduce_scatter or experts"),
        (Problem(AG, 2, 64, 7, 2), DIRECT, "parts of a multiple of 4 bytes"),
        (Problem("all_gather_matmul_wgrad", 64, 64, 64, 2), DIRECT, "a forward operator"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(problem: Problem, spec: str, want: str):
    assert want in refusal(problem, spec)
    with pytest.raises(InputError, match=want):
        build(problem, spec)
    assert spec not in {c.spec for c in by_model(problem, preset("h200-8")).table}


def test_a_plan_of_ones_own_with_it_is_refused():
    """Half of a fused pair would do nothing; a lane of its own would meet another call's words."""
    fused = build(Problem(RS, 16, 32, 16, 2), FUSED)
    matmul, collective = fused.steps
    plain = build(fused.problem, "serial").steps
    uneven = build(Problem(RS, 5, 32, 16, 2, rows=(2, 3)), "serial")
    marked = replace(uneven.steps[1], args=collective.args[:2])
    aside = replace(build(fused.problem, DIRECT).steps[1], lane="side")
    for plan, text in (
        (replace(fused, steps=(matmul, plain[1])), "as it is built"),
        (replace(fused, steps=(plain[0], collective)), "as it is built"),
        (replace(uneven, steps=(uneven.steps[0], marked)), "equal rows on all ranks"),
        (replace(fused, steps=(plain[0], aside),
                 lanes=(*fused.lanes, replace(fused.lanes[0], name="side"))), "as it is built"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=text):
            validate(plan)
