"""y = gather(x) w for few rows: an all-gather and the matmul behind it, in one kernel.

The first SLICES programs send the own rows to all ranks, this one too, a slice each with a flag
behind it (see peer.py), and end. The others have tiles of columns, which wait for all rows.

Memory of each rank, one half for even and one for odd epochs: x of all ranks, [WORLD * m, K]; flags
[SLICES, WORLD].
"""

import triton
import triton.language as tl

from counterpoint.kernels.matmul_all_reduce import partial_tile, store_tile
from counterpoint.kernels.peer import end_of_call, next_epoch, peer_ptr, post, put, wait


@triton.jit(
    do_not_specialize=["m", "rank", "tag", "timeout_ns"],
    do_not_specialize_on_alignment=["bias_ptr"],
)
def all_gather_matmul_kernel(
    x_ptr,  # [m, K], without gaps
    w_ptr,  # [K, N], any strides
    bias_ptr,  # [N]
    y_ptr,  # [WORLD * m, N]
    rows_ptr,  # [WORLD] int64: where each rank's x of all begins
    flags_ptr,  # [WORLD] int64: likewise its flags
    state_ptr,  # [3] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    m,
    N,
    K,
    part,  # words of 4 bytes of x, a whole number
    stride_wk,
    stride_wn,
    half_bytes,  # of the memory: where the half of odd epochs begins
    half_flags,  # likewise, in flags
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,  # a power of 2
    SLICES: tl.constexpr,
    PIECE: tl.constexpr,  # words that are sent at a time
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of y, >= WORLD * m, a power of 2
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    X: tl.constexpr = x_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(N, BLOCK_N)
    epoch = next_epoch(tl.load(state_ptr))
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    ranks = tl.arange(0, WORLD)
    here = (epoch & 1).to(tl.int64) * half_bytes
    flags = (epoch & 1) * half_flags

    late = tl.zeros((WORLD,), tl.int32)
    if program < SLICES:
        # the next rank first: ranks that all begin with the same one would meet there
        to = (rank + 1 + ranks) % WORLD
        words_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        theirs = peer_ptr(rows_ptr, to, here, tl.int32)[:, None] + tl.cast(rank, tl.int64) * part
        pieces = tl.cdiv(part, SLICES * PIECE)  # of a slice
        for piece in range(program * pieces, (program + 1) * pieces):
            offs = piece * PIECE + tl.arange(0, PIECE)[None, :]
            words = tl.load(words_ptr + offs, mask=offs < part, other=0)
            live = works & (offs < part) & (to[:, None] >= 0)
            put(theirs + offs, tl.broadcast_to(words, (WORLD, PIECE)), live)
        flag = flags + program * WORLD + rank
        post(peer_ptr(flags_ptr, to, flag * 4, tl.int32), epoch, works & (to >= 0))
    else:
        first = program - SLICES
        all_flags = flags + tl.arange(0, SLICES)[:, None] * WORLD + ranks[None, :]
        ptrs = peer_ptr(flags_ptr, rank, all_flags * 4, tl.int32)
        slow = wait(ptrs, epoch, stop_ptr, timeout_ns, works & (all_flags >= 0))
        late = tl.max(slow.to(tl.int32), 0)
        full_ptr = peer_ptr(rows_ptr, rank, here, X)
        for tile in range(first, num_tiles, programs - SLICES):
            acc = partial_tile(
                full_ptr, w_ptr, tile, WORLD * m, N, K, K, stride_wk, stride_wn,
                ROWS, ROWS, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
            )  # fmt: skip
            cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            if HAS_BIAS:
                acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            store_tile(y_ptr, acc, cols, WORLD * m, N, ROWS)

    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)
