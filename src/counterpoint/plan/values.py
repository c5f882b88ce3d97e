"""What each cell of each buffer holds, symbolically: the proof that a plan computes its op.

A value is a multiset of terms, the same formula for all cells (i, j) of a box:
    Cell      input[rank, buffer][i + dr, j + dc]
    Row       input[rank, buffer][0, j + dc], a bias
    Product   sum over k in [k0, k1) of left[i + dr, k] right[k + shift, j + dc], two inputs;
              where it is transposed, of left[k, i + dr] right[k + shift, j + dc]
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from counterpoint.plan.bind import Box


class Cell(NamedTuple):
    """One input cell, copied."""

    rank: int
    buffer: str
    dr: int
    dc: int


class Row(NamedTuple):
    """One input row, added to every row."""

    rank: int
    buffer: str
    dc: int


class Product(NamedTuple):
    """A part of a dot product; k as the left input counts it."""

    left: str
    left_rank: int
    transposed: bool
    dr: int
    right: str
    right_rank: int
    dc: int
    shift: int
    k0: int
    k1: int


Term = Cell | Row | Product
Value = tuple[Term, ...]
Piece = tuple[Box, Value]


class Contradiction(Exception):
    """A step that cannot mean what its kind says; the text says why."""


class Memory:
    """The boxes that have been written, none overlapping, with their values."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, str, int], list[Piece]] = {}

    def write(self, pieces: Iterable[Piece]) -> None:
        """Replace what the boxes held."""
        for box, value in pieces:
            key = (box.rank, box.buffer, box.slot)
            kept: list[Piece] = []
            for piece in self._pieces.get(key, []):
                old = piece[0]
                if old.r0 < box.r1 and box.r0 < old.r1 and old.c0 < box.c1 and box.c0 < old.c1:
                    kept += ((rest, piece[1]) for rest in subtract(old, box))
                else:
                    kept.append(piece)
            self._pieces[key] = [*kept, (box, value)]

    def read(self, box: Box) -> list[Piece]:
        """What is written inside `box`."""
        key = (box.rank, box.buffer, box.slot)
        both = ((intersect(old, box), value) for old, value in self._pieces.get(key, []))
        return [(inside, value) for inside, value in both if inside is not None]


def intersect(a: Box, b: Box) -> Box | None:
    """The common cells of two boxes of one buffer, or None."""
    r0, r1, c0, c1 = max(a.r0, b.r0), min(a.r1, b.r1), max(a.c0, b.c0), min(a.c1, b.c1)
    return Box(a.rank, a.buffer, a.slot, r0, r1, c0, c1) if r0 < r1 and c0 < c1 else None


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """The cells of `box` outside `hole`, as at most four boxes."""
    inside = intersect(box, hole)
    if inside is None:
        yield box
        return
    if box.r0 < inside.r0:
        yield box._replace(r1=inside.r0)
    if inside.r1 < box.r1:
        yield box._replace(r0=inside.r1)
    middle = box._replace(r0=inside.r0, r1=inside.r1)
    if box.c0 < inside.c0:
        yield middle._replace(c1=inside.c0)
    if inside.c1 < box.c1:
        yield middle._replace(c0=inside.c1)


def moved(pieces: Iterable[Piece], source: Box, target: Box) -> list[Piece]:
    """Pieces of `source` as they are after a copy to `target`."""
    dr, dc = source.r0 - target.r0, source.c0 - target.c0
    result: list[Piece] = []
    for box, value in pieces:
        place = target._replace(r0=box.r0 - dr, r1=box.r1 - dr, c0=box.c0 - dc, c1=box.c1 - dc)
        result.append((place, normal(_shifted(term, dr, dc) for term in value)))
    return result


