"""Norms behind all-reduces in compiled models: which become one operator, and which are left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from compiled import overlap_pass, quick
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from torch import Tensor

N = 24
Layer = Callable[[Tensor, Tensor, Tensor], Any]


def summed(x: Tensor) -> Tensor:
    """Of what no matmul makes."""
    return collectives.all_reduce(torch.relu(x), "sum", world())


def with_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = residual + summed(x)
    return F.rms_norm(h, (N,), weight, 1e-5), h


def alone(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = summed(x)
    return F.rms_norm(h, (N,), weight, 1e-5), h * residual


def behind_views(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """As behind experts, whose rows are those of all sequences.

    Dynamic sizes of x and of the residual are not known to be equal: results are copied, once.
    """
    rows = collectives.all_reduce(torch.relu(x.reshape(-1, N)), "sum", world())
    h = residual + rows.view(residual.shape)
    return F.rms_norm(h, (N,), weight, 1e-5), h


def of_transformers(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """LlamaRMSNorm, line by line."""
    h = residual + summed(x)
    wide = h.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-5)
    return weight * wide.to(h.dtype), h


def by_layer(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = residual + summed(x)
    return F.layer_norm(h, (N,), weight, residual.flatten(0, -2)[0], 1e-5), h


def by_layer_alone(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = summed(x)
    return F.layer_norm(h, (N,), weight, None, 1e-5), h * residual


def in_its_own_dtype(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """The squares are rounded."""
    h = summed(x) + residual
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)), h


def of_gemma(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """Of 1 + weight, which bf16 does not hold."""
    h = summed(x) + residual
    wide = h.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * (1.0 + weight.float())).type_as(h), h


def of_columns(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = summed(x) + residual
    wide = h.float()
    unit = wide * torch.rsqrt(wide.square().mean(0, keepdim=True) + 1e-5)
    return (unit * weight).to(h.dtype), h


def read_between(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = summed(x) + residual
    mean = h.float().pow(2).mean(-1, keepdim=True)
    return (h.float() * torch.rsqrt(mean + 1e-5) * weight).to(h.dtype), mean


def no_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return summed(x) + residual, weight


def operands(rank: int, rows: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """x of this rank; a residual and a weight of all."""
    own, alike = (torch.Generator().manual_seed(seed) for seed in (rank + 1, 99))
    x = torch.randn(*rows, N, generator=own)
    shared = [torch.randn(*shape, N, generator=alike) for shape in (rows, ())]
    return [t.to(dtype) for t in (x, *shared)]


def rms(h: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(h, (N,), weight, 1e-5)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        with_residual,
        alone,
        behind_views,
        of_transformers,
        by_layer,
        by_layer_alone,
    ],
)
@on_ranks(2)
def test_a_norm_behind_an_all_reduce(rank: int, ranks: int, layer: Layer, dynamic: bool):
    kind, is_alone = "layer" if "layer" in layer.__name__ else "rms", "alone" in layer.__name__
    for dtype in (torch.float32, torch.bfloat16):
        torch.compiler.reset()
        overlap = overlap_pass()
        with torch.no_grad(), by_reference(), quick(overlap) as backend:
            compiled = torch.compile(layer, backend=backend, dynamic=dynamic)
            for rows in ((5,), (2, 3)):
                given = operands(rank, rows, dtype)
                y, h = compiled(*given)
                x, residual, weight = (t.double() for t in given)
                total = torch.relu(x)
                dist.all_reduce(total)
                exact = total if is_alone else total + residual
                most = 2 * torch.finfo(dtype).eps
                normed = exact if is_alone else h.double()
                if kind == "rms":
                    want = rms(normed, weight)
                else:
                    bias = None if is_alone else residual.flatten(0, -2)[0]
                    want = F.layer_norm(normed, (N,), weight, bias, 1e-5)
                other = exact * residual if is_alone else exact
                for got, right in ((y, want), (h, other)):
                    assert got.dtype == dtype
                    assert (got.double() - right).norm() <= 2 * most * right.norm()
        for report in overlap.reports:
            operators = [one.operator for one in report.found]
            assert operators == [f"all_reduce_{kind}_norm"], str(report)


@pytest.mark.parametrize("layer", [
    of_columns, read_between, no_norm, in_its_own_dtype, of_gemma,
])  # fmt: skip
@on_ranks(2)
def test_what_is_left_is_as_it_was(rank: int, ranks: int, layer: Layer):
    given = operands(rank, (5,), torch.bfloat16)
    overlap = overlap_pass()
    with torch.no_grad(), by_reference(), quick(overlap) as backend:
        with pytest.warns(Warning, match="no matmul, but relu stands before it"):
            got = torch.compile(layer, backend=backend)(*given)
        for one, want in zip(got, layer(*given), strict=True):
            torch.testing.assert_close(one, want)
    (one,) = overlap.reports[0].found
    assert not one.operator and one.reason == "no matmul, but relu stands before it"


@on_ranks(2)
def test_a_weight_that_is_computed(rank: int, ranks: int):
    """In fp32 1 + weight is a weight like any other."""
    x, residual, weight = operands(rank, (5,), torch.float32)
    overlap = overlap_pass()
    with torch.no_grad(), by_reference(), quick(overlap) as backend:
        y, h = torch.compile(of_gemma, backend=backend)(x, residual, weight)
        torch.testing.assert_close(y, rms(h, 1 + weight))
        torch.testing.assert_close(h, of_gemma(x, residual, weight)[1])
    assert overlap.reports[0].found[0].operator == "all_reduce_rms_norm"


@on_ranks(2)
def test_where_a_compiler_rounds_as_eager_does_so_does_the_norm(rank: int, ranks: int):
    given = operands(rank, (5,), torch.bfloat16)
    overlap = overlap_pass()
    rounding = torch._inductor.config.patch(emulate_precision_casts=True)
    with torch.no_grad(), by_reference(), quick(overlap) as backend, rounding:
        with pytest.warns(Warning, match="no matmul, but relu stands before it"):
            got = torch.compile(of_transformers, backend=backend)(*given)
        for one, want in zip(got, of_transformers(*given), strict=True):
            assert torch.equal(one, want)


@on_ranks(2)
def test_in_training_it_is_left(rank: int, ranks: int):
    """Its backward reads what stands between."""
    x, residual, weight = operands(rank, (5,), torch.float32)
    overlap = overlap_pass()
    with by_reference(), quick(overlap) as backend:
        compiled = torch.compile(with_residual, backend=backend)
        with pytest.warns(Warning, match="no matmul, but relu stands before it"):
            y, h = compiled(x, residual, weight.requires_grad_())
        (y.sum() + h.sum()).backward()
    assert weight.grad is not None and not overlap.reports[0].found[0].operator
