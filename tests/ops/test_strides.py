"""Operands that lie in any legal way, on one rank alone: results are those of others."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks
from torch import Tensor

import counterpoint as cp
from counterpoint import nn as cnn

E4M3 = torch.float8_e4m3fn


def ways_to_lie(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers in other memory: names, and new tensors."""
    dims = t.dim()
    yield "with an offset", _in(t.new_empty(t.numel() + 3)[3:].view(t.shape), t)
    for dim in range(dims):
        wide = [*t.shape]
        wide[dim] = 2 * wide[dim] + 1
        some = tuple(
            slice(0, 2 * size, 2) if d == dim else slice(None) for d, size in enumerate(t.shape)
        )
        yield f"every other of dim {dim}", _in(t.new_empty(wide)[some], t)
    if dims > 1:
        for order in ((-1, -2), (0, -1)):
            other = t.transpose(*order).contiguous().transpose(*order)
            yield f"transposed {order}", other
    strides = [*t.stride()]
    for odd in (0, 7):
        other = [
            odd if size == 1 else stride for size, stride in zip(t.shape, strides, strict=True)
        ]
        if other != strides:
            yield f"strides {other}", t.as_strided(t.shape, other)
    if not t.is_floating_point() or t.dtype == E4M3:
        return
    mirrored = torch.complex(torch.zeros_like(t, dtype=torch.float32), -t.float())
    if t.dtype == torch.float32:
        yield "a lazy negative", mirrored.conj().imag


def _in(place: Tensor, t: Tensor) -> Tensor:
    place.copy_(t)
    return place


