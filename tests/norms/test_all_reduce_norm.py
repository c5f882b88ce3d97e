"""all_reduce_rms_norm and all_reduce_layer_norm on CPU ranks: results, gradients, refusals."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from drawing import Draw
from island_bodies import on_islands, plans_run
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from refusals import Refusal, wrongly_refused
from torch import Tensor

import counterpoint as cp
from counterpoint.ops.samples import sample_of
from counterpoint.plan.families import build
from counterpoint.problem import Problem

FP8 = torch.float8_e4m3fn
PLANS = ("serial", "direct", "fused one_shot", "fused two_shot", "auto")


class Case(NamedTuple):
    """What one call is given, the same on all ranks but for x."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    layer: bool
    eps: float = 1e-3

    def call(self, **options: Any) -> tuple[Tensor, ...]:
        given = (self.x, self.residual, self.weight)
        if self.layer:
            return cp.all_reduce_layer_norm(*given, self.bias, eps=self.eps, **options)
        return cp.all_reduce_rms_norm(*given, eps=self.eps, **options)


def case_of(
    rows: tuple[int, ...], n: int, dtype: torch.dtype, *, layer: bool = False, bare: bool = False
) -> Case:
    """Random tensors; those of all ranks from rank 0. `bare`: neither residual nor bias."""
    shared = [torch.randn(*rows, n), torch.randn(n), torch.randn(n)]
    for t in shared:
        dist.broadcast(t, 0)
    residual, weight, bias = (t.to(dtype) for t in shared)
    x = torch.randn(*rows, n).to(dtype)
    bias = bias if layer and not bare else None
    return Case(x, None if bare else residual, weight, bias, layer)


def norm_of(case: Case, h: Tensor) -> Tensor:
    """Of given rows, in fp64."""
    n, h = (case.weight.numel(),), h.double()
    weight, bias = case.weight.double(), case.bias
    if case.layer:
        bias = None if bias is None else bias.double()
        return torch.nn.functional.layer_norm(h, n, weight, bias, case.eps)
    return torch.nn.functional.rms_norm(h, n, weight, case.eps)


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def near(got: Tensor, scales: Tensor, want: Tensor, interpreted: bool) -> bool:
    """Whether fp8 values times their scales are the nearest there are, or as near as makes no odds.

    Triton's interpreter loses the carry of what it rounds up to a power of two, and of subnormal
    numbers: there is nothing to see of these.
    """
    want = (want / scales.double()).clamp(-448, 448)
    # half the distance of two values, at least that of subnormal ones; and what fp32 rounds before
    good = (got.double() - want).abs() <= (want.abs() / 16).clamp(min=2**-10) + 2**-13
    if interpreted:
        rounded = want.float().to(FP8)
        carried = (rounded.view(torch.uint8) & 7) == 0
        good |= carried | (rounded.float().abs() < 2**-6)
    return bool(good.all())


def wrong(case: Case, plan: str, what: str, *, interpreted: bool = False) -> list[str]:
    """What is wrong with a call and with its fp8 results."""
    total = case.x.double()
    dist.all_reduce(total)
    dtype, before = case.x.dtype, case.x.clone()
    y, h = case.call(plan=plan)
    most = 2 * torch.finfo(dtype).eps
    want = total if case.residual is None else total + case.residual.double()
    scale = torch.tensor(0.004)
    static, static_h = case.call(plan=plan, out_dtype=FP8, scale=scale)
    by_row, _, scales = case.call(plan=plan, out_dtype=FP8)
    norm = norm_of(case, h)
    largest = norm.abs().amax(-1, keepdim=True)
    shape = case.x.shape
    checks = {
        "h": off(h, want) <= most,
        "y": off(y, norm) <= most,
        "h of fp8": torch.equal(static_h, h),
        "static": near(static, scale, norm, interpreted),
        "scales": torch.allclose(scales.double() * 448, largest, rtol=1e-4),
        "by row": near(by_row, scales, norm, interpreted),
        "shapes": (y.shape, h.shape, scales.shape) == (shape, shape, (*shape[:-1], 1)),
        "x is as it was": torch.equal(case.x, before),
    }
    found = [f"{what} {plan}: {name}" for name, good in checks.items() if not good]
    for t in (y, h, scales, by_row.view(torch.uint8)):
        first = t.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, t):
            found.append(f"{what} {plan}: ranks differ")
    return found


