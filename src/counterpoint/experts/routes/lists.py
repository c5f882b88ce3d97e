"""Which rows of tokens go where in a call: what one rank knows of it, as two operands of numbers.

Blocks of rows that travel lie without gaps, in order of ranks or islands. A block for a rank has
its rows in the order of their first experts there, and of one expert in the order of its owner's
tokens: so the rows that a group of experts is the first to need are neighbours. One for an island
has them in the order of tokens. Tables that all ranks have, on the host, say where every block
begins, on any rank:

    firsts[s, e]  tokens of rank s of which e is the first expert on its rank
    over[s, j]    tokens of rank s that have experts on island j, which is another one

Which rows these are in what they were picked from are lists that a rank has of its own, beside its
tokens: one for each buffer that a spread fills, and one for each that a fold fills.

    sent, out     of each row the own token
    passing       of each row the own token, or, for those of another island, the row of `came`
    rows          of each row the row of `received`
    sums [., top] of each row the rows by expert that are of it, in the order of a token's experts
    gone [., a]   of each row the rows of `parts`, in order; a is the least of top and an island
    y    [., b]   of each token the rows of `back`, in order; b is the least of top and the ranks
    far  [., c]   of each token the rows of `got`, in order; c is the least of top and other islands

Where a row of the last four has fewer, NONE stands for the others.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.group.workspace import Operands
from counterpoint.plan.steps import ROUTES

LISTS = "lists"  # the operand of them
BY_RANK = ("sent", "back")
BY_SOURCE = ("received", "sums")
BY_ISLAND = ("out", "got")
BY_RAIL = ("came", "gone")
HEAD = 5
NONE = 2**31 - 1


class Blocks:
    """Where the blocks of a call begin.

    Args:
        head: whose; ranks of an island; experts of a token; tokens of this rank, and so the rows of
            its sums; all ranks.
        firsts, over: [ranks][experts] and [ranks][islands], see above.
    """

    def __init__(self, head: Sequence[int], firsts: list[list[int]], over: list[list[int]]) -> None:
        self.rank, self.size, self.top, self.tokens, self.ranks = head
        self.firsts, self.over = firsts, over
        self.local = len(firsts[0]) // self.ranks  # experts of a rank
        self.island, self.place = divmod(self.rank, self.size)
        self._edges: dict[tuple[str, int], list[int]] = {}

    def packed(self) -> Tensor:
        """All of it in one row of numbers; int64."""
        head = [self.rank, self.size, self.top, self.tokens, self.ranks]
        numbers = [*head, *sum(self.firsts, []), *sum(self.over, [])]
        return torch.tensor(numbers, dtype=torch.int64)

    def parts(self, name: str) -> int:
        """Of a block, by its rows' first experts; 1: it has none."""
        return self.local if name in BY_RANK + BY_SOURCE else 1

    def edges(self, name: str, holder: int) -> list[int]:
        """Where the parts of all blocks of a buffer begin, as `holder` has it, and the end."""
        key = name, holder
        if key not in self._edges:
            self._edges[key] = [0, *accumulate(self._sizes(*key))]
        return self._edges[key]

    def _sizes(self, name: str, holder: int) -> list[int]:
        ranks, size, local = self.ranks, self.size, self.local
        island, place = divmod(holder, size)
        rail = range(place, ranks, size)
        if name in BY_RANK:
            return self.firsts[holder]
        if name in BY_SOURCE:
            own = slice(holder * local, (holder + 1) * local)
            return [n for row in self.firsts for n in row[own]]
        if name in BY_ISLAND:
            return self.over[holder]
        if name in BY_RAIL:
            return [self.over[r][island] for r in rail]
        mates = range(island * size, (island + 1) * size)
        return [sum(self.firsts[r][d * local : (d + 1) * local]) for r, d in product(rail, mates)]

    def units(self, name: str, blocks: range) -> range:
        """Neighbouring blocks of ranks as blocks of the buffer: those of an island may be one."""
        if name in BY_ISLAND + BY_RAIL:
            return range(blocks.start // self.size, (blocks.stop - 1) // self.size + 1)
        return blocks

    def span(
        self, name: str, holder: int, blocks: range, parts: tuple[int, int] | None = None
    ) -> slice:
        """Rows of neighbouring blocks of ranks; or some parts of one of them."""
        units, each = self.units(name, blocks), self.parts(name)
        first, last = parts or (0, each)
        edges = self.edges(name, holder)
        return slice(edges[units.start * each + first], edges[(units.stop - 1) * each + last])

    def rows(self, name: str) -> list[int]:
        """Of each block of a buffer of this rank."""
        edges = self.edges(name, self.rank)[:: self.parts(name)]
        return [stop - start for start, stop in pairwise(edges)]

    def count(self, name: str) -> int:
        """Rows of a buffer of this rank."""
        return self.edges(name, self.rank)[-1]

    def mine(self, name: str) -> slice:
        """Rows of this island's blocks of a buffer of this rank."""
        return self.span(name, self.rank, self.mates)

    @property
    def mates(self) -> range:
        """The ranks of this island."""
        return range(self.island * self.size, (self.island + 1) * self.size)

    @cached_property
    def lists(self) -> dict[str, tuple[int, int, int]]:
        """Of each list where it begins and its shape; but for `rows`, which the others leave."""
        islands, top = self.ranks // self.size, self.top
        shapes = {
            "sent": (self.count("sent"), 1), "out": (self.count("out"), 1),
            "passing": (self.count("passing"), 1), "sums": (self.count("sums"), top),
            "gone": (self.count("gone"), min(top, self.size)),
            "y": (self.tokens, min(top, self.ranks)), "far": (self.tokens, min(top, islands - 1)),
        }  # fmt: skip
        ends = accumulate(map(prod, shapes.values()))
        return {name: (end - prod(shape), *shape)
                for end, (name, shape) in zip(ends, shapes.items(), strict=True)}  # fmt: skip


class Routes(NamedTuple):
    """Those of one rank in one call.

    Args:
        blocks: see there.
        lists: int32, all lists one behind the other.
    """

    blocks: Blocks
    lists: Tensor

    def list(self, name: str) -> Tensor:
        """One of the lists; with a shape of its own, if its rows may have several entries."""
        if name == "rows":
            start, *shape = self.blocks.lists["far"]
            return self.lists[start + prod(shape) :]
        start, rows, each = self.blocks.lists[name]
        found = self.lists[start : start + rows * each]
        return found if name in ("sent", "out", "passing") else found.view(rows, each)


def most_rows(blocks: Blocks, counts: Tensor) -> int:
    """Rows of the buffer that has most of them, on any rank; equal on all ranks."""
    names = (*BY_RANK[:1], *BY_SOURCE[:1], *BY_ISLAND[:1], *BY_RAIL[:1], "passing")
    by_expert = counts.view(blocks.ranks, blocks.ranks, -1).sum((0, 2))
    sizes = (blocks.edges(name, r)[-1] for name in names for r in range(blocks.ranks))
    return max(*sizes, int(by_expert.max()))


def blocks_in(packed: Tensor) -> Blocks:
    """What `Blocks.packed` has put there, on the host."""
    return _blocks_in(packed.numpy().tobytes())


@lru_cache(maxsize=8)  # the steps of a call ask for the same, and those of the way back
def _blocks_in(packed: bytes) -> Blocks:
    numbers = torch.frombuffer(bytearray(packed), dtype=torch.int64)
    head = numbers[:HEAD].tolist()
    size, ranks = head[1], head[4]
    over = ranks * (ranks // size)
    firsts, far = numbers[HEAD:-over].view(ranks, -1), numbers[-over:].view(ranks, -1)
    return Blocks(head, firsts.tolist(), far.tolist())


def routes_of(operands: Operands) -> Routes:
    """Those of a call."""
    return Routes(blocks_in(operands[ROUTES]), operands[LISTS])
