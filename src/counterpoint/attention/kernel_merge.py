"""Merge two attentions of the same queries by their log-sum-exp: one pass over memory, in place.

In fp32, y += w (other - y) and lse = log(exp(lse) + exp(lse_other)), w = sigmoid(lse_other - lse).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def merge_attention_kernel(
    y_ptr,  # [rows, heads, HEAD_DIM], of any dtype
    lse_ptr,  # [heads, rows] fp32
    other_ptr,  # as y
    lse_other_ptr,  # as lse
    rows,
    stride_y_row,
    stride_y_head,
    stride_lse,  # elements from head to head
    stride_other_row,
    stride_other_head,
    stride_lse_other,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    offs_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    in_rows = offs_row < rows
    mask = in_rows[:, None] & (offs_dim < HEAD_DIM)[None, :]
    lse_ptrs = lse_ptr + head * stride_lse + offs_row
    lse = tl.load(lse_ptrs, mask=in_rows, other=0.0)
    lse_other = tl.load(lse_other_ptr + head * stride_lse_other + offs_row, mask=in_rows, other=0.0)
    # several warps hold the same rows: all have read them before one of them stores new ones
    tl.debug_barrier()
    # of both exponentials the larger is 1: neither overflows
    top = tl.maximum(lse, lse_other)
    exp, exp_other = tl.exp(lse - top), tl.exp(lse_other - top)
    total = exp + exp_other
    weight = exp_other / total
    tl.store(lse_ptrs, top + tl.log(total), mask=in_rows)
    y_ptrs = y_ptr + offs_row[:, None] * stride_y_row + head * stride_y_head + offs_dim[None, :]
    other_ptrs = other_ptr + offs_row[:, None] * stride_other_row + head * stride_other_head
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptrs + offs_dim[None, :], mask=mask, other=0.0).to(tl.float32)
    y += weight[:, None] * (other - y)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)
