"""Sum of a rank's slots in fp32, rounded once: the end of a matmul_reduce_scatter.

One pass over memory: reads every partial once and writes the result once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots", "rows"], do_not_specialize_on_alignment=["bias_ptr"])
def reduce_kernel(
    slots_ptr,  # [ranks, rows, cols], one slot per sender
    own_ptr,  # [rows, cols], the partial that this rank computed itself
    bias_ptr,  # [cols]
    out_ptr,  # [rows, cols]
    order_ptr,  # [num_slots] int64, which slots, in the order of summation
    num_slots,
    rows,
    cols,
    stride_slot,  # elements from slot to slot
    stride_slots,  # elements from row to row, here and below
    stride_own,
    stride_out,
    HAS_OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < cols
    acc = tl.zeros([BLOCK], tl.float32)
    # the order of the plan: the same bits in every run
    for i in range(num_slots):
        slot = tl.load(order_ptr + i)
        source_ptr = slots_ptr + slot * stride_slot + row * stride_slots
        acc += tl.load(source_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_OWN:
        acc += tl.load(own_ptr + row * stride_own + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
