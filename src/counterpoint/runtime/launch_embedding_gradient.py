"""How gradients of embedding bags are launched: entries sorted by row, then one sum for each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.kernels.embedding_gradient import table_gradient_kernel, weight_gradient_kernel
from counterpoint.runtime.embedding_layout import DTYPES, block_of, vector_of

PROGRAMS = 1 << 12
TILE = 1024  # elements of dy at a time
NUM_WARPS = 2
ENTRIES = 16
BLOCK_D = 64


class Sorted(NamedTuple):
    """Entries by the row that they name; nothing of it waits for the GPU."""

    order: Tensor  # int64 [n]
    names: Tensor  # int64 [n], rows of all tables
    starts: Tensor  # int64 [n + 2], of each row that is named; n behind the last
    number: Tensor  # int64 [1], rows that are named


def beside(like: Tensor, numbers: Sequence[Any]) -> Tensor:
    """A few integers on the device of `like`: the driver takes them at once, the host goes on.

    While a graph is captured torch refuses the copy: a replay would read host memory that is gone.
    """
    later = like.is_cuda and not torch.cuda.is_current_stream_capturing()
    return torch.tensor(numbers).to(like.device, non_blocking=later)


def sorted_entries(indices: Tensor, tables: Tensor, firsts: Tensor) -> Sorted:
    """Sort, in the order of entries within a row.

    Args:
        indices: [n], n > 0.
        tables: int64 [n], the table of each.
        firsts: int64 [tables], the number of each table's first row among those of all.
    """
    n = indices.numel()
    names, order = torch.sort(indices.long() + firsts[tables], stable=True)
    new = names.diff(prepend=names[:1] - 1) != 0
    row = new.cumsum(0) - 1
    places = torch.arange(n, device=indices.device)
    starts = torch.full((n + 2,), n, device=indices.device)
    # those that begin no row are written where nobody reads
    starts.scatter_(0, torch.where(new, row, n + 1), places)
    return Sorted(order, names, starts, row[-1:] + 1)


def table_gradients_into(
    grads: Sequence[Tensor], firsts: Sequence[int], dy: Tensor, bags: Tensor,
    scales: Tensor | None, found: Sorted, *, compact: bool,
) -> None:  # fmt: skip
    """Write the rows that are named; others stay as they are.

    Args:
        grads: dtype of dy, [rows, D] or, if `compact`, [rows that are named, D].
        firsts: the number of each one's first row: among all, or among those named.
        dy: [bags of all ranks, columns], without gaps.
        bags: int64 [n], table * bags + bag of each entry.
        scales: fp32 [n].
        found: of the entries.
    """
    dims = [g.shape[1] for g in grads]
    columns = [sum(dims[:i]) for i in range(len(dims))]
    addresses = [g.data_ptr() for g in grads]
    item_bytes = dy.element_size()
    placed = [a // item_bytes for a in (*addresses, dy.data_ptr())]
    vec = vector_of((*dims, dy.shape[1], *placed), item_bytes)
    words = [
        (address, first, dim // vec, column // vec)
        for address, first, dim, column in zip(addresses, firsts, dims, columns, strict=True)
    ]
    block_d = block_of(dims)
    kernel: Any = table_gradient_kernel
    sorted_bags = bags[found.order]
    kernel[(min(PROGRAMS, bags.numel()),)](
        dy, sorted_bags, sorted_bags if scales is None else scales[found.order], found.starts,
        found.names, found.number, beside(dy, words), dy.shape[0],
        dy.shape[1] // vec, DTYPES[dy.dtype], scales is not None, compact,
        max(1, TILE // block_d), block_d, vec, num_warps=NUM_WARPS,
    )  # fmt: skip


def weight_gradient_into(
    out: Tensor, dy: Tensor, tables: Sequence[Tensor], indices: Tensor, bags: Tensor
) -> None:
    """Write each entry's row times its bag's gradient.

    Args:
        out: [n].
        dy: dtype of the tables, [bags of all ranks, columns], without gaps.
        tables: [rows, D], elements of a row side by side.
        indices: [n].
        bags: int64 [n], table * bags + bag of each entry.
    """
    dims = [t.shape[1] for t in tables]
    words = [(t.data_ptr(), t.stride(0), d, sum(dims[:i]))
             for i, (t, d) in enumerate(zip(tables, dims, strict=True))]  # fmt: skip
    kernel: Any = weight_gradient_kernel
    kernel[(-(-out.numel() // ENTRIES),)](
        dy, indices, bags, beside(dy, words), out, out.numel(), dy.shape[0],
        dy.shape[1], DTYPES[dy.dtype], ENTRIES, BLOCK_D, num_warps=NUM_WARPS,
    )  # fmt: skip
