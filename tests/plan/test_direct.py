"""Kernels of ours in plans: what they cost and hold, where they are refused, and how they stand."""

from dataclasses import replace

import pytest
from plan_cases import AG, AG_WGRAD, AR, DISPATCH, RS

from counterpoint.choose.by_model import by_model
from counterpoint.errors import InputError, PlanError
from counterpoint.machine_of import shipped
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.schedules.direct import MAX_BYTES
from counterpoint.tensor_parallel import plan_fused_sum

CASES = [(AG, "direct"), (RS, "direct"), (AR, "direct"), (RS, "fused"), (AR, "fused")]


@pytest.mark.parametrize(("op", "spec"), CASES)
def test_one_step_waits_in_a_kernel_and_stores_words_on_every_rank(op: str, spec: str):
    for ranks in (2, 4, 8):
        plan = build(Problem(op, 8 * ranks, 32, 16, ranks, bias=True), spec)
        (ours,) = (s for s in plan.steps if s.spins)
        assert ours.kind == ("fused" if spec == "fused" else "collective")
        assert (ours.arg("kernel"), ours.arg("transport")) == (
            ("matmul_all_reduce", 0) if spec == "fused" else (0, "words")
        )
        own = {b.name for b in plan.buffers if b.space == "words"}
        stored = [(r.buffer, r.at) for r in ours.writes if r.buffer in own]
        everyone = [(d,) if d else () for d in range(ranks)]
        assert stored == [(name, at) for name in sorted(own, reverse=True) for at in everyone]
        # who gets all sums has a second place, for those of others
        assert len(own) == 1 + (op == AR)
        assert len(plan.steps) == (1 if spec == "fused" else 3 if op != AG else 2)


def test_it_costs_what_the_constants_say():
    machine = preset("h200-4")
    costs, sms = machine.costs, machine.device.num_sms
    for op, spec in CASES:
        problem = Problem(op, 64, 8192, 1024, 4)
        serial, ours = (predicted_s(build(problem, s), machine) for s in ("serial", spec))
        received = 48 * (problem.k if op == AG else problem.n) * 2 * (2 if op == AR else 1)
        ours_s = costs.direct_s + received / costs.direct_bytes_per_s
        library_own_s = costs.matmul_s(64, 8192, 1024, 2, machine.sms)
        library_own_s *= costs.settling(library_own_s)
        if spec == "fused":
            # a matmul of our own: 128 tiles of 64 columns, one on an SM, which takes in 64 of w's
            # and 64 rows of x; its start is that of both
            ours_s += (64 + 64) * 1024 * 2 / (plan_fused_sum.INTAKE * costs.hbm_bytes_per_s / sms)
            assert ours == pytest.approx(ours_s, rel=0.02)
        else:
            library_s = costs.collective_s("all_gather" if op == AG else "reduce_scatter", received)
            assert serial - ours == pytest.approx(library_s - ours_s)
            assert ours == pytest.approx(library_own_s + ours_s)
        assert by_model(problem, machine).spec == ("direct" if op == AG else "fused")


@pytest.mark.parametrize("op", [RS, AR])
def test_tiles_that_do_not_run_at_once_make_a_fused_kernel_slow(op: str):
    """4xH200: 5120 columns are 160 tiles of 32 on 132 SMs, 27.8 us against 18.1 in two kernels."""
    machine = shipped("NVIDIA H200", 4)
    assert machine is not None
    times: dict[int, list[float]] = {}
    for n in (132 * 32, 5120, 8192, 16384):
        problem = Problem(op, 64, n, 3200, 4)
        few = plan_fused_sum.is_few(problem, machine, scatters=op == RS)
        assert few == (n not in (5120, 16384))
        times[n] = [predicted_s(build(problem, spec), machine) for spec in ("direct", "fused")]
    assert times[5120][1] > 1.4 * times[5120][0]
    assert times[5120][1] == pytest.approx(27.8e-6, rel=0.1)
    assert times[8192][1] < times[8192][0]


@pytest.mark.parametrize("op", [RS, AR])
def test_its_words_count_as_memory(op: str):
    problem = Problem(op, 64, 8192, 1024, 4)
    whole = 64 * 8192 * 2
    # of calls in turn; of sums that all get, a quarter comes and a quarter goes
    words = 2 * whole * (2 if op == AR else 1)
    assert build(problem, "serial").num_bytes("words") == 0
    assert build(problem, "direct").num_bytes("words") == words
    assert build(problem, "fused").workspace_bytes == words
    assert build(problem, "direct").workspace_bytes == words + whole
    # what it may not have it does not take
    limited = replace(problem, scratch_bytes_limit=words - 1)
    choice = by_model(limited, preset("h200-4"))
    assert choice.spec not in ("direct", "fused")
    refused = {c.spec: c.verdict for c in choice.table if c.basis == "refused"}
    assert refused["fused"] == f"needs {words} bytes of scratch, the limit is {words - 1}"


