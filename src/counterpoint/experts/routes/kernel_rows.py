"""Where the rows of a mixture of experts lie on each rank: from the counts, on the device.

E experts, E_local on each rank in order. The rows of a rank are sorted by expert, counts[s, e] of
rank s for expert e; where they meet they are sorted by expert, and of one expert by rank. The host
knows nothing of it: kernels read what `routes_kernel` has left for its rank, all of it int32:

    origin [WORLD, E + 1]         where the rows of (s, e) begin on rank s, and how many it has
    place  [E, WORLD]             where they begin on the rank of e
    starts [E_local * WORLD + 1]  the same of the own experts, and how many rows come
    tiles  [E_local + 1]          blocks of BLOCK_M rows before those of each own expert, and all
    ticket [1]                    0: the next tile
    senders [1]                   0: programs that have begun to send
    spoiled [1]                   1: counts do not fit, and all results are NaN
"""

import triton
import triton.language as tl

ANY = tl.constexpr(2**31 - 1)  # rows: as many as there are


@triton.jit
def place_ptr_of(routes_ptr, E, WORLD: tl.constexpr):
    """Where `place` begins."""
    return routes_ptr + WORLD * (E + 1)


@triton.jit
def starts_ptr_of(routes_ptr, E, WORLD: tl.constexpr):
    """Where `starts` begins."""
    return place_ptr_of(routes_ptr, E, WORLD) + E * WORLD


@triton.jit
def tiles_ptr_of(routes_ptr, E, WORLD: tl.constexpr):
    """Where `tiles` begins."""
    return starts_ptr_of(routes_ptr, E, WORLD) + E + 1  # E_local * WORLD is E


@triton.jit
def spoiled_ptr_of(routes_ptr, E, WORLD: tl.constexpr):
    """Where `spoiled` is."""
    return tiles_ptr_of(routes_ptr, E, WORLD) + E // WORLD + 3


def num_words(experts: int, ranks: int) -> int:
    """Words of all of it."""
    return ranks * (experts + 1) + experts * ranks + experts + 1 + experts // ranks + 1 + 3


@triton.jit(do_not_specialize=["rank", "limit", "has", "moves"])
def routes_kernel(
    counts_ptr,  # [WORLD, E] int32 or int64
    moved_ptr,  # the same of the rows that travel, which of tokens are fewer; of a second program
    routes_ptr,  # int32, see above
    over_ptr,  # [1] int64, pinned host memory: 8 bits of 1 + BACK, 24 of missing rows, 32 of ranks
    E,
    rank,
    limit,  # rows that a rank can take
    has,  # rows that each rank has given at least
    moves,  # words before the routes of the second program, of which none are too many
    WORLD: tl.constexpr,  # a power of 2
    EXPERTS: tl.constexpr,  # >= E, a power of 2
    BLOCK_M: tl.constexpr,
    BACK: tl.constexpr,  # rows go back to where they came from; else to their experts, see `spread`
):
    local = E // WORLD
    if tl.program_id(0) == 1:
        counts_ptr, routes_ptr = moved_ptr, routes_ptr + moves
        limit, has = ANY, ANY
    place_ptr = place_ptr_of(routes_ptr, E, WORLD)
    starts_ptr = starts_ptr_of(routes_ptr, E, WORLD)
    tiles_ptr = tiles_ptr_of(routes_ptr, E, WORLD)
    experts, ranks = tl.arange(0, EXPERTS), tl.arange(0, WORLD)
    sources, known = ranks[None, :], experts < E
    here = known[:, None] & (sources >= 0)
    at = sources * E + experts[:, None]
    counts = tl.load(counts_ptr + at, mask=here, other=0).to(tl.int32)
    tl.store(routes_ptr + at + sources, tl.cumsum(counts, 0) - counts, mask=here)
    tl.store(routes_ptr + ranks * (E + 1) + E, tl.sum(counts, 0))

    # the rows that all ranks receive, one rank behind the other; then each from 0
    flat = tl.reshape(counts, (EXPERTS * WORLD,))
    before = tl.reshape(tl.cumsum(flat, 0) - flat, (EXPERTS, WORLD))
    place = experts[:, None] * WORLD + sources
    tl.store(place_ptr + place, before, mask=here)
    # between what threads store, what others read of it, and what they store there then
    tl.debug_barrier()
    first = experts // local * local * WORLD
    before -= tl.load(place_ptr + first, mask=known, other=0)[:, None]
    tl.debug_barrier()
    tl.store(place_ptr + place, before, mask=here)

    own = experts // local == rank
    rows = tl.sum(counts, 1)
    tl.store(starts_ptr + place - rank * local * WORLD, before, mask=here & own[:, None])
    tl.store(starts_ptr + E, tl.sum(tl.where(own, rows, 0)))
    blocks = tl.where(own, spread(tl.cdiv(rows, BLOCK_M), WORLD, not BACK), 0)
    tl.store(tiles_ptr + experts - rank * local, tl.cumsum(blocks, 0) - blocks, mask=own)
    tl.store(tiles_ptr + local, tl.sum(blocks))
    tl.store(tiles_ptr + local + 1 + tl.arange(0, 2), 0)

    owners = experts[:, None] // local == sources
    come, sent = tl.sum(tl.where(owners & here, rows[:, None], 0), 0), tl.sum(counts, 0)
    given, taken = (come, sent) if BACK else (sent, come)
    missing = tl.maximum(taken - limit, given - has)
    bits = tl.sum(tl.where(missing > 0, 1 << (ranks % 32), 0).to(tl.int64))
    most = tl.minimum(tl.max(missing, 0), 0xFFFFFF).to(tl.int64)
    # the same on all ranks, whose tables are equal
    tl.store(spoiled_ptr_of(routes_ptr, E, WORLD), (bits != 0).to(tl.int32))
    if bits != 0:
        tl.store(over_ptr, (bits << 32) | (most << 8) | (1 + BACK))


