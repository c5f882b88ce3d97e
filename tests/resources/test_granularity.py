"""Where matmuls are cut, and that a cut one is the same product."""

import random
from math import ceil

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.errors import InputError
from counterpoint.resources.granularity import NUM_SMS, Cut, cuts


class Launches(TorchDispatchMode):
    """Counts the matmuls that reach the library."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__:
            self.shapes.append(tuple(out.shape))
        return out


def test_cuts_are_at_tiles_and_cover_the_dim():
    draw = random.Random(0)
    for _ in range(300):
        extent, tile = draw.randint(1, 60000), draw.choice((64, 128, 256))
        pieces, across = draw.randint(1, 16), draw.randint(1, 300)
        borders = cuts(extent, pieces, tile=tile, tiles_across=across)
        assert borders[0] == 0 and borders[-1] == extent
        assert list(borders) == sorted(set(borders))
        assert len(borders) - 1 == min(pieces, ceil(extent / tile))
        assert all(border % tile == 0 for border in borders[:-1])
        if extent >= 4 * tile * pieces:  # there is a choice: no piece is more than half off
            equal = extent / pieces
            lengths = [b - a for a, b in zip(borders, borders[1:], strict=False)]
            assert max(lengths) <= 2 * equal + tile and min(lengths) >= equal / 4


def test_cuts_fill_their_waves():
    """33 tiles of 128 rows, 32 across, are 8 waves of 132; half of 8192 rows would be 7.76."""
    assert cuts(8192, 2, tile=128, tiles_across=32) == (0, 4224, 8192)
    for pieces in (2, 4, 8):
        borders = cuts(57344, pieces, tile=128, tiles_across=32)
        waves = [(b - a) // 128 * 32 / NUM_SMS for a, b in zip(borders, borders[1:], strict=False)]
        assert all(wave == int(wave) for wave in waves[:-1]), waves


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"extent": 0}, "extent must be >= 1, got 0"),
        ({"pieces": 0}, "pieces must be from 1 to 16, got 0"),
        ({"pieces": 17}, "pieces must be from 1 to 16, got 17"),
        ({"tile": 0}, "tile must be >= 1, got 0"),
    ],
)
def test_cuts_refuse(given: dict[str, int], text: str):
    values = {"extent": 1024, "pieces": 2, "tile": 128, "tiles_across": 8} | given
    with pytest.raises(InputError, match=text):
        cuts(values.pop("extent"), values.pop("pieces"), **values)


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("along", ["m", "n"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (128, 128), (700, 900), (1025, 257)])
def test_a_cut_matmul_is_the_product(m: int, n: int, along: str):
    x, w, bias = torch.randn(m, 33), torch.randn(33, n), torch.randn(n)
    want = x.double() @ w.double()
    wide = torch.full((m, 2 * n), torch.nan)
    strided = wide[:, ::2]
    out = torch.full((m, n), torch.nan)
    with Launches() as launches, Cut(4, along) as cut:  # type: ignore[arg-type]
        close(x @ w, want)
        close(torch.mm(x, w, out=out), want)
        torch.mm(x, w, out=strided)
        close(torch.addmm(bias, x, w), want + bias)
        close(torch.addmm(bias, x, w, beta=0.5, alpha=2), 2 * want + 0.5 * bias.double())
        close(torch.nn.functional.linear(x, w.t().contiguous(), bias), want + bias)
    close(strided, want)
    assert wide[:, 1::2].isnan().all()
    assert cut.num_matmuls == 6
    extent = m if along == "m" else n
    pieces = min(4, ceil(extent / 128))
    assert len(launches.shapes) == 6 * pieces
    assert sum(shape[0 if along == "m" else 1] for shape in launches.shapes) == 6 * extent


def test_one_piece_only_counts():
    x = torch.randn(300, 300)
    with Launches() as launches, Cut(1) as cut:
        _ = x @ x, x + x
    assert (cut.num_matmuls, launches.shapes) == (1, [(300, 300)])


def test_gradients_pass_through():
    x, w = torch.randn(300, 20, requires_grad=True), torch.randn(20, 200, requires_grad=True)
    (x @ w).square().sum().backward()
    want = x.grad, w.grad
    x.grad = w.grad = None
    with Cut(2):
        (x @ w).square().sum().backward()
    for got, expected in zip((x.grad, w.grad), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_a_wrong_out_is_still_refused_by_torch():
    x, out = torch.randn(300, 300), torch.empty(3, 3)
    with Cut(2), pytest.warns(UserWarning, match="resized"):
        torch.mm(x, x, out=out)
    assert out.shape == (300, 300)
