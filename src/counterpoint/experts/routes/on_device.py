"""Routes of which only the device knows how many rows go where: fixed sizes, and no host waits.

All ranks bring equally many tokens, and gather the experts and weights of all of them at once. Each
then finds by itself what it needs: where rows lie is the same on all ranks. A token that has NONE
in place of an expert has fewer of them: so who has fewer tokens makes up for it. A rank's lists,
one behind the other, each from a multiple of 16 bytes on:

    sent     [held * a]            of each row that it sends the token that it holds: by mate, by
                                   the token's first expert there, by token; a is the least of top
                                   and the mates
    rows     [max_rows]            of each row by expert the received row; those lie by first expert
                                   here, by source, by token
    sums     [received, top]       of each received row its rows by expert, in order of a token's
                                   experts; `received` is the least of max_rows and all tokens
    y        [held, a]             of each token that it holds the rows that come back, in order
    entries  [max_rows]            of each row by expert the token of all ranks * top + which of its
                                   experts
    experts  [tokens, top]         of own tokens
    over     [2]                   one number of 8 bytes: 0; or, where rows are more than max_rows
                                   on some rank, how many more * 2^8, and bits of such ranks * 2^32

Mates are the ranks of an island. A rank holds the tokens of its rail, in order of islands (of the
ranks that have its place in each of them): see experts/plan_islands.py. On one island these are its
own, and the last two lists are empty. Where a list has fewer, NONE stands for the others. Rows by
expert are in order of source ranks, whatever the islands.

`firsts`, on the device, says as in routes.py how many tokens of a rank have e as their first expert
on its rank: [ranks, E]. Of several islands it is two tables [mates, experts of this island], of the
tokens that mates hold: rows for each expert, and such firsts.
"""

from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.experts.routes.find import first_experts, positions
from counterpoint.experts.routes.lists import NONE, Blocks, Routes
from counterpoint.run.launch import At, at

OP = "exchange_routes"
ALIGN = 4  # numbers of 4 bytes


class Sizes(NamedTuple):
    """What lists of one call are as long as.

    Args:
        tokens: of each rank.
        top: experts of a token.
        max_rows: rows by expert.
    """

    tokens: int
    top: int
    ranks: int
    max_rows: int
    islands: int = 1

    @property
    def mates(self) -> int:
        """Ranks of an island."""
        return self.ranks // self.islands

    @property
    def held(self) -> int:
        """Tokens of a rail."""
        return self.tokens * self.islands

    @property
    def back(self) -> int:
        """Rows that come back to a rank at most."""
        return self.held * min(self.top, self.mates)

    @property
    def received(self) -> int:
        """Rows that come to a rank at most."""
        return min(self.max_rows, self.ranks * self.tokens)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each list."""
        rows, several = self.max_rows, self.islands > 1
        return {
            "sent": (self.back,), "rows": (rows,),
            "sums": (self.received, self.top),
            "y": (self.held, min(self.top, self.mates)), "entries": (rows,),
            "experts": (self.tokens * several, self.top), "over": (2 * several,),
        }  # fmt: skip

    def firsts_shape(self, num_experts: int) -> tuple[int, ...]:
        """Of that table, or of both."""
        if self.islands == 1:
            return self.ranks, num_experts
        return 2, self.mates, num_experts // self.islands

    @property
    def starts(self) -> list[int]:
        """Where each list begins, and the end; a compiler's sizes may be symbols."""
        each = (aligned(prod(shape)) for shape in self.shapes.values())
        return [*accumulate(each, initial=0)]

    def lists(self, packed: Tensor) -> "Lists[Tensor]":
        """Those that `packed` has made one."""
        found = zip(self.starts, self.shapes.values(), strict=False)
        return Lists(*(packed[begin : begin + prod(shape)].view(shape) for begin, shape in found))

    def at(self, packed: Tensor) -> "Lists[At]":
        """Where they begin, as kernels are given them."""
        return Lists(*(at(packed, start) for start in known_starts(self)[:-1]))


