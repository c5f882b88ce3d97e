"""How gradients of embedding bags are launched: entries sorted by row, then a sum for each row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.embedding.kernel_gradient import (
    long_rows_kernel,
    mark_rows_kernel,
    names_kernel,
    table_gradient_kernel,
    weight_gradient_kernel,
)
from counterpoint.embedding.layout import (
    DTYPES,
    MAX_BLOCK_D,
    MIN_BLOCK_D,
    block_of,
    vector_of,
)

# H200, 2026-11, a million rows of 128 columns in bf16: of 13 settings the best where bags are long,
# at most 20 us from it where they have one index
PROGRAMS = 1 << 14
TILE = 512  # elements of dy at a time: of several rows, or of several entries of a long one
NUM_WARPS = 2
UNROLL = 2
SEGMENT = 256  # entries of a row that one program adds up
LONG_PROGRAMS, LONG_TILE, LONG_WARPS = 1 << 9, 1 << 12, 8
BLOCK = 1024  # entries, of what is said of each
ENTRIES = 16
BLOCK_D = 64


class Sorted(NamedTuple):
    """Entries by the row that they name; nothing of it waits for the GPU."""

    names: Tensor  # int32 or int64 [n], rows of all tables
    rows: Tensor  # int32 [n]: which of the rows that are named
    starts: Tensor  # int32 [n + 1], of each row that is named, and n
    tables: Tensor  # int32 [n], of each row that is named
    bags: Tensor  # int32 [n], of the global batch
    scales: Tensor | None  # fp32 [n]
    marks: Tensor  # int32 [1 + tables]: whether a row is long; then counters of launches
    bounds: Tensor  # int64 [tables * bags + 1]: where the entries of bags begin

    @property
    def number(self) -> Tensor:
        """How many rows are named, []."""
        return self.rows[-1] + 1


def beside(like: Tensor, numbers: Sequence[Any]) -> Tensor:
    """A few integers on the device of `like`: the driver takes them at once, the host goes on.

    While a graph is captured torch refuses the copy: a replay would read host memory that is gone.
    """
    later = like.is_cuda and not torch.cuda.is_current_stream_capturing()
    return torch.tensor(numbers, dtype=torch.int64).to(like.device, non_blocking=later)


def sorted_entries(
    indices: Tensor, bags: Tensor, bounds: Tensor, scales: Tensor | None, tables: Tensor,
    num_rows: int, num_bags: int,
) -> Sorted:  # fmt: skip
    """Sort, in the order of entries within a row.

    Args:
        indices: [n], n > 0.
        bags: int64 [n], table * num_bags + bag of each.
        bounds: int64 [tables * num_bags + 1], where bags begin.
        scales: fp32 [n]; None: all are 1.
        tables: as kernels take them: see `tables_of`.
        num_rows: of all tables.
        num_bags: of the global batch.
    """
    n, device = indices.numel(), indices.device
    grid = (-(-n // BLOCK),)
    # the sort takes as many passes as a number has bytes
    kind = torch.int32 if num_rows < 1 << 31 else torch.int64
    names = torch.empty(n, dtype=kind, device=device)
    name: Any = names_kernel
    name[grid](indices, bags, tables, names, n, num_bags, BLOCK)
    names, order = torch.sort(names, stable=True)
    num_marks = 1 + len(tables)
    memory = torch.empty(num_marks + n, dtype=torch.int32, device=device)
    memory[: num_marks + 1].zero_()
    marks, rows = memory[:num_marks], memory[num_marks:]
    torch.cumsum(names[1:] != names[:-1], 0, dtype=torch.int32, out=rows[1:])
    starts, row_tables, own_bags = (memory.new_empty(n + i) for i in (1, 0, 0))
    sorted_scales = None if scales is None else torch.empty_like(scales)
    mark: Any = mark_rows_kernel
    mark[grid](
        bags, bags if scales is None else scales, order, rows, starts, row_tables,
        own_bags, own_bags if sorted_scales is None else sorted_scales, marks, n, num_bags,
        scales is not None, SEGMENT, BLOCK,
    )  # fmt: skip
    return Sorted(names, rows, starts, row_tables, own_bags, sorted_scales, marks, bounds)


class Tables(NamedTuple):
    """What sums of rows are written to, as kernels take it."""

    words: Tensor  # int64 [tables, TABLE_WORDS]
    dims: tuple[int, ...]
    vec: int
    dtype: torch.dtype


def tables_of(
    targets: Sequence[Tensor], firsts: Sequence[int], like: Tensor, sums: Sequence[Tensor] = ()
) -> Tables:
    """Tables, or their gradients, as kernels take them.

    Args:
        targets: [rows, D], elements of a row side by side, of one dtype.
        firsts: the number of each one's first row: among all, or among those named.
        like: on their device.
        sums: fp32 [rows] of each, the state of its optimizer.
    """
    dims = tuple(t.shape[1] for t in targets)
    columns = [sum(dims[:i]) for i in range(len(dims))]
    item_bytes = targets[0].element_size()
    strides = [t.stride(0) for t in targets]
    addresses = [t.data_ptr() for t in targets]
    placed = [a // item_bytes for a in addresses]
    vec = vector_of((*dims, *strides, *placed), item_bytes)
    states = [s.data_ptr() for s in sums] or [0] * len(dims)
    each = zip(addresses, firsts, strides, dims, columns, states, strict=True)
    words = [(a, first, s // vec, d // vec, c // vec, state) for a, first, s, d, c, state in each]
    return Tables(beside(like, words), dims, vec, targets[0].dtype)


def sum_rows(
    tables: Tables, dy: Tensor, some: range, found: Sorted, writes: str,
    rates: Tensor | None = None,
) -> None:  # fmt: skip
    """Add up the rows that are named, and write each sum or update a row by it; no other row.

    Sums have the same bits however tables are split into launches.

    Args:
        tables: what is written to.
        dy: dtype of the tables, [bags of all ranks, columns of some of them], without gaps.
        some: these tables, no empty range; a launch for each.
        found: of the entries of all tables.
        writes: see `write_rows` of the kernels.
        rates: fp32 [3] of an update.
    """
    updates, dims, vec = rates is not None, tables.dims, tables.vec
    # an update takes a row at once
    block_d = max(MIN_BLOCK_D, 1 << (max(dims) - 1).bit_length()) if updates else block_of(dims)
    warps = max(NUM_WARPS, min(16, block_d // MAX_BLOCK_D))
    n, width = found.names.numel(), max(dims)
    slots = -(-n // (SEGMENT // 2)) if n > SEGMENT else 1
    partials = torch.empty(slots, width, dtype=torch.float32, device=dy.device)
    long = found.starts.new_empty(slots)
    rows, dtype = max(1, TILE // block_d), DTYPES[tables.dtype]
    rates = partials if rates is None else rates
    first_column = sum(dims[: some.start]) // vec
    kernel: Any = table_gradient_kernel
    kernel[(min(PROGRAMS, -(-n // rows)),)](
        dy, found.bags, found.bags if found.scales is None else found.scales, found.rows,
        found.starts, found.tables, found.names, tables.words, rates, found.marks, long, partials,
        found.bounds, n, len(dy), dy.shape[1] // vec, width, some.start, some.stop, first_column,
        dtype, writes, found.scales is not None, SEGMENT, rows, UNROLL, block_d, vec,
        num_warps=warps,
    )  # fmt: skip
    if n > SEGMENT:
        kernel = long_rows_kernel
        kernel[(min(LONG_PROGRAMS, slots),)](
            found.starts, found.tables, found.names, tables.words, rates, found.marks, long,
            partials, width, some.start, dtype, writes, SEGMENT, max(1, LONG_TILE // block_d),
            block_d, vec, num_warps=max(LONG_WARPS, warps),
        )  # fmt: skip


def weight_gradient_into(
    out: Tensor, dy: Tensor, some: range, tables: Sequence[Tensor], indices: Tensor, bags: Tensor
) -> None:
    """Write each entry's row times its bag's gradient, of entries of some tables.

    Args:
        out: [n].
        dy: dtype of the tables, [bags of all ranks, columns of some of them], without gaps.
        some: these tables.
        tables: [rows, D], elements of a row side by side.
        indices: [n].
        bags: int64 [n], table * bags + bag of each entry.
    """
    dims = [t.shape[1] for t in tables]
    words = [(t.data_ptr(), t.stride(0), d, sum(dims[:i]), 0, 0)
             for i, (t, d) in enumerate(zip(tables, dims, strict=True))]  # fmt: skip
    kernel: Any = weight_gradient_kernel
    kernel[(-(-out.numel() // ENTRIES),)](
        dy, indices, bags, beside(dy, words), out, out.numel(), dy.shape[0], dy.shape[1],
        some.start, some.stop, sum(dims[: some.start]), DTYPES[dy.dtype], ENTRIES, BLOCK_D,
        num_warps=NUM_WARPS,
    )  # fmt: skip
