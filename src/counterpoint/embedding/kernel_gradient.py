"""Gradients of embedding bags: of the rows of all tables, and of each index's weight.

Entries are indices by position, sorted by the row that they name, in their own order within a row.
A program adds up several rows at a time, each in the order of its entries. A row of more than
SEGMENT entries is cut into equal segments, which are summed by several programs; a second kernel
adds their sums in order. Where a row is cut hangs on its own length alone: so its sum has the same
bits whatever the grid, and whatever other rows there are.

Segments of long rows have at least SEGMENT // 2 entries. So if the entries are cut into slots of
that many, no two of them begin in one slot, and a segment's sum is kept by the number of its slot.

A launch sums the rows of some tables, [first_table, last_table): those whose part of dy has come.
Their entries are those at places from bounds[first_table * num_bags] on, sorted as they are: no
entry leaves its table.

A sum is written to a gradient, or the row itself is updated by it, and no gradient is made.

A table is TABLE_WORDS numbers of int64. Of rows' sums: address of what is written, the number of
its first row, row stride, columns, and first column of dy in VEC elements, and the address of its
optimizer's state. Of weights: address, row stride, columns, first column of dy.
"""

import triton
import triton.language as tl

TABLE_WORDS = tl.constexpr(6)
SOME = ("first_table", "last_table", "first_column")  # which tables a launch is for


