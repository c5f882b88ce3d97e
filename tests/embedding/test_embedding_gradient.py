"""Gradients of embedding bags by our kernels: interpreted against torch's."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from embedding_cases import Bags, random_bags
from on_ranks import on_ranks
from torch import Tensor

from counterpoint.embedding import gradients as ops
from counterpoint.embedding import launch_gradient as launches
from counterpoint.embedding.exchange import Slice, at_once, in_one
from counterpoint.embedding.plan_slices import tables_by_slice
from counterpoint.embedding.updates import SGD, RowWiseAdagrad, Steps, Update

CASES: tuple[tuple[tuple[int, ...], str, Any], ...] = (
    ((32, 16), "sum", torch.float32), ((5, 40, 7), "mean", torch.float16),
    ((300,), "weights", torch.float32), ((8, 8, 8), "weights", torch.bfloat16),
)  # fmt: skip
NUM_BAGS = 20
DENSE: Any = ops._dense_by_kernel  # pyright: ignore[reportPrivateUsage]
NAMED: Any = ops._named_by_kernel  # pyright: ignore[reportPrivateUsage]


def pooled_of(bags: Bags, *, mean: bool = False) -> ops.Lookups:
    return ops.Lookups(bags.tables, bags.indices, bags.offsets, bags.weights, True, mean)


def in_slices(dy: Tensor, tables: Sequence[Tensor], count: int) -> list[Slice]:
    """As they come from an exchange: each slice of tables by itself."""
    dims = [t.shape[1] for t in tables]
    cut = tables_by_slice(dims, count)
    parts = dy.split([sum(dims[t] for t in some) for some in cut], 1)
    return [Slice(some, part.contiguous(), at_once) for some, part in zip(cut, parts, strict=True)]


def by_kernel(
    dy: Tensor, pooled: ops.Lookups, *, sparse: bool = False, count: int = 1
) -> list[Tensor]:
    """Gradients as a GPU makes them."""
    slices = in_slices(dy, pooled.tables, count)
    if not sparse:
        return DENSE(slices, pooled)
    each = zip(pooled.tables, NAMED(slices, pooled), strict=True)
    return [ops.as_sparse(table, *found) for table, found in each]


@contextmanager
def settings(**values: int) -> Iterator[None]:
    """Kernels are launched so; what Triton's interpreter warns of is no error of ours."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, value in values.items():
            patch.setattr(launches, name, value)
        yield


def too_far(got: Tensor, want: Tensor, dtype: torch.dtype, least: float = 1e-5) -> bool:
    bound = least + torch.finfo(dtype).eps * want.double().abs()
    return not bool(((got.double() - want.double()).abs() <= bound).all())


@pytest.mark.drawn(5)
@pytest.mark.parametrize("segment", [4, 10, launches.SEGMENT])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("dims", "mode", "dtype"), CASES)
@on_ranks(1)
def test_rows_are_summed_by_kernels_as_by_torch(
    rank: int, ranks: int, dims: tuple[int, ...], mode: str, dtype: Any, sparse: bool, segment: int
) -> list[str]:
    """The path of a GPU, on the CPU, against the CPU's own: index_add in fp32."""
    found: list[str] = []
    bags = random_bags(dims, NUM_BAGS, dtype=dtype, weighted=mode == "weights", rows=6)
    dy = torch.randn(NUM_BAGS, sum(dims)).to(dtype)
    pooled = pooled_of(bags, mean=mode == "mean")
    want = ops.table_gradients(in_one(dy, dims), pooled, sparse=sparse)
    with settings(SEGMENT=segment):
        got = by_kernel(dy, pooled, sparse=sparse)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        if sparse and not torch.equal(one.indices(), other.indices()):
            found.append(f"rows of table {i}")
        one, other = (t.to_dense() for t in (one, other))
        if too_far(one, other, dtype):
            found.append(f"{i}: {(one - other).abs().max()}")
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("dims", "dtype"), [(d, kind) for d, mode, kind in CASES if mode == "weights"]
)
@on_ranks(1)
def test_gradients_of_weights(
    rank: int, ranks: int, dims: tuple[int, ...], dtype: torch.dtype, count: int
):
    bags = random_bags(dims, NUM_BAGS, dtype=dtype, weighted=True, rows=6)
    dy = torch.randn(NUM_BAGS, sum(dims)).to(dtype)
    want = ops.weight_gradient(in_one(dy, dims), pooled_of(bags))
    entries = ops.entries_of(bags.offsets, bags.indices.numel(), last=True)
    out = torch.full_like(want, torch.nan)
    for some, part, _ in in_slices(dy, bags.tables, count):
        with settings():
            given = part, some, bags.tables, bags.indices, entries.bag
            ops.weight_gradient_into(out, *given)
    assert not too_far(out, want, dtype, 1e-4)


