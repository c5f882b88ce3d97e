"""What embedding bags compute by torch: pooled rows on CPU ranks, gradients of tables and weights.

Entries are indices by position. An entry's gradient row is that of its bag times its scale: its
weight, or one over the entries of its bag. What gradients are made of comes by slices of tables;
what needs none of it, such as sorting, is begun before.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from counterpoint.embedding.exchange import Slice
from counterpoint.embedding.launch_gradient import (
    Sorted,
    Tables,
    sorted_entries,
    sum_rows,
    tables_of,
    weight_gradient_into,
)

CHUNK_ELEMENTS = 1 << 24  # of gathered rows in fp32 at a time


class Entries(NamedTuple):
    """For each index the bag of all tables, and of the global batch, that it is in; bags' sizes."""

    bag: Tensor  # int64 [n]: table * bags + bag
    sizes: Tensor  # int64 [tables * bags]
    bounds: Tensor  # int64 [tables * bags + 1]: see `bounds_of`


class Lookups(NamedTuple):
    """What a call has pooled: see `embedding_bag_all_to_all`."""

    tables: Sequence[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    last: bool
    mean: bool


def entries_of(offsets: Tensor, num_indices: int, *, last: bool) -> Entries:
    """Which bag each index is in."""
    bounds = bounds_of(offsets, num_indices, last=last)
    sizes = bounds[1:] - bounds[:-1]
    if not num_indices:  # there may be no bag to repeat, either
        return Entries(bounds.new_empty(0), sizes, bounds)
    return Entries(torch.repeat_interleave(sizes, output_size=num_indices), sizes, bounds)


def bounds_of(offsets: Tensor, num_indices: int, *, last: bool) -> Tensor:
    """Where each bag begins, and where the last one ends: int64 [tables * bags + 1]."""
    bounds = offsets.long()
    if last:
        return bounds.clamp(max=num_indices)
    return torch.cat([bounds, bounds.new_full((1,), num_indices)])


def scales_of(entries: Entries, weights: Tensor | None, *, mean: bool) -> Tensor | None:
    """fp32 [n], or None where all are 1."""
    if weights is not None:
        return weights.float()
    return (1.0 / entries.sizes.clamp(min=1).float())[entries.bag] if mean else None


def pooled_on_cpu(
    tables: Sequence[Tensor], indices: Tensor, bounds: Tensor, weights: Tensor | None,
    num_bags: int, some: range, *, mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[some of the bags, columns of own tables]: sums in fp32, rounded once.

    Args:
        bounds: of the bags of all tables: see `bounds_of`.
        num_bags: of the global batch.
    """
    y = torch.zeros(len(some), sum(t.shape[1] for t in tables))
    parts = y.split([t.shape[1] for t in tables], 1)
    for i, (table, part) in enumerate(zip(tables, parts, strict=True)):
        own = bounds[i * num_bags + some.start :][: len(some) + 1]
        start, stop = own[[0, -1]].tolist()
        if start == stop:
            continue
        rows, own = indices[start:stop].long(), own - start
        scales = None if weights is None else weights[start:stop].float()
        if table.dtype == torch.float32:
            mode = "mean" if mean else "sum"
            part.copy_(embedding_bag(rows, table, own, None, 2.0, False, mode, False, scales, True))
            continue
        # torch rounds sums of 16 bits before it divides them
        sizes = own[1:] - own[:-1]
        if mean:
            scales = torch.repeat_interleave(1.0 / sizes.clamp(min=1).float(), sizes)
        bags = torch.repeat_interleave(torch.arange(len(some)), sizes)
        for few in torch.arange(stop - start).split(max(1, CHUNK_ELEMENTS // table.shape[1])):
            wide = table[rows[few]].float()
            part.index_add_(0, bags[few], wide if scales is None else wide * scales[few, None])
    return y.to(dtype)


def table_gradients(slices: Sequence[Slice], pooled: Lookups, *, sparse: bool) -> list[Tensor]:
    """The gradient of each table in its dtype, dense or coalesced: sums in fp32, rounded once.

    Args:
        slices: of all own tables, of the dtype of the tables.
    """
    tables = pooled.tables
    if sparse:
        each = zip(tables, named_sums(slices, pooled), strict=True)
        return [as_sparse(table, rows, values) for table, (rows, values) in each]
    if pooled.indices.is_cuda and pooled.indices.numel():
        return _dense_by_kernel(slices, pooled)
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tables]
    for grad, (rows, values) in zip(grads, sums_by_torch(slices, pooled), strict=True):
        grad[rows] = values.to(grad.dtype)
    return grads


def named_sums(slices: Sequence[Slice], pooled: Lookups) -> list[tuple[Tensor, Tensor]]:
    """Of each table the rows that are named, int64 [rows], and their sums [rows, D], its dtype."""
    if pooled.indices.is_cuda and pooled.indices.numel():
        return _named_by_kernel(slices, pooled)
    each = zip(pooled.tables, sums_by_torch(slices, pooled), strict=True)
    return [(rows, values.to(table.dtype)) for table, (rows, values) in each]


def as_sparse(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """A coalesced gradient."""
    shape = tuple(table.shape)
    return torch.sparse_coo_tensor(
        rows[None], values, shape, is_coalesced=True, check_invariants=False
    )


def sums_by_torch(slices: Sequence[Slice], pooled: Lookups) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each table the rows that are named, int64 [rows], and their sums, fp32 [rows, D]."""
    if not pooled.indices.numel():  # nothing waits for a GPU
        none = pooled.indices.new_empty(0).long()
        for _, part in _columns(slices, pooled.tables):
            yield none, part.new_empty(0, part.shape[1]).float()
        return
    entries = entries_of(pooled.offsets, pooled.indices.numel(), last=pooled.last)
    scales = scales_of(entries, pooled.weights, mean=pooled.mean)
    for i, part in _columns(slices, pooled.tables):
        table, num_bags = pooled.tables[i], len(part)
        own = (entries.bag // max(num_bags, 1) == i).nonzero().flatten()
        rows, places = torch.unique(pooled.indices[own].long(), return_inverse=True)
        values = torch.zeros(len(rows), table.shape[1], device=part.device)
        step = max(1, CHUNK_ELEMENTS // table.shape[1])
        for some, place in zip(own.split(step), places.split(step), strict=True):
            terms = part[entries.bag[some] - i * num_bags].float()
            if scales is not None:
                terms = terms * scales[some, None]
            values.index_add_(0, place, terms)
        yield rows, values


def _columns(slices: Sequence[Slice], tables: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Each table's number, and the gradient of its columns when that has come."""
    for some, dy, wait in slices:
        wait()
        yield from zip(some, dy.split([tables[t].shape[1] for t in some], 1), strict=True)


def first_rows(tables: Sequence[Tensor]) -> list[int]:
    """The number of each table's first row among those of all, and how many there are."""
    return list(accumulate((len(t) for t in tables), initial=0))


def sorted_by_row(pooled: Lookups, written: Tables, num_bags: int) -> Sorted:
    """The entries of all tables, for kernels; nothing waits for the GPU."""
    n = pooled.indices.numel()
    entries = entries_of(pooled.offsets, n, last=pooled.last)
    scales = scales_of(entries, pooled.weights, mean=pooled.mean)
    num_rows = sum(map(len, pooled.tables))
    return sorted_entries(pooled.indices, entries.bag, entries.bounds, scales, written.words,
                          num_rows, num_bags)  # fmt: skip


def sum_slices(
    written: Tables, slices: Sequence[Slice], entries: Sorted, writes: str,
    rates: Tensor | None = None,
) -> None:  # fmt: skip
    """`sum_rows` of each slice when it has come: one sum in one order for each row."""
    for some, dy, wait in slices:
        wait()
        if some:
            sum_rows(written, dy, some, entries, writes, rates)


def _dense_by_kernel(slices: Sequence[Slice], pooled: Lookups) -> list[Tensor]:
    """Nothing waits for the GPU."""
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in pooled.tables]
    written = tables_of(grads, first_rows(grads)[:-1], grads[0])
    entries = sorted_by_row(pooled, written, len(slices[0].dy))
    sum_slices(written, slices, entries, "rows")
    return grads


def _named_by_kernel(slices: Sequence[Slice], pooled: Lookups) -> list[tuple[Tensor, Tensor]]:
    tables, firsts = pooled.tables, first_rows(pooled.tables)
    written = tables_of(tables, firsts[:-1], tables[0])
    entries = sorted_by_row(pooled, written, len(slices[0].dy))
    # the one wait for the GPU: rows that are named, of each table
    names = entries.names[entries.starts[: int(entries.number)]].long()
    starts = torch.tensor(firsts, dtype=torch.int64).to(names.device)
    edges = torch.searchsorted(names, starts).tolist()
    parts = zip(edges[:-1], edges[1:], firsts[:-1], strict=True)
    rows = [names[start:stop] - first for start, stop, first in parts]
    values = [t.new_empty(len(r), t.shape[1]) for t, r in zip(tables, rows, strict=True)]
    sum_slices(tables_of(values, edges[:-1], names), slices, entries, "named")
    return list(zip(rows, values, strict=True))


def weight_gradient(slices: Sequence[Slice], pooled: Lookups) -> Tensor:
    """The gradient of each index's weight: its row times that of its bag's gradient, in fp32."""
    tables, indices, offsets, weights, last, _ = pooled
    assert weights is not None
    n = indices.numel()
    entries = entries_of(offsets, n, last=last)
    if indices.is_cuda:
        out = torch.empty(n, dtype=weights.dtype, device=indices.device)
        for some, dy, wait in slices:
            wait()
            if n and some:
                weight_gradient_into(out, dy, some, tables, indices, entries.bag)
        return out
    found = torch.zeros(n)
    for i, part in _columns(slices, tables):
        table, num_bags = tables[i], len(part)
        own = (entries.bag // max(num_bags, 1) == i).nonzero().flatten()
        for few in own.split(max(1, CHUNK_ELEMENTS // table.shape[1])):
            terms = part[entries.bag[few] - i * num_bags].float()
            found[few] = (terms * table[indices[few].long()].float()).sum(1)
    return found.to(weights.dtype)
