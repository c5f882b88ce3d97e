"""What embedding bags compute by torch: pooled rows on CPU ranks, gradients of tables and weights.

Entries are indices by position. An entry's gradient row is that of its bag times its scale: its
weight, or one over the entries of its bag.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from counterpoint.ops.register import refuse_double, register
from counterpoint.plan.embedding_bag_all_to_all import OP
from counterpoint.problem import Problem
from counterpoint.runtime.launch_embedding_gradient import (
    Sorted,
    Tables,
    sorted_entries,
    sum_rows,
    tables_of,
    weight_gradient_into,
)
from counterpoint.runtime.library import library_of
from counterpoint.runtime.notice_board import Awaited
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import workspace_of

CHUNK_ELEMENTS = 1 << 24  # of gathered rows in fp32 at a time


class Entries(NamedTuple):
    """For each index the bag of all tables, and of the global batch, that it is in; bags' sizes."""

    bag: Tensor  # int64 [n]: table * bags + bag
    sizes: Tensor  # int64 [tables * bags]


class Lookups(NamedTuple):
    """What a call has pooled: see `embedding_bag_all_to_all`."""

    tables: Sequence[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    last: bool
    mean: bool


def problem_from(dims: Sequence[int], batch: Sequence[int], dtype: torch.dtype) -> Problem:
    """The problem of flat dims: of each rank how many tables, and their columns; made once."""
    return _problem_from(tuple(dims), tuple(batch), dtype)


@lru_cache(maxsize=256)
def _problem_from(dims: tuple[int, ...], batch: tuple[int, ...], dtype: torch.dtype) -> Problem:
    each: list[tuple[int, ...]] = []
    start = 0
    while start < len(dims):
        stop = start + 1 + dims[start]
        each.append(dims[start + 1 : stop])
        start = stop
    return Problem(OP, sum(batch), dtype=dtype, rows=batch, tables=tuple(each))  # type: ignore[arg-type]


def entries_of(offsets: Tensor, num_indices: int, *, last: bool) -> Entries:
    """Which bag each index is in."""
    sizes = bounds_of(offsets, num_indices, last=last).diff()
    return Entries(torch.repeat_interleave(sizes, output_size=num_indices), sizes)


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
        rows, own = indices[start:stop].long(), own - start
        scales = None if weights is None else weights[start:stop].float()
        if table.dtype == torch.float32:
            mode = "mean" if mean else "sum"
            part.copy_(embedding_bag(rows, table, own, None, 2.0, False, mode, False, scales, True))
            continue
        # torch rounds sums of 16 bits before it divides them
        sizes = own.diff()
        if mean:
            scales = torch.repeat_interleave(1.0 / sizes.clamp(min=1).float(), sizes)
        bags = torch.repeat_interleave(torch.arange(len(some)), sizes)
        for few in torch.arange(stop - start).split(max(1, CHUNK_ELEMENTS // table.shape[1])):
            wide = table[rows[few]].float()
            part.index_add_(0, bags[few], wide if scales is None else wide * scales[few, None])
    return y.to(dtype)


def at_once() -> None:
    """Wait for a tensor that is there."""


def exchange(
    dy: Tensor, p: Problem, rank: int, group_name: str
) -> tuple[Tensor, Callable[[], object]]:
    """Gradients of own tables' columns for the global batch, from those of own bags for all tables.

    Returns:
        dtype of dy, [bags of all ranks, columns of own tables], where rows arrive at their place;
        and what the stream waits by that is to read them.
    """
    columns = [sum(each) for each in p.tables]
    if len(columns) == 1:
        return dy.contiguous(), at_once
    sent = torch.cat([part.reshape(-1) for part in dy.split(columns, 1)])
    got = dy.new_empty(p.m * columns[rank])
    workspace = workspace_of(group_of(group_name), dy.device)
    workspace.board.note_op(f"{OP} backward")
    awaited = Awaited(OP, "take part in the exchange of gradients", "backward")
    calls = library_of(workspace, awaited)
    gets, gives = [b * columns[rank] for b in p.rows], [p.rows[rank] * c for c in columns]
    return got.view(p.m, columns[rank]), calls.begin_all_to_all(got, sent, gets, gives)


def table_gradients(
    dy: Tensor, pooled: Lookups, wait: Callable[[], object] = at_once, *, sparse: bool
) -> list[Tensor]:
    """The gradient of each table in its dtype, dense or coalesced: sums in fp32, rounded once.

    Args:
        dy: [bags of all ranks, columns of own tables], as `exchange` returns it.
        wait: for dy; what it is not needed for comes before.
    """
    tables, indices = pooled.tables, pooled.indices
    if not indices.numel():
        wait()
        return [_gradient(t, indices.new_empty(0).long(), t.new_empty(0, t.shape[1]),
                          sparse=sparse) for t in tables]  # fmt: skip
    if dy.is_cuda:
        return _by_kernel(dy, pooled, wait, sparse=sparse)
    wait()
    parts = zip(tables, sums_on_cpu(dy, pooled), strict=True)
    return [_gradient(t, rows, values.to(t.dtype), sparse=sparse) for t, (rows, values) in parts]


def sums_on_cpu(dy: Tensor, pooled: Lookups) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each table the rows that are named, int64 [rows], and their sums, fp32 [rows, D]."""
    entries = entries_of(pooled.offsets, pooled.indices.numel(), last=pooled.last)
    scales = scales_of(entries, pooled.weights, mean=pooled.mean)
    table_of = entries.bag // max(len(dy), 1)
    first = 0
    for i, table in enumerate(pooled.tables):
        own = (table_of == i).nonzero().flatten()
        rows, places = torch.unique(pooled.indices[own].long(), return_inverse=True)
        values = torch.zeros(len(rows), table.shape[1], device=dy.device)
        part = dy[:, first : first + table.shape[1]]
        step = max(1, CHUNK_ELEMENTS // table.shape[1])
        for some, place in zip(own.split(step), places.split(step), strict=True):
            terms = part[entries.bag[some] - i * len(dy)].float()
            if scales is not None:
                terms = terms * scales[some, None]
            values.index_add_(0, place, terms)
        yield rows, values
        first += table.shape[1]


def first_rows(tables: Sequence[Tensor]) -> list[int]:
    """The number of each table's first row among those of all, and how many there are."""
    return list(accumulate((len(t) for t in tables), initial=0))


def sorted_by_row(pooled: Lookups, written: Tables, num_bags: int) -> Sorted:
    """The entries of all tables, for kernels; nothing waits for the GPU."""
    n = pooled.indices.numel()
    entries = entries_of(pooled.offsets, n, last=pooled.last)
    scales = scales_of(entries, pooled.weights, mean=pooled.mean)
    num_rows = sum(map(len, pooled.tables))
    return sorted_entries(pooled.indices, entries.bag, scales, written.words, num_rows, num_bags)


def _by_kernel(
    dy: Tensor, pooled: Lookups, wait: Callable[[], object], *, sparse: bool
) -> list[Tensor]:
    """One launch for all tables, one sum in one order for each row."""
    tables, firsts = pooled.tables, first_rows(pooled.tables)
    if not sparse:
        grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tables]
        written = tables_of(grads, firsts[:-1], dy)
        entries = sorted_by_row(pooled, written, len(dy))
        wait()
        sum_rows(written, dy, entries, "rows")
        return grads
    entries = sorted_by_row(pooled, tables_of(tables, firsts[:-1], dy), len(dy))
    # the one wait for the GPU: rows that are named, of each table
    names = entries.names[entries.starts[: int(entries.number)]].long()
    edges = torch.searchsorted(names, torch.tensor(firsts).to(dy.device)).tolist()
    parts = zip(edges[:-1], edges[1:], firsts[:-1], strict=True)
    rows = [names[start:stop] - first for start, stop, first in parts]
    values = [t.new_empty(len(r), t.shape[1]) for t, r in zip(tables, rows, strict=True)]
    wait()
    sum_rows(tables_of(values, edges[:-1], dy), dy, entries, "named")
    return [_gradient(t, r, v, sparse=True) for t, r, v in zip(tables, rows, values, strict=True)]


def _gradient(table: Tensor, rows: Tensor, values: Tensor, *, sparse: bool) -> Tensor:
    if sparse:
        shape = tuple(table.shape)
        return torch.sparse_coo_tensor(
            rows[None], values, shape, is_coalesced=True, check_invariants=False
        )
    grad = torch.zeros(table.shape, dtype=table.dtype, device=table.device)
    grad[rows] = values
    return grad


def weight_gradient(dy: Tensor, pooled: Lookups) -> Tensor:
    """The gradient of each index's weight: its row times that of its bag's gradient, in fp32."""
    tables, indices, offsets, weights, last, _ = pooled
    assert weights is not None
    n, num_bags = indices.numel(), dy.shape[0]
    entries = entries_of(offsets, n, last=last)
    if dy.is_cuda:
        out = torch.empty(n, dtype=weights.dtype, device=dy.device)
        if n:
            weight_gradient_into(out, dy, tables, indices, entries.bag)
        return out
    table_of = entries.bag // max(num_bags, 1)
    found = torch.zeros(n)
    first = 0
    for i, table in enumerate(tables):
        own = (table_of == i).nonzero().flatten()
        part = dy[:, first : first + table.shape[1]]
        for some in own.split(max(1, CHUNK_ELEMENTS // table.shape[1])):
            terms = part[entries.bag[some] - i * num_bags].float()
            found[some] = (terms * table[indices[some].long()].float()).sum(1)
        first += table.shape[1]
    return found.to(weights.dtype)


def _exchange(
    dy: Tensor, dims: Sequence[int], batch: Sequence[int], rank: int, group_name: str
) -> Tensor:
    got, wait = exchange(dy, problem_from(dims, batch, dy.dtype), rank, group_name)
    wait()
    return got


def _fake_exchange(
    dy: Tensor, dims: Sequence[int], batch: Sequence[int], rank: int, group_name: str
) -> Tensor:
    p = problem_from(dims, batch, dy.dtype)
    return dy.new_empty(p.m, sum(p.tables[rank]))


def _dense(
    dy: Tensor, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor,
    weights: Tensor | None, last: bool, mean: bool,
) -> list[Tensor]:  # fmt: skip
    return table_gradients(dy, Lookups(tables, indices, offsets, weights, last, mean), sparse=False)


def _fake_dense(
    dy: Tensor, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor,
    weights: Tensor | None, last: bool, mean: bool,
) -> list[Tensor]:  # fmt: skip
    return [t.new_empty(t.shape) for t in tables]


def _weights(
    dy: Tensor, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor,
    last: bool,
) -> Tensor:  # fmt: skip
    return weight_gradient(dy, Lookups(tables, indices, offsets, weights, last, False))


def _fake_weights(
    dy: Tensor, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor,
    last: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


# operators of their own, so that a compiled backward holds each as one node
_TENSORS = "Tensor dy, Tensor[] tables, Tensor indices, Tensor offsets"
register(
    "pooled_gradient_all_to_all(Tensor dy, int[] dims, int[] batch, int rank, str group_name) "
    "-> Tensor",
    _exchange, _fake_exchange, refuse_double,
)  # fmt: skip
register(
    f"embedding_bag_table_gradients({_TENSORS}, Tensor? weights, bool last, bool mean) -> Tensor[]",
    _dense, _fake_dense, refuse_double, meets=False,
)  # fmt: skip
register(
    f"embedding_bag_weight_gradient({_TENSORS}, Tensor weights, bool last) -> Tensor",
    _weights, _fake_weights, refuse_double, meets=False,
)  # fmt: skip