@triton.jit
def spoil_kernel(
    word_ptr,  # [1] int64: 0, or `over` of routes_kernel without the operator; of all islands
    routes_ptr,  # as above
    over_ptr,  # as above
    spoils,  # the word of `spoiled`
    BACK: tl.constexpr,  # as above
):
    """All results are NaN if a rank of any island gets more rows than it can take."""
    word = tl.load(word_ptr)
    if word != 0:
        tl.store(routes_ptr + spoils, 1)
        tl.store(over_ptr, word | (1 + BACK))


@triton.jit
def spread(blocks, WORLD: tl.constexpr, SPREAD: tl.constexpr):
    """Places for the blocks of an expert, such that `spread_block` visits all ranks' in turn."""
    if SPREAD:
        blocks = tl.where(blocks > WORLD, (blocks + WORLD - 1) // WORLD * WORLD, blocks)
    return blocks


@triton.jit
def spread_block(place, places, rank, WORLD: tl.constexpr):
    """Which block stands there: the first of each rank's share, own rank first, then the second."""
    share = places // WORLD
    turned = (place + rank) % WORLD * share + place // WORLD
    return tl.where(places > WORLD, turned, place)


@triton.jit
def expert_of(tile, tiles_ptr, local, num_n, EXPERTS: tl.constexpr):
    """The own expert of a tile, and the blocks of rows before it and up to its end.

    Args:
        tile: among all of this rank, num_n for each block of rows.
        EXPERTS: at least `local`, a power of 2.
    """
    experts = tl.arange(0, EXPERTS)
    known = experts < local
    ends = tl.load(tiles_ptr + 1 + experts, mask=known, other=0)
    expert = tl.sum(((ends * num_n <= tile) & known).to(tl.int32))
    return expert, tl.load(tiles_ptr + expert), tl.load(tiles_ptr + expert + 1)


@triton.jit(do_not_specialize=["rows", "end"])
def name_entries_kernel(
    sent_ptr,  # [end] fp32
    entries_ptr,  # [rows] int32: where each row's number goes; those >= end go nowhere
    each_ptr,  # [rows] fp32
    rows,
    end,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entries_ptr + at, mask=at < rows, other=end)
    value = tl.load(each_ptr + at, mask=at < rows, other=0.0)
    tl.store(sent_ptr + entry, value, mask=(at < rows) & (entry < end))


@triton.jit(do_not_specialize=["ranks", "rank", "room"])
def rows_here_kernel(
    counts_ptr,  # [ranks, E] int64
    rows_ptr,  # [LOCAL] int64: of each expert here
    ends_ptr,  # [LOCAL] int32: where they end, and no more than room
    ranks,
    rank,
    room,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    LOCALS: tl.constexpr,  # >= LOCAL, a power of 2
):
    experts = tl.arange(0, LOCALS)
    known = experts < LOCAL
    rows = tl.zeros((LOCALS,), tl.int64)
    for source in tl.range(0, ranks):
        rows += tl.load(counts_ptr + source * E + rank * LOCAL + experts, mask=known, other=0)
    tl.store(rows_ptr + experts, rows, mask=known)
    ends = tl.minimum(tl.cumsum(rows, 0), room).to(tl.int32)
    tl.store(ends_ptr + experts, ends, mask=known)
