"""The kernels that find routes of which only the device knows how many rows go where."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.experts.routes import kernel_on_device as kernels
from counterpoint.experts.routes import kernel_rows
from counterpoint.gpu.device_limits import refused_on
from counterpoint.run.launch import ALIGN, At, Fixed, Launch, at, launch_alone, launch_of
from counterpoint.tensor_parallel.plan_fused_sum import padded

NAME = "exchange_routes"  # in errors
MOST_EXPERTS = 1 << 10  # that a program holds
MOST_TOP = 16  # experts of a token, which code is written out for
ITEMS = 1 << 12  # numbers that a program holds: of some tokens, one for each expert
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
        weights: floating point, of that shape.
    """
    tokens, top = experts.shape
    fixed = (("TOP", top), ("E", num_experts), ("BLOCK", BLOCK))
    given = experts, weights, told
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


def name_entries(sent: Tensor, entries: At, each: Tensor) -> None:
    """sent[entries[i]] = each[i]; entries beyond its end are left out.

    Args:
        sent: fp32.
        entries: int32 [rows], from a multiple of 16 bytes on.
        each: fp32 [rows].
    """
    rows = each.shape[0]
    launched = max(1, -(-rows // BLOCK)), NUM_WARPS
    dtypes = torch.float32, torch.int32, torch.float32
    known = (
        kernel_rows.name_entries_kernel,
        dtypes,
        2,
        (("BLOCK", BLOCK),),
        launched,
        each.device,
        NAME,
    )
    launch_of(*known)(sent, entries, each, rows, sent.shape[0])


def rows_into(rows: Tensor, ends: Tensor, counts: Tensor, rank: int, room: int) -> None:
    """Rows of each expert here, and where they end.

    Args:
        rows: int64 [E_local]; and `ends` int32.
        counts: int64 [ranks, E].
    """
    (ranks, every), local = counts.shape, rows.shape[0]
    fixed = (("E", every), ("LOCAL", local), ("LOCALS", padded(local)))
    kernel = kernel_rows.rows_here_kernel
    launch_alone(kernel, (counts, rows, ends), (ranks, rank, room), fixed, (1, 4), NAME)


class Given(NamedTuple):
    """What the kernels write, `Found` of device_routes.py, and what they read."""

    weights: Tensor
    counts: Tensor
    firsts: Tensor
    packed: Tensor
    lists: Sequence[At]  # where its lists begin, of one island
    every: Tensor  # int32 [ranks * tokens, 2 * top], what all ranks have told


class _Known(NamedTuple):
    """Three kernels, compiled, and the memory between them."""

    tally: Launch
    place: Launch
    pair: Launch
    starts: tuple[int, ...]  # of what lies there
    words: int  # int32, of all of it
    shares: tuple[int, ...]  # arguments of all: tokens of a block, and how many blocks a rank has
    own: tuple[int, ...]  # the same of own tokens
    queued: int


Shape = tuple[int, int, int, int]  # ranks, experts, experts of a token, tokens of a rank


def words_of(shape: Shape, lists: int, rows: int, device: torch.device) -> int:
    """Numbers of 4 bytes that `routes_into` needs, beside what it writes.

    Args:
        lists: their numbers.
        rows: by expert, of each rank.
    """
    return _known(shape, (lists, rows), device).words


def routes_into(given: Given, rank: int, received: int, memory: Tensor) -> None:
    """All that a rank knows of a call, in three kernels.

    Args:
        received: rows that come to it at most.
        memory: int32 [`words_of`].
    """
    weights, counts, firsts, packed, lists, every = given
    (ranks, experts), top = counts.shape, every.shape[1] // 2
    shape = ranks, experts, top, every.shape[0] // ranks
    known = _known(shape, (packed.shape[0], weights.shape[0]), every.device)
    tokens, (sent, rows, sums, y, entries) = every.shape[0] // ranks, lists
    pairs, tallied, queue, order, places, named = (at(memory, start) for start in known.starts)
    numbers = rank, tokens, *known.shares
    empty = packed.shape[0], weights.shape[0], known.queued
    bits = weights.view(torch.int32)
    Launch.in_a_row((
        (known.tally, (every, pairs, tallied, named, packed, weights, queue, *numbers, *known.own,
                       *empty)),
        (known.place, (every, pairs, tallied, named, counts, firsts, queue, order, places, sent, y,
                       *numbers, *known.own)),
        (known.pair, (every, counts, firsts, queue, order, places, rows, sums, entries, bits,
                      *numbers, weights.shape[0], received)),
    ))  # fmt: skip


@lru_cache(maxsize=1024)
def _known(
    shape: Shape, filled: tuple[int, int], device: torch.device
) -> _Known:  # fmt: skip
    """
    Args:
        filled: numbers of the lists, and of the weights.
    """
    ranks, experts, top, tokens = shape
    own, each = shares_of(tokens, ranks, experts)
    blocks = ranks * each.blocks
    queued = blocks * (experts // ranks)
    parts = (blocks * experts, (blocks + own.blocks) * experts, queued, ranks * tokens,
             ranks * tokens, tokens * top)  # fmt: skip
    starts = [*accumulate((-(-part // ALIGN) * ALIGN for part in parts), initial=0)]
    fillers = max(1, min(PROGRAMS, sum((*filled, queued)) // FILLED))
    programs = (blocks + own.blocks + fillers, own.blocks + blocks + ranks, blocks)
    numbers, table = torch.int32, torch.int64
    dtypes = ([numbers] * 5 + [torch.float32, numbers],
              [numbers] * 4 + [table] * 2 + [numbers] * 5,
              [numbers, table, table] + [numbers] * 7)  # fmt: skip
    written = kernels.tally_tokens_kernel, kernels.place_tokens_kernel, kernels.place_pairs_kernel
    each_fixed = fixed_of(own, each, ranks, experts, top)
    launches = (
        launch_of(kernel, tuple(types), sizes, fixed, (count, NUM_WARPS), device, NAME)
        for kernel, types, sizes, fixed, count in zip(
            written, dtypes, (9, 6, 6), each_fixed, programs, strict=True
        )
    )
    shares = each.size, each.blocks
    own_shares = own.size, own.blocks
    return _Known(*launches, tuple(starts[:-1]), starts[-1], shares, own_shares, queued)  # type: ignore[call-arg]
