"""Plans of operands with scales: proved for every family, and what they weigh on wires."""

from dataclasses import replace

import pytest
from plan_cases import AG, AR, RS, make_problem, prove_or_refuse, specs

from counterpoint.choose.choose import choose
from counterpoint.errors import InputError, PlanError
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.scaled import SCALE, operands_of
from counterpoint.plan.steps import Plan, Region
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem, Scales

KINDS: tuple[Scales, ...] = ("tensor", "row", "block")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("op", [AG, RS, AR])
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_proved_or_says_what_it_wants(op: str, kind: Scales):
    proved = 0
    for ranks, rows, islands in ((1, (), 1), (2, (), 1), (3, (4, 0, 5), 1), (4, (), 1), (4, (), 2)):
        shares = () if op == AR else rows
        m, bias = sum(rows) or 4 * ranks, ranks == 4
        problem = make_problem(op, m, 48, 256, ranks, rows=shares, bias=bias, islands=islands,
                               scales=kind)  # fmt: skip
        for spec in specs(problem):
            plan = prove_or_refuse(problem, spec)
            if plan is not None:
                proved += 1
                check_partners(plan)
    assert proved > 20


def check_partners(plan: Plan) -> None:
    """What holds fp8 rows of x has their scales beside it; what is summed is bf16 or fp32."""
    p, buffers = plan.problem, {b.name: b for b in plan.buffers}
    for name, buffer in buffers.items():
        if buffer.dtype == p.x_dtype and name != "w" and p.scales != "tensor":
            scale = buffers[name + SCALE]
            assert scale.dtype == "float32"
            like = replace(scale, name=name, shape=buffer.shape, dtype=buffer.dtype)
            assert like == buffer, "scales lie as their rows do"
    for step in plan.steps:
        if step.kind == "matmul":
            assert buffers[step.writes[0].buffer].dtype == "bfloat16"
        if step.kind == "reduce":
            assert {buffers[r.buffer].dtype for r in step.reads} == {"bfloat16"}


