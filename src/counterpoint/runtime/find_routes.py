"""How ranks learn where tokens go: tables by all, then lists along rails, then inside islands."""

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.runtime.notice_board import Awaited
from counterpoint.runtime.routes import Routes
from counterpoint.runtime.wire import wire_of
from counterpoint.runtime.workspace import Workspace

OP = "exchange_routes"


def find_routes(
    workspace: Workspace, experts: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens that have these experts.

    Args:
        experts: int32 or int64 [tokens, top].
        weights: fp32 of that shape.

    Returns:
        the weights of this rank's rows by expert, fp32 [R]; counts, int64 [ranks, num_experts];
            `Routes.packed`.

    Raises:
        InputError: experts of some rank are none; on all ranks alike.
        PeerTimeoutError: a rank did not come.
    """
    where = _Where(workspace)
    ranks, islands, size = where.ranks, where.islands, where.size
    local, (tokens, top) = num_experts // ranks, experts.shape
    low, high = (int(n) for n in experts.aminmax()) if experts.numel() else (0, 0)
    ids = experts.long().clamp(0, num_experts - 1)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    to_rank = torch.zeros(tokens, ranks, dtype=torch.bool).scatter_(1, ids // local, True)
    to_island = to_rank.view(tokens, islands, size).any(2)
    to_island[:, where.island] = False  # they stay
    own = [torch.tensor([low, high]), counts, to_rank.sum(0), to_island.sum(0)]
    table = where.tables(torch.cat(own))
    for rank, (low, high) in enumerate(table[:, :2].tolist()):
        if low < 0 or high >= num_experts:
            got = f"{low} to {high} on rank {rank}"
            raise InputError(OP, "experts", want=f"0 to {num_experts - 1}", got=got)
    _, counts, once, over = table.split((2, num_experts, ranks, islands), 1)
    found = Routes(workspace.rank, size, top, tokens, once.tolist(), over.tolist(),
                   _rows(to_rank), _rows(to_island), (), torch.empty(0))  # fmt: skip

    told = torch.cat((ids.to(torch.int32), weights.contiguous().view(torch.int32)), 1)
    received, passed = _received(where, found, told, local)
    mine, each = received[:, :top].long() - where.rank * local, received[:, top:]
    pairs = ((mine >= 0) & (mine < local)).flatten().nonzero().flatten()
    pairs = pairs[mine.flatten()[pairs].sort(stable=True).indices]
    found = found._replace(passed=passed, pairs=pairs)
    row_weights = each.contiguous().view(torch.float32).flatten()[pairs]
    return row_weights, counts.contiguous(), found.packed()


def _received(
    where: "_Where", found: Routes, told: Tensor, local: int
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The lists of tokens that come to this rank, by source; and `Routes.passed`.

    Args:
        found: as far as it is known by then.
        told: int32 [tokens, 2 top], experts and the bits of weights.
        local: experts of a rank.
    """
    rows = [told[picked] for picked in found.to_island]
    came = where.along_rails(rows, found.sizes("came", where.rank))
    of_mates: list[list[Tensor]] = []
    passed: list[Tensor] = []
    for island, lists in enumerate(came):
        picked = found.to_rank[where.mates.start : where.mates.stop]
        if island == where.island:
            lists = told
            passed += [picked[0][:0]] * where.size
        else:
            place = lists[:, : found.top].long() // local - where.mates.start
            place.masked_fill_((place < 0) | (place > where.size), where.size)  # of none here
            to_mate = torch.zeros(len(place), where.size + 1, dtype=torch.bool)
            picked = _rows(to_mate.scatter_(1, place, True)[:, :-1])
            passed += picked
        of_mates.append([lists[rows] for rows in picked])
    sent = [torch.cat(each) for each in zip(*of_mates, strict=True)]
    got = where.among_mates(sent, [sum(sizes) for sizes in where.by_mate(found.once)])
    return torch.cat(where.by_source(got, found.once)), passed


def weights_back(workspace: Workspace, routes: Routes, each: Tensor) -> Tensor:
    """What rows by expert have for their weights goes back to their tokens: the way they came.

    Args:
        each: fp32 [R].

    Returns:
        fp32 [tokens, top].
    """
    where, top = _Where(workspace), routes.top
    received = each.new_zeros(sum(routes.sizes("received", where.rank)) * top)
    received[routes.pairs] = each
    blocks = received.view(-1, top).split(routes.sizes("received", where.rank))
    sent = [torch.cat(blocks[place :: where.size]) for place in range(where.size)]
    parts = routes.sizes("parts", where.rank)
    got = where.among_mates(sent, [sum(parts[place :: where.size]) for place in range(where.size)])
    gone = [each.new_zeros(n, top) for n in routes.sizes("gone", where.rank)]
    tokens = each.new_zeros(routes.tokens, top)
    for place, rows in enumerate(got):
        for island, part in enumerate(rows.split(parts[place :: where.size])):
            unit = island * where.size + place
            if island == where.island:
                tokens[routes.to_rank[unit]] += part
            else:
                gone[island][routes.passed[unit]] += part
    for rows, back in zip(
        routes.to_island, where.along_rails(gone, routes.over[where.rank]), strict=True
    ):
        tokens[rows] += back
    return tokens


def _rows(member: Tensor) -> list[Tensor]:
    """Of each column the rows that are true."""
    return [column.nonzero().flatten() for column in member.unbind(1)]


class _Where:
    """Whom a rank meets, one after the other, over its transport."""

    def __init__(self, workspace: Workspace) -> None:
        self.ranks, self.rank = workspace.group.size(), workspace.rank
        self.islands, self.size = workspace.islands.number, workspace.islands.size
        self.island, self.place = divmod(self.rank, self.size)
        self.mates = workspace.islands.mine
        self._wire = wire_of(workspace)
        self._awaited = Awaited(OP, "exchange lists of experts", OP)

    def tables(self, own: Tensor) -> Tensor:
        """Those of all ranks, one under the other."""
        found = own.new_empty(self.ranks, len(own))
        found[self.rank] = own
        for d in range(1, self.ranks):
            to, source = (self.rank + d) % self.ranks, (self.rank - d) % self.ranks
            self._wire.exchange(own, to, found[source], source, self._awaited)
        return found

    def along_rails(self, sent: Sequence[Tensor], gets: Sequence[int]) -> list[Tensor]:
        """Rows for each island, to the rank of this place in it; nothing of its own."""
        rail = range(self.place, self.ranks, self.size)
        return self._each(sent, gets, rail, self.island)

    def among_mates(self, sent: Sequence[Tensor], gets: Sequence[int]) -> list[Tensor]:
        """Rows for each rank of this island; its own as they are."""
        found = self._each(sent, gets, self.mates, self.place)
        found[self.place] = sent[self.place]
        return found

    def _each(
        self, sent: Sequence[Tensor], gets: Sequence[int], peers: range, me: int
    ) -> list[Tensor]:
        found = [sent[me].new_empty(n, *sent[me].shape[1:]) for n in gets]
        for d in range(1, len(peers)):
            to, source = (me + d) % len(peers), (me - d) % len(peers)
            self._wire.exchange(sent[to].contiguous(), peers[to], found[source], peers[source],
                                self._awaited)  # fmt: skip
        return found

    def by_mate(self, once: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows that each rank of this island has for this one, of each island."""
        return [[once[r][self.rank] for r in range(place, self.ranks, self.size)]
                for place in range(self.size)]  # fmt: skip

    def by_source(self, got: Sequence[Tensor], once: Sequence[Sequence[int]]) -> list[Tensor]:
        """Rows from each rank of this island, by the rank that they are of."""
        parts = [rows.split(sizes) for rows, sizes in zip(got, self.by_mate(once), strict=True)]
        return [each[island] for island in range(self.islands) for each in parts]
