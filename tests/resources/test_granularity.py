"""Every form of a matmul, cut: as accurate as whole, in so many launches; and the best cuts."""

from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.errors import InputError
from counterpoint.resources.granularity import TILE, Cut, cuts

TOLERANCE = 1e-6  # waves are compared as rounded to it


@settings(max_examples=200)
@given(
    extent=st.integers(1, 5000), chunks=st.integers(1, 16), tile=st.sampled_from([1, 64, 128]),
    across=st.integers(1, 60), num_sms=st.sampled_from([1, 108, 132]),
)  # fmt: skip
def test_cuts_cover_in_whole_tiles_near_equal_chunks(
    extent: int, chunks: int, tile: int, across: int, num_sms: int
):
    borders = cuts(extent, chunks, tile=tile, tiles_across=across, num_sms=num_sms)
    num_tiles = ceil(extent / tile)
    assert (borders[0], borders[-1]) == (0, extent)
    assert len(borders) == 1 + min(chunks, num_tiles)
    assert all(a < b for a, b in zip(borders, borders[1:], strict=False))
    inner = [border // tile for border in borders[1:-1]]
    assert [t * tile for t in inner] == list(borders[1:-1])
    chunks = len(borders) - 1
    for i, (start, t) in enumerate(zip([0, *inner], inner, strict=False), 1):
        # within half a chunk of an equal division, in whole numbers
        assert 2 * abs(chunks * t - num_tiles * i) <= num_tiles

        def idle(stop: int, start: int = start) -> float:
            work = (stop - start) * across
            return -(-work // num_sms) * num_sms / work

        # no border that was free to be taken leaves fewer SMs without a tile; those just half a
        # chunk away are within or not, as numbers are rounded
        others = [
            idle(other)
            for other in range(start + 1, num_tiles - (chunks - i) + 1)
            if 2 * abs(chunks * other - num_tiles * i) < num_tiles
        ]
        assert idle(t) <= min(others, default=idle(t)) + TOLERANCE


def test_cuts_that_are_known():
    # 28 tiles across on 132 SMs: 14 rows of tiles, 392 blocks, are three waves less four blocks
    assert cuts(8192, 4, tile=128, tiles_across=28) == (0, 1792, 3584, 5376, 8192)
    # 33 rows of tiles, 32 across, are 8 waves; half of 8192 rows would be 7.76
    assert cuts(8192, 2, tile=128, tiles_across=32) == (0, 4224, 8192)
    # where every border is as good, the chunks are equal
    assert cuts(1000, 4, tile=1, tiles_across=132) == (0, 250, 500, 750, 1000)
    assert cuts(130, 16, tile=128, tiles_across=1) == (0, 128, 130)
    assert cuts(128, 16, tile=128, tiles_across=1) == (0, 128)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"extent": 0}, "cuts: extent must be >= 1, got 0"),
        ({"tile": 0}, "cuts: tile must be >= 1, got 0"),
        ({"tiles_across": -1}, "cuts: tiles_across must be >= 1, got -1"),
        ({"chunks": 0}, "cuts: chunks must be from 1 to 16, got 0"),
        ({"chunks": 17}, "cuts: chunks must be from 1 to 16, got 17"),
        ({"num_sms": 0}, "cuts: num_sms must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_cuts_refuse(changes: dict[str, int], text: str):
    given = {"extent": 512, "chunks": 2, "tile": 128, "tiles_across": 4, **changes}
    with pytest.raises(InputError) as caught:
        cuts(given.pop("extent"), given.pop("chunks"), **given)
    assert str(caught.value) == text
    if "chunks" in changes:
        with pytest.raises(InputError, match=text.removeprefix("cuts: ")):  # noqa: SIM117
            with Cut(changes["chunks"]):
                torch.mm(torch.ones(300, 2), torch.ones(2, 2))


class Launches(TorchDispatchMode):
    """Counts what reaches the library: entered before a Cut, it sees what that makes of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


M, N, K = 1000, 777, 33  # eight and seven tiles, the last ones not full

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
CALLS: dict[str, tuple[str, Call, Call]] = {
    # name: the op that is cut, the call, and the same in fp64
    "mm": ("mm", lambda x, w, b: torch.mm(x, w), lambda x, w, b: x @ w),
    "matmul": ("mm", lambda x, w, b: x @ w, lambda x, w, b: x @ w),
    "transposed": (
        "mm", lambda x, w, b: x.t().contiguous().t() @ w.t().contiguous().t(),
        lambda x, w, b: x @ w,
    ),
    "linear": ("mm", lambda x, w, b: F.linear(x, w.t()), lambda x, w, b: x @ w),
    "linear and bias": ("addmm", lambda x, w, b: F.linear(x, w.t(), b[0]),
                        lambda x, w, b: x @ w + b[0]),
    "addmm": ("addmm", lambda x, w, b: torch.addmm(b, x, w), lambda x, w, b: b + x @ w),
    "addmm of a column": ("addmm", lambda x, w, b: torch.addmm(b[:, :1], x, w),
                          lambda x, w, b: b[:, :1] + x @ w),
    "addmm of a number": ("addmm", lambda x, w, b: torch.addmm(b[3, 4], x, w),
                          lambda x, w, b: b[3, 4] + x @ w),
    "addmm, scaled": ("addmm", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=-2),
                      lambda x, w, b: 0.5 * b - 2 * (x @ w)),
    "three dims": ("mm", lambda x, w, b: (x.view(10, 100, K) @ w).view(M, N),
                   lambda x, w, b: x @ w),
}  # fmt: skip


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    return normal(M, K), normal(K, N), normal(M, N)


def assert_as_accurate_as(got: Tensor, plain: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape, got.stride()) == (plain.dtype, plain.shape, plain.stride())
    errors = [(some.double() - want).abs().max().item() for some in (got, plain)]
    assert errors[0] <= 2 * errors[1], errors


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_cut_products_and_their_launches(name: str, dtype: torch.dtype):
    op, call, exact = CALLS[name]
    given = operands(dtype)
    plain, want = call(*given), exact(*(t.double() for t in given))
    for chunks, along in ((1, "m"), (2, "m"), (3, "n"), (7, "n"), (16, "m")):
        with Launches() as launches, Cut(chunks, along) as cut:  # type: ignore[arg-type]
            got = call(*given)
        assert_as_accurate_as(got, plain, want)
        assert cut.num_matmuls == 1
        extent = M if along == "m" else N
        assert launches.of[op] == min(chunks, ceil(extent / min(TILE)))
        assert launches.of["mm"] + launches.of["addmm"] == launches.of[op]


@pytest.mark.parametrize("along", ["m", "n"])
@pytest.mark.parametrize("bias", [False, True])
def test_results_that_are_given(bias: bool, along: Any):
    """Contiguous, a window of something larger, by columns: its own cells are written, no other."""
    x, w, b = operands(torch.float32)
    rest = torch.tensor(float("nan"))

    def run(out: Tensor) -> Tensor:
        return torch.addmm(b, x, w, out=out) if bias else torch.mm(x, w, out=out)

    plain = run(torch.empty(M, N))
    want = x.double() @ w.double() + (b.double() if bias else 0)
    for sizes, window, turned in (((M, N), (0, 0), False), ((M + 9, N + 5), (4, 3), False),
                                  ((N + 5, M + 9), (3, 4), True)):  # fmt: skip
        memory = rest.repeat(sizes)
        whole = memory.t() if turned else memory
        top, left = window[::-1] if turned else window
        out = whole[top : top + M, left : left + N]
        with Launches() as launches, Cut(3, along):
            assert run(out) is out
        assert launches.of["addmm" if bias else "mm"] == 3
        error = (out.double() - want).abs().max()
        assert error <= 2 * (plain.double() - want).abs().max()
        out.fill_(torch.nan)
        assert memory.isnan().all(), "cells around it were written"


def test_out_may_be_the_bias():
    x, w, b = operands(torch.float32)
    want, plain = b.double() + x.double() @ w.double(), torch.addmm(b, x, w)
    with Cut(4):
        torch.addmm(b, x, w, out=b)
    assert_as_accurate_as(b, plain, want)


def test_what_is_too_small_or_none_is_not_cut():
    with Launches() as launches, Cut(4) as cut:
        assert torch.equal(torch.ones(5, 3) @ torch.ones(3, 2), torch.full((5, 2), 3.0))
        assert (torch.ones(0, 3) @ torch.ones(3, 2)).shape == (0, 2)
        assert torch.equal(torch.ones(300, 0) @ torch.ones(0, 2), torch.zeros(300, 2))
    # the last one has rows for three tiles, and nothing to sum
    assert (cut.num_matmuls, launches.of["mm"]) == (3, 1 + 1 + 3)


def test_other_calls_are_passed_on():
    x, w, _ = operands(torch.float32)
    with Launches() as launches, Cut(4) as cut:
        y = torch.relu(x) * 2
        z = torch.bmm(x[None], w[None])
    assert torch.equal(y, torch.relu(x) * 2) and torch.equal(z[0], torch.bmm(x[None], w[None])[0])
    assert (cut.num_matmuls, launches.of["bmm"]) == (0, 1)


def test_shapes_that_do_not_fit_are_refused_as_without():
    x, w, b = operands(torch.float32)
    for call in (lambda: torch.mm(x, w.t()), lambda: torch.addmm(b[:, :5], x, w)):
        with pytest.raises(RuntimeError) as plain:
            call()
        with pytest.raises(RuntimeError) as cut, Cut(4):
            call()
        assert "cannot be multiplied" in str(plain.value) or "expand" in str(plain.value)
        assert ("multiplied" in str(plain.value)) == ("multiplied" in str(cut.value))


def test_gradients_of_cut_products():
    """A mode is below autograd: forward and backward are cut, and graphs are as ever."""

    def gradients(cut: Cut | None) -> tuple[list[Tensor], Counter[str]]:
        x, w, b = (t.requires_grad_() for t in operands(torch.float32))
        scale = torch.randn(M, N, generator=torch.Generator().manual_seed(1))
        with Launches() as launches:
            if cut is None:
                ((F.linear(x, w.t(), b[0]) + torch.mm(x, w)) * scale).sum().backward()
            else:
                with cut:
                    ((F.linear(x, w.t(), b[0]) + torch.mm(x, w)) * scale).sum().backward()
        found = [t.grad for t in (x, w, b)]
        return [t for t in found if t is not None], launches.of

    plain, launches = gradients(None)
    assert launches["mm"] + launches["addmm"] == 6, "two forward, four backward"
    cut = Cut(4)
    got, launches = gradients(cut)
    assert cut.num_matmuls == 6
    # [M, N] and dX [M, K] have eight tiles of rows; dW [K, N] or its transpose has one or seven
    assert launches["mm"] + launches["addmm"] > 6 + 3 * 3
    x, w, b = (t.double() for t in operands(torch.float32))
    scale = torch.randn(M, N, generator=torch.Generator().manual_seed(1)).double()
    bias = torch.zeros_like(b)
    bias[0] = scale.sum(0)
    wants = (2 * scale @ w.t(), 2 * x.t() @ scale, bias)
    for mine, theirs, want in zip(got, plain, wants, strict=True):
        assert_as_accurate_as(mine, theirs, want)


def test_a_mode_ends_where_it_is_left():
    x, w, _ = operands(torch.float32)
    with Launches() as launches:
        with pytest.raises(RuntimeError, match="on purpose"), Cut(4):
            raise RuntimeError("on purpose")
        torch.mm(x, w)
    assert launches.of["mm"] == 1


def test_a_wrong_out_is_resized_by_torch_as_without():
    x, w, _ = operands(torch.float32)
    out = torch.empty(3, 3)
    with Cut(2), pytest.warns(UserWarning, match="resized"):
        torch.mm(x, w, out=out)
    assert torch.equal(out, x @ w)
