"""Activations behind a matmul: of its products as they are stored, in fp32, rounded once.

    relu  silu(h) = h sigmoid(h)  gelu  gelu_tanh, its approximation by tanh;  and gated, as
    silu_mul(h, up) = silu(h) up

The device functions are for kernels that hold a tile of products; the kernels here are for
products that are in memory, and for gradients.
"""

import triton
import triton.language as tl

GELU = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TANH = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): tanh(z) is 2 sigmoid(2 z) - 1
CUBE = tl.constexpr(0.044715)


@triton.jit
def activated(h, NAME: tl.constexpr):
    """The activation of a tile in fp32; NaN stays NaN."""
    if NAME == "relu":
        y = tl.where(h < 0, 0.0, h)
    elif NAME == "silu":
        y = h * tl.sigmoid(h)
    elif NAME == "gelu":
        y = 0.5 * h * (1 + tl.erf(h * GELU))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        y = h * tl.sigmoid(TANH * (h + CUBE * h * h * h))
    return y


@triton.jit
def slope(h, NAME: tl.constexpr):
    """The derivative of `activated`."""
    if NAME == "relu":
        y = tl.where(h > 0, 1.0, tl.where(h <= 0, 0.0, h))
    elif NAME == "silu":
        part = tl.sigmoid(h)
        y = part * (1 + h * (1 - part))
    elif NAME == "gelu":
        y = 0.5 * (1 + tl.erf(h * GELU)) + h * DENSITY * tl.exp(-0.5 * h * h)
    else:
        part = tl.sigmoid(TANH * (h + CUBE * h * h * h))
        y = part * (1 + h * (1 - part) * TANH * (1 + 3 * CUBE * h * h))
    return y


@triton.jit
def activation_kernel(
    h_ptr,  # [N], without gaps as all others
    up_ptr,  # [N], where GATED
    y_ptr,  # [N]; it may be h
    N,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    y = activated(tl.load(h_ptr + offs, mask=mask, other=0.0).to(tl.float32), NAME)
    if GATED:
        y *= tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def activation_gradient_kernel(
    h_ptr,  # [N]
    up_ptr,  # [N], where GATED; so is dup
    dy_ptr,  # [N]
    dh_ptr,  # [N]
    dup_ptr,
    N,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    h = tl.load(h_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dh = dy * slope(h, NAME)
    if GATED:
        dup = dy * activated(h, NAME)
        tl.store(dup_ptr + offs, dup.to(dup_ptr.dtype.element_ty), mask=mask)
        dh *= tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dh_ptr + offs, dh.to(dh_ptr.dtype.element_ty), mask=mask)
