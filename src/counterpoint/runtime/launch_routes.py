"""The kernels that find routes of which only the device knows how many rows go where."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.kernels import device_routes as kernels
from counterpoint.plan.fused_sum import padded
from counterpoint.runtime.device_limits import refused_on
from counterpoint.runtime.launch_alone import Fixed, launch_alone

NAME = "exchange_routes"  # in errors
MOST_EXPERTS = 1 << 10  # that a program holds
MOST_TOP = 16  # experts of a token, which code is written out for
ITEMS = 1 << 11  # numbers that a program holds: of some tokens, one for each expert
COUNTS = 1 << 13  # that a program reads at a time
TOKENS = 256  # of a program at a time, at most
FEW_TOKENS = 16  # that fewer are treated as
PROGRAMS = 128  # that share all tokens: each reads what all have counted
BLOCK = 1 << 9  # entries that are counted at a time
FILLED = 1 << 13  # numbers that a program fills
NUM_WARPS = 8


def takes(device: torch.device, num_experts: int, top: int) -> bool:
    """Whether these kernels are written for so many experts, and for this device."""
    known = num_experts <= MOST_EXPERTS and top <= MOST_TOP
    return device.type == "cuda" and known and not refused_on(device)


def tell_into(told: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> None:
    """What a rank tells all: int32 [tokens, 2 * top], experts and the bits of their weights.

    Args:
        experts: int32 or int64 [tokens, top].
        weights: fp32 of that shape.
    """
    tokens, top = experts.shape
    fixed = (("TOP", top), ("E", num_experts), ("BLOCK", BLOCK))
    given = experts, weights.view(torch.int32), told
    launched = max(1, -(-tokens * top // BLOCK)), NUM_WARPS
    launch_alone(kernels.tell_experts_kernel, given, (tokens,), fixed, launched, NAME)


class Shares(NamedTuple):
    """Tokens in blocks, one for each program, and how many of them it has.

    Args:
        tokens: at a time.
        size: of a block, a multiple of these.
        blocks: of all.
    """

    tokens: int
    size: int
    blocks: int


def shares_of(tokens: int, ranks: int, experts: int) -> tuple[Shares, Shares]:
    """Of own tokens, which all experts count by, and of those of each rank, which own ones do."""
    return (
        _shares(tokens, padded(experts), PROGRAMS),
        _shares(tokens, padded(experts // ranks), max(1, PROGRAMS // ranks)),
    )


def _shares(tokens: int, experts: int, programs: int) -> Shares:
    some = min(TOKENS, max(1, ITEMS // experts), max(FEW_TOKENS, padded(max(tokens, 1))))
    size = max(1, -(-tokens // (some * programs))) * some
    return Shares(some, size, max(1, -(-tokens // size)))


def fixed_of(
    own: Shares, each: Shares, ranks: int, experts: int, top: int
) -> tuple[Fixed, Fixed, Fixed]:
    """What the three kernels are compiled for."""
    local = experts // ranks
    shape = ("TOP", top), ("E", experts), ("LOCAL", local)
    wide = ("EXPERTS", max(32, padded(experts)))
    held = ("LOCALS", padded(local)), ("TOKENS", each.tokens), ("COUNTS", COUNTS)
    return (
        (*shape, wide, ("BLOCK", BLOCK)),
        (*shape, wide, *held, ("OWN_TOKENS", own.tokens)),
        (*shape, *held),
    )


def routes_into(
    weights: Tensor, counts: Tensor, firsts: Tensor, packed: Tensor, lists: Sequence[Tensor],
    every: Tensor, rank: int,
) -> None:  # fmt: skip
    """All that a rank knows of a call, in three kernels.

    Args:
        weights, counts, firsts, packed: `Found` of device_routes.py.
        lists: its `Lists`, parts of `packed`.
        every: int32 [ranks * tokens, 2 * top], what all ranks have told.
    """
    (ranks, experts), top = counts.shape, every.shape[1] // 2
    tokens, sent, rows, sums, y, entries = len(every) // ranks, *lists
    own, each = shares_of(tokens, ranks, experts)
    tally, place, pair = fixed_of(own, each, ranks, experts, top)
    blocks, per = ranks * each.blocks, each.blocks
    pairs, tallied, queue, order, places, named = (
        every.new_empty(shape)
        for shape in ((blocks, experts), (blocks + own.blocks, experts), (blocks, experts // ranks),
                      (ranks, tokens), (ranks, tokens), (tokens, top))
    )  # fmt: skip
    empty = len(packed), len(weights), queue.numel()
    fillers = max(1, min(PROGRAMS, sum(empty) // FILLED))
    sizes, own_sizes = (rank, tokens, each.size, per), (own.size, own.blocks)
    launch_alone(
        kernels.tally_tokens_kernel,
        (every, pairs, tallied, named, packed, weights, queue),
        (*sizes, *own_sizes, *empty), tally, (blocks + own.blocks + fillers, NUM_WARPS), NAME,
    )  # fmt: skip
    launch_alone(
        kernels.place_tokens_kernel,
        (every, pairs, tallied, named, counts, firsts, queue, order, places, sent, y),
        (*sizes, *own_sizes), place, (own.blocks + blocks + ranks, NUM_WARPS), NAME,
    )  # fmt: skip
    launch_alone(
        kernels.place_pairs_kernel,
        (every, counts, firsts, queue, order, places, rows, sums, entries,
         weights.view(torch.int32)),
        (*sizes, len(rows), len(sums)), pair, (blocks, NUM_WARPS), NAME,
    )  # fmt: skip
