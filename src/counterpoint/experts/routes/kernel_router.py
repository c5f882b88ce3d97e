"""From a router's logits to rows sorted by expert, in three kernels, one after another.

Each token's experts and their weights; how many rows each expert has in each block of tokens; and
from these where each row lies among all, sorted by expert and of one expert by token. No atomics
decide an order: a run gives what the one before gave.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(1 << 63))
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def in_order(bits):
    """Bits of fp32 numbers as integers that are ordered as these are; and back again."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["tokens"])
def choose_experts_kernel(
    logits_ptr,  # [tokens, E]
    weights_ptr,  # [tokens, TOP] fp32
    experts_ptr,  # [tokens, TOP] int32
    tokens,
    E,  # at most 65536
    TOP: tl.constexpr,
    RENORMALIZE: tl.constexpr,  # the softmax is that of the chosen, not of all
    TOKENS: tl.constexpr,  # of a program
    EXPERTS: tl.constexpr,  # >= E, a power of 2
    CHOICES: tl.constexpr,  # >= TOP, a power of 2
):
    """The largest logits, the first of equal ones first, NaN above all; and their softmax."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts, choices = tl.arange(0, EXPERTS)[None, :], tl.arange(0, CHOICES)[None, :]
    live, known = token < tokens, experts < E
    here = live[:, None] & known
    logits = tl.load(logits_ptr + token[:, None] * E + experts, mask=here, other=0.0)
    logits = logits.to(tl.float32)
    ordered = in_order(logits.to(tl.int32, bitcast=True))
    ordered = tl.where(logits == 0, 0, ordered)  # -0 is 0
    ordered = tl.where(logits != logits, NOT_A_NUMBER, ordered)
    # one number of a logit and its expert: no two are equal, and the smaller expert is larger
    keys = tl.where(known, (ordered.to(tl.int64) << 16) | (65535 - experts), LEAST)

    chosen = tl.zeros((TOKENS, CHOICES), tl.int32)
    values = tl.zeros((TOKENS, CHOICES), tl.float32)
    most = tl.zeros((TOKENS,), tl.float32)
    for j in tl.static_range(TOP):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], LEAST, keys)
        value = in_order((best >> 16).to(tl.int32)).to(tl.float32, bitcast=True)
        if j == 0:
            most = value
        expert = (65535 - (best & 65535)).to(tl.int32)
        chosen = tl.where(choices == j, expert[:, None], chosen)
        values = tl.where(choices == j, value[:, None], values)

    powers = tl.where(choices < TOP, tl.exp(values - most[:, None]), 0.0)
    if RENORMALIZE:
        total = tl.sum(powers, 1)
    else:
        total = tl.sum(tl.where(known, tl.exp(logits - most[:, None]), 0.0), 1)
    there = live[:, None] & (choices < TOP)
    at = token[:, None] * TOP + choices
    tl.store(experts_ptr + at, chosen, mask=there)
    tl.store(weights_ptr + at, powers / total[:, None], mask=there)


@triton.jit(do_not_specialize=["tokens"])
def choose_experts_gradient_kernel(
    dweights_ptr,  # [tokens, TOP] fp32
    weights_ptr,  # [tokens, TOP] fp32
    experts_ptr,  # [tokens, TOP] int32
    logits_ptr,  # [tokens, E]
    dlogits_ptr,  # [tokens, E]
    tokens,
    E,
    TOP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # as above
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """That of a softmax: each share times what its gradient is above the mean of all."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts, choices = tl.arange(0, EXPERTS)[None, :], tl.arange(0, CHOICES)[None, :]
    live = token < tokens
    known = live[:, None] & (choices < TOP)
    at = token[:, None] * TOP + choices
    weights = tl.load(weights_ptr + at, mask=known, other=0.0)
    mean = tl.sum(weights * tl.load(dweights_ptr + at, mask=known, other=0.0), 1)
    here, place = live[:, None] & (experts < E), token[:, None] * E + experts
    found = tl.zeros((TOKENS, EXPERTS), tl.float32)
    if not RENORMALIZE:
        # shares of all, from the first one that was chosen
        first = tl.load(experts_ptr + token * TOP, mask=live, other=0)
        most = tl.load(logits_ptr + token * E + first, mask=live, other=0.0).to(tl.float32)
        logits = tl.load(logits_ptr + place, mask=here, other=0.0).to(tl.float32)
        share = tl.load(weights_ptr + token * TOP, mask=live, other=0.0)
        found -= tl.exp(logits - most[:, None]) * (share * mean)[:, None]
    for j in tl.static_range(TOP):
        expert = tl.load(experts_ptr + token * TOP + j, mask=live, other=-1)
        weight = tl.load(weights_ptr + token * TOP + j, mask=live, other=0.0)
        above = tl.load(dweights_ptr + token * TOP + j, mask=live, other=0.0)
        if RENORMALIZE:
            above -= mean
        found += tl.where(experts == expert[:, None], (weight * above)[:, None], 0.0)
    tl.store(dlogits_ptr + place, found.to(dlogits_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["entries", "share"])
def count_experts_kernel(
    experts_ptr,  # [entries] int32 or int64; those that are none of E are left out
    blocks_ptr,  # [programs, E] int32
    entries,
    share,  # entries of a program, a multiple of BLOCK
    E,
    EXPERTS: tl.constexpr,  # >= E and >= 32, a power of 2
    BLOCK: tl.constexpr,
):
    """How many entries of each block name each expert."""
    own, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    first = own * share
    last = min(first + share, entries)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in tl.range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        expert = tl.load(experts_ptr + at, mask=at < last, other=-1).to(tl.int32)
        counts += tl.histogram(expert, EXPERTS, mask=(expert >= 0) & (expert < E))
    tl.store(blocks_ptr + own * E + experts, counts, mask=experts < E)


@triton.jit(do_not_specialize=["entries", "share"])
def place_rows_kernel(
    experts_ptr,  # [entries] int32 or int64
    blocks_ptr,  # [programs, E] int32, as above
    next_ptr,  # [programs, E] int32: where a program's next row of each expert goes
    counts_ptr,  # [E] int32: rows of each expert
    places_ptr,  # [entries] int32: where the row of an entry lies among those sorted by expert
    tokens_ptr,  # [entries] int32: the token of each row that is sorted
    entries,
    share,  # as above
    E,
    TOP,  # entries of a token
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of programs' counts that are read at a time
):
    """Entries in order, each behind those of smaller experts and earlier ones of its own.

    Those that name none of E come last.
    """
    own, programs = tl.program_id(0), tl.num_programs(0)
    experts, lanes = tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    known = experts < E
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for block in tl.range(0, programs, BLOCKS):
        which = (block + tl.arange(0, BLOCKS))[:, None]
        here = (which < programs) & known[None, :]
        counts = tl.load(blocks_ptr + which * E + experts[None, :], mask=here, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(which < own, counts, 0), 0)
    if own == 0:
        tl.store(counts_ptr + experts, total, mask=known)
    next_ptr += own * E
    tl.store(next_ptr + experts, tl.cumsum(total, 0) - total + before, mask=known)

    first = own * share
    last = min(first + share, entries)
    beyond = tl.sum(total) + first - tl.sum(before)  # where the next entry of no expert goes
    for start in tl.range(first, last, BLOCK):
        at = start + lanes
        live = at < last
        expert = tl.load(experts_ptr + at, mask=live, other=-1).to(tl.int32)
        valid = live & (expert >= 0) & (expert < E)
        expert = tl.where(valid, expert, -1)
        same = (expert[None, :] == expert[:, None]) & live[None, :]
        # of lanes with equal experts: those before count 1, those behind 65536
        met = (at[None, :] < at[:, None]).to(tl.int32)
        met += (at[None, :] > at[:, None]).to(tl.int32) << 16
        met = tl.sum(tl.where(same, met, 0), 1)
        # between what threads have stored, what others read of it, and what they store there then
        tl.debug_barrier()
        begin = tl.where(valid, tl.load(next_ptr + expert, mask=valid, other=0), beyond)
        place = begin + (met & 65535)
        tl.store(places_ptr + at, place, mask=live)
        tl.store(tokens_ptr + place, at // TOP, mask=live)
        beyond += tl.sum((live & (expert < 0)).to(tl.int32))
        tl.debug_barrier()
        tl.store(next_ptr + expert, place + 1, mask=valid & (met < 65536))