def test_a_chunk_and_its_scales_are_under_one_signal():
    plan = build(Problem(AG, 16, 48, 256, 4, scales="row"), "shard_p2p ring chunks=2")
    pushes = [step for step in plan.steps if step.kind == "copy"]
    assert pushes and all(len(step.posts) == 1 for step in pushes)
    for step in pushes:
        (x, x_scale), (full, full_scale) = step.reads, step.writes
        assert x_scale == replace(x, buffer="x" + SCALE)
        assert full_scale == replace(full, buffer="full" + SCALE)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("scales of another rank", "does not hold the scales of full"),
        ("scales of another chunk", "shapes"),
        ("no scales", "reads x, w, and the scales of both"),
        ("scales that nobody sends", "before it is written"),
        ("scales of x for w", "reads x, w, and the scales of both"),
        ("a part of K", "takes all of K and of w"),
        ("a sum", "reads x, w, and the scales of both"),
        ("fp32 for fp8", "reads x, w, and the scales of both"),
    ],
)
def test_wrong_plans_are_refused(what: str, said: str):
    plan = build(Problem(AG, 16, 48, 256, 4, scales="row"), "shard_p2p ring")
    i = next(i for i, s in enumerate(plan.steps) if s.name == "matmul_2")
    step = plan.steps[i]
    x, w, x_scale, w_scale = step.reads
    other = replace(x_scale, shards=plan.steps[i - 1].reads[2].shards)
    match what:
        case "scales of another rank":
            step = replace(step, reads=(x, w, other, w_scale))
        case "scales of another chunk":
            step = replace(step, reads=(x, w, replace(x_scale, chunk=(0, 2)), w_scale))
        case "no scales":
            step = replace(step, reads=(x, w))
        case "scales that nobody sends":
            plan = replace(plan, steps=tuple(
                replace(s, reads=s.reads[:1], writes=s.writes[:1]) if s.kind == "copy" else s
                for s in plan.steps
            ))  # fmt: skip
        case "scales of x for w":
            step = replace(step, reads=(x, w, x_scale, w))
        case "a part of K":
            cols = (0, 128)
            step = replace(step, reads=(replace(x, cols=cols), Region("w", rows=cols),
                                        x_scale, w_scale))  # fmt: skip
        case "a sum":
            step = replace(step, reads=(*step.reads, step.writes[0]))
        case _:
            plan = replace(plan, buffers=tuple(
                replace(b, dtype="float32") if b.name == "full" else b for b in plan.buffers
            ))  # fmt: skip
            said = "a copy keeps the dtype"
    steps = (*plan.steps[:i], step, *plan.steps[i + 1 :])
    with pytest.raises(PlanError, match=said):
        validate(replace(plan, steps=steps))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scales": "column"}, "scales must be one of '', tensor, row, block, got 'column'"),
        ({"op": "all_gather_matmul_wgrad", "scales": "row"},
         "scales must be left out: the op has none, got 'row'"),
        ({"x_dtype": "float8_e5m2"}, "x_dtype must be left out: x has no scales, got"),
        ({"scales": "row", "x_dtype": "float16"},
         "x_dtype must be one of '', float8_e4m3fn, float8_e5m2, got 'float16'"),
        ({"scales": "block", "x_dtype": "float8_e5m2"},
         "x_dtype must be float8_e4m3fn with block scales, got 'float8_e5m2'"),
        ({"scales": "row", "dtype": "float16"}, "dtype must be bfloat16, of y, where x and w have"),
        ({"scales": "row", "splits": (16, 32)}, "splits must be empty: with scales there is one"),
        ({"scales": "row", "invariant": True}, "scales must be left out of batch-invariant plans"),
        ({"scales": "row", "k": 136}, "k must be a multiple of 16 with row scales, got 136"),
        ({"scales": "tensor", "n": 40}, "n must be a multiple of 16 with tensor scales, got 40"),
        ({"scales": "block", "k": 192}, "k must be a multiple of 128 with block scales, got 192"),
    ],
)  # fmt: skip
def test_wrong_problems_are_refused(fields: dict[str, object], said: str):
    with pytest.raises(InputError, match=said):
        Problem(**{"op": AG, "m": 8, "n": 48, "k": 256, "ranks": 2, **fields})  # type: ignore[arg-type]


def test_a_gather_moves_half_the_bytes_and_a_sum_as_many():
    sizes = (4096, 7168, 8192, 8)
    plain, scaled = Problem(AG, *sizes), Problem(AG, *sizes, scales="row")
    assert plain.link_bytes == 4096 * 7 // 8 * 8192 * 2
    assert scaled.link_bytes == 4096 * 7 // 8 * (8192 + 4)
    blocks = Problem(AG, *sizes, scales="block")
    assert blocks.link_bytes == 4096 * 7 // 8 * (8192 + 8192 // 128 * 4)
    for op in (RS, AR):
        assert Problem(op, *sizes).link_bytes == Problem(op, *sizes, scales="block").link_bytes
    x, x_scale, w, w_scale, y = operands_of(Problem(AG, *sizes, scales="block"))
    assert [b.shape for b in (x_scale, w_scale)] == [(4096, 64), (64, 56)]
    assert (x.dtype, w.dtype, y.dtype) == ("float8_e4m3fn", "float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize("op", [AG, RS])
def test_the_model_prices_fp8_and_the_chooser_weighs_it(op: str):
    machine, times = preset("h200-8"), dict[str, float]()
    for kind in ("", "row"):
        problem = Problem(op, 8192, 7168, 8192, 8, scales=kind)
        serial = build(problem, "serial", machine)
        times[kind] = predicted_s(serial, machine)
        choice = choose(problem, machine)
        assert choice.spec != "serial"
        specs_seen = {candidate.spec for candidate in choice.table}
        assert "shard_p2p ring" in specs_seen
    # matmuls at 1.8 of the rate; a gather of half the bytes, a sum of as many
    least, most = (1.7, 2.0) if op == AG else (1.2, 1.7)
    assert least < times[""] / times["row"] < most
