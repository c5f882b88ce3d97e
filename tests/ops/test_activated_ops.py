"""all_gather_matmul with an activation: every family against fp64, gradients, compilers, errors."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import by_reference
from refusals import wrongly_refused
from torch import Tensor

import counterpoint as cp
from counterpoint.measure.timing import relative_error
from counterpoint.ops.activations import NAMES
from counterpoint.plan.families import families
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem
from counterpoint.run.activated import FUNCTIONS

K, N = 24, 12
ROWS = {1: (5,), 2: (3, 3), 3: (4, 0, 3), 4: (2, 2, 2, 2)}


class Layer:
    """Operands of every rank, and what the result has to be."""

    def __init__(self, rank: int, ranks: int, activation: str, dtype: torch.dtype, seed: int = 0):
        self.rank, self.activation, self.gated = rank, activation, activation.endswith("_mul")
        self.rows = ROWS[ranks]

        def normal(*shape: int, of: int) -> Tensor:
            made = torch.Generator().manual_seed(100 * seed + of)
            return torch.randn(*shape, generator=made).to(dtype)

        self.xs = [normal(m, 2, K, of=r) for r, m in enumerate(self.rows)]
        weights = [normal(N, K, of=10 + rank).t(), normal(K, N, of=20 + rank)]
        self.w: Any = weights if self.gated else weights[0]
        self.bias = None if self.gated else normal(N, of=30 + rank)

    def call(self, plan: Any = "auto", **options: Any) -> Tensor:
        rows = {} if len({*self.rows}) == 1 else {"rows": self.rows}
        given = {"bias": self.bias, "activation": self.activation, "plan": plan, **rows}
        with by_reference():
            return cp.all_gather_matmul(self.xs[self.rank], self.w, **given | options)

    def want(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """By torch in a dtype."""
        x = torch.cat(self.xs).to(dtype)
        gate, *up = [x @ w.to(dtype) for w in (self.w if self.gated else [self.w])]
        gate = gate if self.bias is None else gate + self.bias.to(dtype)
        y = FUNCTIONS[self.activation.removesuffix("_mul")](gate)
        return y * up[0] if up else y


def takes(layer: Layer, spec: str, dtype: torch.dtype) -> bool:
    rows = tuple(2 * m for m in layer.rows)
    n, name = N * (1 + layer.gated), str(dtype).removeprefix("torch.")
    p = Problem("all_gather_matmul", sum(rows), n, K, len(rows), name, rows,  # type: ignore[arg-type]
                activation=layer.activation)  # type: ignore[arg-type]  # fmt: skip
    family = operation_of(p.op).family(spec.split()[0])
    return spec == "auto" or (family is not None and (len(rows) == 1 or not family.refusal(p)))


@pytest.mark.drawn(3)
@pytest.mark.shows("all_gather_matmul", "forward", "bf16 fp16 fp32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@on_ranks(1, 2, 3, 4)
def test_every_family_against_fp64(rank: int, ranks: int, dtype: torch.dtype) -> list[str]:
    found, met = list[str](), set[str]()
    specs = ("auto", *families("all_gather_matmul"), "shard_p2p ring chunks=2", "serial invariant")
    for i, activation in enumerate(NAMES):
        for j, spec in enumerate(specs if i in (2, 5) else specs[i % 4 :: 4]):
            layer = Layer(rank, ranks, activation, dtype, seed=i + j)
            if not takes(layer, spec, dtype):
                continue
            met.add(spec)
            want, plain = layer.want(), layer.want(dtype)
            limit = 2 * relative_error(plain, want) + torch.finfo(dtype).eps
            for _ in range(3):
                y = layer.call(spec)
                error = relative_error(y, want)
                if y.shape != want.shape or y.dtype != dtype or not error <= limit:
                    found.append(f"{activation} {spec}: {tuple(y.shape)} {y.dtype}, {error:.3g}")
    missing = {*specs} - met
    assert missing <= {"islands", "direct"}, missing
    return found


@on_ranks(2)
def test_the_bits_are_those_of_products_that_are_stored(rank: int, ranks: int) -> list[str]:
    """So they do not depend on who asks for a gradient, nor in the mode on rows beside."""
    found = list[str]()
    for activation in NAMES:
        layer = Layer(rank, ranks, activation, torch.bfloat16)
        for plan in ("serial invariant", "shard_p2p invariant"):
            y = layer.call(plan)
            layer.xs[rank].requires_grad_()
            trained = layer.call(plan)
            layer.xs[rank] = layer.xs[rank].detach()
            assert trained.requires_grad and not y.requires_grad
            if not torch.equal(y, trained):
                found.append(f"{activation} {plan}: other bits where it is trained")
    return found


@on_ranks(2)
def test_bits_of_rows_do_not_depend_on_the_rows_beside(rank: int, ranks: int) -> list[str]:
    torch.manual_seed(5)
    x, gate, up = torch.randn(64, K), torch.randn(K, N), torch.randn(K, N)
    found = list[str]()

    def call(m: int, plan: str) -> Tensor:
        shares = [(m + r) // 2 for r in range(2)]
        start = sum(shares[:rank])
        with cp.batch_invariant(), by_reference():
            return cp.all_gather_matmul(
                x[start : start + shares[rank]], (gate, up), rows=shares, plan=plan,
                activation="silu_mul",
            )  # fmt: skip

    want = call(64, "serial")
    for plan in ("auto", "serial", "shard_p2p", "uniform_unfused_1d"):
        for m in (1, 2, 7, 33):
            if not torch.equal(call(m, plan), want[:m]):
                found.append(f"{plan} M{m}")
    return found


@pytest.mark.shows("all_gather_matmul", "backward", "fp32")
@on_ranks(1, 2, 3)
def test_gradients(rank: int, ranks: int) -> list[str]:
    """Of x, of each weight and of a bias, against torch in fp64 on all rows."""
    found = list[str]()
    for activation in NAMES:
        layer = Layer(rank, ranks, activation, torch.float32, seed=3)
        mine = [layer.xs[rank], *(layer.w if layer.gated else [layer.w])]
        mine += [] if layer.bias is None else [layer.bias]
        for t in mine:
            t.requires_grad_()
        y = layer.call("graded" if ranks > 1 else "auto")
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(rank)).double()
        got = torch.autograd.grad(y, mine, dy.float())

        xs = [x.detach().double().requires_grad_() for x in layer.xs]
        ws = [t.detach().double().requires_grad_() for t in mine[1:]]
        products = [torch.cat(xs) @ w for w in ws[: 1 + layer.gated]]
        gate = products[0] if layer.bias is None else products[0] + ws[-1]
        want = FUNCTIONS[activation.removesuffix("_mul")](gate)
        want = want * products[1] if layer.gated else want
        dxs, dws = torch.autograd.grad(want, xs, dy, retain_graph=True), torch.autograd.grad(
            want, ws, dy
        )  # fmt: skip
        whole = torch.cat(dxs)
        dist.all_reduce(whole)
        dx = whole.split(list(layer.rows))[rank]
        for name, g, w in zip(("x", "w", "w or bias"), got, (dx, *dws), strict=False):
            if w.numel() and not relative_error(g, w) < 1e-5:
                found.append(f"{activation}: d{name} {relative_error(g, w):.3g}")
    return found


@on_ranks(2)
def test_what_is_saved_are_the_products(rank: int, ranks: int):
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    layer = Layer(rank, ranks, "silu_mul", torch.float32)
    for w in layer.w:
        w.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = layer.call()
    sizes = sorted(t.numel() for t in saved)
    own = sorted(t.numel() for t in (layer.xs[rank], *layer.w))
    assert sizes == sorted([*own, y.numel(), y.numel()])


@on_ranks(2)
def test_any_dim_is_gathered(rank: int, ranks: int):
    torch.manual_seed(1)
    whole, ws = torch.randn(4, 6, K), [torch.randn(K, N) for _ in range(2)]
    want = torch.nn.functional.silu(whole @ ws[0]) * (whole @ ws[1])
    for _ in range(2):
        part = whole.chunk(2, 1)[rank]
        y = cp.all_gather_matmul(part, ws, activation="silu_mul", gather_dim=1)
        torch.testing.assert_close(y, want)
        part = whole.chunk(2, 2)[rank].contiguous()
        y = cp.all_gather_matmul(part, ws, activation="silu_mul", gather_dim=-1)
        torch.testing.assert_close(y, want)


@on_ranks(2)
def test_nothing_to_sum_or_no_rows(rank: int, ranks: int):
    bias = torch.randn(N)
    y = cp.all_gather_matmul(torch.empty(2, 0), torch.empty(0, N), bias=bias, activation="gelu")
    want = torch.nn.functional.gelu(bias).expand(4, N)
    torch.testing.assert_close(y, want)
    ws = torch.randn(K, N), torch.randn(K, N)
    assert cp.all_gather_matmul(torch.empty(0, K), ws, activation="silu_mul").shape == (0, N)


@on_ranks(2)
def test_as_operators_of_torch(rank: int, ranks: int, draw: Draw):
    """opcheck, and compiled, with gradients and without."""
    layer = Layer(rank, ranks, "silu_mul", torch.float32)
    x, name = layer.xs[rank], dist.group.WORLD.group_name  # type: ignore[union-attr]
    op: Any = torch.ops.counterpoint
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (op.all_gather_matmul_activated, (x, layer.w, None, "silu_mul", "auto", [], name, ranks)),
        (op.all_gather_matmul_activated, (x, layer.w[:1], torch.randn(N), "gelu", "serial", [],
                                          name, ranks)),
    ]  # fmt: skip
    h, up = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    for activation in draw(NAMES, 3):
        second = up if activation.endswith("_mul") else None
        calls.append((op.activated, (h, second, activation, None, 0)))
    dy = torch.randn(2, 3, 4)
    calls.append((op.activated_gradient, (dy, h.detach(), up.detach(), "silu_mul", None, 0)))
    calls.append((op.activated_gradient, (dy, h.detach(), None, "gelu", None, 0)))
    for each, given in calls:
        assert set(torch.library.opcheck(each.default, given).values()) == {"SUCCESS"}

    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return cp.all_gather_matmul(x, (gate, up), activation="silu_mul")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        y = function(x, *layer.w)
        assert torch.equal(compiled(x, *layer.w), y)
        given = [t.detach().clone().requires_grad_() for t in (x, *layer.w)]
        want = torch.autograd.grad(function(*given), given, torch.ones_like(y))
        got = torch.autograd.grad(compiled(*given), given, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@on_ranks(2)
def test_autocast(rank: int, ranks: int):
    torch.manual_seed(2)
    x, ws = torch.randn(3, K), [torch.randn(K, N) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        y = cp.all_gather_matmul(x, ws, activation="silu_mul")
    low = [t.bfloat16() for t in (x, *ws)]
    assert torch.equal(y, cp.all_gather_matmul(low[0], low[1:], activation="silu_mul"))


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> list[str]:
    x, w = torch.randn(3, K), torch.randn(K, N)
    scaled = cp.Scaled(torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(1))
    base = {"x": x, "w": (w, w), "activation": "silu_mul"}
    said = [
        ({"activation": "swish"}, "activation must be one of relu, silu, gelu, gelu_tanh, relu"),
        ({"activation": ["gelu"]}, "activation must be one of relu"),
        ({"w": w}, "w must be (gate, up) with activation='silu_mul', got Tensor"),
        ({"w": (w,)}, "w must be (gate, up) with activation='silu_mul', got 1 weights"),
        ({"w": (w, w, w)}, "w must be (gate, up) with activation='silu_mul', got 3 weights"),
        ({"activation": "gelu"}, "w must be a Tensor with activation='gelu', got 2 weights"),
        ({"w": (w, w[:, :3])}, "w must be of one shape, gate and up, got"),
        ({"w": (w, w.double())}, "w must be torch.float32 as x, got torch.float64"),
        ({"w": (w, None)}, "w must be"),
        ({"bias": torch.randn(N)}, "bias must be None with activation='silu_mul', got a Tensor"),
        ({"x": scaled}, "w must be one counterpoint.Scaled, as x is, got Tensor"),
        ({"w": (scaled, scaled)}, "x must be one counterpoint.Scaled, as w is, got Tensor"),
        ({"x": scaled, "w": (scaled, w)}, "w must be one counterpoint.Scaled, as x is, got Tensor"),
        ({"x": scaled, "w": scaled}, "w must be (gate, up) with activation='silu_mul', got Tensor"),
        ({"x": scaled, "w": ()}, "w must be (gate, up) with activation='silu_mul', got 0 weights"),
        ({"plan": "uniform_fused_2d"}, "plan must be for one weight, got 'uniform_fused_2d'"),
        ({"x": x[0]}, "x must be [rows, ..., K] of 2 or more dims, got 1-D"),
    ]  # fmt: skip
    wrong = wrongly_refused(cp.all_gather_matmul, base, said)
    y = cp.all_gather_matmul(x, (w, w), activation="silu_mul")
    assert y.shape == (6, N) and y.isfinite().all()
    return wrong
