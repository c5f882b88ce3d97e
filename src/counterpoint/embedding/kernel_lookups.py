"""Embedding bags of table-wise shards, each pooled row stored straight into its owner's output.

A task is a block of bags of one table, or of some columns of it. A program pools it in fp32 and
stores the rows where they belong in the memory of the rank that owns the bags: no buffer is sent,
received or concatenated. Tasks for all ranks alternate, own ones among them: own rows take memory's
time and none of the links', so neither has a part of the kernel to itself.

Nobody waits before all rows are sent. The program that is done last raises the flags on all ranks,
and waits for theirs: when no other is left, so the grid may be of any size, and need not be
resident. Nor are SMs reserved for another group's collective. While it waits here, one block of one
SM is all that is held; what it waits for comes from a peer's programs, of which each ends by itself
but the last, and which get to run one after another on what a waiting collective leaves on that
peer: whoever waits with many programs leaves SMs to others.

A chunk is WORDS numbers of int64: address of its first element, row stride, columns, columns again,
its first column of the output, table. The first two counts are in VEC_IN, the others in VEC_OUT
elements, so that the compiler knows how wide loads and stores may be.
"""

import triton
import triton.language as tl

from counterpoint.kernels.peer import end_of_call, is_last, next_epoch, peer_ptr, post, put, wait

WORDS = tl.constexpr(6)


