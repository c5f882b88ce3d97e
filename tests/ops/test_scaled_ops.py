"""fp8 operands with scales on CPU ranks: every family against fp64, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import Draw
from island_bodies import on_islands, plans_run
from on_ranks import on_ranks
from rank_bodies import by_reference, device, world
from scaled_bodies import (
    AG,
    AR,
    E4M3,
    E5M2,
    KINDS,
    RS,
    Case,
    Operands,
    call,
    exact,
    off,
    operands,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import counterpoint as cp
from counterpoint.norms.norms import Norm, by_torch
from counterpoint.ops.samples import sample_of
from counterpoint.plan.families import families
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem
from counterpoint.run import activated, scaled

# all of opcheck but "test_schema": torch compares no two fp8 tensors
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def specs(op: str, ranks: int) -> list[str]:
    """Each family that takes operands with scales."""
    found = ["auto"]
    for name in families(op):
        family = operation_of(op).family(name)
        assert family is not None
        if not family.refusal(Problem(op, 4 * ranks, 16, 128, ranks, scales="row")):
            found.append(name)
            found += [f"{name} ring chunks=3"] if name == "shard_p2p" else []
    return found


def cases(op: str, ranks: int) -> list[Case]:
    uneven = (3, 0, 5)[:ranks]
    found: list[Case] = []
    for i, spec in enumerate(specs(op, ranks)):
        for j, kind in enumerate(KINDS):
            bias, inner = (i + j) % 2 == 0, (3,) if (i + j) % 3 == 0 else ()
            even = (i + j) % 3 or op == AR or spec == "direct"
            rows = (4,) * ranks if even else uneven
            k, n = ((256, 48), (128, 16), (640, 272))[(i + j) % 3]
            x_dtype = E5M2 if kind != "block" and i % 4 == 3 else E4M3
            found.append(Case(op, kind, spec, rows, k, n, bias, inner, x_dtype))
    return found


@pytest.mark.drawn(4)
@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "forward", "fp8")
@pytest.mark.parametrize("op", [AG, RS, AR])
@on_ranks(1, 2, 3)
def test_every_family_with_every_kind_of_scale(
    rank: int, ranks: int, op: str, draw: Draw
) -> list[str]:
    found = cases(op, ranks)
    assert {case.kind for case in found} == set(KINDS)
    some = draw([*enumerate(found)], len(found) // 3)
    return [text for i, case in some for text in off(case, 17 * i)]


@pytest.mark.parametrize("op", [AG, RS, AR])
@on_ranks(4)
def test_operands_with_scales_between_islands(
    rank: int, ranks: int, op: str, draw: Draw
) -> list[str]:
    """By the library, and by the plan between islands."""
    found: list[str] = []
    for size in (1, 2):
        with on_islands(rank, size):
            for i, kind in draw([*enumerate(KINDS)], 1, size):
                for plan in ("auto", "islands chunks=2"):
                    found += off(Case(op, kind, plan, (4,) * ranks, bias=True), i)
            plans = ("serial", "islands chunks=2")
            assert plans_run() == {(op, ranks // size, plan) for plan in plans}
    return found


def turned(x: cp.Scaled) -> cp.Scaled:
    return cp.Scaled(*(t.movedim(0, 1) if t.dim() else t for t in x))


@on_ranks(2)
def test_another_dim_than_the_first(rank: int, ranks: int):
    for kind in KINDS:
        case = Case(AG, kind, "shard_p2p", (3,) * ranks, inner=(2,))
        everyone = operands(case, ranks, 5, device())
        mine = everyone[rank]
        want = call(case, mine)
        turned = Operands(
            cp.Scaled(*(t.movedim(0, 1) if t.dim() else t for t in mine.x)), *mine[1:]
        )
        y = cp.all_gather_matmul(turned.x, mine.w, plan=case.plan, gather_dim=1)
        assert torch.equal(y, want.movedim(0, 1))
        case = case._replace(op=RS)
        mine = operands(case, ranks, 5, device())[rank]
        turned = Operands(
            cp.Scaled(*(t.movedim(0, 1) if t.dim() else t for t in mine.x)), *mine[1:]
        )
        y = cp.matmul_reduce_scatter(turned.x, mine.w, plan=case.plan, scatter_dim=-2)
        assert torch.equal(y, call(case, mine).movedim(0, 1))


@on_ranks(2)
def test_operands_of_any_strides_and_nothing_to_do(rank: int, ranks: int):
    case = Case(RS, "row", "serial", (4, 4))
    x, w, _ = operands(case, ranks, 3, device())[rank]
    want = cp.matmul_reduce_scatter(x, w)
    wide = torch.zeros(8, 2 * case.k).to(E4M3)
    wide[:, ::2] = x.data
    loose = cp.Scaled(wide[:, ::2], torch.stack([x.scale, x.scale], 1)[:, 0])
    w = cp.Scaled(w.data.contiguous(), w.scale)
    assert torch.equal(cp.matmul_reduce_scatter(loose, w), want)
    none = cp.Scaled(x.data[:, :0], x.scale), cp.Scaled(w.data[:0], w.scale)
    assert torch.equal(cp.matmul_reduce_scatter(*none), torch.zeros_like(want))


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "compiled forward", "fp8"
)
@pytest.mark.parametrize("op", [AG, RS, AR])
@on_ranks(2)
def test_fp8_is_torchs_own(rank: int, ranks: int, op: str, draw: Draw):
    for kind in draw(KINDS, 1):
        case = Case(op, kind, "serial", (4, 4), bias=True)
        mine = operands(case, ranks, 7, device())[rank]
        real = call(case, mine)
        where = (world().group_name, ranks) if op == AR else ([], world().group_name, ranks)
        where = (*where, rank) if op == RS else where
        given = (mine.x.data, mine.w.data, mine.bias, case.plan, *where)
        scales = [s.view(1) if s.dim() == 0 else s for s in (mine.x.scale, mine.w.scale)]
        entry = getattr(torch.ops.counterpoint, op).default
        checks = torch.library.opcheck(entry, (*given, *scales), test_utils=CHECKS)
        assert set(checks.values()) == {"SUCCESS"}
        with FakeTensorMode() as mode:
            x, w = (cp.Scaled(*map(mode.from_tensor, each)) for each in mine[:2])
            y = call(case, Operands(x, w, None))
        assert (y.shape, y.dtype) == (real.shape, real.dtype)
        compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(case, mine), real)


def wrong_calls(x: cp.Scaled, w: cp.Scaled) -> list[tuple[str, Any, Any, dict[str, Any]]]:
    """What is said, and x, w and options of a call."""
    half, wide = x.data.bfloat16(), torch.float8_e8m0fnu
    return [
        ("w must be one counterpoint.Scaled, as x is, got Tensor", x, w.data, {}),
        ("x must be one counterpoint.Scaled, as w is, got Tensor", x.data, w, {}),
        ("w must be one counterpoint.Scaled, as x is, got list", x, [w, w], {}),
        ("x must be bf16, fp16 or fp32, got torch.float8_e4m3fn; pass a counterpoint.Scaled of it "
         "and its scale", x.data, w.data, {}),
        ("x must be float8_e4m3fn or float8_e5m2, where it has scales, got torch.bfloat16",
         cp.Scaled(half, x.scale), w, {}),
        ("w must be torch.float8_e4m3fn, where x has scales, got torch.bfloat16",
         x, cp.Scaled(w.data.bfloat16(), w.scale), {}),
        ("w must be torch.float8_e4m3fn, where x has scales, got torch.float8_e5m2",
         x, cp.Scaled(w.data.to(E5M2), w.scale), {}),
        ("bias must be torch.bfloat16, where x has scales, got torch.float32",
         x, w, {"bias": torch.zeros(48)}),
        ("x.scale must be a Tensor, got float", cp.Scaled(x.data, 1.0), w, {}),  # type: ignore[arg-type]
        ("w.scale must be [1], [1, N=48], or [K/128=2, N/128=1], got (48, 1)",
         x, cp.Scaled(w.data, w.scale.t()), {}),
        ("x.scale must be (4, 1), as w has scales per row, got (4, 2)",
         cp.Scaled(x.data, x.scale.expand(4, 2)), w, {}),
        ("x.scale must be (4, 1), as w has scales per row, got (1,)",
         cp.Scaled(x.data, x.scale[0, 0]), w, {}),
        ("x.scale must be (1,), as w has scales per tensor, got (4, 1)",
         x, cp.Scaled(w.data, w.scale[0, 0]), {}),
        ("x.scale must be float32, got torch.bfloat16",
         cp.Scaled(x.data, x.scale.bfloat16()), w, {}),
        ("w.scale must be float32, got torch.float8_e8m0fnu; mxfp8 and nvfp4 need a GPU of compute "
         "capability 10.0, and are not supported",
         x, cp.Scaled(w.data, torch.ones(8, 48).to(wide)), {}),
        ("x.scale must be on cpu as x, got meta", cp.Scaled(x.data, x.scale.to("meta")), w, {}),
        ("k must be a multiple of 16 with row scales, got 24",
         cp.Scaled(x.data[:, :24], x.scale), cp.Scaled(w.data[:24], w.scale), {}),
        ("n must be a multiple of 16 with row scales, got 40",
         x, cp.Scaled(w.data[:, :40], w.scale[:, :40]), {}),
        ("k must be a multiple of 128 with block scales, got 144",
         cp.Scaled(x.data[:, :144], x.scale.expand(4, 2)),
         cp.Scaled(w.data[:144], w.scale[:, :1].expand(2, 1)), {}),
        ("x_dtype must be float8_e4m3fn with block scales, got 'float8_e5m2'",
         cp.Scaled(x.data.to(E5M2), x.scale.expand(4, 2)),
         cp.Scaled(w.data, w.scale[:, :1].expand(2, 1)), {}),
        ("x must be without requires_grad: fp8 operands have no gradient, got a tensor that "
         "requires one; take the layers of counterpoint.nn and to_fp8, or detach it",
         cp.Scaled(x.data.clone().requires_grad_(), x.scale), w, {}),
        ("w.scale must be without requires_grad",
         x, cp.Scaled(w.data, w.scale.clone().requires_grad_()), {}),
    ]  # fmt: skip


@on_ranks(2)
def test_wrong_operands_are_refused_on_all_ranks(rank: int, ranks: int) -> list[str]:
    problems: list[str] = []
    for op in (AG, RS, AR):
        case = Case(op, "row", "auto", (4, 4) if op == AG else (2, 2))
        mine = operands(case, ranks, 11, device())[rank]
        for said, x, w, options in wrong_calls(mine.x, mine.w):
            with pytest.raises(cp.InputError, match=re.escape(said)):
                getattr(cp, op)(x, w, **options)
        problems += off(case)  # nothing is lost
    return problems


@on_ranks(2)
def test_families_without_such_matmuls_are_refused(rank: int, ranks: int):
    refused = {AG: ("direct", "uniform_fused_2d"), RS: ("fused", "hetero_fused_2d"),
               AR: ("fused", "running_sum")}  # fmt: skip
    for op, specs in refused.items():
        case = Case(op, "row", "", (4, 4))
        mine = operands(case, ranks, 13, device())[rank]
        for spec in specs:
            said = f"plan must be for operands without scales, got '{spec}'"
            with pytest.raises(cp.InputError, match=said):
                call(case._replace(plan=spec), mine)
    mine = operands(Case(AG, "row", "", (4, 4), inner=(2,)), ranks, 13, device())[rank]
    for dim, said in (
        (-1, "another dim than the last, where x has scales"),
        (5, "a dim of x, 0 to"),
    ):
        with pytest.raises(cp.InputError, match=f"gather_dim must be {said}"):
            cp.all_gather_matmul(mine.x, mine.w, gather_dim=dim)


@on_ranks(2)
def test_ranks_that_differ_in_their_scales_hear_of_it(rank: int, ranks: int):
    case = Case(RS, ("row", "tensor")[rank], "serial", (4, 4))
    mine = operands(case, ranks, 19, device())[rank]
    with pytest.raises(cp.InputError, match=r"x_scale.shape must be equal on all ranks"):
        call(case, mine)


@on_ranks(2)
def test_each_rank_may_have_a_scale_of_its_own(rank: int, ranks: int) -> list[str]:
    """That of a gathered x travels with its rows, in each call."""
    return off(Case(AG, "tensor", "serial", (4, 4))) + off(Case(AR, "tensor", "serial", (2, 2)))


@on_ranks(2)
def test_a_rank_whose_operands_do_not_belong_together_is_heard_of(rank: int, ranks: int):
    for op in (AR, AG, RS):
        case = Case(op, "row", "serial", (4, 4))
        mine = operands(case, ranks, 19, device())[rank]
        call(case, mine)
        w = mine.w if rank == 0 else mine.w.data
        with pytest.raises(cp.InputError, match=r"w must be one counterpoint\.Scaled, as x is"):
            getattr(cp, op)(mine.x, w)


def test_what_stands_there_is_each_number_times_its_scale():
    data = torch.arange(1, 257).float().view(1, 256).to(E4M3)
    scale = torch.tensor([[2.0, 3.0]])
    want = data.double() * torch.cat([torch.full((128,), 2.0), torch.full((128,), 3.0)])
    assert torch.equal(exact(cp.Scaled(data, scale)), want)


def with_activation(
    case: Case, activation: str, rank: int, ranks: int, seed: int
) -> tuple[cp.Scaled, Any, Tensor | None, Tensor]:
    """x, the weight or gate and up, a bias of one weight, and what has to come."""
    x, w, bias = operands(case, ranks, seed, device())[rank]
    _, up, _ = operands(case, ranks, seed + 100, device())[rank]
    gated = activation.endswith("_mul")
    with by_reference():
        gate = call(case, Operands(x, w, None if gated else bias))
        product = call(case, Operands(x, up, None)) if gated else None
    want = torch.empty_like(gate)
    activated.into(activation, gate, product, want)
    return x, (w, up) if gated else w, None if gated else bias, want


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2, 3)
def test_an_activation_is_of_the_products(rank: int, ranks: int, kind: str) -> list[str]:
    """As they are without it, by every family; eagerly, compiled, and along another dim."""
    found: list[str] = []
    for i, spec in enumerate(specs(AG, ranks)):
        for j, activation in enumerate(("silu_mul", "gelu", "relu_mul", "gelu_tanh")):
            if spec != "auto" and (i + j) % 2:
                continue
            even = (i + j) % 3 > 0
            rows = (4,) * ranks if even else (3, 0, 5)[:ranks]
            k, n = ((256, 48), (640, 272))[j % 2]
            case = Case(AG, kind, spec, rows, k, n, bias=True, inner=(2,))
            x, w, bias, want = with_activation(case, activation, rank, ranks, 41 * i + j)
            options: dict[str, Any] = {"bias": bias, "plan": spec, "activation": activation}
            options |= {} if even else {"rows": rows}
            with by_reference():
                for _ in range(2):
                    y = cp.all_gather_matmul(x, w, **options)
                    if y.dtype != torch.bfloat16 or not torch.equal(y, want):
                        found.append(f"{spec} {activation} {rows}: {y.dtype} {tuple(y.shape)}")
                if spec == "auto" and even:
                    y = cp.all_gather_matmul(turned(x), w, gather_dim=1, **options)
                    assert torch.equal(y, want.movedim(0, 1))
                    compiled = torch.compile(cp.all_gather_matmul, fullgraph=True,
                                             backend="aot_eager")  # fmt: skip
                    assert torch.equal(compiled(x, w, **options), want)
    return found


@on_ranks(2)
def test_what_an_activation_behind_scales_refuses(rank: int, ranks: int):
    case = Case(AG, "row", "serial", (4, 4), 128, 48)
    x, (gate, up), _, _ = with_activation(case, "silu_mul", rank, ranks, 51)
    block = cp.Scaled(up.data, torch.ones(1, 1))
    odd = cp.Scaled(gate.data[:, :40], gate.scale[:, :40])
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("w.scale must be of one shape, gate and up, got [(1, 48), (1, 1)]", (gate, block), {}),
        ("w must be of one shape, gate and up", (gate, odd), {}),
        ("n must be a multiple of 16 with row scales, of gate and of up, got 80", (odd, odd), {}),
        ("bias must be None with activation='silu_mul'", (gate, up),
         {"bias": torch.ones(48).bfloat16()}),
        ("scales must be left out of batch-invariant plans", (gate, up),
         {"plan": "serial invariant"}),
        ("w must be without requires_grad: fp8 operands have no gradient",
         (gate, cp.Scaled(up.data.detach().requires_grad_(), up.scale)), {}),
    ]  # fmt: skip
    for text, w, options in cases:
        with pytest.raises(cp.InputError, match=re.escape(text)):
            cp.all_gather_matmul(x, w, activation="silu_mul", **options)
    with pytest.raises(cp.InputError, match="got 0 weights"):  # the other rank hears it
        cp.all_gather_matmul(x, (gate, up) if rank else [], activation="silu_mul")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_norm_behind_a_sum(rank: int, ranks: int, kind: str):
    """As behind the sum that is there: RMS and LayerNorm, fp8 on both sides; compiled, too."""
    case = Case(AR, kind, "serial", (2, 2), bias=True)
    x, w, bias = operands(case, ranks, 29, device())[rank]
    alike = torch.Generator().manual_seed(3)
    residual, weight, norm_bias = (
        torch.randn(*shape, generator=alike).bfloat16() for shape in ((4, case.n), *[(case.n,)] * 2)
    )
    total = call(case, Operands(x, w, bias))
    for layer, out_dtype in ((False, None), (True, None), (True, E4M3)):
        norm, of = cp.matmul_all_reduce_rms_norm, Norm("rms", 1e-3, bool(out_dtype))
        more: dict[str, Any] = {"residual": residual, "norm_weight": weight, "eps": 1e-3}
        if layer:
            norm, of = cp.matmul_all_reduce_layer_norm, of._replace(kind="layer")  # type: ignore[assignment]
            more["norm_bias"] = norm_bias
        given = {"x": total, "residual": residual, "weight": weight}
        want = by_torch(of, given | ({"bias": norm_bias} if layer else {}))

        def run(norm: Any = norm, more: Any = more, out: Any = out_dtype) -> tuple[Tensor, ...]:
            return norm(x, w, bias=bias, plan="serial", out_dtype=out, **more)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        with by_reference():
            for found in (run(), run(), compiled()):
                assert all(torch.equal(a.float(), b.float())
                           for a, b in zip(found, want, strict=True))  # fmt: skip


@on_ranks(2)
def test_what_a_norm_behind_scales_refuses(rank: int, ranks: int):
    x, w, _ = operands(Case(AR, "row", "serial", (2, 2)), ranks, 31, device())[rank]
    residual, weight = torch.zeros(4, 48).bfloat16(), torch.ones(48).bfloat16()
    bf16 = "torch.bfloat16 on cpu where x has scales"
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"residual must be {bf16}, got torch.float32 on cpu", {"residual": residual.float()}),
        (f"norm_weight must be {bf16}, got torch.float16 on cpu", {"norm_weight": weight.half()}),
        ("out_dtype must be torch.float8_e4m3fn, or torch.bfloat16 where x has scales, got "
         "torch.float16", {"out_dtype": torch.float16}),
        ("w must be one counterpoint.Scaled, as x is, got Tensor", {"w": w.data}),
        ("bias must be torch.bfloat16, where x has scales, got torch.float32",
         {"bias": torch.zeros(48)}),
    ]  # fmt: skip
    base: dict[str, Any] = {"x": x, "w": w, "residual": residual, "norm_weight": weight}
    for text, wrong in cases:
        with pytest.raises(cp.InputError, match=f"matmul_all_reduce_rms_norm: {re.escape(text)}"):
            cp.matmul_all_reduce_rms_norm(**(base | wrong))
    with cp.batch_invariant(), pytest.raises(cp.InputError, match="left out of batch-invariant"):
        cp.matmul_all_reduce_rms_norm(**base)


@on_ranks(2)
def test_random_calls_by_a_problem_alone(rank: int, ranks: int):
    """What is tuned and compared: operands that the problem says, called by a plan."""
    for op in (AG, RS, AR):
        for kind in KINDS:
            problem = Problem(op, 8, 48, 256, ranks, scales=kind, x_dtype="float8_e4m3fn")
            sample = sample_of(problem, world(), device())
            (y,) = sample.call("shard_p2p")(0)  # type: ignore[misc]
            assert y.dtype == torch.bfloat16 and y.isfinite().all()


@pytest.mark.parametrize(
    ("capability", "kind", "said"),
    [
        ((8, 0), "row", "op: fp8 needs an NVIDIA GPU of compute capability 8.9 or later, this one "
         "is 8.0"),
        ((10, 0), "block", "op: scales of blocks need a GPU of compute capability 9.0, this one is "
         "10.0"),
        ((9, 0), "block", ""),
        ((8, 9), "tensor", ""),
    ],
)  # fmt: skip
def test_a_gpu_without_fp8_is_refused_when_a_plan_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kind: str, said: str
):
    name = "{}.{}".format(*capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(scaled, "capability_of", lambda _: name)
    if not said:
        assert callable(scaled.multiply_of("op", kind, torch.device("cuda")))
        return
    with pytest.raises(cp.UnsupportedError, match=re.escape(said)):
        scaled.multiply_of("op", kind, torch.device("cuda"))
