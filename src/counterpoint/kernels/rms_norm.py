"""What a decoder layer does with a sum over ranks: add it to the residual, normalise by RMS.

One pass: a program has a whole row in registers, so that y and the residual are read once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def add_rms_norm_kernel(
    y_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    weight_ptr,  # [N]
    out_ptr,  # [M, N]: h / rms(h) * weight, where h = y + residual
    sum_ptr,  # [M, N]: h
    N,
    eps,
    BLOCK: tl.constexpr,  # >= N, a power of 2
):
    row = tl.program_id(0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    y = tl.load(y_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    h = y + tl.load(residual_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    # as it is stored: the next layer reads the rounded one, and so does a model that is not fused
    h = h.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + offs, h, mask=mask)
    h = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h) / N + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + offs, (h * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
