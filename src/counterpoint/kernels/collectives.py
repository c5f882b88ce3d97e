"""All-gather, reduce-scatter and all-reduce of a kernel each: words stored straight to the peers.

For what is too little for a library's collective to be worth its start. A tensor is a row of words
of 4 bytes, two 16-bit values or one of fp32, and each rank owns an equal part of them. No program
waits before it has sent all of its own; see peer.py for words.

Words of each rank: slots by sender, [ranks, words of a part], and where both a reduce-scatter and
an all-gather are asked for, the results behind them, likewise.
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
def sum_of_words(words, DTYPE: tl.constexpr, IN_ORDER: tl.constexpr):
    """The sum over dim 0 of words of DTYPE, in fp32, rounded once."""
    if DTYPE.primitive_bitwidth == 16:
        low, high = unpack(words, DTYPE)
        total = pack(sum_of_parts(low, IN_ORDER), sum_of_parts(high, IN_ORDER), DTYPE)
    else:
        total = sum_of_parts(words.to(tl.float32, bitcast=True), IN_ORDER)
        total = total.to(tl.int32, bitcast=True)
    return total


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def collective_kernel(
    source_ptr,  # int32: [WORLD * part] if it is scattered, else [part]
    target_ptr,  # int32: [WORLD * part] if it is gathered, else [part]
    words_ptr,  # [WORLD] int64: where each rank's words begin
    state_ptr,  # [6] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    part,  # words that each rank owns
    half_bytes,  # of the memory: where the half of odd epochs begins
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,  # a power of 2
    SCATTER: tl.constexpr,
    GATHER: tl.constexpr,
    DTYPE: tl.constexpr,  # that is summed
    IN_ORDER: tl.constexpr,  # of ranks
    BLOCK: tl.constexpr,
    NUM_WARPS: tl.constexpr,  # of the launch
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(tl.load(state_ptr))
    here = (epoch & 1).to(tl.int64) * half_bytes
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    ranks = tl.arange(0, WORLD)
    # the next rank first: ranks that all begin with the same one would meet there
    to = (rank + 1 + ranks) % WORLD
    blocks = tl.cdiv(part, BLOCK)
    own = tl.cast(rank, tl.int64) * part
    slots = ranks.to(tl.int64)[:, None] * part
    mine = peer_ptr(words_ptr, rank, here, tl.int32)
    theirs = peer_ptr(words_ptr, to, here, tl.int32)[:, None]
    late = tl.zeros((WORLD,), tl.int32)

    for block in range(program, blocks, programs):
        offs = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = works & (offs < part) & (to[:, None] >= 0)
        if SCATTER:
            words = tl.load(
                source_ptr + (to.to(tl.int64)[:, None] * part + offs), mask=live, other=0
            )
        else:
            words = tl.load(source_ptr + offs, mask=offs < part, other=0)
            words = tl.broadcast_to(words, (WORLD, BLOCK))
        put_words(theirs + (own + offs), words, live)

    results = 0
    if SCATTER:
        if GATHER:
            results = WORLD * tl.cast(part, tl.int64)
        for block in range(program, blocks, programs):
            offs = block * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = works & (offs < part) & (ranks[:, None] >= 0)
            at = mine + (slots + offs)
            words, slow = take_words(at, stop_ptr, timeout_ns, live, NUM_WARPS)
            late = late | tl.max(slow.to(tl.int32), 1)
            total = sum_of_words(words, DTYPE, IN_ORDER)[None, :]
            if GATHER:
                good = tl.max(late, 0) == 0  # not what was summed of too little
                total = tl.broadcast_to(total, (WORLD, BLOCK))
                put_words(theirs + (results + own + offs), total, live & good)
            else:
                tl.store(target_ptr + offs, total, mask=offs < part)
    if GATHER:
        heard = tl.max(late, 0) == 0
        for block in range(program, blocks, programs):
            offs = block * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = works & (offs < part) & (ranks[:, None] >= 0)
            at = mine + (results + slots + offs)
            words, slow = take_words(at, stop_ptr, timeout_ns, live, NUM_WARPS)
            late = late | tl.where(heard, tl.max(slow.to(tl.int32), 1), 0)
            tl.store(target_ptr + (slots + offs), words, mask=offs < part)

    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)
