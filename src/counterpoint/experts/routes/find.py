"""How ranks learn where tokens go: tables by all, then lists along rails, then inside islands.

The host waits once, for the tables: sizes of all that follows are known from them. Rows are put in
order by stable sorts, and nothing is added up by atomics.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts.fused.launch_sums import Source, sum_rows
from counterpoint.experts.routes.lists import NONE, Blocks, Routes
from counterpoint.group.notice_board import Awaited
from counterpoint.group.wire import wire_of
from counterpoint.group.workspace import Workspace
from counterpoint.run.lanes_cuda import lanes_of

OP = "exchange_routes"
NOWHERE = 2**62  # beyond all experts, those of one island behind those of another


def find_routes(
    workspace: Workspace, experts: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of tokens that have these experts.

    Args:
        experts: int32 or int64 [tokens, top].
        weights: fp32 of that shape.

    Returns:
        the weights of this rank's rows by expert, fp32 [R]; counts, int64 [ranks, num_experts], and
            `Blocks.packed`, both on the host; the lists of `Routes`.

    Raises:
        InputError: experts of some rank are none; on all ranks alike.
        PeerTimeoutError: a rank did not come.
    """
    where = _Where(workspace)
    local, ids = num_experts // where.ranks, experts.long()
    ends, none = ends_of(ids), ids == NONE
    ids = ids.clamp(0, num_experts - 1).masked_fill_(none, NONE)
    to_rank = _in_order(first_experts(ids, local, where.ranks))
    wide = local * where.size
    by_island = first_experts(ids // wide * wide, wide, where.islands)  # in the order of tokens
    by_island[where.island] = NOWHERE  # they stay
    to_island = _in_order(by_island)
    counted = [_counts(found, num_experts, width)
               for found, width in ((ids.flatten().sort().values, 1), (to_rank.firsts, 1),
                                    (to_island.firsts, wide))]  # fmt: skip
    table = where.tables(torch.cat([torch.stack(ends), *counted])).cpu()
    for rank, (low, high) in enumerate(table[:, :2].tolist()):
        if low < 0 or high >= num_experts:
            got = f"{low} to {high} on rank {rank}"
            raise InputError(OP, "experts", want=f"0 to {num_experts - 1}", got=got)
    _, counts, firsts, over = table.split((2, num_experts, num_experts, where.islands), 1)
    head = workspace.rank, where.size, experts.shape[1], experts.shape[0], where.ranks
    blocks = Blocks(head, firsts.tolist(), over.tolist())

    told = torch.cat((ids.to(torch.int32), weights.contiguous().view(torch.int32)), 1)
    sent, out = to_rank.rows(blocks.count("sent")), to_island.rows(blocks.count("out"))
    came = where.along_rails(told[out], blocks.rows("out"), blocks.rows("came"))
    to_mate = _to_mates(came[:, : blocks.top].long(), blocks)
    own, before = sent[blocks.mine("sent")], blocks.mine("passing").start
    passed = to_mate.rows(blocks.count("passing") - len(own))
    passing = torch.cat((passed[:before], own, passed[before:]))
    held = torch.cat((came[passed[:before]], told[own], came[passed[before:]]))
    received = where.among_mates(held, blocks.rows("passing"), blocks.rows("received"))
    pairs = _by_expert(received[:, : blocks.top], blocks, counts)

    top, each = blocks.top, received[:, blocks.top :].contiguous().view(torch.float32)
    lists = (
        sent, out, passing, positions(pairs, len(received) * top),
        to_mate.entries(len(passed), min(top, where.size), before, len(own)),
        to_rank.entries(len(sent), min(top, where.ranks)),
        to_island.entries(len(out), min(top, where.islands - 1)), pairs // max(top, 1),
    )  # fmt: skip
    packed = torch.cat([found.flatten().to(torch.int32) for found in lists])
    return each.flatten()[pairs], counts.contiguous(), blocks.packed(), packed


def ends_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest expert that is named; 0 and 0 where none is."""
    named = ids.masked_fill(ids == NONE, 0)
    return torch.aminmax(named) if ids.numel() else (ids.new_zeros(()), ids.new_zeros(()))


class _InOrder(NamedTuple):
    """Tokens of each of some places: in order of places, of first experts, and of tokens.

    Args:
        firsts: first experts there, ascending; then NOWHERE.
        order: place * tokens + token, of each.
        shape: places, tokens.
    """

    firsts: Tensor
    order: Tensor
    shape: tuple[int, int]

    def rows(self, count: int) -> Tensor:
        """The tokens of those that are somewhere."""
        return self.order[:count] % max(self.shape[1], 1)

    def entries(self, count: int, most: int, before: int = 0, others: int = 0) -> Tensor:
        """Of each token its rows, ascending, then NONE: [tokens, most].

        Args:
            count: of all rows.
            before: there, `others` that are not of these come between.
        """
        found = positions(self.order[:count], self.shape[0] * self.shape[1])
        found += ((found >= before) & (found < NONE)) * others
        return found.view(self.shape).t().sort(1).values[:, :most]


def first_experts(ids: Tensor, width: int, places: int) -> Tensor:
    """The first expert that a token has at each place, or NOWHERE: [places, tokens].

    Args:
        ids: int64 [tokens, top]; those of no place are left out.
        width: experts of a place.
    """
    at = (ids // width).clamp(-1, places)
    at.masked_fill_(at < 0, places)
    found = ids.new_full((len(ids), places + 1), NOWHERE)
    return found.scatter_reduce_(1, at, ids, "amin")[:, :-1].t().contiguous()


def _in_order(firsts: Tensor) -> _InOrder:
    found, order = firsts.flatten().sort(stable=True)
    return _InOrder(found, order, (firsts.shape[0], firsts.shape[1]))


def _counts(ascending: Tensor, end: int, width: int) -> Tensor:
    """How many of them are in each interval of that width up to `end`."""
    edges = torch.arange(0, end + 1, width, device=ascending.device)
    return torch.searchsorted(ascending, edges).diff()


def _to_mates(ids: Tensor, blocks: Blocks) -> _InOrder:
    """Of what came over the rails, by island, and in each of them by rank of this one."""
    start, local = blocks.mates.start * blocks.local, blocks.local
    firsts = first_experts(ids - start, local, blocks.size)
    islands = torch.arange(len(blocks.rows("came")))
    islands = islands.repeat_interleave(torch.tensor(blocks.rows("came"), dtype=torch.int64))
    return _in_order(firsts + islands.to(ids.device) * (blocks.size * local))


def _by_expert(ids: Tensor, blocks: Blocks, counts: Tensor) -> Tensor:
    """Entries row * top + place of those for this rank's experts, by expert, then as they come."""
    own = slice(blocks.rank * blocks.local, (blocks.rank + 1) * blocks.local)
    mine = ids.flatten().long() - own.start
    mine.masked_fill_((mine < 0) | (mine >= blocks.local), blocks.local)
    return mine.sort(stable=True).indices[: int(counts[:, own].sum())]


def positions(pairs: Tensor, count: int) -> Tensor:
    """Where each of `count` entries stands in `pairs`, or NONE."""
    found = pairs.new_full((count,), NONE)
    found[pairs] = torch.arange(len(pairs), device=pairs.device)
    return found


def weights_back(workspace: Workspace, routes: Routes, each: Tensor) -> Tensor:
    """What rows by expert have for their weights goes back to their tokens: the way they came.

    Args:
        each: fp32 [R].

    Returns:
        fp32 [tokens, top].
    """
    where, blocks = _Where(workspace), routes.blocks
    entries = routes.list("sums").clamp(max=len(each))
    received = torch.cat((each, each.new_zeros(1)))[entries]
    parts = where.among_mates(received, blocks.rows("received"), blocks.rows("passing"))
    gone = each.new_empty(blocks.count("gone"), blocks.top)
    sum_rows(gone, Source(parts, routes.list("gone")))
    got = where.along_rails(gone, blocks.rows("gone"), blocks.rows("got"))
    tokens, mine = each.new_empty(blocks.tokens, blocks.top), blocks.mine("sent").start
    own = Source(parts[blocks.mine("passing")], routes.list("y"), mine)
    sum_rows(tokens, own, Source(got, routes.list("far")))
    return tokens


class _Where:
    """Whom a rank meets, over its transport."""

    def __init__(self, workspace: Workspace) -> None:
        self.ranks, self.rank = workspace.group.size(), workspace.rank
        self.islands, self.size = workspace.islands.number, workspace.islands.size
        self.island, self.place = divmod(self.rank, self.size)
        self.mates = workspace.islands.mine
        if workspace.device.type == "cuda":
            lanes_of(workspace).follow()
        self._wire = wire_of(workspace)
        self._awaited = Awaited(OP, "exchange lists of experts", OP)

    def tables(self, own: Tensor) -> Tensor:
        """Those of all ranks, one under the other."""
        sizes = [1] * self.ranks
        rows = own.expand(self.ranks, -1).contiguous()
        return self._exchanged(rows, sizes, sizes, range(self.ranks))

    def along_rails(self, rows: Tensor, gives: Sequence[int], gets: Sequence[int]) -> Tensor:
        """Rows for each island, to the rank of this place in it; none of them for this one."""
        return self._exchanged(rows, gives, gets, range(self.place, self.ranks, self.size))

    def among_mates(self, rows: Tensor, gives: Sequence[int], gets: Sequence[int]) -> Tensor:
        """Blocks for each rank of this island, of each island, and what comes of each of both."""
        islands, size = range(self.islands), range(self.size)
        blocks = rows.split(list(gives))
        sent = torch.cat([block for place in size for block in blocks[place :: self.size]])
        to, of = ([sum(each[place :: self.size]) for place in size] for each in (gives, gets))
        got = self._exchanged(sent, to, of, self.mates)
        blocks = got.split([gets[i * self.size + place] for place in size for i in islands])
        return torch.cat([blocks[place * self.islands + i] for i in islands for place in size])

    def _exchanged(
        self, rows: Tensor, gives: Sequence[int], gets: Sequence[int], peers: range
    ) -> Tensor:
        """Blocks for each peer, and what comes from each; this rank's own as it is."""
        found = rows.new_empty(sum(gets), *rows.shape[1:])
        sent, kept = (
            dict(zip(peers, whole.split(list(sizes)), strict=True))
            for whole, sizes in ((rows, gives), (found, gets))
        )
        kept.pop(self.rank).copy_(sent.pop(self.rank))
        to, of = ([(block, peer) for peer, block in each.items()] for each in (sent, kept))
        self._wire.exchange(to, of, self._awaited)
        return found