def aligned(numbers: int) -> int:
    return -(-numbers // ALIGN) * ALIGN


@lru_cache(maxsize=1024)
def known_starts(sizes: Sizes) -> list[int]:
    return sizes.starts


Each = TypeVar("Each")


class Lists(NamedTuple, Generic[Each]):
    """See above."""

    sent: Each
    rows: Each
    sums: Each
    y: Each
    entries: Each
    experts: Each
    over: Each


def packed(lists: Lists[Tensor]) -> Tensor:
    """All of them as one, int32."""
    ends = ((0, -x.numel() % ALIGN) for x in lists)
    padded = (F.pad(x.flatten(), end, value=NONE) for x, end in zip(lists, ends, strict=True))
    return torch.cat([x.int() for x in padded])


class Found(NamedTuple):
    """What a rank knows of a call.

    Args:
        weights: fp32 [max_rows], of rows by expert; zero behind them.
        counts: int64 [ranks, E].
        firsts, lists: see above; int64, and int32.
    """

    weights: Tensor
    counts: Tensor
    firsts: Tensor
    lists: Tensor


def found_by(rank: int, sizes: Sizes, ids: Tensor, weights: Tensor, num_experts: int) -> Found:
    """What a rank finds in the lists of all, by torch.

    Args:
        ids: int64 [ranks * tokens, top], experts of all tokens.
        weights: fp32 of that shape.
    """
    tokens, top, ranks, max_rows, islands = sizes
    local, size, held = num_experts // ranks, sizes.mates, sizes.held
    first_mate, place = rank // size * size, rank % size
    # fewer bits are sorted in fewer passes
    small = torch.int16 if num_experts < 2**15 else torch.int32
    firsts = first_experts(ids, local, ranks)  # [ranks, ranks * tokens]
    firsts = firsts.clamp_(max=num_experts).to(small)
    by_source = firsts.view(ranks, ranks, tokens).transpose(0, 1).reshape(ranks, -1)
    named = ids.clamp(max=num_experts).view(ranks, -1)
    counts, table = (_counted(x, num_experts) for x in (named, by_source))

    by_rail = firsts[first_mate : first_mate + size].view(size, islands, size, tokens)
    mine = by_rail[:, :, place].reshape(size, held)
    order, sent_rows = mine.flatten().sort(stable=True).indices, (mine < num_experts).sum()
    sent = _until(sent_rows, order[: sizes.back] % max(held, 1))
    back = positions(order, size * held)
    back = back.masked_fill_(back >= sent_rows, NONE).view(size, held).t().sort(1).values

    here = firsts[rank]  # of all tokens
    by_mate = _turned(here, islands, size)
    received = by_mate.sort(stable=True).indices
    where = _turned(positions(received, len(here)), size, islands)
    # rows by expert, then as a source has them: by first expert, then by token
    order = here.view(ranks, tokens).sort(dim=1, stable=True).indices
    order += torch.arange(ranks, device=ids.device)[:, None] * tokens
    order = order.flatten()
    which = ids[order] - rank * local
    which = which.masked_fill_((which < 0) | (which >= local), local).flatten()
    pairs = which.to(small).sort(stable=True).indices[:max_rows]
    pairs = F.pad(pairs, (0, max_rows - len(pairs)))
    token = order[pairs // top] if ids.numel() else pairs
    rows = counts[:, rank * local : (rank + 1) * local].sum()
    entries = _until(rows, token * top + pairs % top)
    each = torch.cat((weights.flatten(), weights.new_zeros(1)))[entries.clamp(max=ids.numel())]
    # where there are more than max_rows all results are NaN, but rows are read where memory is
    room = sizes.shapes["sums"][0]
    at = where[token].clamp(max=room - 1) if ids.numel() else pairs
    sums = ids.new_full((ids.numel() + 1,), NONE)
    sums[entries.clamp(max=ids.numel())] = torch.arange(max_rows, device=ids.device)
    sums = _turned(sums[:-1].view(ids.shape), islands, size)[received[:room]]
    own, over = ids[:0], ids[:0, 0].int()
    if islands > 1:
        own, over = ids[rank * tokens : (rank + 1) * tokens], _over(counts, max_rows)
        both = torch.stack((counts, table)).view(2, islands, size, num_experts)
        table = both[..., first_mate * local : (first_mate + size) * local].sum(1)
    back = back[:, : min(top, size)]
    lists = Lists(sent, _until(rows, at), sums, back, entries, own, over)
    return Found(each, counts, table, packed(lists))


def _turned(tokens: Tensor, first: int, second: int) -> Tensor:
    """Those of all ranks by island, then place, the other way round; or back."""
    return tokens.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)


def _over(counts: Tensor, max_rows: int) -> Tensor:
    """The list `over`. Bits of more than 32 ranks are each of several."""
    missing = counts.view(len(counts), len(counts), -1).sum((0, 2)) - max_rows
    bits = F.pad(missing > 0, (0, -len(missing) % 32)).view(-1, 32).any(0)
    ranks = (bits.long() << torch.arange(32, device=bits.device)).sum()
    most = missing.max().clamp(0, 0xFFFFFF)
    return ((ranks << 32) | (most << 8)).view(1).view(torch.int32)


def _counted(values: Tensor, end: int) -> Tensor:
    """How often each number below `end` is in each row: int64 [rows, end]. No other is above it."""
    found = values.new_zeros(len(values), end + 1, dtype=torch.int64)
    found.scatter_add_(1, values.long(), torch.ones_like(values, dtype=torch.int64))
    return found[:, :end].contiguous()


def _until(count: Tensor, values: Tensor) -> Tensor:
    """The first `count` of them, which the device alone knows, and NONE behind."""
    places = torch.arange(len(values), device=values.device)
    return torch.where(places < count, values, NONE)


def on_host(rank: int, firsts: Tensor, lists: Tensor, sizes: Sizes) -> Routes:
    """The same as the host lays plans out by, inside an island; it waits for the device.

    Args:
        rank: the place of this one in its island.
        firsts: of the tokens that mates hold.
    """
    ranks, table, found = sizes.mates, firsts.cpu(), sizes.lists(lists)
    blocks = Blocks((rank, ranks, sizes.top, sizes.held, ranks), table.tolist(), [[0]] * ranks)
    # what is received by first expert, then source, is there by source first
    own = table[:, rank * blocks.local : (rank + 1) * blocks.local].t()
    source = torch.arange(ranks).expand(blocks.local, -1).flatten()
    order = source.repeat_interleave(own.flatten()).sort(stable=True).indices.to(lists.device)
    rows = found.rows[: int((found.rows != NONE).sum())]
    parts = {
        "sent": found.sent, "rows": positions(order, len(order))[rows.long()],
        "sums": found.sums[order], "y": found.y,
    }  # fmt: skip
    packed: list[Tensor] = []
    for name, (_, *shape) in blocks.lists.items():
        part = parts.get(name, lists.new_zeros(0)).flatten()[: prod(shape)].int()
        packed.append(F.pad(part, (0, prod(shape) - len(part))))
    return Routes(blocks, torch.cat((*packed, parts["rows"].int())))
