"""Boxes of memory, and the parts of a step, which are made of them."""

from typing import NamedTuple


class Box(NamedTuple):
    """Rows [r0, r1) x columns [c0, c1) of a buffer as `rank` stores it; `slot` of its slots."""

    rank: int
    buffer: str
    slot: int
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.r1 - self.r0, self.c1 - self.c0

    @property
    def empty(self) -> bool:
        """Whether the box has no cell."""
        return self.r1 <= self.r0 or self.c1 <= self.c0


class Part(NamedTuple):
    """One launch of a step: what it reads, in the step's order, and the one box it writes.

    Of an attention, a result of a launch; "diagonal": the i-th query attends to the first i keys.
    What reads nothing is zero: nobody attends to these keys.
    """

    reads: tuple[Box, ...]
    write: Box
    diagonal: bool = False


def hull(boxes: list[Box]) -> list[Box]:
    """Boxes that follow one another as one."""
    return [part.write for part in merged([Part((), box) for box in boxes], set())]


def merged(parts: list[Part], shared: set[int]) -> list[Part]:
    """Join neighbours whose boxes follow one another in memory; `shared` reads are equal."""
    found: list[Part] = []
    for part in parts:
        if found and _joins(found[-1], part, shared):
            reads = zip(found[-1].reads, part.reads, strict=True)
            joined = tuple(
                a if i in shared else a._replace(r1=b.r1) for i, (a, b) in enumerate(reads)
            )
            found[-1] = Part(joined, found[-1].write._replace(r1=part.write.r1))
        else:
            found.append(part)
    return found


def _joins(first: Part, second: Part, shared: set[int]) -> bool:
    def follows(a: Box, b: Box) -> bool:
        return a._replace(r0=0, r1=0) == b._replace(r0=0, r1=0) and a.r1 == b.r0

    reads = enumerate(zip(first.reads, second.reads, strict=True))
    return follows(first.write, second.write) and all(
        a == b if i in shared else follows(a, b) for i, (a, b) in reads
    )
