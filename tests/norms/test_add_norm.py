"""The kernel of a norm without peers, interpreted against torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from on_ranks import on_ranks

from counterpoint.norms import norms
from counterpoint.norms.norms import FP8, Norm

SHAPES = [(1, 16), (3, 20), (2, 1), (2, 33)]


@contextmanager
def blocks_of(most_columns: int) -> Iterator[None]:
    """A block of a row has at most so many columns; what is compiled is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "MAX_BLOCK", most_columns)
        for forget in (norms.launch_of.cache_clear, norms.compiled.cache_clear):
            forget()
        yield
    norms.launch_of.cache_clear()
    norms.compiled.cache_clear()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("most_columns", [1 << 14, 8])
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@on_ranks(1)
def test_it_is_the_norm_of_its_rows(
    rank: int, ranks: int, kind: str, given: bool, size: tuple[int, int], most_columns: int
):
    """Of y, where rows have as many blocks as it takes; h is to the bit."""
    with blocks_of(most_columns):
        x, residual, weight, bias = (torch.randn(size) for _ in range(4))
        # far from 0: a variance by squares alone would lose its digits
        x, weight, bias = x + 100 * (kind == "layer"), weight[0], bias[0]
        extra = {"residual": residual, "bias": bias if kind == "layer" else None}
        tensors: dict[str, Any] = {"x": x, "weight": weight, **(extra if given else {})}
        y, h = (torch.full_like(x, torch.nan) for _ in range(2))
        norms.run(Norm(kind, 1e-3), tensors, [y, h])  # type: ignore[arg-type]
    assert torch.equal(h, x + residual if given else x)
    h, n = h.double(), size[1:]
    if kind == "layer":
        wide = bias.double() if given else None
        want = torch.nn.functional.layer_norm(h, n, weight.double(), wide, 1e-3)
    else:
        want = torch.nn.functional.rms_norm(h, n, weight.double(), 1e-3)
    assert (y - want).norm() < 2e-5 * want.norm().clamp(min=1e-3)


@pytest.mark.parametrize("most_columns", [1 << 14, 8])
@on_ranks(1)
def test_a_row_has_a_scale_whatever_it_holds(rank: int, ranks: int, most_columns: int):
    """Rows of zeros and of tiny values have one, too."""
    with blocks_of(most_columns):
        x = torch.randn(4, 24)
        x[1], x[2] = 0, 1e-36
        y, h = torch.zeros(4, 24, dtype=FP8), torch.full_like(x, torch.nan)
        scales = torch.full((4, 1), torch.nan)
        norms.run(Norm("rms", 1e-3, fp8=True), {"x": x, "weight": torch.ones(24)}, [y, h, scales])
    norm = torch.nn.functional.rms_norm(x, (24,), torch.ones(24), 1e-3)
    assert torch.allclose(scales * 448, norm.abs().amax(1, keepdim=True), atol=1e-29)
    assert (y[1].float() == 0).all() and y.float().isfinite().all()
    assert (y[[0, 3]].float().abs().amax(1) == 448).all()


@on_ranks(1)
def test_what_is_no_number_is_seen(rank: int, ranks: int):
    """A row with a number that is none has no scale, and spoils no other's."""
    x = torch.randn(3, 24)
    x[:2, 5] = torch.nan
    y, h, scales = torch.zeros(3, 24, dtype=FP8), x.clone(), torch.zeros(3, 1)
    norms.run(Norm("rms", 1e-3, fp8=True), {"x": x, "weight": torch.ones(24)}, [y, h, scales])
    assert scales[:2].isnan().all() and scales[2].isfinite().all()
