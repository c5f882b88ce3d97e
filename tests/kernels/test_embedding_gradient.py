"""Gradients of embedding bags by our kernels: interpreted against torch's, and compiled."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import triton.language as tl
from embedding_cases import Bags, random_bags
from rankpool import RankPool
from torch import Tensor

from counterpoint.kernels.embedding_gradient import (
    long_rows_kernel,
    mark_rows_kernel,
    names_kernel,
    table_gradient_kernel,
    weight_gradient_kernel,
)
from counterpoint.ops import embedding_gradients as ops
from counterpoint.ops.embedding_exchange import Slice, at_once, in_one
from counterpoint.ops.embedding_updates import SGD, RowWiseAdagrad, Steps, Update
from counterpoint.plan.embedding_slices import tables_by_slice
from counterpoint.runtime import launch_embedding_gradient as launches
from counterpoint.testing.ptx import compiled

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


def wrong_gradients(rank: int, ranks: int, segment: int) -> list[str]:
    """The path of a GPU, on the CPU, against the CPU's own: index_add in fp32."""
    found: list[str] = []
    for dims, mode, dtype in CASES:
        bags = random_bags(dims, NUM_BAGS, dtype=dtype, weighted=mode == "weights", rows=6)
        dy = torch.randn(NUM_BAGS, sum(dims)).to(dtype)
        pooled = pooled_of(bags, mean=mode == "mean")
        for sparse in (False, True):
            want = ops.table_gradients(in_one(dy, dims), pooled, sparse=sparse)
            with settings(SEGMENT=segment):
                got = by_kernel(dy, pooled, sparse=sparse)
            for i, (one, other) in enumerate(zip(got, want, strict=True)):
                if sparse and not torch.equal(one.indices(), other.indices()):
                    found.append(f"{dims} {mode}: rows of table {i}")
                one, other = (t.to_dense() for t in (one, other))
                if too_far(one, other, dtype):
                    found.append(f"{dims} {mode} {sparse=}, {i}: {(one - other).abs().max()}")
        if bags.weights is not None:
            want = ops.weight_gradient(in_one(dy, dims), pooled)
            entries = ops.entries_of(bags.offsets, bags.indices.numel(), last=True)
            for count in (1, 2):
                out = torch.full_like(want, torch.nan)
                for some, part, _ in in_slices(dy, bags.tables, count):
                    with settings():
                        ops.weight_gradient_into(out, part, some, bags.tables, bags.indices,
                                                 entries.bag)  # fmt: skip
                if too_far(out, want, dtype, 1e-4):
                    found.append(f"{dims}: weights, {count}")
    return found


@pytest.mark.parametrize("segment", [4, 10, launches.SEGMENT])
def test_rows_are_summed_by_kernels_as_by_torch(pool: RankPool, segment: int):
    assert pool.run(wrong_gradients, 1, segment, group=False) == [[]]


