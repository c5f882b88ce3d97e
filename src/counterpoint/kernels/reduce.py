"""Sums over ranks in fp32, in an order that is known; with it a matmul_reduce_scatter ends.

The kernel is one pass over memory: it reads every partial once and writes the result once.
"""

import triton
import triton.language as tl


@triton.jit
def sum_of_parts(parts, IN_ORDER: tl.constexpr):
    """The sum of [WORLD, ..] of fp32 over dim 0.

    In order it is that of the numbers from 0 on, as in `reduce_kernel`; tl.sum's is its layout's,
    which the number of rows decides.
    """
    WORLD: tl.constexpr = parts.shape[0]
    if not IN_ORDER:
        total = tl.sum(parts, 0)
    elif WORLD <= 2:
        total = tl.sum(parts, 0) + 0.0  # from 0 on: not -0
    else:
        ranks = tl.arange(0, WORLD)
        ranks = ranks[:, None] if len(parts.shape) == 2 else ranks[:, None, None]
        total = tl.sum(tl.where(ranks == 0, parts, 0.0), 0)
        for rank in tl.static_range(1, WORLD):
            total += tl.sum(tl.where(ranks == rank, parts, 0.0), 0)
    return total


@triton.jit(do_not_specialize=["num_sources", "rows"], do_not_specialize_on_alignment=["bias_ptr"])
def reduce_kernel(
    slots_ptr,  # [ranks, rows, cols], one slot per sender
    own_ptr,  # [rows, cols], the partial that this rank computed itself
    bias_ptr,  # [cols]
    out_ptr,  # [rows, cols]
    order_ptr,  # [num_sources] int64: slots in the order of summation; -1 is the own partial
    num_sources,
    rows,
    cols,
    stride_slot,  # elements from slot to slot
    stride_slots,  # elements from row to row, here and below
    stride_own,
    stride_out,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < cols
    acc = tl.zeros([BLOCK], tl.float32)
    # the order of the plan: the same bits in every run
    for i in range(num_sources):
        slot = tl.load(order_ptr + i)
        if slot < 0:
            source_ptr = own_ptr + row * stride_own
        else:
            source_ptr = slots_ptr + slot * stride_slot + row * stride_slots
        acc += tl.load(source_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
