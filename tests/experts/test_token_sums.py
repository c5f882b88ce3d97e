"""Sums of a token's rows and their gradients: kernels interpreted against fp64, and by torch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

from counterpoint.experts.fused import sums as token_sums
from counterpoint.experts.fused.launch_sums import Source, sum_by_kernel, sum_rows

# tokens, top, rows, N; more rows than are named, fewer, a row of two blocks
CASES = ((7, 2, 20, 40), (9, 3, 5, 16), (4, 1, 4, 2100), (3, 2, 0, 8), (0, 2, 6, 8))

Case = tuple[int, int, int, int]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def drawn(
    tokens: int, top: int, rows: int, n: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout, index, weights, y; rows that are named once, several times, and not at all."""
    index = torch.randint(max(rows, 1), (tokens, top))
    weights = torch.randn(tokens, top)
    return torch.randn(tokens, n).to(dtype), index, weights, torch.randn(rows, n).to(dtype)


def want_of(dout: Tensor, index: Tensor, weights: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """By autograd in fp64, from what a token is by definition."""
    exact, scale = y.double().requires_grad_(), weights.double().requires_grad_()
    out = (exact[index] * scale[..., None]).sum(1)
    dy, dweights = torch.autograd.grad(out, (exact, scale), dout.double(), allow_unused=True)
    assert dy is not None and dweights is not None
    return dy, dweights


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    bound = 1e-5 + torch.finfo(dtype).eps * want.abs()
    return got.shape == want.shape and bool(((got.double() - want).abs() <= bound).all())


@contextmanager
def interpreted() -> Iterator[None]:
    """What Triton's interpreter warns of is no error of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.mark.drawn(6)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@DTYPES
@on_ranks(1)
def test_kernels_sum_as_fp64_does(
    rank: int, ranks: int, dtype: torch.dtype, case: Case, kind: torch.dtype
) -> list[str]:
    """Both kernels, on the CPU, into memory full of NaN."""
    found: list[str] = []
    tokens, _, rows, n = case
    dout, index, weights, y = drawn(*case, dtype)
    if not rows:
        dout, index, weights = dout[:0], index[:0], weights[:0]
    dy, dweights = want_of(dout, index, weights, y)
    got, found_w = (
        torch.full((rows, n), torch.nan, dtype=dtype),
        torch.full_like(weights, torch.nan),
    )
    with interpreted():
        token_sums.gradient_into(got, found_w, dout, index.to(kind), weights, y)
        if not near(got, dy, dtype) or not near(found_w, dweights, torch.float32):
            found.append("gradient")
        got.fill_(torch.nan)
        token_sums.gradient_into(got, found_w[:0], dout, index.to(kind), weights, None)
        if not near(got, dy, dtype):
            found.append("gradient of rows alone")
        if tokens and rows:
            out = torch.full((tokens, n), torch.nan, dtype=dtype)
            sum_by_kernel(out, Source(y, index.to(kind)))
            if not near(out, y.double()[index].sum(1), dtype):
                found.append("sum")
    return found


def of_two(case: Case, dtype: torch.dtype) -> tuple[Source, Source, Tensor]:
    """Weighted rows and others, of entries that may name none of either; their sums in fp64."""
    tokens, top, rows, n = case
    sources: list[Source] = []
    want = torch.zeros(tokens, n, dtype=torch.float64)
    for first, width in ((5, top), (0, 1)):
        index = torch.randint(first + rows + 3, (tokens, width), dtype=torch.int32)
        index.masked_fill_(torch.rand(tokens, width) < 0.2, 2**31 - 1)
        y, weights = torch.randn(rows, n).to(dtype), torch.randn(rows) if first else None
        sources.append(Source(y, index, first, weights))
        for j in range(width):
            for t, at in enumerate((index[:, j] - first).tolist()):
                if 0 <= at < rows:
                    want[t] += y[at].double() * (1 if weights is None else weights[at].double())
    return sources[0], sources[1], want


@pytest.mark.drawn(4)
@pytest.mark.parametrize("call", [sum_by_kernel, sum_rows])
@pytest.mark.parametrize("case", CASES[:-1], ids=str)
@DTYPES
@on_ranks(1)
def test_rows_of_two_places_are_summed_and_entries_of_neither_left_out(
    rank: int, ranks: int, dtype: torch.dtype, case: Case, call: Callable[..., None]
):
    source, more, want = of_two(case, dtype)
    out = torch.full(want.shape, torch.nan, dtype=dtype)
    with interpreted():
        call(out, source, more)
    assert near(out, want, dtype)


@on_ranks(1)
def test_rows_that_are_none_are_left_out(rank: int, ranks: int):
    """The forward has said so; the backward reads and writes nothing of them."""
    index, y = torch.tensor([[0, 5], [-1, 1]]), torch.randn(2, 8)
    dout, weights = torch.ones(2, 8), torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    dy, dweights = torch.full((2, 8), torch.nan), torch.zeros(2, 2)
    with interpreted():
        token_sums.gradient_into(dy, dweights, dout, index, weights, y)
    assert dweights[0, 1] == dweights[1, 0] == 0
    assert dy[:, 0].tolist() == [2.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_computes_the_same(dtype: torch.dtype):
    torch.manual_seed(1)
    for case in CASES:
        dout, index, weights, y = drawn(*case, dtype)
        if not case[2]:
            continue
        dy, dweights = want_of(dout, index, weights, y)
        got, found = token_sums.gradients(dout, index, weights, case[2], y)
        assert near(got, dy, dtype) and near(found, dweights, torch.float32)
        got, none = token_sums.gradients(dout, index, weights, case[2], None)
        assert near(got, dy, dtype) and not none.numel()
        out = token_sums.sum_of_tokens(y, index)
        assert near(out, y.double()[index].sum(1), dtype)
    ops = torch.ops.counterpoint
    torch.library.opcheck(ops.token_sum, (y, index))
    torch.library.opcheck(ops.token_sum_gradient, (dout, index, weights, case[2], y))