def hot_bags(rows: int, hot: float, seed: int) -> Bags:
    """A share of the indices of two tables name one row each; the last bags are empty."""
    draw = torch.Generator().manual_seed(seed)
    n, full = 420, 2 * NUM_BAGS - 3
    offsets = torch.tensor([*(n * i // full for i in range(full + 1)), n, n, n])
    indices = torch.randint(rows, (n,), generator=draw)
    indices[torch.rand(n, generator=draw) < hot] = rows // 2
    tables = [torch.randn(rows, d, generator=draw) for d in (24, 16)]
    return Bags(tables, indices, offsets, None)


def wrong_bits(rank: int, ranks: int, hot: float, rows: int) -> list[str]:
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


@pytest.mark.parametrize(("hot", "rows"), [(0.0, 200), (0.8, 200), (1.0, 200), (0.5, 1), (0.3, 3)])
def test_a_long_row_has_the_same_bits_however_it_is_cut(pool: RankPool, hot: float, rows: int):
    assert pool.run(wrong_bits, 1, hot, rows, group=False) == [[]]


UPDATES = (("sgd", SGD(0.3)), ("rowwise_adagrad", RowWiseAdagrad(0.3, eps=1e-3, scale=0.5)))


def wrong_updates(rank: int, ranks: int) -> list[str]:
    """Two updates by the kernels, against fp64."""
    found: list[str] = []
    for (kind, optimizer), dtype in product(UPDATES, (torch.float32, torch.float16)):
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


def test_rows_are_updated_in_place(pool: RankPool):
    assert pool.run(wrong_updates, 1, group=False) == [[]]


def other_bits_in_slices(rank: int, ranks: int, hot: float) -> list[str]:
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
            how = dict(UPDATES)[what]
            if what == "rowwise_adagrad":
                sums = [torch.ones(rows) for _ in dims]
            update(Update(what, torch.tensor(how.rates), sums, Steps()), dy, pooled, count)
        return copies + sums

    for what in ("dense", "sparse", *dict(UPDATES)):
        whole = made(what, 1)
        assert not torch.equal(whole[0], tables[0])
        for count in (2, 3, 5, 8):
            if not all(map(torch.equal, made(what, count), whole)):
                found.append(f"{what}: {count} slices")
    return found


@pytest.mark.parametrize("hot", [0.0, 0.7, 1.0])
def test_slices_of_tables_have_the_bits_of_all_at_once(pool: RankPool, hot: float):
    assert pool.run(other_bits_in_slices, 1, hot, group=False) == [[]]


TYPES = {"dy_ptr": "*bf16", "bags_ptr": "*i32", "scales_ptr": "*fp32", "rows_ptr": "*i32",
         "starts_ptr": "*i32", "row_tables_ptr": "*i32", "names_ptr": "*i32", "tables_ptr": "*i64",
         "rates_ptr": "*fp32", "marks_ptr": "*i32", "long_ptr": "*i32", "partials_ptr": "*fp32",
         "bounds_ptr": "*i64", "n": "i32", "num_bags": "i32", "stride": "i32", "width": "i32",
         "first_table": "i32", "last_table": "i32", "first_column": "i32"}  # fmt: skip


@pytest.mark.parametrize("writes", ["rows", "named", "sgd", "rowwise_adagrad"])
def test_gradients_are_loaded_16_bytes_at_a_time(writes: str):
    constants = {"DTYPE": tl.bfloat16, "WRITES": writes, "SCALED": True,
                 "SEGMENT": launches.SEGMENT, "ROWS": launches.TILE // 128,
                 "UNROLL": launches.UNROLL, "BLOCK_D": 128, "VEC": 8}  # fmt: skip
    found = compiled(table_gradient_kernel, 90, TYPES, constants,
                     num_warps=launches.NUM_WARPS,
                     aligned=tuple(k for k, v in TYPES.items() if v[0] == "*"))  # fmt: skip
    assert "ld.global.v4.b32" in found.ptx
    assert not found.spills
    assert re.search(r"st\.global\.v\d\.b32", found.ptx)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_what_is_beside_it_compiles(capability: int):
    types = {k: v for k, v in TYPES.items() if k in long_rows_kernel.arg_names}
    constants = {"DTYPE": tl.bfloat16, "WRITES": "rows", "SEGMENT": launches.SEGMENT,
                 "STEP": launches.LONG_TILE // 128, "BLOCK_D": 128, "VEC": 8}  # fmt: skip
    assert not compiled(long_rows_kernel, capability, types, constants, num_warps=8).spills
    types = {"indices_ptr": "*i64", "bags_ptr": "*i64", "tables_ptr": "*i64", "names_ptr": "*i32",
             "n": "i32", "num_bags": "i32"}  # fmt: skip
    assert not compiled(names_kernel, capability, types, {"BLOCK": 1024}, num_warps=4).spills
    types = {"bags_ptr": "*i64", "scales_ptr": "*fp32", "order_ptr": "*i64", "rows_ptr": "*i32",
             "starts_ptr": "*i32", "tables_ptr": "*i32", "sorted_bags_ptr": "*i32",
             "sorted_scales_ptr": "*fp32", "marks_ptr": "*i32", "n": "i32",
             "num_bags": "i32"}  # fmt: skip
    constants = {"SCALED": True, "SEGMENT": launches.SEGMENT, "BLOCK": launches.BLOCK}
    assert not compiled(mark_rows_kernel, capability, types, constants, num_warps=4).spills


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_weights_gradient_compiles(capability: int):
    types = {"dy_ptr": "*bf16", "indices_ptr": "*i32", "bags_ptr": "*i64", "tables_ptr": "*i64",
             "out_ptr": "*fp32", "n": "i32", "num_bags": "i32", "stride": "i32",
             "first_table": "i32", "last_table": "i32", "first_column": "i32"}  # fmt: skip
    constants = {"DTYPE": tl.bfloat16, "ENTRIES": 16, "BLOCK_D": 64}
    assert not compiled(weight_gradient_kernel, capability, types, constants, num_warps=2).spills
