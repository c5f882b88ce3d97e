"""y = sum over ranks of x w for few rows: a matmul of decoding and its all-reduce, in one kernel.

Or its reduce-scatter. Each program multiplies tiles of columns over the whole of K and sends each
one off as soon as it is done; the sum over the ranks comes after its last tile, when the others
have arrived. Three protocols, all by low-latency words (see peer.py):

- one shot: every rank gets every partial tile and sums for itself. One trip, ranks x the bytes.
- two shots: a tile's columns are divided among the ranks; each sums its part and gives it to all.
- scatter: a tile's rows go to their owners, who sum them. One trip; the rest is as in one shot.

Partials travel in the dtype of y (a single row in fp32), are summed in fp32 in a fixed order,
and rounded once. All ranks hold the same bits.

Words of each rank, one half for even and one for odd epochs: slots of partials by sender, [ranks,
tiles, rows, columns of a tile or chunk], then results by the rank that has summed them, likewise. A
word holds two rows of a 16-bit dtype, or one fp32 value.
"""

import triton
import triton.language as tl

from counterpoint.kernels.peer import (
    end_of_call,
    next_epoch,
    pack,
    peer_ptr,
    put_words,
    take_words,
    unpack,
)
from counterpoint.kernels.reduce import sum_of_parts


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
def to_words(acc, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, OUT: tl.constexpr):
    """[ROWS, COLS] of fp32 as words of int32: [ROWS / 2, COLS] if in pairs."""
    if PAIRS:
        low, high = tl.split(tl.permute(tl.reshape(acc, (ROWS // 2, 2, COLS)), (0, 2, 1)))
        words = pack(low, high, OUT)
    else:
        words = acc.to(tl.int32, bitcast=True)
    return words


@triton.jit
def sum_of_ranks(
    words, bias, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, OUT: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Sum of [WORLD, rows, COLS] words over the ranks, plus [1, COLS]: [ROWS, COLS] in fp32."""
    if PAIRS:
        low, high = unpack(words, OUT)
        low, high = sum_of_parts(low, IN_ORDER) + bias, sum_of_parts(high, IN_ORDER) + bias
        pairs = tl.join(low, high)
        total = tl.reshape(tl.permute(pairs, (0, 2, 1)), (ROWS, COLS))
    else:
        total = sum_of_parts(words.to(tl.float32, bitcast=True), IN_ORDER) + bias
    return total


@triton.jit(
    do_not_specialize=["M", "rank", "tag", "timeout_ns"],
    do_not_specialize_on_alignment=["bias_ptr"],
)
def matmul_all_reduce_kernel(
    x_ptr,  # [M, K], the columns of a row without gaps
    w_ptr,  # [K, N], any strides
    bias_ptr,  # [N]
    y_ptr,  # [M, N]; what is scattered: M rows of each owner, x has those of all
    words_ptr,  # [WORLD] int64: where each rank's words begin
    state_ptr,  # [6] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    M,
    N,
    K,
    stride_xm,
    stride_wk,
    stride_wn,
    half_bytes,  # of all words there are: where those of odd epochs begin, whatever a call's size
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,  # a power of 2
    SHOTS: tl.constexpr,
    SCATTER: tl.constexpr,  # with one shot
    HAS_BIAS: tl.constexpr,
    IN_ORDER: tl.constexpr,  # of ranks is summed
    OWN: tl.constexpr,  # rows of y, >= M, a power of 2
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr,  # of the launch
):
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    ROWS: tl.constexpr = OWN * WORLD if SCATTER else OWN  # of a tile
    PAIRS: tl.constexpr = OWN > 1 and OUT.primitive_bitwidth == 16
    HIGH: tl.constexpr = OWN // 2 if PAIRS else OWN  # rows of words, of a slot
    STEP: tl.constexpr = 2 if PAIRS else 1
    CHUNK: tl.constexpr = BLOCK_N // WORLD  # columns of a tile that one rank sums
    COLS: tl.constexpr = BLOCK_N if SHOTS == 1 else CHUNK  # of a slot
    slot = tl.cdiv(M, STEP) * COLS  # words of it: rows that there are not have none
    program, programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(N, BLOCK_N)
    epoch = next_epoch(tl.load(state_ptr))
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    ranks = tl.arange(0, WORLD)
    offs_h, offs_n = tl.arange(0, HIGH), tl.arange(0, BLOCK_N)
    rows = works & (offs_h * STEP < M)

    turn = (epoch & 1).to(tl.int64) * half_bytes
    sent = tl.cast(num_tiles, tl.int64) * slot  # words of one sender, of slots or of results
    results = turn + WORLD * sent * 4
    # a slot as [WORLD, HIGH, COLS] words, one for each rank that it goes to or comes from
    place = offs_h[None, :, None] * COLS + tl.arange(0, COLS)[None, None, :]
    live = rows[None, :, None] & (ranks[:, None, None] >= 0) & (place >= 0)

    for tile in range(program, num_tiles, programs):
        acc = partial_tile(
            x_ptr, w_ptr, tile, M, N, K, stride_xm, stride_wk, stride_wn,
            ROWS, OWN, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
        )  # fmt: skip
        mine = to_words(acc, ROWS, BLOCK_N, PAIRS, OUT)
        to = peer_ptr(words_ptr, ranks, turn, tl.int32)[:, None, None]
        to = to + (rank * sent + tile * slot + place)
        if SCATTER:
            chunks = tl.reshape(mine, (WORLD, HIGH, BLOCK_N))
        elif SHOTS == 1:
            chunks = tl.broadcast_to(mine[None, :, :], (WORLD, HIGH, COLS))
        else:
            chunks = tl.permute(tl.reshape(mine, (HIGH, WORLD, CHUNK)), (1, 0, 2))
        put_words(to, chunks, live)

    late = tl.zeros((WORLD,), tl.int32)
    from_all = peer_ptr(words_ptr, rank, turn, tl.int32) + ranks.to(tl.int64)[:, None, None] * sent
    own = rank * CHUNK if SHOTS == 2 else 0  # first of the columns of a tile that are summed here
    for tile in range(program, num_tiles, programs):
        at = from_all + (tile * slot + place)
        chunks, slow = take_words(at, stop_ptr, timeout_ns, live, NUM_WARPS)
        late = late | tl.max(tl.max(slow.to(tl.int32), 2), 1)
        cols = tile * BLOCK_N + own + tl.arange(0, COLS)[None, :]
        bias = tl.zeros((1, COLS), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total = sum_of_ranks(chunks, bias, OWN, COLS, PAIRS, OUT, IN_ORDER)
        if SHOTS == 1:
            store_tile(y_ptr, total, cols, M, N, N, OWN)
        else:
            # the own chunk of the result, to everyone; not what was summed of too little
            good = tl.max(late, 0) == 0
            sums = to_words(total, OWN, CHUNK, PAIRS, OUT)
            sums = tl.broadcast_to(sums[None, :, :], (WORLD, HIGH, CHUNK))
            to = peer_ptr(words_ptr, ranks, results, tl.int32)[:, None, None]
            put_words(to + (rank * sent + tile * slot + place), sums, live & good)

    if SHOTS == 2:
        heard = tl.max(late, 0) == 0  # else nobody has the sums, for want of those that are late
        # of each column the rank that has summed it, and where it has put it
        there = (offs_n // CHUNK).to(tl.int64)[None, :] * sent + (offs_n % CHUNK)[None, :]
        there = there + offs_h[:, None] * CHUNK
        for tile in range(program, num_tiles, programs):
            at = peer_ptr(words_ptr, rank, results, tl.int32) + (tile * slot + there)
            some = rows[:, None] & (offs_n >= 0)[None, :]
            sums, slow = take_words(at, stop_ptr, timeout_ns, some, NUM_WARPS)
            slow = tl.max(tl.max(tl.reshape(slow.to(tl.int32), (HIGH, WORLD, CHUNK)), 2), 0)
            late = late | tl.where(heard, slow, 0)
            bias = tl.zeros((1, BLOCK_N), tl.float32)
            total = sum_of_ranks(sums[None, :, :], bias, OWN, BLOCK_N, PAIRS, OUT, IN_ORDER)
            store_tile(y_ptr, total, tile * BLOCK_N + offs_n[None, :], M, N, N, OWN)

    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)


@triton.jit
def store_tile(y_ptr, total, cols, M, N, stride_ym, ROWS: tl.constexpr):
    """Store [ROWS, ..] of fp32 at columns `cols`, [1, ..], of y [M, N]."""
    offs_m = tl.arange(0, ROWS)[:, None]
    y_ptrs = y_ptr + offs_m.to(tl.int64) * stride_ym + cols
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(offs_m < M) & (cols < N))