@pytest.mark.parametrize(
    ("problem", "spec", "want"),
    [
        (Problem(RS, 6, 64, 64, 3), "direct", "a power of two up to 32"),
        (Problem(AR, 6, 64, 64, 3), "direct", "a power of two up to 32"),
        (Problem(AR, 6, 64, 64, 3), "fused", "a power of two up to 32"),
        (Problem(RS, 64, 64, 64, 64), "direct", "a power of two up to 32"),
        (Problem(AG, 5, 64, 64, 2, rows=(2, 3)), "direct", "equal rows on all ranks"),
        (Problem(RS, 5, 64, 64, 2, rows=(2, 3)), "fused", "equal rows on all ranks"),
        (Problem(RS, 2, 7, 64, 2), "direct", "shares of a multiple of 4 bytes"),
        (Problem(AG, 2, 64, 7, 2), "direct", "shares of a multiple of 4 bytes"),
        (Problem(AR, 3, 6, 7, 4), "direct", "shares of a multiple of 4 bytes"),
        (Problem(AR, 3, 1, 7, 4), "direct", "equal shares of y"),
        (Problem(AG, 8192, 64, 8192, 2), "direct", f"at most {MAX_BYTES} bytes to send"),
        (Problem(RS, 66, 64, 64, 2), "fused", "64 rows or fewer"),
        (Problem(RS, 64, 64, 64, 2, dtype="float32"), "fused", "of 16-bit numbers"),
        (Problem(DISPATCH, 192, 64, 64, 3, experts=2), "fused", "a power of two up to 32"),
        (Problem(DISPATCH, 64, 60, 64, 2, experts=2), "fused", "K and N multiples of 8"),
        (Problem(DISPATCH, 64, 64, 64, 2, dtype="float32", experts=2), "fused", "16-bit numbers"),
        (Problem(DISPATCH, 4096, 64, 64, 2, experts=1024), "fused", "at most 1024 experts"),
        (Problem(AG, 2, 64, 64, 2), "fused", "auto or one of serial, direct, shard_p2p"),
        (Problem(AG_WGRAD, 64, 64, 64, 2), "direct", "auto or one of serial, sliced"),
        (Problem(DISPATCH, 64, 64, 64, 2, experts=2), "direct", "auto or one of serial, fused"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(problem: Problem, spec: str, want: str):
    with pytest.raises(InputError, match=f"plan must be .*{want}"):
        build(problem, spec)
    assert spec not in {c.spec for c in by_model(problem, preset("h200-8")).table}


def test_a_plan_of_ones_own_with_it_is_refused():
    """Half of a plan would do nothing; a lane of its own would meet another call's words."""
    problem = Problem(RS, 16, 32, 16, 2)
    direct, fused = build(problem, "direct"), build(problem, "fused")
    matmul, collective = direct.steps
    plain = build(problem, "serial").steps
    uneven = build(Problem(RS, 5, 32, 16, 2, rows=(2, 3)), "serial")
    marked = replace(uneven.steps[1], args=collective.args)
    side = replace(direct.lanes[0], name="side")
    aside = replace(collective, lane="side")
    wider = replace(fused.steps[0], args=(*fused.steps[0].args[:2], ("block_n", 128)))
    for plan, text in (
        (replace(direct, steps=(matmul, replace(plain[1], writes=collective.writes))),
         "which only kernels of ours keep in order"),
        (replace(direct, steps=(plain[0], aside), lanes=(*direct.lanes, side)), "as it is built"),
        (replace(uneven, steps=(uneven.steps[0], marked)), "as it is built"),
        (replace(uneven, family="direct", steps=(uneven.steps[0], marked)), "equal rows on all"),
        (replace(fused, steps=(wider,)), "as it is built"),
        (replace(fused, steps=(*fused.steps, replace(fused.steps[0], name="again"))), "as it is"),
        (replace(fused, variant=""), ""),
        (replace(fused, family="mine"), "auto or one of serial, direct, fused, .*got 'mine"),
    ):  # fmt: skip
        if not text:
            validate(plan)
            continue
        with pytest.raises(PlanError, match=text):
            validate(plan)
