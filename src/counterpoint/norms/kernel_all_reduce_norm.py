"""Sum over ranks, residual and norm in one kernel: for the few rows of decoding.

A program has whole rows. It sends them as low-latency words to the peers, takes theirs, and has the
sum in registers, where the residual is added and the row normalised: neither a second launch nor a
trip through memory stands between. What a rank has itself is not sent.

- one_shot: all of a row goes to each peer. One trip, and ranks times the bytes.
- two_shot: each rank sums its part of the columns of every row and gives the sums to all.

The sum is rounded to the dtype of x, as an all-reduce rounds it. Words of each rank: slots by
sender, of all rows, and for two shots the results behind them, likewise.
"""

import triton
import triton.language as tl

from counterpoint.kernels.collectives import sum_of_words
from counterpoint.kernels.peer import (
    EMPTY,
    end_of_call,
    next_epoch,
    peer_ptr,
    put_words,
    take_words,
    unpack,
)
from counterpoint.norms.kernel_add_norm import (
    BY_ROW,
    STATIC,
    largest_of,
    moments,
    normed,
    scale_of,
    store_normed,
)


@triton.jit
def elements(words, DTYPE: tl.constexpr):
    """Words of the last dim as the elements that they are, in fp32."""
    if DTYPE.primitive_bitwidth == 16:
        low, high = unpack(words, DTYPE)
        values = tl.interleave(low, high)
    else:
        values = words.to(tl.float32, bitcast=True)
    return values


@triton.jit
def own_words(ptrs, mask):
    """Words of this rank as its peers get them: 0 for EMPTY."""
    words = tl.load(ptrs, mask=mask, other=0)
    return tl.where(words == EMPTY, 0, words)


@triton.jit(do_not_specialize=["M", "eps", "rank", "tag", "timeout_ns"])
def all_reduce_norm_kernel(
    x_ptr,  # int32: [M, words of a row]
    residual_ptr,  # [M, N]
    weight_ptr,  # [N]
    bias_ptr,  # [N]
    scale_ptr,  # [1] fp32, of a STATIC result
    y_ptr,  # [M, N]: norm(h) * weight + bias, where h = the sum of x over ranks + residual
    h_ptr,  # [M, N]
    scales_ptr,  # [M] fp32, of one BY_ROW
    words_ptr,  # [WORLD] int64: where each rank's words begin
    state_ptr,  # [6] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    M,
    N,
    part,  # words of a row that go to one rank
    eps,
    half_bytes,  # of the memory: where the half of odd epochs begins
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,  # a power of 2
    TWO_SHOT: tl.constexpr,
    LAYER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,  # 0, STATIC or BY_ROW
    DTYPE: tl.constexpr,  # of x
    IN_ORDER: tl.constexpr,  # of ranks is summed
    BLOCK: tl.constexpr,  # words, at least `part`
    NUM_WARPS: tl.constexpr,  # of the launch
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(tl.load(state_ptr))
    here = (epoch & 1).to(tl.int64) * half_bytes
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    ranks = tl.arange(0, WORLD)
    # the next rank first: ranks that all begin with the same one would meet there; the last is own
    to = (rank + 1 + ranks) % WORLD
    peers = (ranks < WORLD - 1)[:, None]
    others = (ranks != rank)[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    inside = offs < part  # of loads, which then need not wait for the state
    live = works & inside
    # of one shot a row is one part, of two a part for each rank
    PARTS: tl.constexpr = WORLD if TWO_SHOT else 1
    row_words = part * PARTS
    slot = tl.cast(M, tl.int64) * part
    mine = peer_ptr(words_ptr, rank, here, tl.int32)
    theirs = peer_ptr(words_ptr, to, here, tl.int32)[:, None] + rank * slot
    slots = ranks.to(tl.int64)[:, None] * slot
    late = tl.zeros((WORLD,), tl.int32)

    for row in range(program, M, programs):
        x = x_ptr + tl.cast(row, tl.int64) * row_words
        if TWO_SHOT:
            words = tl.load(x + (to[:, None] * part + offs), mask=inside & peers, other=0)
        else:
            words = tl.broadcast_to(tl.load(x + offs, mask=inside, other=0), (WORLD, BLOCK))
        put_words(theirs + (tl.cast(row, tl.int64) * part + offs), words, live & peers)

    results = WORLD * slot
    if TWO_SHOT:
        for row in range(program, M, programs):
            at = tl.cast(row, tl.int64) * part + offs
            words, slow = take_words(mine + (slots + at), stop_ptr, timeout_ns, live & others,
                                     NUM_WARPS)  # fmt: skip
            own = own_words(
                x_ptr + (tl.cast(row, tl.int64) * row_words + rank * part + offs), inside
            )
            late = late | tl.max(slow.to(tl.int32), 1)
            words = tl.where(others, words, tl.broadcast_to(own, (WORLD, BLOCK)))
            total = tl.broadcast_to(sum_of_words(words, DTYPE, IN_ORDER)[None, :], (WORLD, BLOCK))
            good = tl.max(late, 0) == 0  # not what was summed of too little
            put_words(theirs + (results + at), total, live & good & (ranks >= 0)[:, None])
    heard = tl.max(late, 0) == 0

    WIDTH: tl.constexpr = 2 if DTYPE.primitive_bitwidth == 16 else 1  # elements of a word
    columns = tl.arange(0, WIDTH * BLOCK)
    if TWO_SHOT:
        mask = tl.broadcast_to((columns < WIDTH * part)[None, :], (WORLD, WIDTH * BLOCK))
        columns = (ranks * (WIDTH * part))[:, None] + columns[None, :]
    else:
        mask = columns < N
    scale = 1.0
    if FP8 == STATIC:
        scale = tl.load(scale_ptr)
    for row in range(program, M, programs):
        # on their way while words are waited for
        cells = tl.cast(row, tl.int64) * N + columns
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
        bias = weight
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=mask, other=0.0)
        residual = weight
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + cells, mask=mask, other=0.0)
        at = mine + (slots + (tl.cast(row, tl.int64) * part + offs))
        if TWO_SHOT:
            total, slow = take_words(at + results, stop_ptr, timeout_ns, live & (slots >= 0),
                                     NUM_WARPS)  # fmt: skip
        else:
            words, slow = take_words(at, stop_ptr, timeout_ns, live & others, NUM_WARPS)
            own = own_words(x_ptr + (tl.cast(row, tl.int64) * row_words + offs), inside)
            words = tl.where(others, words, tl.broadcast_to(own, (WORLD, BLOCK)))
            total = sum_of_words(words, DTYPE, IN_ORDER)
        late = late | tl.where(heard, tl.max(slow.to(tl.int32), 1), 0)
        h = elements(total, DTYPE)
        if HAS_RESIDUAL:
            h += residual.to(tl.float32)
        # as it is stored: the next layer reads the rounded one, and so does a model not fused
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + cells, h, mask=mask)
        h = h.to(tl.float32)
        mean, squares = moments(h, mask, tl.cast(N, tl.float32), LAYER)
        y = normed(h, mean, tl.rsqrt(squares / N + eps), weight, bias, LAYER, HAS_BIAS)
        if FP8 == BY_ROW:
            scale = scale_of(largest_of(y, mask))
            tl.store(scales_ptr + row, scale)
        store_normed(y_ptr + cells, y, mask, scale, FP8 != 0)

    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)