def plans_for(rows: int, n: int, dtype: torch.dtype, ranks: int) -> list[str]:
    """Those that take such rows."""
    name = str(dtype).removeprefix("torch.")
    found: list[str] = []
    for plan in PLANS[:-1]:
        try:
            build(Problem("all_reduce_norm", rows, n, ranks=ranks, dtype=name), plan)  # type: ignore[arg-type]
        except cp.InputError:
            continue
        found.append(plan)
    return [*found, "auto"]


SHAPES = [((5,), 24), ((2, 3), 40), ((1,), 4), ((3,), 7)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.shows("all_reduce_rms_norm all_reduce_layer_norm", "forward", "bf16 fp16 fp32 fp8")
@on_ranks(1, 2, 3, 4)
def test_results_are_those_of_fp64(rank: int, ranks: int, draw: Draw) -> list[str]:
    """By torch, as on a user's CPU ranks; rows that ranks share evenly and not."""
    found: list[str] = []
    with by_reference():
        for (rows, n), layer, dtype in draw([*product(SHAPES, (False, True), DTYPES)], 6):
            case = case_of(rows, n, dtype, layer=layer, bare=n == 4)
            for plan in plans_for(len(case.x.flatten(0, -2)), n, dtype, ranks):
                found += wrong(case, plan, f"{rows} {n} {dtype} layer={layer}")
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layer", [False, True])
@on_ranks(2, 4)
def test_kernels_give_them_too(rank: int, ranks: int, layer: bool, draw: Draw) -> list[str]:
    """Interpreted; more rows than programs, rows of one word, of powers of two and not."""
    found: list[str] = []
    every = [*zip(SHAPES, (*DTYPES, torch.float32), strict=True)]
    for (rows, n), dtype in draw(every, 2):
        case = case_of(rows, n, dtype, layer=layer, bare=n == 4)
        for plan in plans_for(len(case.x.flatten(0, -2)), n, dtype, ranks):
            found += wrong(case, plan, f"{rows} {n} {dtype}", interpreted=True)
    return found


@on_ranks(4)
def test_norms_between_islands_are_the_librarys(rank: int, ranks: int) -> list[str]:
    """With a residual and without, also of fp8 results; kernels reach one island alone."""
    found: list[str] = []
    for size in (1, 2):
        with on_islands(rank, size), by_reference():
            for (rows, n), layer in product(SHAPES, (False, True)):
                case = case_of(rows, n, torch.float16, layer=layer, bare=n == 4)
                found += wrong(case, "auto", f"{rows} {n} layer={layer} on islands of {size}")
            assert {(n, spec) for _, n, spec in plans_run()} == {(ranks // size, "serial")}
            with pytest.raises(cp.InputError, match="plan must be for ranks of one island"):
                case_of((5,), 24, torch.float16).call(plan="direct")
    return found


@on_ranks(2)
def test_plans_give_the_same_bits_on_two_ranks(rank: int, ranks: int) -> None:
    """The sum of two numbers has one rounding, whoever adds them; -0.0 is 0.0 in words."""
    case = case_of((3,), 32, torch.bfloat16)
    case.x[0, ::3], case.x[1] = -0.0, 0.0
    assert case.residual is not None
    case.residual[0] = -0.0
    first = case.call(plan="serial")
    for plan in PLANS[1:]:
        for got, want in zip(case.call(plan=plan), first, strict=True):
            assert torch.equal(got, want), plan


def gradients(case: Case, call: Callable[..., Any], dy: Tensor, dh: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in case[:4] if t is not None]
    x, *rest = leaves
    names = [n for n, t in zip(("residual", "weight", "bias"), case[1:4], strict=True)
             if t is not None]  # fmt: skip
    y, h = call(x, **dict(zip(names, rest, strict=True)))
    return list(torch.autograd.grad((y, h), leaves, (dy, dh)))


def called(case: Case, plan: str) -> Callable[..., Any]:
    """The function of x and of the tensors that are there."""

    def call(x: Tensor, **given: Tensor) -> Any:
        shared = {"residual": None, "bias": None} | given
        return case._replace(x=x, **shared).call(plan=plan)

    return call


@pytest.mark.shows("all_reduce_rms_norm all_reduce_layer_norm", "backward", "fp32 bf16")
@on_ranks(1, 2)
def test_gradients_are_those_of_fp64(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for layer, bare, dtype in product((False, True), (False, True), (torch.float32, DTYPES[1])):
        case = case_of((2, 3), 24, dtype, layer=layer, bare=bare)
        dy, dh = (case_of((2, 3), 24, dtype).residual for _ in range(2))
        assert dy is not None and dh is not None
        got = gradients(case, called(case, "auto"), dy, dh)

        def exact(x: Tensor, case: Case = case, **given: Tensor) -> tuple[Tensor, Tensor]:
            # the others' x is a constant of this rank's gradient
            total = x.detach().clone()
            dist.all_reduce(total)
            h = x + (total - x.detach())
            h = h + given["residual"] if "residual" in given else h
            wide = case._replace(weight=given["weight"], bias=given.get("bias"))
            return norm_of(wide, h), h

        doubled: Any = {name: t if t is None else t.double()
                        for name, t in zip(Case._fields[:4], case[:4], strict=True)}  # fmt: skip
        wide = case._replace(**doubled)
        want = gradients(wide, exact, dy.double(), dh.double())
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            if a.dtype != dtype or off(a, b) > 6 * torch.finfo(dtype).eps:
                found.append(f"layer={layer} bare={bare} {dtype} {i}: {off(a, b)}")
    return found


@pytest.mark.shows("all_reduce_rms_norm all_reduce_layer_norm", "double backward", "refused")
@on_ranks(2)
def test_gradients_that_are_refused(rank: int, ranks: int) -> None:
    case = case_of((3,), 8, torch.float32)
    x = case.x.requires_grad_()
    y, _ = case.call()
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(cp.UnsupportedError, match="double backward"):
        dx.sum().backward()
    want = "x must be without requires_grad: an fp8 result has no gradient"
    with pytest.raises(cp.InputError, match=want):
        case.call(out_dtype=FP8, scale=torch.tensor(1.0))
    with torch.no_grad():
        y, _ = case.call(out_dtype=FP8, scale=torch.tensor(1.0))
    assert not y.requires_grad


@pytest.mark.shows(
    "all_reduce_rms_norm all_reduce_layer_norm", "compiled forward, compiled backward", "fp32"
)
@on_ranks(2)
def test_a_compiled_call_is_the_eager_one(rank: int, ranks: int) -> None:
    torch.compiler.reset()
    for layer, plan in ((False, "serial"), (True, "direct")):
        case = case_of((3,), 16, torch.float32, layer=layer)
        dy, dh = torch.randn(3, 16), torch.randn(3, 16)
        call = called(case, plan)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        want = gradients(case, call, dy, dh)
        assert all(map(torch.equal, gradients(case, compiled, dy, dh), want))
        fp8 = partial(case.call, plan=plan, out_dtype=FP8)
        same = torch.compile(fp8, backend="aot_eager", fullgraph=True)()
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(fp8(), same, strict=True))


@on_ranks(2)
def test_opcheck_of_the_operators(rank: int, ranks: int) -> None:
    ops: Any = torch.ops.counterpoint
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    where = "serial", world().group_name
    for layer, scale in product((False, True), (None, torch.tensor(0.5))):
        case = case_of((3,), 8, torch.float32, layer=layer)
        for fp8 in (False, True):
            given = (*case[:4], scale if fp8 else None, "layer" if layer else "rms", 1e-5, fp8)
            for op, more in ((ops.all_reduce_norm, where), (ops.add_norm, ())):
                found = torch.library.opcheck(op.default, (*given, *more), test_utils=tests)
                assert set(found.values()) == {"SUCCESS"}


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> list[str]:
    x, r, w, one = torch.randn(2, 4), torch.randn(2, 4), torch.ones(4), torch.ones(())
    cases: list[Refusal] = [
        ({"x": x.double()}, "x must be bf16, fp16 or fp32, got torch.float64"),
        ({"x": x[0]}, "x must be [rows, ..., N] of 2 or more dims and 1 or more columns, got (4,)"),
        ({"x": None}, "x must be a Tensor, got NoneType"),
        ({"residual": r[:1]}, "residual must be (2, 4), got (1, 4)"),
        ({"residual": r.half()},
         "residual must be torch.float32 on cpu as x, got torch.float16 on cpu"),
        ({"weight": None}, "weight must be a Tensor, got NoneType"),
        ({"weight": r}, "weight must be [N=4], got (2, 4)"),
        ({"eps": -1}, "eps must be a number >= 0, got -1"),
        ({"eps": [1]}, "eps must be a number >= 0, got [1]"),
        ({"out_dtype": torch.float16},
         "out_dtype must be torch.float8_e4m3fn, or torch.float32 as x, got torch.float16"),
        ({"scale": one}, "scale must be None without out_dtype=torch.float8_e4m3fn, got Tensor"),
        ({"scale": 0.5, "out_dtype": FP8}, "scale must be a Tensor, got float"),
        ({"scale": one.half(), "out_dtype": FP8},
         "scale must be 1 number, torch.float32 on cpu as x, got (), torch.float16 on cpu"),
        ({"scale": r, "out_dtype": FP8},
         "scale must be 1 number, torch.float32 on cpu as x, got (2, 4), torch.float32 on cpu"),
    ]  # fmt: skip
    base: dict[str, Any] = {"x": x, "residual": r, "weight": w}
    return wrongly_refused(cp.all_reduce_rms_norm, base, cases, exact=True)


@on_ranks(2)
def test_calls_that_repeat_know_their_settings(rank: int, ranks: int) -> None:
    """What tells one call from another is not in its tensors alone; no rows are a call, too."""
    case = case_of((3,), 16, torch.float32, layer=True)
    plain = case._replace(layer=False, bias=None)
    for _ in range(3):
        layer, rms = case.call(plan="fused"), plain.call(plan="fused")
        wide = plain._replace(eps=1.0).call(plan="fused")
        assert off(layer[0], norm_of(case, layer[1])) < 1e-6
        assert off(rms[0], norm_of(plain, rms[1])) < 1e-6
        assert off(wide[0], norm_of(plain._replace(eps=1.0), wide[1])) < 1e-6
    none = cp.all_reduce_layer_norm(torch.zeros(0, 16), None, case.weight, case.bias, out_dtype=FP8)
    assert [t.shape for t in none] == [(0, 16), (0, 16), (0, 1)]


@on_ranks(2)
def test_no_rows_have_a_backward(rank: int, ranks: int) -> None:
    x, weight = torch.zeros(0, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    for norm in (cp.all_reduce_rms_norm, cp.all_reduce_layer_norm):
        dx, dweight = torch.autograd.grad(norm(x, None, weight)[0].sum(), (x, weight))
        assert dx.shape == (0, 16) and not dweight.any()


@on_ranks(2)
def test_plans_are_tuned_on_random_calls(rank: int, ranks: int) -> None:
    problem = Problem(
        "all_reduce_norm", 4, 16, ranks=2, dtype="float32", bias=True, norm="layer", eps=1e-3,
        residual=True, quantized="tensor",
    )  # fmt: skip
    sample = sample_of(problem, world(), torch.device("cpu"))
    results: Any = [sample.call(plan)(0) for plan in ("serial", "fused")]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.shows("matmul_all_reduce_rms_norm", "forward, backward", "fp32")
@pytest.mark.shows("matmul_all_reduce_layer_norm", "forward", "fp32 fp8")
@on_ranks(2)
def test_a_norm_behind_a_matmul(rank: int, ranks: int) -> None:
    """The same as of its product, gradients included; its bias, fp8, and a LayerNorm, too."""
    torch.manual_seed(rank)
    x, w = torch.randn(3, 8).requires_grad_(), torch.randn(8, 16).requires_grad_()
    case, bias = case_of((3,), 16, torch.float32, layer=True), torch.ones(16)
    norm: dict[str, Any] = {"residual": case.residual, "norm_weight": case.weight}
    options: list[dict[str, Any]] = [{}, {"out_dtype": FP8, "scale": torch.tensor(0.1)}]
    for option in options:
        given: dict[str, Any] = {"eps": case.eps, **option}
        with torch.no_grad():
            y, h = cp.matmul_all_reduce_layer_norm(
                x, w, bias=bias, norm_bias=case.bias, **norm, **given
            )
        both = case._replace(x=(x @ w).detach() + bias / 2)
        want, total = both.call(**option)
        torch.testing.assert_close((y.float(), h), (want.float(), total))
    y, h = cp.matmul_all_reduce_rms_norm(x, w, bias=bias, eps=case.eps, **norm)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    with torch.autocast("cpu", torch.bfloat16):
        half = cp.matmul_all_reduce_rms_norm(x, w, bias=bias, eps=case.eps, **norm)
    assert all(t.dtype == torch.bfloat16 for t in half)
    torch.testing.assert_close([t.float() for t in half], [y, h], atol=0.1, rtol=0.02)
    plain = case._replace(layer=False, bias=None, x=h.detach().requires_grad_())
    (dh,) = torch.autograd.grad(norm_of(plain, plain.x).sum(), plain.x)
    torch.testing.assert_close((dx, dw), (dh @ w.t(), x.t() @ dh))
