"""Routes of which only the device knows how many rows go where: fixed sizes, and no host waits.

All ranks bring equally many tokens, and gather the experts and weights of all of them at once. Each
then finds by itself what it needs: where rows lie is the same on all ranks. Its lists, one behind
the other, each from a multiple of 16 bytes on:

    sent     [tokens * a]          of each row that it sends the own token: by rank, by the token's
                                   first expert there, by token; a is the least of top and the ranks
    rows     [max_rows]            of each row by expert the received row; those lie by first expert
                                   here, by source, by token
    sums     [received, top]       of each received row its rows by expert, in order of a token's
                                   experts; `received` is the least of max_rows and all tokens
    y        [tokens, a]           of each token the rows that come back, in order
    entries  [max_rows]            of each row by expert the token of all ranks * top + which of its
                                   experts

Where a list has fewer, NONE stands for the others. `firsts` [ranks, E], on the device, says as in
routes.py how many tokens of a rank have e as their first expert on its rank.
"""

from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.runtime import launch_routes
from counterpoint.runtime.find_routes import first_experts, positions
from counterpoint.runtime.library import library_of
from counterpoint.runtime.notice_board import Awaited
from counterpoint.runtime.routes import NONE, Blocks, Routes
from counterpoint.runtime.workspace import Workspace

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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each list."""
        tokens, top, ranks, rows = self
        return {
            "sent": (tokens * min(top, ranks),), "rows": (rows,),
            "sums": (min(rows, ranks * tokens), top), "y": (tokens, min(top, ranks)),
            "entries": (rows,),
        }  # fmt: skip

    @property
    def starts(self) -> list[int]:
        """Where each list begins, and the end."""
        each = (-(-prod(shape) // ALIGN) * ALIGN for shape in self.shapes.values())
        return [*accumulate(each, initial=0)]

    def lists(self, packed: Tensor) -> "Lists":
        """Those that `packed` has made one."""
        found = zip(self.starts, self.shapes.values(), strict=False)
        return Lists(*(packed[at : at + prod(shape)].view(shape) for at, shape in found))


class Lists(NamedTuple):
    """See above."""

    sent: Tensor
    rows: Tensor
    sums: Tensor
    y: Tensor
    entries: Tensor

    def packed(self) -> Tensor:
        """All of them, as int32."""
        ends = ((0, -x.numel() % ALIGN) for x in self)
        padded = (F.pad(x.flatten(), end, value=NONE) for x, end in zip(self, ends, strict=True))
        return torch.cat([x.int() for x in padded])


class Found(NamedTuple):
    """What a rank knows of a call.

    Args:
        weights: fp32 [max_rows], of rows by expert; zero behind them.
        counts, firsts: int64 [ranks, E].
        lists: see above.
    """

    weights: Tensor
    counts: Tensor
    firsts: Tensor
    lists: Tensor


def find(
    workspace: Workspace, experts: Tensor, weights: Tensor, num_experts: int, max_rows: int
) -> Found:
    """Those of tokens that have these experts; a token with an expert that is none has NaN weights.

    Args:
        experts: int32 or int64 [tokens, top], tokens equally many on all ranks.
        weights: fp32 of that shape.
        max_rows: rows by expert that a rank can take; more of them are left out.
    """
    ranks, rank, (tokens, top) = workspace.group.size(), workspace.rank, experts.shape
    kernels = launch_routes.by_kernels(experts, num_experts)
    told = experts.new_empty(tokens, 2 * top, dtype=torch.int32)
    (launch_routes.tell_into if kernels else tell_into)(told, experts, weights, num_experts)
    every = told.new_empty(ranks * tokens, 2 * top)
    calls = library_of(workspace, Awaited(OP, "gather lists of experts", OP))
    calls.all_gather(every.view(-1), told.view(-1))
    if kernels:
        return found_by_kernels(rank, ranks, every, num_experts, max_rows)
    each = every[:, top:].contiguous().view(torch.float32)
    return found_by(rank, ranks, every[:, :top].long(), each, num_experts, max_rows)


def tell_into(told: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> None:
    """What a rank tells all, by torch: see launch_routes.py."""
    wrong = ((experts < 0) | (experts >= num_experts)).any(1, keepdim=True)
    ids, bits = told.split(experts.shape[1], 1)
    ids.copy_(experts.clamp(0, num_experts - 1))
    bits.copy_(weights.masked_fill(wrong, torch.nan).view(torch.int32))


def found_by_kernels(
    rank: int, ranks: int, every: Tensor, num_experts: int, max_rows: int
) -> Found:
    """As `found_by`, from what all ranks have told."""
    sizes = Sizes(len(every) // ranks, every.shape[1] // 2, ranks, max_rows)
    each = every.new_empty(max_rows, dtype=torch.float32)
    counts, table = (every.new_empty(ranks, num_experts, dtype=torch.int64) for _ in range(2))
    packed = every.new_empty(sizes.starts[-1])
    launch_routes.routes_into(each, counts, table, packed, sizes.lists(packed), every, rank)
    return Found(each, counts, table, packed)


def found_by(
    rank: int, ranks: int, ids: Tensor, weights: Tensor, num_experts: int, max_rows: int
) -> Found:
    """What a rank finds in the lists of all, by torch.

    Args:
        ids: int64 [ranks * tokens, top], experts of all tokens.
        weights: fp32 of that shape.
    """
    tokens, top = ids.shape[0] // ranks, ids.shape[1]
    sizes, local = Sizes(tokens, top, ranks, max_rows), num_experts // ranks
    # fewer bits are sorted in fewer passes
    small = torch.int16 if num_experts < 2**15 else torch.int32
    firsts = first_experts(ids, local, ranks)  # [ranks, ranks * tokens]
    firsts = firsts.clamp_(max=num_experts).to(small)
    by_source = firsts.view(ranks, ranks, tokens).transpose(0, 1).reshape(ranks, -1)
    counts, table = (_counted(x, num_experts) for x in (ids.reshape(ranks, -1), by_source))

    mine = firsts[:, rank * tokens : (rank + 1) * tokens]
    order, sent_rows = mine.flatten().sort(stable=True).indices, (mine < num_experts).sum()
    sent = _until(sent_rows, order[: sizes.shapes["sent"][0]] % max(tokens, 1))
    back = positions(order, ranks * tokens)
    back = back.masked_fill_(back >= sent_rows, NONE).view(ranks, tokens).t().sort(1).values

    here = firsts[rank]  # of all tokens
    received = here.sort(stable=True).indices
    place = positions(received, len(here))
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
    at = place[token].clamp(max=room - 1) if ids.numel() else pairs
    sums = ids.new_full((ids.numel() + 1,), NONE)
    sums[entries.clamp(max=ids.numel())] = torch.arange(max_rows, device=ids.device)
    sums = sums[:-1].view(ids.shape)[received[:room]]
    lists = Lists(sent, _until(rows, at), sums, back[:, : min(top, ranks)], entries)
    return Found(each, counts, table, lists.packed())


def _counted(values: Tensor, end: int) -> Tensor:
    """How often each number below `end` is in each row: int64 [rows, end]. No other is above it."""
    found = values.new_zeros(len(values), end + 1, dtype=torch.int64)
    found.scatter_add_(1, values.long(), torch.ones_like(values, dtype=torch.int64))
    return found[:, :end].contiguous()


def _until(count: Tensor, values: Tensor) -> Tensor:
    """The first `count` of them, which the device alone knows, and NONE behind."""
    places = torch.arange(len(values), device=values.device)
    return torch.where(places < count, values, NONE)


def weights_back(workspace: Workspace, lists: Tensor, each: Tensor, sizes: Sizes) -> Tensor:
    """What rows by expert have for their weights goes back to their tokens, fp32 [tokens, top].

    Args:
        each: fp32 [max_rows].
    """
    tokens, top, ranks, _ = sizes
    entries = sizes.lists(lists).entries
    sent = each.new_zeros(ranks * tokens * top + 1)
    sent[entries.clamp(max=len(sent) - 1).long()] = each
    found = each.new_empty(ranks, tokens * top)
    calls = library_of(workspace, Awaited(OP, "send gradients of weights", OP))
    calls.all_to_all(found.view(-1), sent[:-1])
    return found.sum(0).view(tokens, top)  # each is zero but on one rank


def on_host(rank: int, size: int, firsts: Tensor, lists: Tensor, sizes: Sizes) -> Routes:
    """The same as the host lays plans out by; it waits for the device. No list is of islands.

    Args:
        size: ranks of an island.
    """
    tokens, top, ranks, _ = sizes
    table, found = firsts.cpu(), sizes.lists(lists)
    far = [[0] * (ranks // size)] * ranks
    blocks = Blocks((rank, size, top, tokens, ranks), table.tolist(), far)
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
