"""Rows times their weights, and their products with other rows, over the rows that there are.

What a combine's gradient does with the rows that come to experts. As in activation.py, results have
room for more rows than come, and the GPU alone knows how many these are.
"""

import triton
import triton.language as tl

from counterpoint.kernels.activation import activated, rows_here, slope


@triton.jit(do_not_specialize=["room"])
def weighted_rows_kernel(
    rows_ptr,  # [room, N]
    weights_ptr,  # [room] fp32
    other_ptr,  # [room, N]; of DOTS
    counts_ptr,  # [WORLD, E] int32 or int64
    y_ptr,  # [room, N]: rows times weights
    dots_ptr,  # [room] fp32: rows times other; of DOTS
    room,
    E,
    rank,
    N,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,  # see rows_here; 0: as many rows as there is room for
    DOTS: tl.constexpr,  # and rows beyond those that there are become 0; else they are left
    BLOCK_N: tl.constexpr,
):
    """In fp32, rounded once."""
    rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS)
    last = room if DOTS else rows
    for row in tl.range(tl.program_id(0), last, tl.num_programs(0)):
        there = row < rows
        weight = tl.load(weights_ptr + row, mask=there, other=0.0)
        at = tl.cast(row, tl.int64) * N
        total = tl.zeros((BLOCK_N,), tl.float32)
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            live = (cols < N) & there
            x = tl.load(rows_ptr + at + cols, mask=live, other=0.0).to(tl.float32)
            if DOTS:
                total += x * tl.load(other_ptr + at + cols, mask=live, other=0.0).to(tl.float32)
            y = (x * weight).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + at + cols, y, mask=cols < N)
        if DOTS:
            tl.store(dots_ptr + row, tl.sum(total))


@triton.jit(do_not_specialize=["room", "received"])
def gathered_rows_kernel(
    from_ptr,  # [received, N]
    index_ptr,  # [room] int32: of each row which one of those it is
    counts_ptr,  # [WORLD, E] int32 or int64
    y_ptr,  # [room, N]
    room,
    received,
    E,
    rank,
    N,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,  # see rows_here
    BLOCK_N: tl.constexpr,
):
    """Rows by expert of tokens that have come once; those beyond what there are, are left."""
    rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        which = tl.load(index_ptr + row)
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            live = (cols < N) & (which < received)
            at = from_ptr + tl.cast(which, tl.int64) * N + cols
            x = tl.load(at, mask=live, other=0.0)
            tl.store(y_ptr + tl.cast(row, tl.int64) * N + cols, x, mask=cols < N)


@triton.jit(do_not_specialize=["room"])
def weighted_swiglu_kernel(
    dhidden_ptr,  # [room, N]: of weights times silu(gate) * up, before the weights
    weights_ptr,  # [room] fp32
    products_ptr,  # [room, 2 N]: gate, then up
    counts_ptr,  # [WORLD, E] int32 or int64
    dproducts_ptr,  # [room, 2 N]
    dots_ptr,  # [room] fp32: gradients of the weights
    room,
    E,
    rank,
    N,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,  # see rows_here
    BLOCK_N: tl.constexpr,
):
    """What two kernels compute: dhidden times weights, rounded, and the gradients of both halves.

    Of rows beyond those that there are dots become 0, and the others are left.
    """
    X: tl.constexpr = dproducts_ptr.dtype.element_ty
    rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS)
    for row in tl.range(tl.program_id(0), room, tl.num_programs(0)):
        there = row < rows
        weight = tl.load(weights_ptr + row, mask=there, other=0.0)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            live = (cols < N) & there
            at = tl.cast(row, tl.int64) * N + cols
            wide = at + tl.cast(row, tl.int64) * N
            dy = tl.load(dhidden_ptr + at, mask=live, other=0.0).to(tl.float32)
            gate = tl.load(products_ptr + wide, mask=live, other=0.0).to(tl.float32)
            up = tl.load(products_ptr + wide + N, mask=live, other=0.0).to(tl.float32)
            total += dy * (activated(gate, "silu") * up).to(X).to(tl.float32)
            dy = (dy * weight).to(X).to(tl.float32)
            tl.store(dproducts_ptr + wide, (dy * slope(gate, "silu") * up).to(X), mask=live)
            tl.store(dproducts_ptr + wide + N, (dy * activated(gate, "silu")).to(X), mask=live)
        tl.store(dots_ptr + row, tl.sum(total))
