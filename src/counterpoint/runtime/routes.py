"""Which rows of tokens go where in a call: what one rank knows of it, as one operand of numbers.

Blocks of rows that travel lie without gaps, in order of ranks or islands, and a block's rows in the
order of its owner's tokens. So tables that all ranks have say where every block begins, on any
rank; which rows these are in what they were picked from is a list that a rank has of its own.

    once[s, d]   tokens of rank s that have experts on rank d
    over[s, j]   tokens of rank s that have experts on island j, which is another one
    to_rank      own tokens for each rank
    to_island    own tokens for each other island
    passed       of what came over the rail from each other island, rows for each rank of this one
    pairs        of each row by expert, which of the received rows' experts it is: row * top + place
"""

from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.plan.steps import ROUTES
from counterpoint.runtime.workspace import Operands

BY_RANK = ("sent", "back")
BY_SOURCE = ("received", "sums")
BY_ISLAND = ("out", "got")
BY_RAIL = ("came", "gone")
HEAD = 4


class Routes(NamedTuple):
    """Those of one rank in one call.

    Args:
        rank: whose; `size` ranks are an island.
        top: experts of a token.
        tokens: of this rank, and so the rows of its sums.
        once, over: [ranks][ranks] and [ranks][islands], see above.
        to_rank, to_island, passed, pairs: see above; `passed` for each rank of all, in order: those
            of an island j are for this island's ranks.
    """

    rank: int
    size: int
    top: int
    tokens: int
    once: list[list[int]]
    over: list[list[int]]
    to_rank: Sequence[Tensor]
    to_island: Sequence[Tensor]
    passed: Sequence[Tensor]
    pairs: Tensor

    @property
    def island(self) -> int:
        """Of this rank."""
        return self.rank // self.size

    @property
    def place(self) -> int:
        """Of this rank in its island."""
        return self.rank % self.size

    @property
    def slots(self) -> Tensor:
        """Of each row by expert, the row that was received."""
        return self.pairs // self.top

    def sizes(self, name: str, holder: int) -> list[int]:
        """Rows of each block of a buffer as `holder` has it."""
        ranks, size = len(self.once), self.size
        island, place = divmod(holder, size)
        rail = range(place, ranks, size)
        if name in BY_RANK:
            return self.once[holder]
        if name in BY_SOURCE:
            return [row[holder] for row in self.once]
        if name in BY_ISLAND:
            return self.over[holder]
        if name in BY_RAIL:
            return [self.over[r][island] for r in rail]
        mates = range(island * size, (island + 1) * size)
        return [self.once[r][d] for r, d in product(rail, mates)]

    def units(self, name: str, blocks: Sequence[int]) -> list[int]:
        """Blocks of ranks as blocks of the buffer: those of an island may be one."""
        if name in BY_ISLAND + BY_RAIL:
            return sorted({block // self.size for block in blocks})
        return sorted(blocks)

    def span(self, name: str, holder: int, units: Sequence[int]) -> slice:
        """Rows of neighbouring blocks."""
        ends = [0, *accumulate(self.sizes(name, holder))]
        return slice(ends[units[0]], ends[units[-1] + 1])

    def picked(self, name: str, unit: int) -> Tensor:
        """Which rows a block has of what it was picked from: of own tokens, or of `came`."""
        if name in BY_RANK:
            return self.to_rank[unit]
        if name in BY_ISLAND:
            return self.to_island[unit]
        island = unit // self.size
        if island == self.island:
            return self.to_rank[unit]
        return self.passed[unit] + self.span("came", self.rank, [island]).start

    def packed(self) -> Tensor:
        """All of it in one row of numbers; int64."""
        head = torch.tensor([self.rank, self.size, self.top, self.tokens])
        tables = (torch.tensor(t, dtype=torch.int64).view(-1) for t in (self.once, self.over))
        return torch.cat([head, *tables, *self.to_rank, *self.to_island, *self.passed, self.pairs])


def most_rows(routes: Routes, counts: Tensor) -> int:
    """Rows of the buffer that has most of them, on any rank; equal on all ranks."""
    ranks = len(routes.once)
    names = (*BY_RANK[:1], *BY_SOURCE[:1], *BY_ISLAND[:1], *BY_RAIL[:1], "passing")
    by_expert = counts.view(ranks, ranks, -1).sum((0, 2))
    sizes = (sum(routes.sizes(name, r)) for name in names for r in range(ranks))
    return max(*sizes, int(by_expert.max()))


def routes_in(packed: Tensor, ranks: int) -> Routes:
    """What `Routes.packed` has put there."""
    rank, size, top, tokens = packed[:HEAD].tolist()
    islands = ranks // size
    once, over, lists = packed[HEAD:].tensor_split((ranks * ranks, ranks * (ranks + islands)))
    found = Routes(rank, size, top, tokens, once.view(ranks, ranks).tolist(),
                   over.view(ranks, islands).tolist(), (), (), (), lists)  # fmt: skip
    mine, passing = found.island, found.sizes("passing", rank)
    passed = [0 if r // size == mine else n for r, n in enumerate(passing)]
    sizes = [*found.once[rank], *found.over[rank], *passed]
    *each, pairs = lists.split([*sizes, len(lists) - sum(sizes)])
    ends = ranks, ranks + islands
    return found._replace(
        to_rank=each[: ends[0]], to_island=each[ends[0] : ends[1]], passed=each[ends[1] :],
        pairs=pairs,
    )  # fmt: skip


def routes_of(operands: Operands, ranks: int) -> Routes:
    """Those of a call."""
    return routes_in(operands[ROUTES], ranks)
