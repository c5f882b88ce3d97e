"""The lists of experts/routes/on_device.py, from the experts of all tokens, in three kernels.

Each list is a sort by small numbers that keeps the order of what is equal, so it is counted, not
sorted: how many entries each expert has in each block of tokens; from these where each entry of a
block begins; and inside a block an entry goes behind those before it that have its expert. First
tokens find their places, as sent and as received. Then these, in the order of their first expert
here, put their rows in order of experts: how many rows a block of that order has is counted by
atomics while its tokens find their places. Integers are all that atomics add, so that each run
gives the same bits.

Tokens of a source are in blocks of `share`, `per` for each source. This rank's own are in smaller
ones as well, `own` of `own_share`, since what is sent has more experts to count by.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(2**31 - 1)
NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@triton.jit(do_not_specialize=["tokens"])
def tell_experts_kernel(
    experts_ptr,  # [tokens, TOP] int32 or int64
    weights_ptr,  # [tokens, TOP], floating point
    told_ptr,  # [tokens, 2 * TOP] int32: experts, then weights
    tokens,
    TOP: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a rank tells all; weights of a token with an expert that is none of E are NaN.

    NONE is told as it is: a token that has it has fewer experts, and its weights stay.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, token = at < tokens * TOP, at // TOP
    wrong = at < 0
    for i in tl.static_range(TOP):
        expert = tl.load(experts_ptr + token * TOP + i, mask=live, other=0)
        wrong |= (expert < 0) | ((expert >= E) & (expert != NONE))
    expert = tl.load(experts_ptr + at, mask=live, other=0)
    clamped = tl.minimum(tl.maximum(expert, 0), E - 1).to(tl.int32)
    expert = tl.where(expert == NONE, NONE, clamped)
    weight = tl.load(weights_ptr + at, mask=live, other=0.0).to(tl.float32)
    weight = weight.to(tl.int32, bitcast=True)
    place = told_ptr + at + token * TOP
    tl.store(place, expert, mask=live)
    tl.store(place + TOP, tl.where(wrong, NOT_A_NUMBER, weight), mask=live)


@triton.jit
def fill(ptr, count, value, program, programs, BLOCK: tl.constexpr):
    """`value` everywhere; this is one of some programs that share it."""
    for start in tl.range(program * BLOCK, count, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(ptr + at, tl.full((BLOCK,), value, ptr.dtype.element_ty), mask=at < count)


@triton.jit
def is_first(expert, j, experts_ptr, live, LOCAL: tl.constexpr, TOP: tl.constexpr):
    """Whether an expert is a token's smallest on its rank; of equal ones the earliest is.

    Args:
        j: which of the token's experts, all of which are at `experts_ptr`.
        live: where it is one of E.
    """
    begin = expert - expert % LOCAL
    found = live
    for i in tl.static_range(TOP):
        other = tl.load(experts_ptr + i, mask=live, other=-1)
        found &= (other < begin) | (other > expert) | ((other == expert) & (i >= j))
    return found


@triton.jit(
    do_not_specialize=[
        "rank", "tokens", "share", "per", "own_share", "own", "words", "rows", "queued"
    ]
)  # fmt: skip
def tally_tokens_kernel(
    every_ptr,  # [RANKS * tokens, 2 * TOP]: what all ranks have told
    pairs_ptr,  # [RANKS * per, E] int32: entries of each block that name an expert
    firsts_ptr,  # [RANKS * per + own, E] int32: tokens of each block whose first one it is
    named_ptr,  # [tokens, TOP] int32: own experts, -1 where they are not the first of their rank
    lists_ptr,  # [words] int32: NONE from now on
    weights_ptr,  # [rows] fp32: 0 from now on
    queue_ptr,  # [queued] int32: 0 from now on
    rank,
    tokens,
    share,
    per,
    own_share,
    own,
    words,
    rows,
    queued,
    TOP: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,  # experts of a rank
    EXPERTS: tl.constexpr,  # >= E and >= 32, a power of 2
    BLOCK: tl.constexpr,  # entries at a time
):
    """Count each block; other programs behind these empty what the next kernels fill in part."""
    program, blocks = tl.program_id(0), E // LOCAL * per
    if program >= blocks + own:
        filler, fillers = program - blocks - own, tl.num_programs(0) - blocks - own
        fill(lists_ptr, words, NONE, filler, fillers, BLOCK)
        fill(weights_ptr, rows, 0, filler, fillers, BLOCK)
        fill(queue_ptr, queued, 0, filler, fillers, BLOCK)
    else:
        mine = program >= blocks
        source = tl.where(mine, rank, program // per)
        size = tl.where(mine, own_share, share)
        first = tl.where(mine, program - blocks, program % per) * size
        last = (source * tokens + min(first + size, tokens)) * TOP
        pairs = tl.zeros((EXPERTS,), tl.int32)
        firsts = tl.zeros((EXPERTS,), tl.int32)
        for start in tl.range((source * tokens + first) * TOP, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            live, token = at < last, at // TOP
            experts_ptr = every_ptr + token * (2 * TOP)
            j = at - token * TOP
            expert = tl.load(experts_ptr + j, mask=live, other=-1)
            known = live & (expert < E)
            leads = is_first(expert, j, experts_ptr, known, LOCAL, TOP)
            pairs += tl.histogram(expert, EXPERTS, mask=known)
            firsts += tl.histogram(expert, EXPERTS, mask=leads)
            named = named_ptr + at - rank * tokens * TOP
            tl.store(named, tl.where(leads, expert, -1), mask=live & mine)
        experts = tl.arange(0, EXPERTS)
        there = experts < E
        tl.store(firsts_ptr + program * E + experts, firsts, mask=there)
        tl.store(pairs_ptr + program * E + experts, pairs, mask=there & (program < blocks))


@triton.jit
def tallied(
    tallies_ptr, E, first, last, own, begin, count, COLUMNS: tl.constexpr, COUNTS: tl.constexpr
):
    """Of columns from `begin` on the sums of rows first to last, and of those before `own`.

    Args:
        tallies_ptr: [rows, E].
        count: of columns, at most COLUMNS, a power of 2.
        COUNTS: how many numbers are read at a time.
    """
    BLOCK: tl.constexpr = COUNTS // COLUMNS
    columns = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((COLUMNS,), tl.int32)
    before = tl.zeros((COLUMNS,), tl.int32)
    for start in tl.range(first, last, BLOCK):
        row = (start + tl.arange(0, BLOCK))[:, None]
        here = (row < last) & (columns < count)
        found = tl.load(tallies_ptr + row * E + begin + columns, mask=here, other=0).to(tl.int32)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(row < own, found, 0), 0)
    return total, before


@triton.jit
def begins(counts):
    """Where those that are counted begin, one behind the other."""
    return tl.cumsum(counts, 0) - counts


# Tables below are [experts, tokens]: lanes have tokens, and a token's numbers are in one thread.


@triton.jit
def met_before(met):
    """How often an expert was met in the tokens before each."""
    return tl.cumsum(met, 1) - met


@triton.jit
def among(table, hot):
    """Of each token its number where `hot` is; 0 without one."""
    return tl.sum(tl.where(hot, table, 0), 0)


@triton.jit
def sum_tables(
    source, pairs_ptr, firsts_ptr, counts_ptr, table_ptr, per, E: tl.constexpr,
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """`counts` and `firsts` of a source."""
    experts, first = tl.arange(0, EXPERTS), source * per
    pairs, _ = tallied(pairs_ptr, E, first, first + per, 0, 0, E, EXPERTS, COUNTS)
    firsts, _ = tallied(firsts_ptr, E, first, first + per, 0, 0, E, EXPERTS, COUNTS)
    tl.store(counts_ptr + source * E + experts, pairs.to(tl.int64), mask=experts < E)
    tl.store(table_ptr + source * E + experts, firsts.to(tl.int64), mask=experts < E)


@triton.jit
def send_tokens(
    block, named_ptr, firsts_ptr, sent_ptr, y_ptr, tokens, size, before, blocks,
    TOP: tl.constexpr, E: tl.constexpr, EACH: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """`sent` and `y` of a block of own tokens.

    Args:
        before: blocks of all tokens, those of own ones being counted behind them.
        EACH: columns of y.
    """
    experts, own = tl.arange(0, EXPERTS)[:, None], before + block
    total, ahead = tallied(firsts_ptr, E, before, before + blocks, own, 0, E, EXPERTS, COUNTS)
    following = begins(total) + ahead
    last = min((block + 1) * size, tokens)
    for start in tl.range(block * size, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        met = tl.zeros((EXPERTS, TOKENS), tl.int32)
        for j in tl.static_range(TOP):
            expert = tl.load(named_ptr + token * TOP + j, mask=token < last, other=-1)
            met += (experts == expert[None, :]).to(tl.int32)
        row, there = following[:, None] + met_before(met), met > 0
        turn = tl.cumsum(met, 0) - met
        tl.store(sent_ptr + row, token[None, :], mask=there)
        tl.store(y_ptr + token[None, :] * EACH + turn, row, mask=there)
        following += tl.sum(met, 1)


@triton.jit
def receive_tokens(
    block, every_ptr, firsts_ptr, queue_ptr, order_ptr, places_ptr, rank, tokens, size, per,
    TOP: tl.constexpr, E: tl.constexpr, LOCAL: tl.constexpr, LOCALS: tl.constexpr,
    TOKENS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Where the tokens of a block lie among those received, and among those of their source."""
    experts = tl.arange(0, LOCALS)
    begin, source = rank * LOCAL, block // per
    first, last = source * per, source * per + per
    every, ahead = tallied(
        firsts_ptr, E, 0, E // LOCAL * per, block, begin, LOCAL, LOCALS, COUNTS
    )  # fmt: skip
    same, near = tallied(firsts_ptr, E, first, last, block, begin, LOCAL, LOCALS, COUNTS)
    following = begins(every) + ahead
    beyond = following - begins(same) - near  # rows of other sources, and of experts before
    end = source * tokens + min((block - first + 1) * size, tokens)
    for start in tl.range(source * tokens + (block - first) * size, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        live = token < end
        least = tl.full((TOKENS,), LOCALS, tl.int32)
        for j in tl.static_range(TOP):
            expert = tl.load(every_ptr + token * (2 * TOP) + j, mask=live, other=-1) - begin
            least = tl.where((expert >= 0) & (expert < LOCAL), tl.minimum(expert, least), least)
        hot = experts[:, None] == least[None, :]
        met, here = hot.to(tl.int32), least < LOCAL
        place = among(following[:, None] + met_before(met), hot)
        line = place - among(beyond[:, None], hot)
        tl.store(order_ptr + source * tokens + line, token, mask=here)
        tl.store(places_ptr + source * tokens + line, place, mask=here)
        queue = queue_ptr + (first + line // size) * LOCAL
        for j in tl.static_range(TOP):
            expert = tl.load(every_ptr + token * (2 * TOP) + j, mask=live, other=-1) - begin
            known = (expert >= 0) & (expert < LOCAL)
            tl.atomic_add(queue + expert, 1, mask=known, sem="relaxed", scope="gpu")
        following += tl.sum(met, 1)


@triton.jit(do_not_specialize=["rank", "tokens", "share", "per", "own_share", "own"])
def place_tokens_kernel(
    every_ptr,  # as above
    pairs_ptr,
    firsts_ptr,
    named_ptr,
    counts_ptr,  # [RANKS, E] int64
    table_ptr,  # [RANKS, E] int64: `firsts` of the lists
    queue_ptr,  # [RANKS * per, LOCAL] int32, of 0: rows by expert of blocks in that order
    order_ptr,  # [RANKS, tokens] int32: tokens that come of a source, in order of their firsts here
    places_ptr,  # [RANKS, tokens] int32: the received rows of these
    sent_ptr,
    y_ptr,
    rank,
    tokens,
    share,
    per,
    own_share,
    own,
    TOP: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    EXPERTS: tl.constexpr,  # as above
    LOCALS: tl.constexpr,  # >= LOCAL, a power of 2
    OWN_TOKENS: tl.constexpr,  # at a time, of own ones
    TOKENS: tl.constexpr,  # of all
    COUNTS: tl.constexpr,  # that are read at a time
):
    """Programs of own tokens, then of all tokens, then of tables: one of each source."""
    RANKS: tl.constexpr = E // LOCAL
    EACH: tl.constexpr = TOP if TOP < RANKS else RANKS
    program, blocks = tl.program_id(0), RANKS * per
    if program < own:
        send_tokens(
            program, named_ptr, firsts_ptr, sent_ptr, y_ptr, tokens, own_share, blocks, own,
            TOP, E, EACH, EXPERTS, OWN_TOKENS, COUNTS,
        )  # fmt: skip
    elif program < own + blocks:
        receive_tokens(
            program - own, every_ptr, firsts_ptr, queue_ptr, order_ptr, places_ptr, rank, tokens,
            share, per, TOP, E, LOCAL, LOCALS, TOKENS, COUNTS,
        )  # fmt: skip
    else:
        source = program - own - blocks
        sum_tables(source, pairs_ptr, firsts_ptr, counts_ptr, table_ptr, per, E, EXPERTS, COUNTS)


@triton.jit(do_not_specialize=["rank", "tokens", "share", "per", "max_rows", "room"])
def place_pairs_kernel(
    every_ptr,  # as above
    counts_ptr,
    table_ptr,
    queue_ptr,
    order_ptr,
    places_ptr,
    rows_ptr,
    sums_ptr,
    entries_ptr,
    weights_ptr,  # [max_rows], bits of fp32 numbers
    rank,
    tokens,
    share,
    per,
    max_rows,
    room,  # rows of `sums`
    TOP: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    LOCALS: tl.constexpr,
    TOKENS: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Rows by expert of a block of tokens that come of a source; those beyond max_rows nowhere."""
    block, experts = tl.program_id(0), tl.arange(0, LOCALS)
    begin, source, RANKS = rank * LOCAL, block // per, E // LOCAL
    first = source * per
    every, before = tallied(counts_ptr, E, 0, RANKS, source, begin, LOCAL, LOCALS, COUNTS)
    ahead, _ = tallied(queue_ptr, LOCAL, first, block, 0, 0, LOCAL, LOCALS, COUNTS)
    following = begins(every) + before + ahead
    come, _ = tallied(table_ptr, E, source, source + 1, 0, begin, LOCAL, LOCALS, LOCALS)
    last = min((block - first + 1) * share, tl.sum(come))
    for start in tl.range((block - first) * share, last, TOKENS):
        line = start + tl.arange(0, TOKENS)
        live = line < last
        token = tl.load(order_ptr + source * tokens + line, mask=live, other=0)
        place = tl.load(places_ptr + source * tokens + line, mask=live, other=0)
        told_ptr = every_ptr + token * (2 * TOP)
        met = tl.zeros((LOCALS, TOKENS), tl.int32)
        for j in tl.static_range(TOP):
            expert = tl.load(told_ptr + j, mask=live, other=-1) - begin
            met += (experts[:, None] == expert[None, :]).to(tl.int32)
        row = following[:, None] + met_before(met)
        for j in tl.static_range(TOP):
            expert = tl.load(told_ptr + j, mask=live, other=-1) - begin
            hot = experts[:, None] == expert[None, :]
            at = among(row, hot)
            fits = (expert >= 0) & (expert < LOCAL) & (at < max_rows)
            weight = tl.load(told_ptr + TOP + j, mask=fits, other=0)
            tl.store(weights_ptr + at, weight, mask=fits)
            tl.store(rows_ptr + at, tl.minimum(place, room - 1), mask=fits)
            tl.store(entries_ptr + at, token * TOP + j, mask=fits)
            tl.store(sums_ptr + place * TOP + j, at, mask=fits & (place < room))
            row += hot.to(tl.int32)  # the same expert again is the next row
        following += tl.sum(met, 1)
