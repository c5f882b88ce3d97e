"""Sums of a token's rows, and what their gradients are: experts, on one rank.

A token is the weighted sum of some rows. In its gradient each row is a sum of its own: of the
tokens that name it, mostly one, in their order. Atomics count these and find the first; no others
are added up by them, so a run gives the same bits as the one before.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "count", "more_first", "more_count", "tokens"])
def token_sum_kernel(
    rows_ptr,  # [count, N]
    index_ptr,  # [tokens, TOP]: which rows make a token; others than these rows are left out
    first,  # what an entry says of the first row
    count,
    weights_ptr,  # [count] fp32, of rows; of WEIGHTED
    more_ptr,  # [more_count, N], rows that follow; of MORE
    more_index_ptr,  # [tokens, MORE]
    more_first,
    more_count,
    out_ptr,  # [tokens, N]
    tokens,
    N,
    TOP: tl.constexpr,
    MORE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each token the sum of its rows, in fp32 and in order."""
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        own = tl.cast(token, tl.int64)
        for start in tl.range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            total = tl.zeros((BLOCK_N,), tl.float32)
            for j in tl.static_range(TOP):
                row = tl.load(index_ptr + own * TOP + j).to(tl.int64) - first
                known = (row >= 0) & (row < count)
                place = rows_ptr + row * N + cols
                each = tl.load(place, mask=(cols < N) & known, other=0.0).to(tl.float32)
                if WEIGHTED:
                    each *= tl.load(weights_ptr + row, mask=known, other=0.0)
                total += each
            for j in tl.static_range(MORE):
                row = tl.load(more_index_ptr + own * MORE + j).to(tl.int64) - more_first
                known = (row >= 0) & (row < more_count)
                place = more_ptr + row * N + cols
                total += tl.load(place, mask=(cols < N) & known, other=0.0).to(tl.float32)
            tl.store(out_ptr + own * N + cols, total.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["entries", "rows"])
def name_rows_kernel(
    index_ptr,  # [entries]: the row that each names
    named_ptr,  # [2, rows] int32, of 0: how many name a row, and how far the first is from the end
    entries,
    rows,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + at, mask=at < entries, other=-1).to(tl.int64)
    known = (row >= 0) & (row < rows)
    tl.atomic_add(named_ptr + row, 1, mask=known, sem="relaxed", scope="gpu")
    tl.atomic_max(named_ptr + rows + row, entries - at, mask=known, sem="relaxed", scope="gpu")


@triton.jit
def next_entry(index_ptr, row, entry, entries, BLOCK: tl.constexpr):
    """The next entry that names a row, of which there is one: seldom, so all are looked at."""
    found, start = entries, entry + 1
    while (found == entries) & (start < entries):
        at = start + tl.arange(0, BLOCK)
        which = tl.load(index_ptr + at, mask=at < entries, other=-1)
        found = tl.min(tl.where(which == row, at, entries), 0)
        start += BLOCK
    return found


@triton.jit(do_not_specialize=["entries", "rows"])
def token_sum_gradient_kernel(
    dout_ptr,  # [tokens, N]
    weights_ptr,  # [tokens * TOP], of each entry
    y_ptr,  # [rows, N], what was summed; of WEIGHTS
    index_ptr,  # [tokens * TOP]: the row that each entry names
    named_ptr,  # [2, rows] int32, as above
    dy_ptr,  # [rows, N]
    dweights_ptr,  # [tokens * TOP]; of WEIGHTS
    entries,
    rows,
    N,
    TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WEIGHTS: tl.constexpr,  # have a gradient, too
):
    """dy of each row: the gradients of its tokens, times their weights; and the weights' own."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        count = tl.load(named_ptr + row)
        begin = entries - tl.load(named_ptr + rows + row)
        row_at = tl.cast(row, tl.int64) * N
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            total = tl.zeros((BLOCK_N,), tl.float32)
            entry = begin
            for i in tl.range(0, count):
                if i > 0:
                    entry = next_entry(index_ptr, row, entry, entries, BLOCK_N)
                place = dout_ptr + (entry // TOP).to(tl.int64) * N + cols
                weight = tl.load(weights_ptr + entry).to(tl.float32)
                total += weight * tl.load(place, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(dy_ptr + row_at + cols, total.to(dy_ptr.dtype.element_ty), mask=cols < N)
        if WEIGHTS:
            entry = begin
            for i in tl.range(0, count):
                if i > 0:
                    entry = next_entry(index_ptr, row, entry, entries, BLOCK_N)
                part = tl.zeros((BLOCK_N,), tl.float32)
                for first in tl.range(0, N, BLOCK_N):
                    cols = first + tl.arange(0, BLOCK_N)
                    place = dout_ptr + (entry // TOP).to(tl.int64) * N + cols
                    term = tl.load(place, mask=cols < N, other=0.0).to(tl.float32)
                    value = tl.load(y_ptr + row_at + cols, mask=cols < N, other=0.0)
                    part += term * value.to(tl.float32)
                found = tl.sum(part, 0).to(dweights_ptr.dtype.element_ty)
                tl.store(dweights_ptr + entry, found)
