"""y = sum over ranks of x w, for few rows: the matmul of decoding and its all-reduce, in one kernel.

Each program multiplies tiles of columns over the whole of K and sends each one off as soon as it is
done; the sum over the ranks comes after its last tile, when the others have arrived. Three ways:

- one shot: every rank gets every partial tile and sums for itself. One trip, ranks x the bytes.
- two shots: a tile's columns are divided among the ranks; each sums its part and gives it to all.
- by words or by flags (see peer.py): words for few bytes, where a fence costs more than it saves.

Partials travel as fp32 words, or behind flags in the dtype of y; they are summed in fp32, in the
order of ranks, and rounded once. All ranks hold the same bits.

Cells of each rank, for even and for odd epochs: slots of partials by sender, [ranks, tiles, ROWS,
columns of a tile or part], then results [tiles, ROWS, BLOCK_N]. Its flags: [2, 2, tiles, ranks], of
even and odd epochs, of slots and results. Words, other cells, and flags are in memories of their own.
"""

import triton
import triton.language as tl

from counterpoint.kernels.peer import (
    next_epoch,
    peer_ptr,
    post,
    put,
    put_words,
    take_words,
    wait,
)


@triton.jit
def partial_tile(
    x_ptr, w_ptr, tile, M, N, K, stride_xm, stride_wk, stride_wn,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_N] of x w in fp32, as (w^T x^T)^T: the long side of the product is that of w."""
    PADDED: tl.constexpr = max(ROWS, 16)  # rows that tensor cores take
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m, offs_k = tl.arange(0, PADDED), tl.arange(0, BLOCK_K)
    cols = (offs_n if EVEN_N else tl.where(offs_n < N, offs_n, 0)).to(tl.int64)
    rows = offs_m[None, :] < M
    w_ptrs = w_ptr + cols[:, None] * stride_wn + offs_k[None, :] * stride_wk
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
        w_ptrs += BLOCK_K * stride_wk
        x_ptrs += BLOCK_K
    acc = tl.trans(acc)
    if ROWS < PADDED:  # rows from M on are none of the result
        acc = tl.where(offs_m[:, None] < M, acc, 0.0)
        acc = tl.sum(tl.reshape(acc, (PADDED // ROWS, ROWS, BLOCK_N)), 0)
    return acc


@triton.jit(do_not_specialize=["M", "rank", "tag", "timeout_ns"])
def matmul_all_reduce_kernel(
    x_ptr,  # [M, K], the columns of a row without gaps
    w_ptr,  # [K, N], any strides
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    cells_ptr,  # [WORLD] int64: where each rank's cells begin
    flags_ptr,  # [WORLD] int64: likewise its flags
    state_ptr,  # [3] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    M,
    N,
    K,
    stride_xm,
    stride_wk,
    stride_wn,
    turn_bytes,  # of the slots and results of one turn
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,  # a power of 2
    SHOTS: tl.constexpr,
    WORDS: tl.constexpr,  # else flags, with two shots
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # >= M, a power of 2
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    PART: tl.constexpr = BLOCK_N // WORLD  # columns of a tile that one rank sums
    COLS: tl.constexpr = BLOCK_N if SHOTS == 1 else PART  # of a slot
    TILE: tl.constexpr = ROWS * BLOCK_N
    SLOT: tl.constexpr = ROWS * COLS
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    CELL: tl.constexpr = tl.int64 if WORDS else OUT
    CELL_BYTES: tl.constexpr = CELL.primitive_bitwidth // 8
    program, programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(N, BLOCK_N)
    epoch = next_epoch(tl.load(state_ptr))
    works = tl.load(state_ptr + 2) == 0
    ranks = tl.arange(0, WORLD)
    everyone = works & (ranks >= 0)
    offs_m, offs_n = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)

    turn = (epoch & 1).to(tl.int64) * turn_bytes
    flags = (epoch & 1) * 2 * num_tiles * WORLD  # those of slots; of results behind them
    sent = tl.cast(num_tiles, tl.int64) * SLOT  # cells of one sender's slots
    results = turn + WORLD * sent * CELL_BYTES
    # a slot as [WORLD, ROWS, COLS] cells, one for each rank that it goes to or comes from
    cell = offs_m[None, :, None] * COLS + tl.arange(0, COLS)[None, None, :]
    live = (offs_m < M)[None, :, None] & works & (ranks[:, None, None] >= 0) & (cell >= 0)

    for tile in range(program, num_tiles, programs):
        acc = partial_tile(
            x_ptr, w_ptr, tile, M, N, K, stride_xm, stride_wk, stride_wn,
            ROWS, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
        )  # fmt: skip
        to = peer_ptr(cells_ptr, ranks, turn, CELL)[:, None, None]
        to = to + (rank * sent + tile * SLOT + cell)
        if SHOTS == 1:
            put_words(to, tl.broadcast_to(acc[None, :, :], (WORLD, ROWS, COLS)), epoch, live)
        else:
            parts = tl.permute(tl.reshape(acc, (ROWS, WORLD, PART)), (1, 0, 2))
            if WORDS:
                put_words(to, parts, epoch, live)
            else:
                put(to, parts.to(OUT), live)
                flag = flags + tile * WORLD + rank
                post(peer_ptr(flags_ptr, ranks, flag * 4, tl.int32), epoch, everyone)

    late = tl.zeros((WORLD,), tl.int32)
    from_all = peer_ptr(cells_ptr, rank, turn, CELL) + ranks.to(tl.int64)[:, None, None] * sent
    if SHOTS == 2:
        for tile in range(program, num_tiles, programs):
            at = from_all + (tile * SLOT + cell)
            if WORDS:
                parts, slow = take_words(at, epoch, live, timeout_ns)
                late = late | tl.max(tl.max(slow.to(tl.int32), 2), 1)
            else:
                flag = flags + tile * WORLD + ranks
                slow = wait(
                    peer_ptr(flags_ptr, rank, flag * 4, tl.int32), epoch, everyone, timeout_ns
                )
                late = late | slow.to(tl.int32)
                parts = tl.load(at, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
            part = tl.sum(parts, 0)
            if HAS_BIAS:
                cols = tile * BLOCK_N + rank * PART + tl.arange(0, PART)
                part += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
            # the own part of the result, to everyone
            cols = rank * PART + tl.arange(0, PART)
            to = peer_ptr(cells_ptr, ranks, results, CELL)[:, None, None]
            to = to + (tile * TILE + offs_m[None, :, None] * BLOCK_N + cols[None, None, :])
            sums = tl.broadcast_to(part[None, :, :], (WORLD, ROWS, PART))
            if WORDS:
                put_words(to, sums, epoch, live)
            else:
                put(to, sums.to(OUT), live)
                flag = flags + (num_tiles + tile) * WORLD + rank
                post(peer_ptr(flags_ptr, ranks, flag * 4, tl.int32), epoch, everyone)

    rows = offs_m[:, None] < M
    for tile in range(program, num_tiles, programs):
        cols = tile * BLOCK_N + offs_n[None, :]
        if SHOTS == 1:
            parts, slow = take_words(from_all + (tile * SLOT + cell), epoch, live, timeout_ns)
            late = late | tl.max(tl.max(slow.to(tl.int32), 2), 1)
            total = tl.sum(parts, 0)
            if HAS_BIAS:
                total += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        else:
            at = peer_ptr(cells_ptr, rank, results, CELL) + tile * TILE
            at = at + (offs_m[:, None] * BLOCK_N + offs_n[None, :])
            if WORDS:
                total, slow = take_words(at, epoch, rows & works & (cols >= 0), timeout_ns)
                slow = tl.reshape(slow.to(tl.int32), (ROWS, WORLD, PART))
                late = late | tl.max(tl.max(slow, 2), 0)
            else:
                flag = flags + (num_tiles + tile) * WORLD + ranks
                slow = wait(
                    peer_ptr(flags_ptr, rank, flag * 4, tl.int32), epoch, everyone, timeout_ns
                )
                late = late | slow.to(tl.int32)
                total = tl.load(at, mask=rows & works, other=0.0, cache_modifier=".cg")
        y_ptrs = y_ptr + offs_m[:, None].to(tl.int64) * N + cols
        tl.store(y_ptrs, total.to(OUT), mask=rows & (cols < N))

    if tl.max(late, 0) > 0:
        tl.store(state_ptr + 2, 1)
        # one store, so that the host sees both or neither
        bits = tl.sum(tl.where(late > 0, 1 << (ranks % 32), 0).to(tl.int64))
        tl.store(fault_ptr, (bits << 32) | (tag + 1))
    # the last program to end moves the epoch on: all have read it by then
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, epoch)