def hot_bags(rows: int, hot: float, seed: int) -> Bags:
    """A share of the indices of two tables name one row each; the last bags are empty."""
    draw = torch.Generator().manual_seed(seed)
    n, full = 420, 2 * NUM_BAGS - 3
    offsets = torch.tensor([*(n * i // full for i in range(full + 1)), n, n, n])
    indices = torch.randint(rows, (n,), generator=draw)
    indices[torch.rand(n, generator=draw) < hot] = rows // 2
    tables = [torch.randn(rows, d, generator=draw) for d in (24, 16)]
    return Bags(tables, indices, offsets, None)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("hot", "rows"), [(0.0, 200), (0.8, 200), (1.0, 200), (0.5, 1), (0.3, 3)])
@on_ranks(1)
def test_a_long_row_has_the_same_bits_however_it_is_cut(
    rank: int, ranks: int, hot: float, rows: int
) -> list[str]:
    """Of long rows: fp64, and the bits of other grids, of other rows beside, and of each run."""
    bags, found = hot_bags(rows, hot, 1), list[str]()
    dy = torch.randn(NUM_BAGS, 40)
    pooled = pooled_of(bags)
    entries = ops.entries_of(bags.offsets, bags.indices.numel(), last=True)
    first: list[Tensor] = []
    for how in ({}, {"PROGRAMS": 1}, {"PROGRAMS": 7, "LONG_PROGRAMS": 2}, {}):
        with settings(SEGMENT=16, **how):
            grads = by_kernel(dy, pooled)
        first = first or grads
        if not all(map(torch.equal, grads, first)):
            found.append(f"{how}: other bits")
    for i, (grad, part) in enumerate(zip(first, dy.split((24, 16), 1), strict=True)):
        own = entries.bag // NUM_BAGS == i
        want = torch.zeros(grad.shape, dtype=torch.float64)
        want.index_add_(0, bags.indices[own], part.double()[entries.bag[own] % NUM_BAGS])
        if too_far(grad, want, torch.float32, 1e-4):
            found.append(f"{i}: off by {(grad - want).abs().max()}")
    # fewer other rows, the same entries of the hot one
    keep = bags.indices == rows // 2
    counts = torch.zeros(2 * NUM_BAGS, dtype=torch.int64).index_add_(0, entries.bag, keep.long())
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    alone = ops.Lookups(bags.tables, bags.indices[keep], offsets, None, True, False)
    with settings(SEGMENT=16):
        grads = by_kernel(dy, alone)
    for one, other in zip(grads, first, strict=True):
        if not torch.equal(one[rows // 2], other[rows // 2]):
            found.append("bits hang on other rows")
    return found


UPDATES: dict[str, Any] = {
    "sgd": SGD(0.3), "rowwise_adagrad": RowWiseAdagrad(0.3, eps=1e-3, scale=0.5),
}  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", UPDATES)
@on_ranks(1)
def test_rows_are_updated_in_place(
    rank: int, ranks: int, kind: str, dtype: torch.dtype
) -> list[str]:
    """Two updates by the kernels, against fp64."""
    found, optimizer = list[str](), UPDATES[kind]
    dims, rates = (24, 300), torch.tensor(optimizer.rates)
    bags = random_bags(dims, NUM_BAGS, rows=9, longest=9, dtype=dtype)
    bags.tables[0] = torch.randn(9, 31).to(dtype)[:, :24]  # with gaps
    pooled = pooled_of(bags)
    adagrad = kind == "rowwise_adagrad"
    sums = [torch.rand(len(t)) for t in bags.tables] if adagrad else []
    exact = [t.double() for t in bags.tables]
    squares = [s.double() for s in sums]
    for _ in range(2):
        dy = torch.randn(NUM_BAGS, sum(dims)).to(dtype)
        wide = pooled._replace(tables=exact)
        grads = [
            torch.zeros_like(t).index_put_((rows,), values.double())
            for t, (rows, values) in zip(
                exact, ops.sums_by_torch(in_one(dy, dims), wide), strict=True
            )
        ]
        lr, eps, scale = map(float, rates.double())
        for i, g in enumerate(grads):
            step = lr * scale * g
            if adagrad:
                squares[i] += (scale * g).square().mean(1)
                step /= squares[i].sqrt()[:, None] + eps
            exact[i] = (exact[i] - step).to(dtype).double()
        with settings(SEGMENT=4):
            update(Update(kind, rates, sums, Steps()), dy, pooled)
    for i, (table, want) in enumerate(zip(bags.tables, exact, strict=True)):
        # a rounding of 16 bits that fell to the other side is one of the next step as well
        if too_far(table, want, dtype, 1e-5 if dtype == torch.float32 else 1e-2):
            found.append(f"{kind} {dtype} {i}: {(table.double() - want).abs().max()}")
    if any(too_far(s, w, torch.float32) for s, w in zip(sums, squares, strict=True)):
        found.append(f"{kind} {dtype}: state")
    return found


def update(how: Update, dy: Tensor, pooled: ops.Lookups, count: int = 1) -> None:
    """As `apply_update` does on a GPU."""
    placed, slices = how.steps.placed(pooled.tables, how.sums), in_slices(dy, pooled.tables, count)
    entries = ops.sorted_by_row(pooled, placed, len(dy))
    ops.sum_slices(placed, slices, entries, how.kind, how.rates)


def test_tables_that_lie_at_the_same_place_otherwise_are_placed_anew():
    first, second = torch.zeros(20, 8), torch.zeros(20, 8)
    changed = (first[:20], first[:20:2], first.view(torch.bfloat16)[:10, :8])
    steps = Steps()
    for table in (first[:10], *changed):
        placed, anew = (s.placed([table, second], []) for s in (steps, Steps()))
        assert torch.equal(placed.words, anew.words) and placed.dtype == table.dtype
        assert steps.placed([table, second], []) is placed


@pytest.mark.drawn(3)
@pytest.mark.parametrize("hot", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("what", ["dense", "sparse", *UPDATES])
@on_ranks(1)
def test_slices_of_tables_have_the_bits_of_all_at_once(
    rank: int, ranks: int, what: str, hot: float
) -> list[str]:
    """Gradients and updates by slices against those of one: tables of few and of many columns.

    Segments of long rows begin in the same slots as those of another table, and nobody names one of
    the tables.
    """
    draw, found = torch.Generator().manual_seed(1), list[str]()
    dims, rows, num_bags = (24, 8, 16, 40, 8), 30, 12
    sizes = torch.randint(5, (len(dims) * num_bags,), generator=draw)
    sizes[2 * num_bags : 3 * num_bags] = 0
    n, offsets = int(sizes.sum()), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    indices = torch.randint(rows, (n,), generator=draw)
    indices[torch.rand(n, generator=draw) < hot] = rows // 2
    tables = [torch.randn(rows, d, generator=draw) for d in dims]
    dy = torch.randn(num_bags, sum(dims), generator=draw)

    def made(what: str, count: int) -> list[Tensor]:
        copies, sums = [t.clone() for t in tables], list[Tensor]()
        pooled = ops.Lookups(copies, indices, offsets, None, True, False)
        with settings(SEGMENT=8):
            if what in ("dense", "sparse"):
                grads = by_kernel(dy, pooled, sparse=what == "sparse", count=count)
                return [g.to_dense() for g in grads]
            how = UPDATES[what]
            if what == "rowwise_adagrad":
                sums = [torch.ones(rows) for _ in dims]
            update(Update(what, torch.tensor(how.rates), sums, Steps()), dy, pooled, count)
        return copies + sums

    whole = made(what, 1)
    assert not torch.equal(whole[0], tables[0])
    for count in (2, 3, 5, 8):
        if not all(map(torch.equal, made(what, count), whole)):
            found.append(f"{count} slices")
    return found
