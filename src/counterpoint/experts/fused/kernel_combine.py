"""Experts multiply, and each row of the product goes to the rank that it came from.

x is sorted by expert, and of one expert by rank: see routes.py. A tile's rows are stored at their
final place on their owners as soon as they are computed; nothing waits in this kernel. The last of
its programs posts one flag to each rank; `arrival_kernel`, of one program, waits for those of all,
and `collect_kernel` takes the rows. One program that waits keeps no collective of another group
from running, so no SMs are left to those.

By routes a row that goes back is a token's weighted sum over the experts of this rank: the kernel
leaves its products on this rank, and `send_sums_kernel`, behind it, sums and sends them.

Memory of each rank, one half for even and one for odd epochs: rows [limit, N]; flags [WORLD].
"""

import triton
import triton.language as tl

from counterpoint.experts.routes.kernel_rows import expert_of, starts_ptr_of, tiles_ptr_of
from counterpoint.kernels.peer import end_of_call, is_last, next_epoch, peer_ptr, post, put, wait


@triton.jit
def weight_tile(
    w_desc, expert, at_k, at_n, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[BLOCK_K, BLOCK_N] of an expert's weight, which is stored by columns or by rows."""
    if COLUMNS:
        w = w_desc.load([expert, at_n, at_k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        w = w_desc.load([expert, at_k, at_n]).reshape(BLOCK_K, BLOCK_N)
    return w


@triton.jit(do_not_specialize=["R", "rank", "limit"])
def matmul_all_to_all_kernel(
    x_desc,  # [R, K]
    w_desc,  # [E_local, N, K] where COLUMNS, else [E_local, K, N]
    add_ptr,  # [R, N], added to the products
    product_ptr,  # [R, N], of LOCAL
    routes_ptr,  # see routes.py
    rows_ptr,  # [WORLD] int64: where each rank's received rows begin
    flags_ptr,  # [WORLD] int64: likewise its flags
    state_ptr,  # [6] int32: epoch, programs that have ended, whether a wait has given up
    R,
    N,
    K,
    E,
    half_bytes,  # of the memory: where the half of odd epochs begins
    half_flags,  # likewise, in flags
    limit,  # rows that a rank can take
    rank,
    WORLD: tl.constexpr,  # a power of 2
    EXPERTS: tl.constexpr,  # >= E_local, a power of 2
    COLUMNS: tl.constexpr,
    HAS_ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # blocks of rows that share their columns of w in L2
    STAGES: tl.constexpr,
    LOCAL: tl.constexpr,  # the products stay here
):
    X: tl.constexpr = x_desc.dtype
    local = E // WORLD
    starts_ptr = starts_ptr_of(routes_ptr, E, WORLD)
    tiles_ptr = tiles_ptr_of(routes_ptr, E, WORLD)
    epoch = next_epoch(tl.load(state_ptr))
    works = tl.load(state_ptr + 2) == 0
    half = (epoch & 1).to(tl.int64) * half_bytes
    num_n = tl.cdiv(N, BLOCK_N)
    program, programs = tl.program_id(0), tl.num_programs(0)

    for tile in tl.range(program, tl.load(tiles_ptr + local) * num_n, programs, flatten=True):
        expert, before, until = expert_of(tile, tiles_ptr, local, num_n, EXPERTS)
        num_m = until - before
        inside = tile - before * num_n
        first = inside // (GROUP_M * num_n) * GROUP_M
        high = min(num_m - first, GROUP_M)
        # the rows of the next rank first: ranks that all began with one owner's would meet there
        turn = num_m * ((rank + 1) % WORLD) // WORLD
        block = (first + inside % (GROUP_M * num_n) % high + turn) % num_m
        at_n = inside % (GROUP_M * num_n) // high * BLOCK_N
        own_ptr = starts_ptr + expert * WORLD
        at_m = tl.load(own_ptr) + block * BLOCK_M

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            w = weight_tile(w_desc, expert, k, at_n, COLUMNS, BLOCK_K, BLOCK_N)
            acc = tl.dot(x_desc.load([at_m, k]), w, acc, input_precision="ieee")

        rows = at_m + tl.arange(0, BLOCK_M)
        owner = tl.zeros((BLOCK_M,), tl.int32)
        place = rows
        live = rows < min(tl.load(own_ptr + WORLD), R)
        if not LOCAL:
            for s in tl.static_range(1, WORLD):
                owner += (rows >= tl.load(own_ptr + s)).to(tl.int32)
            origin = tl.load(routes_ptr + owner * (E + 1) + rank * local + expert)
            place = origin + rows - tl.load(own_ptr + owner)
            live = works & live & (place < limit)
        cols = at_n + tl.arange(0, BLOCK_N)
        live = live[:, None] & (cols < N)[None, :]
        if HAS_ADD:
            add = tl.load(add_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], live, other=0)
            acc += add.to(tl.float32)
        if LOCAL:
            to = product_ptr + place.to(tl.int64)[:, None] * N + cols[None, :]
            tl.store(to, acc.to(X), live)
        else:
            row_bytes = place.to(tl.int64) * N * (X.primitive_bitwidth // 8)
            to = peer_ptr(rows_ptr, owner, half + row_bytes, X)[:, None] + cols[None, :]
            put(to, acc.to(X), live)

    if not LOCAL:
        post_all(flags_ptr, state_ptr, epoch, half_flags, rank, works, programs, WORLD)


@triton.jit
def post_all(
    flags_ptr, state_ptr, epoch, half_flags, rank, works, programs, WORLD: tl.constexpr
):  # fmt: skip
    """The last program tells all ranks that all programs have sent all of theirs."""
    if is_last(state_ptr + 1, programs):
        tl.store(state_ptr + 1, 0)
        # pairs with the acquire in `arrival_kernel`, on the peers
        ranks = tl.arange(0, WORLD)
        flag = (epoch & 1) * half_flags + rank
        post(peer_ptr(flags_ptr, ranks, flag * 4, tl.int32), epoch, works & (ranks >= 0))


@triton.jit(do_not_specialize=["rank", "limit", "room", "received"])
def send_sums_kernel(
    product_ptr,  # [limit, N], by expert
    index_ptr,  # [received rows, TOP] int32: rows of a token, in order; those >= limit are none
    weights_ptr,  # [limit] fp32, of rows; of WEIGHTED
    moves_ptr,  # see routes.py, of tokens by their first experts here: received rows
    rows_ptr,  # [WORLD] int64: where the rows that come back to each rank begin
    flags_ptr,  # as above
    state_ptr,
    N,
    E,
    half_bytes,
    half_flags,
    limit,
    room,  # rows that a rank can take back
    received,  # rows of `index`: fewer than have come, where those of experts are more than limit
    rank,
    WORLD: tl.constexpr,
    PAIRS: tl.constexpr,  # >= E, a power of 2
    TOP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each token's sum over the experts here, in fp32 and in order, to its owner."""
    X: tl.constexpr = product_ptr.dtype.element_ty
    epoch = next_epoch(tl.load(state_ptr))
    works = tl.load(state_ptr + 2) == 0
    half = (epoch & 1).to(tl.int64) * half_bytes
    starts_ptr = starts_ptr_of(moves_ptr, E, WORLD)
    pairs = tl.arange(0, PAIRS)
    ends = tl.load(starts_ptr + 1 + pairs, mask=pairs < E, other=2147483647)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(program, min(tl.load(starts_ptr + E), received), programs):
        pair = tl.sum((ends <= row).to(tl.int32), 0)  # of a first expert and an owner
        owner = pair % WORLD
        origin = tl.load(moves_ptr + owner * (E + 1) + rank * (E // WORLD) + pair // WORLD)
        place = origin + row - tl.load(starts_ptr + pair)
        live = works & (place < room)
        to = peer_ptr(rows_ptr, owner, half + place.to(tl.int64) * N * X.primitive_bitwidth // 8, X)
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            total = tl.zeros((BLOCK_N,), tl.float32)
            for j in tl.static_range(TOP):
                entry = tl.load(index_ptr + tl.cast(row, tl.int64) * TOP + j).to(tl.int64)
                known = entry < limit
                there = (cols < N) & known
                each = tl.load(product_ptr + entry * N + cols, mask=there, other=0.0)
                each = each.to(tl.float32)
                if WEIGHTED:
                    each *= tl.load(weights_ptr + entry, mask=known, other=0.0)
                total += each
            put(to + cols, total.to(X), (cols < N) & live)
    post_all(flags_ptr, state_ptr, epoch, half_flags, rank, works, programs, WORLD)


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def arrival_kernel(
    flags_ptr,  # as above
    state_ptr,
    fault_ptr,  # [1] int64, pinned host memory: 1 + tag, and above it the bits of the late ranks
    half_flags,
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,
):
    epoch = next_epoch(tl.load(state_ptr))
    stop_ptr = state_ptr + 2
    works = tl.load(stop_ptr) == 0
    ranks = tl.arange(0, WORLD)
    own = peer_ptr(flags_ptr, rank, ((epoch & 1) * half_flags + ranks) * 4, tl.int32)
    # pairs with the release of each rank's last program
    late = wait(own, epoch, stop_ptr, timeout_ns, works & (ranks >= 0))
    end_of_call(late.to(tl.int32), ranks, 1, state_ptr, fault_ptr, tag)


@triton.jit(do_not_specialize=["tokens", "count", "limit", "room", "rank", "clear", "spoils"])
def collect_kernel(
    rows_ptr,  # [WORLD] int64: where each rank's received rows begin
    state_ptr,  # [6] int32: the epoch of the call, which has been counted
    routes_ptr,  # see routes.py
    index_ptr,  # [tokens, TOP] which rows make a token; TOP 0: row i is token i
    weights_ptr,  # [tokens, TOP]; of SOME fp32, where WEIGHTED
    y_ptr,  # [tokens, N]
    over_ptr,  # [1] int64, pinned host memory: 3, if a row of `index` is none
    tokens,
    count,  # the word of routes that says how many rows there are
    spoils,  # the word of `spoiled`
    N,
    half_bytes,  # where the rows of odd epochs begin
    limit,  # rows that there is room for
    room,  # of SOME: rows of memory, of which limit may be more, as they are named again
    rank,
    clear,  # 1: the rows of y beyond those are zeroed; else left as they are; TOP 0, or SOME
    TOP: tl.constexpr,
    SOME: tl.constexpr,  # of `index` those >= room are left out
    WEIGHTED: tl.constexpr,  # of SOME; else all weights are 1
    BLOCK_N: tl.constexpr,
):
    Y: tl.constexpr = y_ptr.dtype.element_ty
    half = (tl.load(state_ptr) & 1).to(tl.int64) * half_bytes
    from_ptr = peer_ptr(rows_ptr, rank, half, Y)
    there_are = min(limit, tl.load(routes_ptr + count))
    spoiled = tl.load(routes_ptr + spoils) != 0
    if SOME or TOP == 0:
        there_are = min(tokens, there_are)
        tokens = tl.where(clear != 0, tokens, there_are)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        row_at = tl.cast(token, tl.int64) * N
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            to = y_ptr + row_at + cols
            if TOP == 0:
                live = (cols < N) & (token < there_are)
                row = tl.load(from_ptr + row_at + cols, mask=live, other=0.0)
                row = tl.where(live & spoiled, float("nan"), row)
                tl.store(to, row, mask=cols < N)
            else:
                total = tl.zeros((BLOCK_N,), tl.float32)
                for j in tl.static_range(TOP):
                    which = tl.load(index_ptr + token * TOP + j).to(tl.int64)
                    there = (which >= 0) & (which < (room if SOME else there_are))
                    row = tl.load(from_ptr + which * N + cols, mask=(cols < N) & there, other=0.0)
                    if SOME:
                        row = row.to(tl.float32)
                        if WEIGHTED:
                            row *= tl.load(weights_ptr + token * TOP + j)
                        total += row
                    else:
                        weight = tl.load(weights_ptr + token * TOP + j).to(tl.float32)
                        if not there:
                            tl.store(over_ptr, 3)
                        total += tl.where(there, weight * row.to(tl.float32), float("nan"))
                total = tl.where(spoiled, float("nan"), total)
                tl.store(to, total.to(Y), mask=cols < N)
