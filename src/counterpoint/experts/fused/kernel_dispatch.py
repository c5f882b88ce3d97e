"""Rows go to their experts, which multiply them as they come.

x is sorted by expert; what arrives is sorted by expert, and of one expert by rank: see routes.py.
The first SENDERS programs send, expert by expert to all ranks: the rows of each (expert, rank) in
PARTS parts with a flag behind each. The others take tiles in order, each when the parts that it is
made of are there; programs that have sent all they have take tiles as well.

By routes a row of x is a token, which goes once to each rank: with the rows of its first expert
there. Tiles of an expert then wait for all that has come with experts up to it, and take each row
from where it has come to.

Only senders are waited for. None of them waits before it has sent, nor where another of this rank
has not begun by then: they are the grid's first programs, and however few are resident, it ends.
So it leaves no SMs to another group's collective: where that was launched first, and keeps most of
this grid from running, the senders still end one after another, and no rank waits for more.

Memory of each rank, one half for even and one for odd epochs: rows [limit, K], the second half from
row `half_rows`; flags [E_local, PARTS, WORLD].
"""

import triton
import triton.language as tl

from counterpoint.experts.fused.kernel_combine import weight_tile
from counterpoint.experts.routes.kernel_rows import (
    expert_of,
    place_ptr_of,
    spoiled_ptr_of,
    spread_block,
    starts_ptr_of,
    tiles_ptr_of,
)
from counterpoint.kernels.activation import activated
from counterpoint.kernels.peer import end_of_call, next_epoch, peer_ptr, post, put, wait
from counterpoint.kernels.proxy import through_tma


