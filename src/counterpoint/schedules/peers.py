"""The order in which ranks meet: ring offsets or XOR masks, and the signals between them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from counterpoint.plan.steps import Peer, Signal, Step

Chunk = tuple[int, int]


def orders(ranks: int) -> tuple[str, ...]:
    """The orders that so many ranks can meet in: XOR masks need a power of two."""
    return ("ring", "xor")[: 1 + (not ranks & (ranks - 1))]


def cuts(chunks: int) -> list[tuple[str, Chunk]]:
    """Parts of a block in order, each with what its steps have behind their names."""
    return [(f"_{i}" if chunks > 1 else "", (i, chunks)) for i in range(chunks)]


@dataclass(frozen=True, slots=True)
class Order:
    """The peers of a group of `ranks`, by distance d = 1 .. ranks - 1.

    ring: I send to me + d and receive from me - d: no two ranks share a link at one distance.
    xor: I exchange with me ^ d; distances 2..3, 4..7 are then contiguous ranks on everyone.
    """

    peers: Literal["ring", "xor"]
    ranks: int

    @property
    def distances(self) -> range:
        """1 .. ranks - 1, nearest first."""
        return range(1, self.ranks)

    @property
    def farthest(self) -> int:
        """The distance whose copies come last."""
        return self.ranks - 1

    def to(self, d: int) -> Peer:
        """Whom I send to at distance d; d = 0 is me."""
        return (d,)

    def source(self, d: int) -> Peer:
        """Who sends to me at distance d; d = 0 is me."""
        return (d,) if self.peers == "xor" else ((self.ranks - d) % self.ranks,)

    def post(self, slot: int, d: int) -> Signal:
        """Tell the rank at distance d."""
        return Signal(slot, self.to(d))

    def wait(self, slot: int, d: int) -> Signal:
        """Hear from the rank that I am at distance d of: pairs with its `post(slot, d)`."""
        return Signal(slot, self.source(d))

    def barrier(self, name: str, lane: str, slot: int, after: Iterable[str] = ()) -> Step:
        """All with all, on slots slot + 1 .. slot + ranks - 1."""
        posts = tuple(self.post(slot + d, d) for d in self.distances)
        waits = tuple(self.wait(slot + d, d) for d in self.distances)
        return Step(name, lane, "barrier", after=tuple(after), waits=waits, posts=posts)


@lru_cache(maxsize=1024)
def runs(
    peers: Literal["ring", "xor"], ranks: int, group: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """For each rank, how many shards of a group follow one another, and how many after a gap."""
    found: list[tuple[int, ...]] = []
    for rank in range(ranks):
        shards = {(rank + d) % ranks if peers == "ring" else rank ^ d for d in group}
        starts = [shard for shard in sorted(shards) if shard - 1 not in shards]
        ends = [shard + 1 for shard in sorted(shards) if shard + 1 not in shards]
        found.append(tuple(end - start for start, end in zip(starts, ends, strict=True)))
    return tuple(found)
