"""A plain tiled matmul with blocks that come and go: the subject of the resource experiment.

Not for products: the matmul library is faster. Its blocks per SM can be shaped, and its tile is the
experiment's variable.
"""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [K, N]
    y_ptr,  # [M, N]
    M,
    N,
    K,  # a multiple of BLOCK_K; M and N of their tiles
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles of a column of blocks that share their columns of w in L2
):
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * num_n) * GROUP_M
    rows = min(num_m - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * num_n) % rows
    pid_n = pid % (GROUP_M * num_n) // rows

    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_k[:, None] * N + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * N
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty))