@triton.jit
def send_part(
    unit, x_ptr, sent_ptr, routes_ptr, rows_ptr, flags_ptr, T, words, E, half_rows, half_flags,
    limit, rank, epoch, works, WORLD: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
):  # fmt: skip
    """Send part of the rows of an expert: number `unit` of what this rank sends."""
    local = E // WORLD
    expert = unit // (WORLD * PARTS)
    # a program turns to another rank with each expert: none has all that goes to the busiest one
    turn = (unit + expert * PARTS) % (WORLD * PARTS)
    # the next rank first, the own one last: ranks that all began with the same one would meet there
    to, part = (rank + 1 + turn // PARTS) % WORLD, turn % PARTS
    there = to * local + expert
    origin_ptr = routes_ptr + rank * (E + 1) + there
    begin = tl.load(origin_ptr)
    count = tl.load(origin_ptr + 1) - begin
    place = tl.load(place_ptr_of(routes_ptr, E, WORLD) + there * WORLD + rank)
    first = count * part // PARTS
    # neither beyond what x has nor beyond what the other rank can take
    last = min(min(count * (part + 1) // PARTS, T - begin), limit - place)
    total = tl.where(works, last - first, 0) * words
    x_words = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    row = ((epoch & 1) * half_rows + place + first).to(tl.int64)
    to_ptr = peer_ptr(rows_ptr, to, row * words * 4, tl.int32)
    if TOKEN_WORDS:
        ROWS: tl.constexpr = CHUNK // TOKEN_WORDS
        for at in tl.range(first, tl.where(works, last, first), ROWS):
            rows = at + tl.arange(0, ROWS)
            token = tl.load(sent_ptr + begin + rows, mask=rows < last, other=0).to(tl.int64)
            for col in tl.range(0, words, TOKEN_WORDS):
                cols = col + tl.arange(0, TOKEN_WORDS)
                live = (rows < last)[:, None] & (cols < words)[None, :]
                taken = tl.load(x_words + token[:, None] * words + cols[None, :], mask=live)
                ptrs = to_ptr + (rows - first).to(tl.int64)[:, None] * words + cols[None, :]
                put(ptrs, taken, live)
    else:
        from_ptr = x_words + (begin + first).to(tl.int64) * words
        for at in tl.range(0, total, CHUNK):
            offs = at + tl.arange(0, CHUNK)
            put(to_ptr + offs, tl.load(from_ptr + offs, mask=offs < total), offs < total)
    one = tl.arange(0, 1)
    flag = (epoch & 1) * half_flags + (expert * PARTS + part) * WORLD + rank
    post(peer_ptr(flags_ptr, to + one, flag * 4, tl.int32), epoch, works & (one >= 0))


@triton.jit
def parts_of(at_m, own_ptr, WORLD: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[PARTS, WORLD]: the parts that rows [at_m, at_m + BLOCK_M) of an expert are made of."""
    sources = tl.arange(0, WORLD)
    begin = tl.load(own_ptr + sources)
    count = tl.load(own_ptr + 1 + sources) - begin
    parts = tl.arange(0, PARTS)[:, None]
    first = begin[None, :] + count[None, :] * parts // PARTS
    last = begin[None, :] + count[None, :] * (parts + 1) // PARTS
    return (first < last) & (first < at_m + BLOCK_M) & (last > at_m)


@triton.jit
def store_gated(
    acc, y_ptr, hidden_ptr, rows, live, at_n, N, keeps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile whose columns are those of gate, then of up; of what is rounded.

    Args:
        at_n: the first of its columns of gate.
        N: columns of gate, and of up.
    """
    X: tl.constexpr = hidden_ptr.dtype.element_ty
    products = tl.permute(tl.reshape(acc.to(X), (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    gate, up = tl.split(products)
    cols = at_n + tl.arange(0, BLOCK_N // 2)
    live = live[:, None] & (cols < N)[None, :]
    hidden = activated(gate.to(tl.float32), "silu") * up.to(tl.float32)
    row = rows.to(tl.int64)[:, None]
    tl.store(hidden_ptr + row * N + cols[None, :], hidden.to(X), live)
    if keeps:
        to = y_ptr + row * 2 * N + cols[None, :]
        tl.store(to, gate, live)
        tl.store(to + N, up, live)


@triton.jit(do_not_specialize=["T", "limit", "room", "keeps", "rank", "tag", "timeout_ns"])
def all_to_all_matmul_kernel(
    x_ptr,  # [T, K]
    received_desc,  # [rows of both halves, K], of this rank
    w_desc,  # [E_local, N, K] where COLUMNS, else [E_local, K, N]; GATED: [E_local, 2, N / 2, K]
    y_ptr,  # [limit, N]
    hidden_ptr,  # [limit, N / 2], of GATED: silu(gate) * up, where gate and up are halves of y
    routes_ptr,  # see routes.py
    moves_ptr,  # the same of the rows that travel: of tokens by their first experts
    sent_ptr,  # [T] int32, of tokens: which one each row that is sent is
    index_ptr,  # [limit] int32, of tokens: which received row each row by expert is
    rows_ptr,  # [WORLD] int64: where each rank's received rows begin
    flags_ptr,  # [WORLD] int64: likewise its flags
    state_ptr,  # [6] int32: epoch, programs that have ended, whether a wait has given up
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    T,  # rows that are sent at most
    N,
    K,
    E,
    words,  # of 4 bytes in a row of x
    half_rows,  # the row at which the half of odd epochs begins
    half_flags,  # likewise, in flags
    limit,  # rows by expert that a rank can take
    room,  # received rows that it can take
    keeps,  # of GATED: 1: y is wanted as well
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,  # a power of 2
    EXPERTS: tl.constexpr,  # >= E_local, a power of 2
    COLUMNS: tl.constexpr,
    SENDERS: tl.constexpr,
    PARTS: tl.constexpr,  # a power of 2
    CHUNK: tl.constexpr,  # words that are sent at a time
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # blocks of rows that share their columns of w in L2
    STAGES: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,  # of a token, sent at a time; 0: x has a row for each expert
    GATED: tl.constexpr,  # of tokens
):
    X: tl.constexpr = x_ptr.dtype.element_ty
    local = E // WORLD
    starts_ptr = starts_ptr_of(routes_ptr, E, WORLD)
    tiles_ptr = tiles_ptr_of(routes_ptr, E, WORLD)
    epoch = next_epoch(tl.load(state_ptr))
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    program, programs = tl.program_id(0), tl.num_programs(0)
    ranks = tl.arange(0, WORLD)
    part_flags = tl.arange(0, PARTS)[:, None] * WORLD + ranks[None, :]
    flags = (epoch & 1) * half_flags + part_flags
    late = tl.zeros((WORLD,), tl.int32)

    senders_ptr = tiles_ptr + local + 2
    waits = program >= SENDERS
    if program < SENDERS:
        tl.atomic_add(senders_ptr, 1, sem="relaxed", scope="gpu")
        for unit in tl.range(program, local * WORLD * PARTS, SENDERS):
            send_part(
                unit, x_ptr, sent_ptr, moves_ptr, rows_ptr, flags_ptr, T, words, E, half_rows,
                half_flags, room, rank, epoch, works, WORLD, PARTS, CHUNK, TOKEN_WORDS,
            )  # fmt: skip
        waits = tl.atomic_add(senders_ptr, 0, sem="relaxed", scope="gpu") == SENDERS

    if waits:
        num_n = tl.cdiv(N, BLOCK_N)
        tiles = tl.load(tiles_ptr + local) * num_n
        come = min(tl.load(starts_ptr + E), limit)
        spoiled = tl.load(spoiled_ptr_of(routes_ptr, E, WORLD)) != 0
        ticket_ptr = tiles_ptr + local + 1
        ready = 0  # experts with which all that comes is there; of tokens
        tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
        while tile < tiles:
            expert, before, until = expert_of(tile, tiles_ptr, local, num_n, EXPERTS)
            num_m = until - before
            inside = tile - before * num_n
            first = inside // (GROUP_M * num_n) * GROUP_M
            high = min(num_m - first, GROUP_M)
            place = first + inside % (GROUP_M * num_n) % high
            at_n = inside % (GROUP_M * num_n) // high * BLOCK_N
            own_ptr = starts_ptr + expert * WORLD
            at_m = tl.load(own_ptr) + spread_block(place, num_m, rank, WORLD) * BLOCK_M
            end = min(tl.load(own_ptr + WORLD), come)
            if at_m < end:
                rows = at_m + tl.arange(0, BLOCK_M)
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                if TOKEN_WORDS:
                    while ready <= expert:
                        own = flags + ready * PARTS * WORLD
                        ptrs = peer_ptr(flags_ptr, rank, own * 4, tl.int32)
                        slow = wait(ptrs, epoch, stop_ptr, timeout_ns, works & (own >= 0))
                        late = tl.maximum(late, tl.max(slow.to(tl.int32), 0))
                        ready += 1
                    row = tl.load(index_ptr + rows, mask=rows < end, other=0).to(tl.int64)
                    half = ((epoch & 1) * half_rows).to(tl.int64) * words * 4
                    from_ptr = peer_ptr(rows_ptr, rank, half, X) + row[:, None] * K
                    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                        ks = k + tl.arange(0, BLOCK_K)
                        live = (rows < end)[:, None] & (ks < K)[None, :]
                        # as peers have stored it: see `wait`
                        x = tl.load(from_ptr + ks[None, :], live, other=0, cache_modifier=".cg")
                        if GATED:
                            w = w_desc.load([expert, 0, at_n // 2, k]).reshape(BLOCK_N, BLOCK_K).T
                        else:
                            w = weight_tile(w_desc, expert, k, at_n, COLUMNS, BLOCK_K, BLOCK_N)
                        acc = tl.dot(x, w, acc, input_precision="ieee")
                else:
                    needed = works & parts_of(at_m, own_ptr, WORLD, PARTS, BLOCK_M)
                    own = flags + expert * PARTS * WORLD
                    ptrs = peer_ptr(flags_ptr, rank, own * 4, tl.int32)
                    slow = wait(ptrs, epoch, stop_ptr, timeout_ns, needed)
                    late = tl.maximum(late, tl.max(slow.to(tl.int32), 0))
                    through_tma()
                    here = (epoch & 1) * half_rows + at_m
                    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                        w = weight_tile(w_desc, expert, k, at_n, COLUMNS, BLOCK_K, BLOCK_N)
                        x = received_desc.load([here, k])
                        acc = tl.dot(x, w, acc, input_precision="ieee")
                acc = tl.where(spoiled, float("nan"), acc)
                if GATED:
                    store_gated(
                        acc, y_ptr, hidden_ptr, rows, rows < end, at_n // 2, N // 2, keeps, BLOCK_M,
                        BLOCK_N,
                    )  # fmt: skip
                else:
                    cols = at_n + tl.arange(0, BLOCK_N)
                    to = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
                    tl.store(to, acc.to(X), (rows < end)[:, None] & (cols < N)[None, :])
            tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")

    if program == programs - 1:
        # all have sent all of theirs: without rows from a rank, this call would not hear of it
        own = flags + (local - 1) * PARTS * WORLD
        ptrs = peer_ptr(flags_ptr, rank, own * 4, tl.int32)
        slow = wait(ptrs, epoch, stop_ptr, timeout_ns, works & (own >= 0))
        late = tl.maximum(late, tl.max(slow.to(tl.int32), 0))
    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)


@triton.jit(do_not_specialize=["rows", "count"])
def clear_kernel(
    y_ptr,  # [rows, N]
    routes_ptr,  # see routes.py
    rows,
    count,  # the word of routes that says how many of them there are; the others are zeroed
    N,
    BLOCK_N: tl.constexpr,
):
    first = min(rows, tl.load(routes_ptr + count)) + tl.program_id(0)
    for row in tl.range(first, rows, tl.num_programs(0)):
        to = y_ptr + tl.cast(row, tl.int64) * N
        for at in tl.range(0, N, BLOCK_N):
            cols = at + tl.arange(0, BLOCK_N)
            tl.store(to + cols, tl.zeros((BLOCK_N,), y_ptr.dtype.element_ty), mask=cols < N)