def as_rows(pieces: Iterable[Piece], source: Box, target: Box) -> list[Piece]:
    """A bias [1, N] spread over the rows of `target`."""
    dc = source.c0 - target.c0
    result: list[Piece] = []
    for box, value in pieces:
        if len(value) != 1 or not isinstance(value[0], Cell):
            raise Contradiction("the bias is not an input")
        row = Row(value[0].rank, value[0].buffer, value[0].dc + dc)
        result.append((target._replace(c0=box.c0 - dc, c1=box.c1 - dc), (row,)))
    return result


def product(
    x_pieces: Iterable[Piece],
    w_pieces: list[Piece],
    x: Box,
    w: Box,
    target: Box,
    *,
    transposed: bool = False,
    stacked: bool = False,
) -> list[Piece]:
    """What a matmul of x (or, transposed, of x^T) and w adds to `target`.

    Args:
        stacked: w is one of several weights in one input, so k counts from its first row there.
    """
    result: list[Piece] = []
    if transposed:
        x, x_pieces = _turned(x), [(_turned(box), value) for box, value in x_pieces]
    for x_box, x_value in x_pieces:
        for w_box, w_value in w_pieces:
            k0 = max(x_box.c0 - x.c0, w_box.r0 - w.r0)
            k1 = min(x_box.c1 - x.c0, w_box.r1 - w.r0)
            if k0 >= k1:
                continue
            a, b = _operand(x_value, x), _operand(w_value, w)
            if transposed:
                a = a._replace(dr=a.dc, dc=a.dr)
            start, shift = k0 + x.c0 + a.dc, w.r0 + b.dr - x.c0 - a.dc
            # a shard counts its rows from 0, the whole from the first rank's; columns are the same
            if shift and not (transposed or stacked):
                where = f"({x.c0 + a.dc}, {w.r0 + b.dr})"
                raise Contradiction(f"{a.buffer} and {b.buffer} meet at different k {where}")
            dr, dc = x.r0 - target.r0, w.c0 - target.c0
            term = Product(
                a.buffer, a.rank, transposed, a.dr + dr,
                b.buffer, b.rank, b.dc + dc, shift, start, start + k1 - k0,
            )  # fmt: skip
            place = target._replace(
                r0=x_box.r0 - dr, r1=x_box.r1 - dr, c0=w_box.c0 - dc, c1=w_box.c1 - dc
            )
            result.append((place, (term,)))
    return result


def _turned(box: Box) -> Box:
    return box._replace(r0=box.c0, r1=box.c1, c0=box.r0, c1=box.r1)


def total(target: Box, contributions: Iterable[Piece]) -> list[Piece]:
    """The sum of pieces that may overlap, as pieces that do not."""
    pieces: list[Piece] = [(target, ())]
    for box, value in contributions:
        split: list[Piece] = []
        for old, terms in pieces:
            inside = intersect(old, box)
            if inside is not None:
                split.append((inside, terms + value))
            split.extend((rest, terms) for rest in subtract(old, box))
        pieces = split
    return [(box, normal(terms)) for box, terms in pieces]


def normal(terms: Iterable[Term]) -> Value:
    """Terms in one order, products over adjacent intervals of k joined."""
    result: list[Term] = []
    for term in sorted(terms, key=lambda t: (type(t).__name__, t)):
        last = result[-1] if result else None
        if isinstance(term, Product) and isinstance(last, Product) and _continues(last, term):
            result[-1] = last._replace(k1=term.k1)
        else:
            result.append(term)
    return tuple(result)


def _continues(first: Product, second: Product) -> bool:
    return first[:-2] == second[:-2] and first.k1 == second.k0


def _shifted(term: Term, dr: int, dc: int) -> Term:
    if isinstance(term, Row):
        return term._replace(dc=term.dc + dc)
    return term._replace(dr=term.dr + dr, dc=term.dc + dc)


def _operand(value: Value, box: Box) -> Cell:
    if len(value) != 1 or not isinstance(value[0], Cell):
        raise Contradiction(f"operand {box.buffer} of a matmul does not hold an input")
    return value[0]
