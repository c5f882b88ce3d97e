"""A tiled matmul whose grid is free: X x Y blocks share out all tiles, each by a loop of its own.

What the resource-aware overlap paper sweeps: with few blocks SMs stay empty, with as many as fit
they stay full to the end, with more of them blocks come and go.
"""

import triton
import triton.language as tl


@triton.jit
def free_grid_matmul_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [K, N]
    y_ptr,  # [M, N]
    M,
    N,
    K,  # a multiple of BLOCK_K; M and N of their tiles
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_k = tl.arange(0, BLOCK_K)
    for pid_m in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        for pid_n in range(tl.program_id(1), tl.cdiv(N, BLOCK_N), tl.num_programs(1)):
            offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
            x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
            w_ptrs = w_ptr + offs_k[:, None] * N + offs_n[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for _ in range(0, K, BLOCK_K):
                acc = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), acc)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K * N
            y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
            tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty))