@triton.jit(do_not_specialize=["n", "num_bags"])
def names_kernel(
    indices_ptr,  # [n]
    bags_ptr,  # [n] int64: table * num_bags + bag of each entry
    tables_ptr,  # [tables, TABLE_WORDS] int64
    names_ptr,  # [n] int32 or int64
    n,
    num_bags,
    BLOCK: tl.constexpr,
):
    """The row that each entry names, among those of all tables."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entry < n
    table = tl.load(bags_ptr + entry, mask=live, other=0).to(tl.int32) // num_bags
    name = tl.load(indices_ptr + entry, mask=live, other=0) + tl.load(
        tables_ptr + (table * TABLE_WORDS + 1)
    )
    tl.store(names_ptr + entry, name.to(names_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n", "num_bags"])
def mark_rows_kernel(
    bags_ptr,  # [n] int64: table * num_bags + bag of each entry
    scales_ptr,  # [n] fp32
    order_ptr,  # [n] int64: the entry at each place
    rows_ptr,  # [n] int32: which of the rows that are named, in their order
    starts_ptr,  # [rows + 1] int32: the first place of each row that is named, and n
    tables_ptr,  # [rows] int32: its table
    sorted_bags_ptr,  # [n] int32: the bag at each place
    sorted_scales_ptr,  # [n] fp32
    marks_ptr,  # int32; the first becomes 1 if a row is long
    n,
    num_bags,
    SCALED: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where rows begin, and bags and scales in the order of rows."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < n
    row = tl.load(rows_ptr + place, mask=live, other=0)
    before = tl.load(rows_ptr + place - 1, mask=live & (place > 0), other=-1)
    new = live & (row != before)
    entry = tl.load(order_ptr + place, mask=live, other=0)
    bag = tl.load(bags_ptr + entry, mask=live, other=0).to(tl.int32)
    tl.store(starts_ptr + row, place, mask=new)
    tl.store(starts_ptr + row + 1, n, mask=place == n - 1)
    tl.store(tables_ptr + row, bag // num_bags, mask=new)
    tl.store(sorted_bags_ptr + place, bag % num_bags, mask=live)
    if SCALED:
        scale = tl.load(scales_ptr + entry, mask=live, other=0.0)
        tl.store(sorted_scales_ptr + place, scale, mask=live)
    far = tl.load(rows_ptr + place + SEGMENT, mask=place < n - SEGMENT, other=-1)
    tl.store(marks_ptr + place * 0, 1, mask=far == row)


@triton.jit
def write_rows(
    table_ptrs, row, start, names_ptr, rates_ptr, live, first, total, DTYPE: tl.constexpr,
    WRITES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """What becomes of [R, BLOCK_D] sums of columns from `first` on.

    Args:
        table_ptrs: [R, 1], of the words of each row's table.
        row: [R, 1], among those that are named.
        start: [R, 1], its first entry.
        rates_ptr: [3] fp32 of an update: learning rate, epsilon, a factor of gradients.
        live: [R, 1]: it is written.
        WRITES: "rows" of a gradient; "named": the same without those that are not named, one after
            the other; "sgd" and "rowwise_adagrad" update rows of the table, of which `total` has
            all columns.
    """
    cols = tl.arange(0, total.shape[1])[None, :]
    if WRITES == "named":
        number = row.to(tl.int64)
    else:
        number = tl.load(names_ptr + start, mask=live, other=0).to(tl.int64)
    number -= tl.load(table_ptrs + 1, mask=live, other=0)
    stride = tl.load(table_ptrs + 2, mask=live, other=0) * VEC
    dim = tl.load(table_ptrs + 3, mask=live, other=0) * VEC
    there = live & (first + cols < dim)
    addresses = tl.load(table_ptrs, mask=live, other=0).to(tl.pointer_type(DTYPE))
    align: tl.constexpr = VEC * (DTYPE.primitive_bitwidth // 8)
    places = tl.multiple_of(addresses, (align, align)) + (number * stride + first) + cols
    if WRITES == "sgd" or WRITES == "rowwise_adagrad":
        old = tl.load(places, mask=there, other=0.0).to(tl.float32)
        rate = tl.load(rates_ptr)
        total *= tl.load(rates_ptr + 2)
        if WRITES == "rowwise_adagrad":
            state_ptrs = tl.load(table_ptrs + 5, mask=live, other=0).to(tl.pointer_type(tl.float32))
            before = tl.load(state_ptrs + number, mask=live, other=0.0)
            tl.debug_barrier()  # all threads have read it when one of them writes
            squares = tl.sum(total * total, 1)[:, None] / tl.maximum(dim, 1).to(tl.float32)
            tl.store(state_ptrs + number, before + squares, mask=live)
            rate = rate / (tl.sqrt(before + squares) + tl.load(rates_ptr + 1))
        total = old - rate * total
    tl.store(places, total.to(DTYPE), mask=there)


@triton.jit(do_not_specialize=["n", "num_bags", "stride", "width", *SOME])
def table_gradient_kernel(
    dy_ptr,  # [num_bags, columns of these tables]
    bags_ptr,  # [n] int32: the bag at each place
    scales_ptr,  # [n] fp32, likewise
    rows_ptr,  # [n] int32: which of the rows that are named
    starts_ptr,  # [rows + 1] int32: where the entries of each row begin
    row_tables_ptr,  # [rows] int32
    names_ptr,  # [n] int32 or int64: the row of all tables
    tables_ptr,  # [tables, TABLE_WORDS] int64
    rates_ptr,  # [3] fp32 of an update
    marks_ptr,  # [1 + tables] int32: whether rows are long; how many of these tables' are in `long`
    long_ptr,  # [slots] int32: rows
    partials_ptr,  # [slots, width] fp32: sums of segments
    bounds_ptr,  # [tables * num_bags + 1] int64: where bags begin
    n,
    num_bags,
    stride,  # of a row of dy, in VEC elements
    width,
    first_table,
    last_table,
    first_column,  # of all tables' columns, the one that dy begins with, in VEC elements
    DTYPE: tl.constexpr,  # of dy and what is written
    WRITES: tl.constexpr,
    SCALED: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,  # at a time; as many entries of a segment at a time
    UNROLL: tl.constexpr,  # entries of each of those rows
    BLOCK_D: tl.constexpr,
    VEC: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = SEGMENT // 2
    first_place = tl.load(bounds_ptr + first_table * num_bags).to(tl.int32)
    last_place = tl.load(bounds_ptr + last_table * num_bags).to(tl.int32)

    # segments of long rows first: each is more work than most rows are
    slots = tl.where(tl.load(marks_ptr) != 0, (last_place + half - 1) // half, 0)
    for slot in range(first_place // half + program, slots, programs):
        low = slot * half
        for side in tl.static_range(2):
            # a long row of which a segment begins here holds the slot's first place or its last
            at = low if side == 0 else tl.minimum(low + half, n) - 1
            row = tl.load(rows_ptr + at)
            start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
            length = (stop - start).to(tl.int64)
            pieces = (length + SEGMENT - 1) // SEGMENT
            piece = (tl.maximum(low - start, 0) * pieces + length - 1) // length
            begin = start + (piece * length // pieces).to(tl.int32)
            end = start + ((piece + 1) * length // pieces).to(tl.int32)
            once = start > low if side else start <= low
            once = once & (start >= first_place) & (start < last_place)
            if once & (length > SEGMENT) & (piece < pieces) & (begin < low + half):
                if piece == 0:  # in any order: a row's sum hangs on none of it
                    found = tl.atomic_add(marks_ptr + 1 + first_table, 1, sem="relaxed")
                    tl.store(long_ptr + found, row)
                table_ptr = tables_ptr + tl.load(row_tables_ptr + row) * TABLE_WORDS
                dim, column = tl.load(table_ptr + 3) * VEC, tl.load(table_ptr + 4) - first_column
                for first in range(0, dim.to(tl.int32), BLOCK_D):
                    there = first + cols < dim
                    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
                    for low_entry in range(begin, end, ROWS * UNROLL):
                        terms = ()
                        for u in tl.static_range(UNROLL):
                            entry = low_entry + u * ROWS + lanes
                            live = entry < end
                            bag = tl.load(bags_ptr + entry, mask=live, other=0).to(tl.int64)
                            term_ptrs = dy_ptr + (bag * stride + column) * VEC + first + cols
                            term = tl.load(term_ptrs, mask=live & there, other=0.0)
                            terms = terms + (term,)  # noqa: RUF005
                        for u in tl.static_range(UNROLL):
                            term = terms[u].to(tl.float32)
                            if SCALED:
                                entry = low_entry + u * ROWS + lanes
                                term *= tl.load(scales_ptr + entry, mask=entry < end, other=0.0)
                            acc += term
                    partial_ptr = partials_ptr + tl.cast(slot, tl.int64) * width + first
                    tl.store(partial_ptr + cols, tl.sum(acc, 0)[None, :], mask=there)

    some = first_place < last_place
    first_row = tl.load(rows_ptr + first_place, mask=some, other=0)
    count = tl.load(rows_ptr + last_place - 1, mask=some, other=-1) + 1
    for low in range(first_row + program * ROWS, count, programs * ROWS):
        row = low + lanes
        start = tl.load(starts_ptr + row, mask=row < count, other=0)
        length = tl.load(starts_ptr + (row + 1), mask=row < count, other=0) - start
        length = tl.where(length <= SEGMENT, length, 0)
        works = length > 0
        table = tl.load(row_tables_ptr + row, mask=works, other=0)
        table_ptrs = tables_ptr + table * TABLE_WORDS
        dim = tl.load(table_ptrs + 3, mask=works, other=0) * VEC
        column = tl.load(table_ptrs + 4, mask=works, other=0) - first_column
        longest = tl.max(tl.max(length, 1), 0)
        for first in range(0, tl.max(tl.max(dim, 1), 0).to(tl.int32), BLOCK_D):
            there = first + cols < dim
            total = tl.zeros((ROWS, BLOCK_D), tl.float32)
            for i in range(0, longest, UNROLL):
                terms = ()
                for u in tl.static_range(UNROLL):
                    live = i + u < length
                    bag = tl.load(bags_ptr + (start + (i + u)), mask=live, other=0).to(tl.int64)
                    term_ptrs = dy_ptr + (bag * stride + column) * VEC + first + cols
                    term = tl.load(term_ptrs, mask=live & there, other=0.0)
                    terms = terms + (term,)  # noqa: RUF005  (the compiler knows no other way)
                for u in tl.static_range(UNROLL):
                    term = terms[u].to(tl.float32)
                    if SCALED:
                        live = i + u < length
                        term *= tl.load(scales_ptr + (start + (i + u)), mask=live, other=0.0)
                    total += term
            write_rows(table_ptrs, row, start, names_ptr, rates_ptr, works, first, total, DTYPE,
                       WRITES, VEC)  # fmt: skip


@triton.jit(do_not_specialize=["width", "first_table"])
def long_rows_kernel(
    starts_ptr, row_tables_ptr, names_ptr, tables_ptr, rates_ptr, marks_ptr, long_ptr,  # as above
    partials_ptr, width, first_table, DTYPE: tl.constexpr, WRITES: tl.constexpr,
    SEGMENT: tl.constexpr,
    STEP: tl.constexpr,  # segments at a time
    BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The sums of long rows, from those of their segments."""
    lanes, cols = tl.arange(0, STEP)[:, None], tl.arange(0, BLOCK_D)[None, :]
    one = tl.zeros((1, 1), tl.int32)
    for k in range(tl.program_id(0), tl.load(marks_ptr + 1 + first_table), tl.num_programs(0)):
        row = tl.load(long_ptr + k)
        start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        length = (stop - start).to(tl.int64)
        pieces = (length + SEGMENT - 1) // SEGMENT
        table_ptr = tables_ptr + tl.load(row_tables_ptr + row) * TABLE_WORDS
        dim = tl.load(table_ptr + 3) * VEC
        for first in range(0, dim.to(tl.int32), BLOCK_D):
            acc = tl.zeros((STEP, BLOCK_D), tl.float32)
            for low in range(0, pieces.to(tl.int32), STEP):
                piece = low + lanes
                slot = (start + piece * length // pieces) // (SEGMENT // 2)
                there = (piece < pieces) & (first + cols < dim)
                acc += tl.load(partials_ptr + (slot * width + first) + cols, mask=there, other=0.0)
            total = tl.sum(acc, 0)[None, :]
            write_rows(table_ptr + one, row + one, start + one, names_ptr, rates_ptr, one == 0,
                       first, total, DTYPE, WRITES, VEC)  # fmt: skip


@triton.jit(do_not_specialize=["n", "num_bags", "stride", *SOME])
def weight_gradient_kernel(
    dy_ptr,  # [num_bags, columns of these tables]
    indices_ptr,  # [n]
    bags_ptr,  # [n] int64: table * num_bags + bag of each entry
    tables_ptr,  # [tables, TABLE_WORDS] int64
    out_ptr,  # [n]
    n,
    num_bags,
    stride,  # of a row of dy
    first_table,
    last_table,
    first_column,  # of all tables' columns, the one that dy begins with
    DTYPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_D)[None, :]
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)[:, None]
    live = entry < n
    bag = tl.load(bags_ptr + entry, mask=live, other=0)
    live = live & (bag // num_bags >= first_table) & (bag // num_bags < last_table)
    table_ptrs = tables_ptr + bag // num_bags * TABLE_WORDS
    index = tl.load(indices_ptr + entry, mask=live, other=0).to(tl.int64)
    dim = tl.load(table_ptrs + 2, mask=live, other=0)
    column = tl.load(table_ptrs + 3, mask=live, other=0) - first_column
    table = tl.load(table_ptrs, mask=live, other=0).to(tl.pointer_type(DTYPE))
    row_ptrs = table + index * tl.load(table_ptrs + 1, mask=live, other=0)
    term_ptrs = dy_ptr + (bag % num_bags) * stride + column
    acc = tl.zeros((ENTRIES, BLOCK_D), tl.float32)
    for first in range(0, tl.max(tl.max(dim, 1), 0).to(tl.int32), BLOCK_D):
        there = first + cols < dim
        row = tl.load(row_ptrs + (first + cols), mask=there, other=0.0).to(tl.float32)
        term = tl.load(term_ptrs + (first + cols), mask=there, other=0.0).to(tl.float32)
        acc += row * term
    total = tl.sum(acc, 1)[:, None]
    tl.store(out_ptr + entry, total.to(out_ptr.dtype.element_ty), mask=live)