@triton.jit
def pooled(
    chunk_ptr, indices_ptr, weights_ptr, offsets_ptr, one_ptr, bags, live, num_bags, num_indices,
    num_offsets, DTYPE: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, VEC_IN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """[BAGS, BLOCK_D] of fp32: the sum or mean of the rows of each of `bags` of one chunk.

    Args:
        chunk_ptr: of the chunk's words.
        bags: [BAGS, 1] int32, of the global batch, where `live`.
        num_bags: of the global batch.
    """
    address = tl.load(chunk_ptr).to(tl.pointer_type(DTYPE))
    table_ptr = tl.multiple_of(address, VEC_IN * (DTYPE.primitive_bitwidth // 8))
    stride, width = tl.load(chunk_ptr + 1) * VEC_IN, tl.load(chunk_ptr + 2).to(tl.int32) * VEC_IN
    bag = tl.load(chunk_ptr + 5).to(tl.int32) * num_bags + bags
    begin = tl.load(offsets_ptr + bag, mask=live, other=0).to(tl.int32)
    more = live & (bag + 1 < num_offsets)
    end = tl.load(offsets_ptr + bag + 1, mask=more, other=num_indices).to(tl.int32)
    count = tl.where(live, tl.minimum(end, num_indices) - begin, 0)
    cols = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros((bags.shape[0], BLOCK_D), tl.float32)
    longest = tl.maximum(tl.max(tl.max(count, 1), 0), 0)
    # a remainder of one is left to the loop below
    several = tl.maximum(longest + UNROLL - 2, 0) // UNROLL * UNROLL
    last = num_indices - 1
    for first in range(0, several, UNROLL):
        # without masks, of which there are few registers; a bag that is shorter reads row 0 instead
        rows = ()
        for i in tl.static_range(UNROLL):
            index = tl.load(indices_ptr + tl.minimum(begin + (first + i), last))
            index = tl.where(first + i < count, index, 0).to(tl.int64)
            place = table_ptr + index * stride + cols
            row = tl.load(place) if EVEN_D else tl.load(place, mask=cols < width, other=0.0)
            rows = rows + (row,)  # noqa: RUF005  (the compiler knows no other way)
        # all loads are on their way before the first sum: what is summed hangs on a load behind
        # a barrier, else the assembler puts each sum right behind its load
        tl.debug_barrier()
        one = tl.load(one_ptr)
        for i in tl.static_range(UNROLL):
            there = first + i < count
            if WEIGHTED:
                scale = tl.load(weights_ptr + (begin + (first + i)), mask=there, other=0.0)
                scale = scale.to(tl.float32)
            else:
                scale = one
            acc += tl.where(there, rows[i].to(tl.float32) * scale, 0.0)
    for i in range(several, longest):
        there = i < count
        index = tl.load(indices_ptr + (begin + i), mask=there, other=0).to(tl.int64)
        some = (there & (cols >= 0)) if EVEN_D else (there & (cols < width))
        row = tl.load(table_ptr + index * stride + cols, mask=some, other=0.0).to(tl.float32)
        if WEIGHTED:
            scale = tl.load(weights_ptr + (begin + i), mask=there, other=0.0)
            row *= scale.to(tl.float32)
        acc += row
    if MEAN:
        acc /= tl.maximum(count, 1).to(tl.float32)
    return acc


@triton.jit(
    do_not_specialize=["num_bags", "num_indices", "num_offsets", "num_chunks", "stride", "blocks",
                       "half", "turn", "rank", "tag", "timeout_ns"],
    do_not_specialize_on_alignment=["indices_ptr", "weights_ptr", "offsets_ptr"],
)  # fmt: skip
def embedding_all_to_all_kernel(
    indices_ptr,  # [indices] int32 or int64, of one table after another
    weights_ptr,  # [indices], of each index
    offsets_ptr,  # [tables * num_bags (+ 1)] int32 or int64: where each bag begins
    one_ptr,  # [1] fp32: 1.0
    chunks_ptr,  # [num_chunks, WORDS] int64
    starts_ptr,  # [WORLD + 1] int32: the first bag of each rank
    outs_ptr,  # [WORLD] int64: where each rank's outputs begin
    flags_ptr,  # [WORLD] int64: likewise its flags, of each rank
    state_ptr,  # [6] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    num_bags,
    num_indices,
    num_offsets,
    num_chunks,
    stride,  # of a row of the output, in VEC_OUT elements
    blocks,  # of bags, of the rank that has most
    half,  # where the second turn of the outputs begins, in 16 bytes
    half_flags,  # where the flags of odd epochs begin
    turn,  # of the output; -1: the epoch's parity
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,  # >= WORLD, a power of 2
    DTYPE: tl.constexpr,  # of tables and output
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,  # of a task
    BLOCK_D: tl.constexpr,  # columns of a task
    EVEN_D: tl.constexpr,  # all chunks have as many
    VEC_IN: tl.constexpr,
    VEC_OUT: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(tl.load(state_ptr))
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    here = tl.where(turn < 0, epoch & 1, turn).to(tl.int64) * half * 16
    cols = tl.arange(0, BLOCK_D)[None, :]
    pieces = blocks * num_chunks
    per_round = tl.maximum(programs // WORLD, 1)  # pieces in a round of the grid
    for task in range(program, tl.where(works, pieces * WORLD, 0), programs):
        # in each round of the grid a program is at another rank, mostly
        piece = task // WORLD
        to = (rank + 1 + task % WORLD + piece // per_round) % WORLD
        start = tl.load(starts_ptr + to)
        bags = tl.load(starts_ptr + to + 1) - start
        chunk_ptr = chunks_ptr + (piece // blocks) * WORDS
        own = (piece % blocks) * BAGS + tl.arange(0, BAGS)[:, None]
        live = own < bags
        acc = pooled(
            chunk_ptr, indices_ptr, weights_ptr, offsets_ptr, one_ptr, start + own, live, num_bags,
            num_indices, num_offsets, DTYPE, MEAN, WEIGHTED, BLOCK_D, EVEN_D, VEC_IN, UNROLL,
        )  # fmt: skip
        place = own.to(tl.int64) * stride + tl.load(chunk_ptr + 4)
        some = live & (cols >= 0)
        if not EVEN_D:
            some = live & (cols < tl.load(chunk_ptr + 3).to(tl.int32) * VEC_OUT)
        out_ptr = peer_ptr(outs_ptr, to, here, DTYPE)
        put(out_ptr + (place * VEC_OUT + cols), acc.to(DTYPE), some)

    if is_last(state_ptr + 1, programs):
        tl.store(state_ptr + 1, 0)
        ranks = tl.arange(0, LANES)
        others = works & (ranks < WORLD) & (ranks != rank)
        flags = (epoch & 1) * half_flags
        peers = tl.where(others, ranks, rank)  # there are no addresses beyond the ranks
        post(peer_ptr(flags_ptr, peers, (flags + rank) * 4, tl.int32), epoch, others)
        own_flags = peer_ptr(flags_ptr, rank, 0, tl.int32) + (flags + ranks)
        late = wait(own_flags, epoch, stop_ptr, timeout_ns, others)
        end_of_call(late.to(tl.int32), ranks, 1, state_ptr, fault_ptr, tag)


@triton.jit(
    do_not_specialize=["num_bags", "num_indices", "num_offsets", "num_chunks", "stride", "blocks",
                       "spans"],
    do_not_specialize_on_alignment=["indices_ptr", "weights_ptr", "offsets_ptr"],
)  # fmt: skip
def lookup_kernel(
    indices_ptr,
    weights_ptr,
    offsets_ptr,
    one_ptr,  # [1] fp32: 1.0
    chunks_ptr,  # [num_chunks, WORDS] int64
    spans_ptr,  # [spans, 3] int32: first bag, bags, and the first one's row of the output
    out_ptr,  # [rows, columns], local
    num_bags,
    num_indices,
    num_offsets,
    num_chunks,
    stride,  # of a row of the output, in VEC_OUT elements
    blocks,  # of bags, of the longest span
    spans,
    DTYPE: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
    VEC_IN: tl.constexpr,
    VEC_OUT: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Spans of bags of own tables, side by side: the same tasks, nobody to send them to."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    pieces = blocks * num_chunks
    for task in range(tl.program_id(0), pieces * spans, tl.num_programs(0)):
        span_ptr = spans_ptr + (task // pieces) * 3
        piece = task % pieces
        chunk_ptr = chunks_ptr + (piece // blocks) * WORDS
        own = (piece % blocks) * BAGS + tl.arange(0, BAGS)[:, None]
        live = own < tl.load(span_ptr + 1)
        acc = pooled(
            chunk_ptr, indices_ptr, weights_ptr, offsets_ptr, one_ptr, tl.load(span_ptr) + own,
            live, num_bags, num_indices, num_offsets, DTYPE, MEAN, WEIGHTED, BLOCK_D, EVEN_D,
            VEC_IN, UNROLL,
        )  # fmt: skip
        place = (tl.load(span_ptr + 2) + own).to(tl.int64) * stride + tl.load(chunk_ptr + 4)
        some = live & (cols >= 0)
        if not EVEN_D:
            some = live & (cols < tl.load(chunk_ptr + 3).to(tl.int32) * VEC_OUT)
        tl.store(out_ptr + (place * VEC_OUT + cols), acc.to(DTYPE), mask=some)


@triton.jit(do_not_specialize=["half", "rank"])
def copy_out_kernel(
    target_ptr,  # [count]
    outs_ptr,  # [ranks] int64: where each rank's outputs begin
    state_ptr,  # [6] int32: epoch of the call that has just ended
    count,
    half,  # where the second turn begins, in 16 bytes
    rank,
    BLOCK: tl.constexpr,
):
    """What the last call has left in this rank's memory, in the half of its epoch."""
    here = (tl.load(state_ptr) & 1).to(tl.int64) * half * 16
    source_ptr = peer_ptr(outs_ptr, rank, here, target_ptr.dtype.element_ty)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offs, mask=offs < count, cache_modifier=".cg")
    tl.store(target_ptr + offs, values, mask=offs < count)