def repeated(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one number, row or column, expanded: names, and other numbers than t's."""
    for dim in range(t.dim()):
        if t.shape[dim]:
            yield f"repeated in dim {dim}", t.narrow(dim, 0, 1).expand(t.shape)


def all_reduced(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return cp.all_reduce_layer_norm(x, residual, weight, bias)


def products_normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return cp.matmul_all_reduce_rms_norm(x, w, residual=residual, norm_weight=weight)


def scaled(op: Any) -> Callable[..., Any]:
    def call(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Any:
        return op(cp.Scaled(x, x_scale), cp.Scaled(w, w_scale))

    return call


def experts(x: Tensor, w: Tensor, down: Tensor, weights: Tensor) -> Any:
    counts = torch.full((2, 2), len(x) // 2)
    y = cp.all_to_all_matmul(x, w, counts=counts)
    index = torch.arange(len(x)).view(-1, 1).flip(0)
    return cp.matmul_all_to_all(y, down, counts=counts, sum_of=(index, weights))


def by_routes(x: Tensor, w: Tensor, down: Tensor, weights: Tensor) -> Any:
    chosen = torch.arange(len(x)).view(-1, 1) % 2
    routes = cp.exchange_routes(chosen, weights, num_experts=2)
    return cp.matmul_all_to_all(cp.all_to_all_matmul(x, w, counts=routes), down, counts=routes)


def bags(table: Tensor, weights: Tensor) -> Any:
    indices, offsets = torch.arange(len(weights)) % 3, torch.arange(4) % 2
    return cp.embedding_bag_all_to_all(
        [table], indices, offsets.sort().values * len(weights) // 2, per_sample_weights=weights
    )


def floats(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def fp8(m: int, k: int, n: int, kind: str) -> list[Tensor]:
    x, w = torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3).t()
    of_x, of_w = ((m, 1), (1, n)) if kind == "row" else ((1,), (1,))
    return [x, torch.rand(of_x) + 0.5, w, torch.rand(of_w) + 0.5]


SIZES = [(1, 5, 3), (2, 1, 2), (3, 4, 1), (0, 2, 3)]
CALLS: dict[str, tuple[Callable[..., Any], Callable[[int, int, int], list[Tensor]]]] = {
    "gather": (cp.all_gather_matmul, lambda m, k, n: floats((m, k), (k, n))),
    "gather 3-D": (cp.all_gather_matmul, lambda m, k, n: floats((m, 1, k), (k, n))),
    "gather dim 1": (lambda x, w: cp.all_gather_matmul(x, w, gather_dim=1),
                     lambda m, k, n: floats((2, m, k), (k, n))),
    "gather K": (lambda x, w: cp.all_gather_matmul(x, w, gather_dim=-1),
                 lambda m, k, n: floats((m, k), (2 * k, n))),
    "gather with a bias": (lambda x, w, b: cp.all_gather_matmul(x, w, bias=b),
                           lambda m, k, n: floats((m, k), (k, n), (n,))),
    "gather for two": (lambda x, w, v: cp.all_gather_matmul(x, [w, v]),
                       lambda m, k, n: floats((m, k), (k, n), (k, n))),
    "gather gated": (lambda x, w, v: cp.all_gather_matmul(x, [w, v], activation="silu_mul"),
                     lambda m, k, n: floats((m, k), (k, n), (k, n))),
    "scatter": (lambda x, w, b: cp.matmul_reduce_scatter(x, w, bias=b),
                lambda m, k, n: floats((2 * m, k), (k, n), (n,))),
    "scatter dim 1": (lambda x, w: cp.matmul_reduce_scatter(x, w, scatter_dim=1),
                      lambda m, k, n: floats((1, 2 * m, k), (k, n))),
    "scatter columns": (lambda x, w: cp.matmul_reduce_scatter(x, w, scatter_dim=-1),
                        lambda m, k, n: floats((m, k), (k, 2 * n))),
    "reduce": (lambda x, w, b: cp.matmul_all_reduce(x, w, bias=b),
               lambda m, k, n: floats((m, k), (k, n), (n,))),
    "norm": (all_reduced, lambda m, k, n: floats((m, k), (m, k), (k,), (k,))),
    "norm 3-D": (all_reduced, lambda m, k, n: floats((m, 1, k), (m, 1, k), (k,), (k,))),
    "product and norm": (products_normed, lambda m, k, n: floats((m, k), (k, n), (m, n), (n,))),
    "attention": (lambda q, k, v: cp.all_gather_attention(q, k, v, layout="bshd"),
                  lambda m, k, n: floats(*[(n, m, 1, k)] * 3)),
    "attention of heads": (lambda q, k, v: cp.all_gather_attention(q, k, v, layout="bhsd"),
                           lambda m, k, n: floats((1, 2, m, k), *[(1, 1, m, k)] * 2)),
    "experts": (experts, lambda m, k, n: floats((2 * m, k), (1, k, n), (1, n, k), (2 * m, 1))),
    "experts by routes": (by_routes,
                          lambda m, k, n: floats((2 * m, k), (1, k, n), (1, n, k), (2 * m, 1))),
    "copied": (lambda b: cnn.copy_to_group(b) * 2, lambda m, k, n: floats((m, k))),
}  # fmt: skip
SCALED = {
    f"{op.__name__} in fp8 by {kind}": (scaled(op), kind)
    for op in (cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce)
    for kind in ("tensor", "row")
}


def results(call: Callable[..., Any], given: list[Tensor], dys: list[Tensor] | None) -> Any:
    """What a call returns, and its gradients."""
    given = [t.detach() for t in given]
    with torch.set_grad_enabled(dys is not None):
        if dys is not None:
            given = [t.requires_grad_() for t in given]
        ys = call(*given)
        ys = list(ys) if isinstance(ys, list | tuple) else [ys]
    if dys is None:
        return ys
    dys += [torch.randn(y.shape) for y in ys[len(dys) :]]
    return [*ys, *torch.autograd.grad(ys, given, dys, allow_unused=True)]


def differences(what: str, got: list[Any], want: list[Any]) -> list[str]:
    wrong: list[str] = []
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        try:
            torch.testing.assert_close(one, other)
        except AssertionError as error:
            wrong.append(f"{what}: result {i}: {error}")
    return wrong


def compared(name: str, call: Callable[..., Any], given: list[Tensor], rank: int, *, trains: bool
) -> Iterator[str]:  # fmt: skip
    """What is wrong with a call of operands of which one lies in another way on rank 1."""
    for i, plain in enumerate(given):
        for change in (ways_to_lie, repeated):
            for way, odd in change(plain):
                if odd.dim() == 3 and "experts" in name and 1 not in (odd.stride(1), odd.stride(2)):
                    continue  # it is refused
                # rank 0 has the same numbers without gaps
                same = odd.resolve_neg().clone(memory_format=torch.contiguous_format)
                want = [*given[:i], same, *given[i + 1 :]]
                mine = [*given[:i], odd, *given[i + 1 :]] if rank else want
                for dys in (None, *([[]] if trains else [])):
                    what = f"{name} {[list(t.shape) for t in given]}, operand {i} {way}"
                    expected = results(call, want, dys)
                    yield from differences(what, results(call, mine, dys), expected)
                    if dys:  # gradients that lie oddly
                        yield from differences(
                            f"{what} and dy",
                            results(call, mine, _odd(dys) if rank else dys),
                            expected,
                        )


def _odd(dys: list[Tensor]) -> list[Tensor]:
    return [[odd for _, odd in ways_to_lie(dy)][-2 if dy.dim() else 0] for dy in dys]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_any_strides(rank: int, ranks: int, name: str, draw: Draw) -> list[str]:
    os.environ["COUNTERPOINT_TIMEOUT_S"] = "20"  # of a rank that has raised
    call, made = CALLS[name]
    wrong: list[str] = []
    for sizes in draw(SIZES, 1):
        wrong += compared(name, call, made(*sizes), rank, trains=True)
    return wrong


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SCALED)
@on_ranks(2)
def test_any_strides_with_scales(rank: int, ranks: int, name: str) -> list[str]:
    os.environ["COUNTERPOINT_TIMEOUT_S"] = "20"
    call, kind = SCALED[name]
    rows = 2 if "scatter" in name else 1
    wrong: list[str] = []
    for m, k, n in ((2, 16, 16), (1, 16, 32)):
        wrong += compared(name, call, fp8(rows * m, k, n, kind), rank, trains=False)
    return wrong


@on_ranks(2)
def test_any_strides_of_bags(rank: int, ranks: int) -> list[str]:
    """Where it is legal: a table's rows have no gaps, weights none at all."""
    os.environ["COUNTERPOINT_TIMEOUT_S"] = "20"
    table, weights = torch.randn(3, 2), torch.rand(4)
    wrong: list[str] = []
    for name, odd in ways_to_lie(table):
        if odd.stride(1) == 1:
            for grads in (None, []):
                want = results(bags, [table, weights], grads)
                wrong += differences(name, results(bags, [odd, weights], grads), want)
    return wrong
