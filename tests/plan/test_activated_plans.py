"""Plans with an activation: proved for every family; once, of whole sums, of the right operands."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from plan_cases import AG, OPS, make_problem, prove_or_refuse, specs

from counterpoint.choose.choose import choose
from counterpoint.choose.known import problem_key
from counterpoint.errors import InputError, PlanError
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.activated import one_kernel
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan, Region, Step
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Activation, Problem, Scales

NAMES = [name for name in get_args(Activation) if name]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("scales", ["", "tensor", "row", "block"])
@pytest.mark.parametrize("activation", NAMES)
def test_every_family_is_proved_or_says_what_it_wants(activation: Activation, scales: Scales):
    proved = 0
    n, k = (96, 256) if scales else (48, 64)
    for ranks, rows, islands in ((1, (), 1), (2, (), 1), (3, (4, 0, 5), 1), (4, (), 1), (4, (), 2)):
        m, bias = sum(rows) or 4 * ranks, ranks == 4 and not activation.endswith("_mul")
        problem = make_problem(AG, m, n, k, ranks, rows=rows, bias=bias, islands=islands,
                               activation=activation, scales=scales)  # fmt: skip
        for spec in specs(problem):
            plan = prove_or_refuse(problem, spec)
            if plan is not None:
                proved += 1
                applied = [s for s in plan.steps if s.arg("activation")]
                assert applied and all(s.arg("activation") == activation for s in applied)
    assert proved > 20


def test_gate_and_up_are_halves_of_one_gather():
    p = Problem(AG, 16, 48, 64, 4, activation="silu_mul")
    assert p.splits == (24, 24) and p.y_columns == 24 and p.flop == 2 * 16 * 48 * 64
    assert p == Problem(AG, 16, 48, 64, 4, activation="silu_mul", splits=(24, 24))
    plan = build(p, "graded 1/1/2 ring")
    both, apart = (
        [s for s in build(each, plan.spec).steps if s.kind == "matmul"]
        for each in (p, replace(p, activation=""))
    )
    assert len(both) == 3 and len(apart) == 6
    assert plan.buffer("y").shape == (16, 24)
    assert "M16 N24+24 K64 bfloat16 silu_mul on 4 ranks" in str(p)
    assert problem_key(p) != problem_key(replace(p, activation="gelu_mul"))


def test_each_weight_has_scales_of_its_own():
    p = Problem(AG, 16, 96, 256, 4, activation="silu_mul", scales="row")
    plan = build(p, "graded 1/1/2 ring")
    buffers = {b.name: b.shape for b in plan.buffers}
    assert buffers["w0_scale"] == buffers["w1_scale"] == (1, 48)
    (*_, step) = (s for s in plan.steps if s.kind == "matmul")
    names = [region.buffer for region in step.reads]
    assert names == ["full", "w0", "w1", "full_scale", "w0_scale", "w1_scale"]
    assert not step.accumulates
    swapped = changed(plan, step.name, lambda s: replace(
        s, reads=(*s.reads[:4], s.reads[5], s.reads[4])
    ))  # fmt: skip
    with pytest.raises(PlanError, match="w1_scale does not hold the scales of w0"):
        validate(swapped)
    fewer = changed(plan, step.name, lambda s: replace(s, reads=s.reads[:5]))
    with pytest.raises(PlanError, match="reads x, w, and the scales of both"):
        validate(fewer)


def with_args(step: Step, **args: Any) -> Step:
    return replace(step, args=tuple({**dict(step.args), **args}.items()))


def changed(plan: Plan, name: str, change: Any) -> Plan:
    steps = tuple(change(s) if s.name == name else s for s in plan.steps)
    assert steps != plan.steps
    return replace(plan, steps=steps)


def test_twice_is_refused():
    p = Problem(AG, 16, 48, 64, 2, activation="gelu")
    plan = build(p, "uniform_fused_1d ring")  # a matmul into scratch, and a move from there
    twice = changed(plan, "scatter_1", lambda s: with_args(s, activation="gelu"))
    with pytest.raises(PlanError, match=r"holds \(Activated\(name='gelu', of=\(\(Activated"):
        validate(twice)


def test_before_the_sum_is_whole_is_refused():
    p = Problem(AG, 16, 48, 64, 2, activation="gelu")
    plan = build(p, "uniform_fused_2d ring")
    early = changed(plan, "matmul_0", lambda s: with_args(s, activation="gelu"))
    with pytest.raises(PlanError, match="has an activation of a sum that is not whole"):
        validate(early)
    # or where the sum is one of parts that each have been rounded
    parts = Region("x", cols=(0, 32)), Region("w", rows=(0, 32))
    serial = build(p, "serial")
    part = changed(
        serial, "matmul", lambda s: replace(s, reads=(replace(parts[0], buffer="full"), parts[1]))
    )
    with pytest.raises(PlanError, match=r"k0=0, k1=32.*the op defines \(Activated"):
        validate(part)


def test_without_it_is_refused():
    plan = build(Problem(AG, 16, 48, 64, 2, bias=True, activation="gelu"), "serial")
    bare = changed(plan, "matmul", lambda s: replace(s, args=(("bias", 1),)))
    with pytest.raises(PlanError, match=r"holds \(Product.*the op defines \(Activated"):
        validate(bare)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("up and gate", "holds .*of=.*w1.*the op defines"),
        ("gate twice", "holds .*the op defines"),
        ("one weight", "reads x, w and, to accumulate, one sum; gated, two weights"),
        ("another activation", "has the activation 'gelu_mul' in a matmul: the problem's is"),
        ("of one weight", "has the activation 'silu' in a matmul: the problem's is 'silu_mul', of"),
        ("columns of up", "shapes .* do not fit a matmul"),
    ],
)
def test_wrong_operands_are_refused(what: str, said: str):
    plan = build(Problem(AG, 16, 48, 64, 2, activation="silu_mul"), "serial")
    x, gate, up = Region("full"), Region("w0"), Region("w1")
    changes: dict[str, Any] = {
        "up and gate": lambda s: replace(s, reads=(x, up, gate)),
        "gate twice": lambda s: replace(s, reads=(x, gate, gate)),
        "one weight": lambda s: replace(s, reads=(x, gate)),
        "another activation": lambda s: with_args(s, activation="gelu_mul"),
        "of one weight": lambda s: replace(with_args(s, activation="silu"), reads=(x, gate)),
        "columns of up": lambda s: replace(s, reads=(x, gate, replace(up, cols=(0, 12)))),
    }
    with pytest.raises(PlanError, match=said):
        validate(changed(plan, "matmul", changes[what]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"activation": "swish"}, "activation must be one of '', relu, silu, gelu, gelu_tanh"),
        ({"activation": "silu_mul", "scales": "row"},
         "n must be a multiple of 16 with row scales, of gate and of up"),
        ({"activation": "gelu", "splits": (16, 32)}, "splits must be empty with gelu, got"),
        ({"activation": "silu_mul", "splits": (16, 32)},
         "splits must be two equal halves of N with silu_mul, got"),
        ({"activation": "silu_mul", "n": 47}, "splits must be two equal halves of N with silu_mul"),
        ({"activation": "silu_mul", "bias": True}, "bias must be False with silu_mul, got True"),
    ],
)  # fmt: skip
def test_wrong_problems_are_refused(fields: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        Problem(**{"op": AG, "m": 16, "n": 48, "k": 64, "ranks": 2, **fields})


@pytest.mark.parametrize("op", [op for op in OPS if op != AG])
def test_other_operators_have_none(op: str):
    with pytest.raises(InputError, match="activation must be left out: the op has none, or sums"):
        make_problem(op, 16, 48, 64, 2, activation="relu")


@pytest.mark.parametrize(
    ("n", "taken", "not_taken"),  # of gate and of up, and rows: Llama-3 at TP8 and TP2
    [
        (1792, (48, 64, 128, 256, 512, 1024, 8192), (32, 2048)),
        (3584, (48, 64, 128, 256, 512, 8192), (8, 32, 1024, 2048)),
        (6656, (48, 64, 128, 8192), (32, 256, 512, 1024, 2048)),
        (7168, (48, 64, 128, 256, 2048, 8192), (32, 512, 1024)),
        (14336, (48, 64, 128, 1024, 2048, 8192), (32, 256, 512)),
        (26624, (48, 64, 1024, 2048, 8192), (32, 128, 256, 512)),
    ],
)
def test_one_kernel_is_taken_where_it_is_as_fast(
    n: int, taken: tuple[int, ...], not_taken: tuple[int, ...]
):
    p = Problem(AG, 8, 2 * n, 64, 2, activation="silu_mul")
    assert [m for m in (*taken, *not_taken) if one_kernel(p, m, n, 132)] == [*taken]
    assert all(one_kernel(replace(p, invariant=True), m, n, 132) for m in not_taken)
    for other in (replace(p, dtype="float32"), Problem(AG, 8, n, 64, 2, activation="gelu")):
        assert not any(one_kernel(other, m, n, 132) for m in taken)


def test_its_price():
    """Gate and up cost no more than as two results, and the elementwise pass behind them."""
    machine = preset("h200-8")
    for m in (64, 512, 8192):
        gated = Problem(AG, m, 7168, 8192, 8, activation="silu_mul")
        apart = replace(gated, activation="")
        for spec in ("serial", "graded 1/1/2/4 xor"):
            with_it, without = (predicted_s(build(p, spec), machine) for p in (gated, apart))
            passes = machine.costs.memory_s(3 * m * 3584 * 2)
            assert 0.8 * without < with_it <= 1.05 * (without + passes)
    choice = choose(Problem(AG, 8192, 7168, 8192, 8, activation="silu_mul"), machine)
    assert choice.spec != "serial" and "silu_mul" in choice.explain()
    plain = Problem(AG, 8192, 7168, 8192, 8)
    behind = replace(plain, activation="gelu", dtype="float32")
    assert predicted_s(build(behind, "serial"), machine) > predicted_s(
        build(replace(plain, dtype="float32"), "serial"), machine
    )
