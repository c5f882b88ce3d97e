"""y = x w (+ bias), and an activation of it, whose rows have the same bits at any number of rows.

Or gated, y = activation(x w) * (x up): a tile is half of w, half of up. Products are rounded to the
dtype of y before an activation, as they are where they are stored in between.

Each cell of a product is one chain of sums over K, from its first number to its last, in fp32,
rounded once: it is never split, and tensor cores take 16 numbers at a time. So the tile may be
chosen for M; and the kernel, too, as few rows are multiplied by the code of matmul_all_reduce.py.
All have the same bits: on an H200, by wgmma as by mma.sync, and with either operand as the long
side.
"""

import triton
import triton.language as tl

from counterpoint.kernels.activation import activated
from counterpoint.tensor_parallel.kernel_matmul_all_reduce import partial_tile, store_tile


@triton.jit(do_not_specialize=["M"])
def few_rows_matmul_kernel(
    x_ptr,  # [M, K], the columns of a row without gaps
    w_ptr,  # [K, N], any strides
    bias_ptr,  # [N]
    y_ptr,  # [M, N], the columns of a row without gaps
    M,
    N,
    K,
    stride_xm,
    stride_wk,
    stride_wn,
    stride_ym,
    ROWS: tl.constexpr,  # >= M, a power of 2
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a name, or ""
):
    tile = tl.program_id(0)
    acc = partial_tile(
        x_ptr, w_ptr, tile, M, N, K, stride_xm, stride_wk, stride_wn,
        ROWS, ROWS, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
    )  # fmt: skip
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        acc = activated(acc.to(y_ptr.dtype.element_ty).to(tl.float32), ACTIVATION)
    store_tile(y_ptr, acc, cols, M, N, stride_ym, ROWS)


@triton.jit
def left_and_right(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The halves of a tile's columns, each of which a thread has a half of."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["M", "up_first"])
def invariant_matmul_kernel(
    x,  # [M, K]: a descriptor of tiles, or an address; so are w and y
    w,  # [N, K] where W_BY_COLUMNS, else [K, N]; GATED, a descriptor of w and up, [2, N, K]
    bias_ptr,  # [N]
    y,  # [M, N]
    M,
    N,
    K,
    stride_xm,  # of addresses; the columns of x and of y have no gaps
    stride_wk,
    stride_wn,
    stride_ym,
    up_first,  # 1: GATED, it is up and w
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # GATED, of w and of up together
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles of a column of tiles that share their columns of w in L2
    DESCRIPTORS: tl.constexpr,
    W_BY_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HALVES: tl.constexpr,  # by descriptors y is stored half by half: less memory, one more stage
    ACTIVATION: tl.constexpr,  # a name, or ""
    GATED: tl.constexpr,
):
    DTYPE: tl.constexpr = y.dtype if DESCRIPTORS else y.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of y
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, WIDTH)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=DESCRIPTORS):
        first_m = tile // (GROUP_M * num_n) * GROUP_M
        rows = min(num_m - first_m, GROUP_M)
        start_m = (first_m + tile % (GROUP_M * num_n) % rows) * BLOCK_M
        start_n = tile % (GROUP_M * num_n) // rows * WIDTH
        offs_m = (start_m + tl.arange(0, BLOCK_M)).to(tl.int64)
        offs_n = (start_n + tl.arange(0, WIDTH)).to(tl.int64)
        in_m, in_n = offs_m[:, None] < M, offs_n[None, :] < N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if DESCRIPTORS:
                x_tile = x.load([start_m, k])
                if GATED:  # as one operand: two by themselves would take a third longer
                    w_tile = tl.reshape(w.load([0, start_n, k]), (BLOCK_N, BLOCK_K)).T
                else:
                    w_tile = w.load([start_n, k]).T if W_BY_COLUMNS else w.load([k, start_n])
            else:
                offs_k = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
                x_ptrs = x + offs_m[:, None] * stride_xm + offs_k[None, :]
                w_ptrs = w + offs_k[:, None] * stride_wk + offs_n[None, :] * stride_wn
                x_tile = tl.load(x_ptrs, mask=in_m & (offs_k[None, :] < K), other=0.0)
                w_tile = tl.load(w_ptrs, mask=in_n & (offs_k[:, None] < K), other=0.0)
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            acc = acc.to(DTYPE).to(tl.float32)
            if GATED:
                left, right = left_and_right(acc, BLOCK_M, BLOCK_N)
                gate = tl.where(up_first != 0, right, left)
                acc = activated(gate, ACTIVATION) * tl.where(up_first != 0, left, right)
            else:
                acc = activated(acc, ACTIVATION)
        if DESCRIPTORS:
            if HALVES:
                left, right = left_and_right(acc, BLOCK_M, BLOCK_N)
                y.store([start_m, start_n], left.to(DTYPE))
                y.store([start_m, start_n + BLOCK_N // 2], right.to(DTYPE))
            else:
                y.store([start_m, start_n], acc.to(DTYPE))
        else:
            y_ptrs = y + offs_m[:, None] * stride_ym + offs_n[None, :]
            tl.store(y_ptrs, acc.to(DTYPE), mask=in_m & in_n)
