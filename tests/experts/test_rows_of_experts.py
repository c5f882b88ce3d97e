"""Kernels over the rows that counts leave: activations and weights, against fp64; and by torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import Tensor

from counterpoint.experts.fused import weighted_rows
from counterpoint.ops.activations import NAMES, swiglu
from counterpoint.run import activated
from counterpoint.run.activated import FUNCTIONS

NUMBERS = 9001  # no multiple of a block, and more than two of them
ROOM = 12
UNTOUCHED = 7.0
GROUP = "0"  # the first group that a process makes
# counts of all ranks, this rank, N
CASES: dict[str, tuple[list[list[int]] | None, int, int]] = {
    "all rows": (None, 0, 20),
    "uneven": ([[1, 4, 2, 0], [3, 0, 1, 2]], 0, 20),
    "experts without rows": ([[5, 4, 0, 3, 9, 9], [3, 0, 0, 2, 9, 9], [0, 0, 0, 3, 0, 0]], 1, 33),
    "no rows": ([[4, 4, 0], [3, 1, 0], [2, 2, 0]], 2, 20),
    "one takes all": ([[0, 0, 6, 0], [0, 0, 6, 0]], 1, 600),
    "wide": ([[0, 0, 6, 0], [0, 0, 1, 0]], 1, 2500),
    "more than there is room for": ([[9, 9], [9, 9]], 1, 8),
    "one column": ([[2], [3]][:1], 0, 1),
    "one column of two ranks": ([[2, 1], [3, 1]], 0, 1),
}
EVERY = pytest.mark.parametrize("name", CASES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
OF_TORCH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def drawn(name: str, *columns: float) -> tuple[list[Tensor], list[Tensor | None], int, int]:
    """Tensors of so many times N columns, both kinds of counts, rank, rows; beyond them is NaN.

    Args:
        columns: 0: [rows].
    """
    table, rank, n = CASES[name]
    made = [torch.randn(ROOM, int(c * n)) if c else torch.randn(ROOM) for c in columns]
    if table is None:
        return made, [None], rank, ROOM
    counts = torch.tensor(table)
    rows = min(ROOM, int(counts.view(len(table), len(table), -1)[:, rank].sum()))
    for t in made:
        t[rows:] = torch.nan
    return made, [counts, counts.int()], rank, rows


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", NAMES)
@DTYPES
@on_ranks(1)
def test_values_and_gradients(rank: int, ranks: int, dtype: torch.dtype, name: str) -> list[str]:
    found = list[str]()
    torch.manual_seed(0)
    h, up, dy = (torch.randn(NUMBERS).mul(3).to(dtype) for _ in range(3))
    h[:4] = torch.tensor([0.0, -0.0, 60.0, -60.0]).to(dtype)
    y, dh, dup = (torch.full((NUMBERS + 8,), float("nan"), dtype=dtype) for _ in range(3))
    with np.errstate(over="ignore"):  # exp(60) is infinite, as it should be
        activated.launch(name, (h, up, y), False, None, rank)
        activated.launch(name, (h, up, dy, dh, dup), False, None, rank)
    given = [t.double().requires_grad_() for t in (h, up)[: 1 + name.endswith("_mul")]]
    exact = FUNCTIONS[name.removesuffix("_mul")](given[0])
    exact = exact * given[1] if len(given) > 1 else exact
    grads = torch.autograd.grad(exact, given, dy.double())
    for what, got, want in zip(("y", "dh", "dup"), (y, dh, dup), (exact, *grads), strict=False):
        off = (got[:NUMBERS].double() - want).abs()
        bound = torch.finfo(dtype).eps * want.abs() + 2e-6 * (1 + up.double().abs())
        if not (off <= bound * (1 + dy.double().abs())).all():
            found.append(f"{what}: {off.max():.3g}")
        if not got[NUMBERS:].isnan().all():
            found.append(f"{what}: wrote behind its end")
    return found


@on_ranks(1)
def test_nan_stays_nan(rank: int, ranks: int):
    for name in NAMES:
        h, y = torch.tensor([float("nan"), 1.0, float("inf"), 2.0]), torch.empty(4)
        with np.errstate(all="ignore"):
            activated.launch(name, (h, torch.ones(4), y), False, None, rank)
        assert y.isnan().tolist() == [True, False, False, False], name
        assert y[2] == float("inf")


def of_swiglu(
    name: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor | None], int, int]:
    (dy, gate_up), tables, rank, rows = drawn(name, 1, 2)
    gate_up, n = 3 * gate_up, dy.shape[1]
    gate_up[0, :n] = (40 * gate_up[0, :n]).clamp(-80, 80)  # where the sigmoid is 0 or 1
    return (3 * dy).to(dtype), gate_up.to(dtype), tables, rank, rows


def swiglu_in_fp64(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    y = F.silu(gate) * up
    return y.detach(), torch.autograd.grad(y, exact, dy.double())[0]


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    most = want.abs().max() if want.numel() else 0
    bound = 1e-6 * most + 2 * torch.finfo(dtype).eps * want.abs()
    return got.dtype == dtype and bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.drawn(5)
@EVERY
@DTYPES
@on_ranks(1)
def test_rows_of_experts_are_activated_and_no_others_touched(
    rank: int, ranks: int, dtype: torch.dtype, name: str
) -> list[str]:
    found: list[str] = []
    dy, gate_up, tables, at, rows = of_swiglu(name, dtype)
    for table in tables:
        y, dgate_up = (torch.full_like(t, UNTOUCHED) for t in (dy, gate_up))
        given = (gate_up, gate_up, dy, dgate_up, dgate_up)
        activated.launch("silu_mul", (gate_up, gate_up, y), True, table, at)
        activated.launch("silu_mul", given, True, table, at)
        for what, got, want in zip(
            ("y", "gradient"), (y, dgate_up), swiglu_in_fp64(dy[:rows], gate_up[:rows]), strict=True
        ):
            if not near(got[:rows], want, dtype):
                found.append(what)
            if not (got[rows:] == UNTOUCHED).all():
                found.append(f"{what}: rows beyond are written")
    return found


@EVERY
@OF_TORCH
def test_the_cpu_activates_the_same(dtype: torch.dtype, name: str):
    dy, gate_up, (counts, *_), rank, rows = of_swiglu(name, dtype)
    given = gate_up.clone().requires_grad_()
    y = swiglu(given, counts, rank)
    (found,) = torch.autograd.grad(y, given, dy)
    want, dwant = swiglu_in_fp64(dy[:rows], gate_up[:rows])
    assert near(y.detach()[:rows], want, dtype) and near(found[:rows], dwant, dtype)


@pytest.mark.drawn(1)
@OF_TORCH
def test_the_operators_of_activations(dtype: torch.dtype):
    op = torch.ops.counterpoint
    whole, dy = torch.randn(5, 12).to(dtype).requires_grad_(), torch.randn(5, 6).to(dtype)
    given = (None, "silu_mul", torch.tensor([[2, 3]]), 0)
    torch.library.opcheck(op.activated, (whole, *given))
    torch.library.opcheck(op.activated_gradient, (dy, whole.detach(), *given))


def weighted(got: Tensor, want: Tensor, terms: Tensor) -> bool:
    """To the rounding of one result, and in fp32 of what it is the sum of."""
    kind = torch.finfo(got.dtype)
    bound = kind.eps * (want.abs() + kind.smallest_normal) + 1e-6 * terms
    return bool(((got.double() - want).abs() <= bound).all())


def wrongly_weighted(got: tuple[Tensor, Tensor], given: tuple[Tensor, ...], count: int) -> bool:
    (y, dots), (rows, weights, other) = got, (t[:count].double() for t in given)
    products = rows * other
    good = weighted(y[:count], rows * weights[:, None], torch.zeros(()))
    good = good and weighted(dots[:count], products.sum(1), products.abs().sum(1))
    return not (good and not y[count:].any() and not dots[count:].any())


@pytest.mark.drawn(5)
@EVERY
@DTYPES
@on_ranks(1)
def test_rows_are_weighted_and_no_others_touched(
    rank: int, ranks: int, dtype: torch.dtype, name: str
) -> list[str]:
    found: list[str] = []
    (rows, weights, other), tables, at, count = drawn(name, 1, 0, 1)
    rows, other = rows.to(dtype), other.to(dtype)
    for table in tables:
        y, alone = (torch.full_like(rows, UNTOUCHED) for _ in range(2))
        dots = torch.full_like(weights, UNTOUCHED)
        weighted_rows.into(y, dots, rows, weights, other, table, at)
        if wrongly_weighted((y, dots), (rows, weights, other), count):
            found.append("rows or dots")
        weighted_rows.into(alone, dots[:0], rows, weights, None, table, at)
        if not torch.equal(alone[:count], y[:count]):
            found.append("rows alone")
        if not (alone[count:] == UNTOUCHED).all():
            found.append("rows beyond are written")
    return found


@pytest.mark.drawn(5)
@EVERY
@DTYPES
@on_ranks(1)
def test_tokens_that_have_come_once_are_rows_of_their_experts(
    rank: int, ranks: int, dtype: torch.dtype, name: str
) -> list[str]:
    (rows, *_), tables, at, count = drawn(name, 1, 0, 1)
    draw = torch.Generator().manual_seed(3)
    received = torch.randn(max(1, len(rows) // 2), rows.shape[1], generator=draw).to(dtype)
    index = torch.randint(len(received), (len(rows),), generator=draw, dtype=torch.int32)
    index[count:] = 2**31 - 1
    found: list[str] = []
    if tables[0] is None:  # somebody counts
        return found
    for table in tables:
        y = torch.full_like(rows.to(dtype), UNTOUCHED)
        weighted_rows.gather_into(y, received, index, table, at)
        if not torch.equal(y[:count], received[index[:count].long()]):
            found.append("rows")
        if not (y[count:] == UNTOUCHED).all():
            found.append("rows beyond are written")
    by_torch = weighted_rows.gathered(received, index, len(rows), tables[0], at)
    if not torch.equal(by_torch[:count], y[:count]):
        found.append("rows by torch")
    return found


@pytest.mark.drawn(5)
@EVERY
@DTYPES
@on_ranks(1)
def test_gradients_of_weighted_swiglu_are_those_of_two_kernels(
    rank: int, ranks: int, dtype: torch.dtype, name: str
) -> list[str]:
    """Bit for bit, and no row beyond those that there are is written but for their dots of 0."""
    (rows, weights, other), tables, at, count = drawn(name, 1, 0, 1)
    dhidden, products = rows.to(dtype), torch.cat((rows, other), 1).flip(1).to(dtype)
    found: list[str] = []
    if tables[0] is None:  # somebody counts
        return found
    for table in tables:
        hidden, dproducts = torch.empty_like(dhidden), torch.full_like(products, UNTOUCHED)
        scaled, want = torch.empty_like(dhidden), torch.full_like(products, UNTOUCHED)
        dots, want_dots = (torch.full_like(weights, UNTOUCHED) for _ in range(2))
        side = "silu_mul", (products, products, hidden), True, table, at
        activated.launch(*side)
        hidden[count:] = torch.nan
        weighted_rows.into(scaled, want_dots, dhidden, weights, hidden, table, at)
        activated.launch("silu_mul", (products, products, scaled, want, want), True, table, at)
        weighted_rows.swiglu_back_into(dproducts, dots, dhidden, weights, products, table, at)
        if not torch.equal(dproducts, want) or not torch.equal(dots, want_dots):
            found.append(f"{dtype}: other bits")
    return found


@OF_TORCH
@on_ranks(1)
def test_torch_weights_the_same(rank: int, ranks: int, dtype: torch.dtype) -> list[str]:
    found: list[str] = []
    weigh = torch.ops.counterpoint.weighted_rows
    for name in ("all rows", "one column"):  # of the one rank that there is
        (rows, weights, other), (counts, *_), _, count = drawn(name, 1, 0, 1)
        given = rows.to(dtype), weights, other.to(dtype)
        if wrongly_weighted(weigh(*given, counts, GROUP), given, count):
            found.append(name)
    rows, weights, counts = torch.randn(5, 3), torch.randn(5), torch.tensor([[2, 1]])
    if dtype == torch.float32:
        for more in ((None, None), (rows, counts)):
            torch.library.opcheck(weigh, (rows, weights, *more, GROUP))
    rows[3:], weights[3:] = torch.nan, torch.nan
    if wrongly_weighted(weigh(rows, weights, rows, counts, GROUP), (rows, weights, rows), 3):
        found.append("rows of one rank")
    return found
