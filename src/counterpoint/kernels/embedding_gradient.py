"""Gradients of embedding bags: of the rows of all tables, and of each index's weight.

Entries are indices by position, sorted by the row that they name, in their own order within a row:
so each row of a gradient is one sum, of one program, in one order, whatever the grid. A row that is
named by most of a batch is still one program's work.

A table is TABLE_WORDS numbers of int64. Of the first kernel: address of its gradient, the number of
its first row, columns and first column of dy in VEC elements. Of the second: address, row stride,
columns, first column of dy.
"""

import triton
import triton.language as tl

TABLE_WORDS = tl.constexpr(4)


@triton.jit(do_not_specialize=["num_bags", "stride"])
def table_gradient_kernel(
    dy_ptr,  # [num_bags, columns]
    bags_ptr,  # [n] int64: table * num_bags + bag of each entry, sorted by rows
    scales_ptr,  # [n] fp32, likewise
    starts_ptr,  # [rows + 1 and more] int64: where the entries of each row begin
    names_ptr,  # [n] int64: row of all tables that each entry names, sorted
    count_ptr,  # [1] int64: rows that are named
    tables_ptr,  # [tables, TABLE_WORDS] int64
    num_bags,
    stride,  # of a row of dy, in VEC elements
    DTYPE: tl.constexpr,  # of dy and gradients
    SCALED: tl.constexpr,
    COMPACT: tl.constexpr,  # rows of a gradient are those that are named, one after the other
    STEP: tl.constexpr,  # entries at a time
    BLOCK_D: tl.constexpr,
    VEC: tl.constexpr,
):
    lanes, cols = tl.arange(0, STEP)[:, None], tl.arange(0, BLOCK_D)[None, :]
    count = tl.load(count_ptr).to(tl.int32)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        table_ptr = tables_ptr + tl.load(bags_ptr + start) // num_bags * TABLE_WORDS
        address = tl.load(table_ptr).to(tl.pointer_type(DTYPE))
        grad_ptr = tl.multiple_of(address, VEC * (DTYPE.primitive_bitwidth // 8))
        number = tl.cast(row, tl.int64) if COMPACT else tl.load(names_ptr + start)
        number -= tl.load(table_ptr + 1)
        dim = tl.load(table_ptr + 2) * VEC
        column = tl.load(table_ptr + 3)
        for first in range(0, dim.to(tl.int32), BLOCK_D):
            acc = tl.zeros((STEP, BLOCK_D), tl.float32)
            there = first + cols < dim
            for at in range(0, (stop - start).to(tl.int32), STEP):
                entry = start + at + lanes
                live = entry < stop
                bag = tl.load(bags_ptr + entry, mask=live, other=0) % num_bags
                place = dy_ptr + (bag * stride + column) * VEC + first
                term = tl.load(place + cols, mask=live & there, other=0.0).to(tl.float32)
                if SCALED:
                    term *= tl.load(scales_ptr + entry, mask=live, other=0.0)
                acc += term
            total = tl.sum(acc, 0)[None, :]
            tl.store(grad_ptr + (number * dim + first) + cols, total.to(DTYPE), mask=there)


@triton.jit(do_not_specialize=["n", "num_bags", "stride"])
def weight_gradient_kernel(
    dy_ptr,  # [num_bags, columns]
    indices_ptr,  # [n]
    bags_ptr,  # [n] int64: table * num_bags + bag of each entry
    tables_ptr,  # [tables, TABLE_WORDS] int64
    out_ptr,  # [n]
    n,
    num_bags,
    stride,  # of a row of dy
    DTYPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_D)[None, :]
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)[:, None]
    live = entry < n
    bag = tl.load(bags_ptr + entry, mask=live, other=0)
    table_ptrs = tables_ptr + bag // num_bags * TABLE_WORDS
    index = tl.load(indices_ptr + entry, mask=live, other=0).to(tl.int64)
    dim = tl.load(table_ptrs + 2, mask=live, other=0)
    table = tl.load(table_ptrs, mask=live, other=0).to(tl.pointer_type(DTYPE))
    row_ptrs = table + index * tl.load(table_ptrs + 1, mask=live, other=0)
    term_ptrs = dy_ptr + (bag % num_bags) * stride + tl.load(table_ptrs + 3, mask=live, other=0)
    acc = tl.zeros((ENTRIES, BLOCK_D), tl.float32)
    for first in range(0, tl.max(tl.max(dim, 1), 0).to(tl.int32), BLOCK_D):
        there = first + cols < dim
        row = tl.load(row_ptrs + (first + cols), mask=there, other=0.0).to(tl.float32)
        term = tl.load(term_ptrs + (first + cols), mask=there, other=0.0).to(tl.float32)
        acc += row * term
    total = tl.sum(acc, 1)[:, None]
    tl.store(out_ptr + entry, total.to(out_ptr.dtype.element_ty), mask=live)
