"""The matmul of few rows: a tile of columns over the whole of K, and how it is stored."""

import triton
import triton.language as tl


@triton.jit
def partial_tile(
    x_ptr, w_ptr, tile, M, N, K, stride_xm, stride_wk, stride_wn,
    ROWS: tl.constexpr, OWN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_N] of x w in fp32, as (w^T x^T)^T: the long side of the product is that of w.

    Of every OWN rows the first M are rows of x, one after the other, and the others are 0.
    """
    PADDED: tl.constexpr = max(ROWS, 16)  # rows that tensor cores take
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r, offs_k = tl.arange(0, PADDED), tl.arange(0, BLOCK_K)
    cols = (offs_n if EVEN_N else tl.where(offs_n < N, offs_n, 0)).to(tl.int64)
    there = (offs_r % OWN < M) & (offs_r < ROWS)
    offs_m = (offs_r // OWN) * M + offs_r % OWN
    rows = there[None, :]
    w_ptrs = w_ptr + cols[:, None] * stride_wn + offs_k[None, :].to(tl.int64) * stride_wk
    x_ptrs = x_ptr + offs_m[None, :] * stride_xm + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, PADDED), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=rows, other=0.0)
        else:
            w = tl.load(w_ptrs, mask=offs_k[None, :] < K - k, other=0.0)
            x = tl.load(x_ptrs, mask=rows & (offs_k[:, None] < K - k), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk
        x_ptrs += BLOCK_K
    acc = tl.trans(acc)
    if ROWS < PADDED:  # the others are none of the result
        acc = tl.where(there[:, None], acc, 0.0)
        acc = tl.sum(tl.reshape(acc, (PADDED // ROWS, ROWS, BLOCK_N)), 0)
    return acc


@triton.jit
def store_tile(y_ptr, total, cols, M, N, stride_ym, ROWS: tl.constexpr):
    """Store [ROWS, ..] of fp32 at columns `cols`, [1, ..], of y [M, N]."""
    offs_m = tl.arange(0, ROWS)[:, None]
    y_ptrs = y_ptr + offs_m.to(tl.int64) * stride_ym + cols
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(offs_m < M) & (cols < N))
