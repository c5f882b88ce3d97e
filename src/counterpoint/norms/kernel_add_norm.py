"""What a decoder layer does with a sum over ranks: add it to the residual, and normalise the rows.

By RMS, or as a LayerNorm; the result in the dtype of x, or in fp8 with a scale that is given or one
of each row. The device functions here take a tile of any shape, so that all_reduce_norm.py uses
them on what it has just summed; the kernel is for rows that are in memory: a program has a whole
row in registers where it is short, and else passes over blocks of its columns.

A row is summed in one order, by pairs, however its columns are spread over threads, and products
are rounded before they are added. So a row has the same bits by both kernels.
"""

import triton
import triton.language as tl

STATIC, BY_ROW = tl.constexpr(1), tl.constexpr(2)  # whose scale an fp8 result has; 0: none
FP8_MAX = tl.constexpr(448.0)  # of e4m3
LEAST = tl.constexpr(1e-30)  # of a row's largest value, for which its scale is made
FAR = tl.constexpr(4096)  # columns that the threads of a program have next to one another
MOST_PAIRS = tl.constexpr(16)  # times that a row is halved
OPTIONS = {"enable_fp_fusion": False}  # of launches: no product is added before it is rounded


@triton.jit
def row_sum(x):
    """The sum of a tile as a row, of a power of 2: each step adds pairs, whose order is no matter.

    Columns far apart first, which one thread has, then neighbours. Zeros behind a row change none.
    """
    x = tl.reshape(x, (x.numel,))
    for _ in tl.static_range(MOST_PAIRS):
        if x.numel > FAR:
            x = tl.sum(tl.reshape(x, (2, x.numel // 2)), 0)
    for _ in tl.static_range(MOST_PAIRS):
        if x.numel > 1:
            x = tl.sum(tl.reshape(x, (x.numel // 2, 2)), 1)
    return tl.sum(x)


@triton.jit
def moments(h, mask, count, LAYER: tl.constexpr):
    """The mean of a tile, 0 unless it is a LayerNorm's, and the sum of squares about it."""
    mean = 0.0
    if LAYER:
        mean = row_sum(h) / count
        h = tl.where(mask, h - mean, 0.0)
    return mean, row_sum(h * h)


@triton.jit
def normed(h, mean, scale, weight, bias, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """(h - mean) * scale * weight + bias, in fp32."""
    if LAYER:
        h = h - mean
    y = h * scale * weight.to(tl.float32)
    if HAS_BIAS:
        y = y + bias.to(tl.float32)
    return y


@triton.jit
def largest_of(y, mask):
    """The largest absolute value of a tile; NaN if one is."""
    worst = tl.sum(tl.where(mask & (y != y), y, 0.0))  # 0 else: tl.max leaves NaN out
    return tl.max(tl.where(mask, tl.abs(y), 0.0)) + worst


@triton.jit
def scale_of(largest):
    """The scale of a row in fp8: its largest value becomes the largest that there is."""
    return tl.maximum(largest, LEAST, propagate_nan=tl.PropagateNan.ALL) / FP8_MAX


@triton.jit
def store_normed(y_ptrs, y, mask, scale, FP8: tl.constexpr):
    """Store a tile in the dtype of the result; fp8 divided by its scale, and not above FP8_MAX."""
    if FP8:
        y = tl.maximum(tl.div_rn(y, scale), -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        y = tl.minimum(y, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def add_norm_kernel(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    weight_ptr,  # [N]
    bias_ptr,  # [N]
    scale_ptr,  # [1] fp32, of a STATIC result
    y_ptr,  # [M, N]: norm(h) * weight + bias, where h = x + residual
    h_ptr,  # [M, N]
    scales_ptr,  # [M] fp32, of one BY_ROW
    N,
    eps,
    LAYER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,  # 0, STATIC or BY_ROW
    WHOLE: tl.constexpr,  # a block holds a row
    BLOCK: tl.constexpr,  # a power of 2
):
    program = tl.program_id(0)
    row = program.to(tl.int64) * N
    limit = BLOCK if WHOLE else N
    offs = tl.arange(0, BLOCK)
    h = tl.zeros((BLOCK,), tl.float32)
    mean, squares = 0.0, 0.0
    for start in range(0, limit, BLOCK):
        cols = start + offs
        mask = cols < N
        h = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            h += tl.load(residual_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        # as it is stored: the next layer reads the rounded one, and so does a model not fused
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row + cols, h, mask=mask)
        h = h.to(tl.float32)
        count = tl.minimum(N - start, BLOCK).to(tl.float32)
        part_mean, part = moments(h, mask, count, LAYER)
        if WHOLE:
            mean, squares = part_mean, part
        else:  # of this block and of those before it, which are `start` values
            apart = part_mean - mean
            mean += apart * (count / (start + count))
            squares += part + apart * apart * (start * (count / (start + count)))
    scale = tl.rsqrt(squares / N + eps)
    # what other threads have stored of the row is loaded again
    if not WHOLE:
        tl.debug_barrier()
    given = 1.0
    if FP8 == STATIC:
        given = tl.load(scale_ptr)
    # of the block that is at work
    weight = tl.zeros((BLOCK,), weight_ptr.dtype.element_ty)
    bias = weight
    if FP8 == BY_ROW:
        largest = 0.0
        for start in range(0, limit, BLOCK):
            cols = start + offs
            mask = cols < N
            if not WHOLE:
                h = tl.load(h_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + cols, mask=mask, other=0.0)
            y = normed(h, mean, scale, weight, bias, LAYER, HAS_BIAS)
            found = largest_of(y, mask)
            largest = tl.maximum(largest, found, propagate_nan=tl.PropagateNan.ALL)
        given = scale_of(largest)
        tl.store(scales_ptr + program, given)
    for start in range(0, limit, BLOCK):
        cols = start + offs
        mask = cols < N
        if not WHOLE:
            h = tl.load(h_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        if not WHOLE or FP8 != BY_ROW:
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + cols, mask=mask, other=0.0)
        y = normed(h, mean, scale, weight, bias, LAYER, HAS_BIAS)
        store_normed(y_ptr + row + cols, y, mask, given, FP8 != 0)
