"""What each cell of each buffer holds, symbolically: the proof that a plan computes its op.

A value is a multiset of terms, the same formula for all cells (i, j) of a box:
    Cell      input[rank, buffer][i + dr, j + dc]
    Row       input[rank, buffer][0, j + dc], a bias
    Product   sum over k in [k0, k1) of left[i + dr, k] right[k + shift, j + dc], two inputs;
              where it is transposed, of left[k, i + dr] right[k + shift, j + dc]
    Attended  what rows [low, high) of a peer give to cell (i + dr, j + dc) of a rank, in an
              attention: keys to a query, or, of dk and dv, queries to a key. Both ends may move
              with i
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from counterpoint.plan.boxes import Box, Part


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


class Attended(NamedTuple):
    """A part of a row of an attention's result: its column j + dc.

    Rows [low + low_slope * i, high + high_slope * i) of `other`, as it counts its own.
    """

    of: str  # y, lse, dq, dk or dv
    rank: int
    dr: int
    other: int
    low: int
    high: int
    low_slope: int = 0
    high_slope: int = 0
    dc: int = 0


class Activated(NamedTuple):
    """An activation of what a cell would hold; gated, times what another one would."""

    name: str
    of: "tuple[Value, ...]"


Term = Cell | Row | Product | Attended | Activated
# what each result of an attention is made of
MADE_OF = {"y": ("q", "k", "v"), "lse": ("q", "k"),
           **dict.fromkeys(("dq", "dk", "dv"), ("q", "k", "v", "dy", "y", "lse"))}  # fmt: skip
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
            a, b = operand(x_value, x), operand(w_value, w)
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


def attended(of: str, part: Part, memory: Memory) -> list[Piece]:
    """What a result of an attention holds: one of `MADE_OF`."""
    if not part.reads:
        return [(part.write, ())]
    added: list[Piece] = []
    q, keys, *rest = part.reads
    for piece, _ in memory.read(keys):  # of all ranks, those of each
        start, stop = piece.r0 - keys.r0, piece.r1 - keys.r0
        given = (q, piece, *(_some(b, start, stop) if i == 0 else b for i, b in enumerate(rest)))
        target = _some(part.write, start, stop) if of in ("dk", "dv") else part.write
        added.append((target, (_attended(of, part._replace(reads=given, write=target), memory),)))
    for box in part.reads[len(MADE_OF[of]) :]:
        added += moved(memory.read(box), box, part.write)
    return total(part.write, added)


def _some(box: Box, start: int, stop: int) -> Box:
    return box._replace(r0=box.r0 + start, r1=box.r0 + stop)


def _attended(of: str, part: Part, memory: Memory) -> Attended:
    """By keys of one rank."""
    target = part.write
    places: dict[str, tuple[int, int]] = {}
    firsts: dict[str, Fraction] = {}  # of columns, in as many as are there
    for name, box in zip(MADE_OF[of], part.reads, strict=False):
        pieces = memory.read(box)
        cell = operand(pieces[0][1], box) if len(pieces) == 1 else Cell(-1, "several", 0, 0)
        if cell.buffer != name or pieces[0][0] != box:
            raise Contradiction(f"{box.buffer} does not hold rows of {name}, but of {cell.buffer}")
        places[name] = cell.rank, box.r0 + cell.dr
        firsts[name] = Fraction(box.c0 + cell.dc, box.c1 - box.c0)
    if len({*firsts.values()}) > 1:
        raise Contradiction(f"{', '.join(firsts)} are not of the same heads")
    dc = int(firsts["q"] * (target.c1 - target.c0)) - target.c0
    for names in (("q", "dy", "y", "lse"), ("k", "v")):
        if len({places[name] for name in names if name in places}) > 1:
            raise Contradiction(f"{', '.join(names)} are not of the same rows")
    (rank, row), (other, low) = places["q"], places["k"]
    (queries, _), (keys, _) = part.reads[0].shape, part.reads[1].shape
    if of in ("dk", "dv"):  # a later key has fewer queries
        start, slope = (row - target.r0, 1) if part.diagonal else (row, 0)
        return Attended(of, other, low - target.r0, rank, start, row + queries, slope, dc=dc)
    stop, slope = (low + 1 - target.r0, 1) if part.diagonal else (low + keys, 0)
    return Attended(of, rank, row - target.r0, other, low, stop, 0, slope, dc)


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
    for term in sorted(terms, key=lambda t: (type(t).__name__, _order(t))):
        last = result[-1] if result else None
        if isinstance(term, Product) and isinstance(last, Product) and _continues(last, term):
            result[-1] = last._replace(k1=term.k1)
        elif isinstance(term, Attended) and isinstance(last, Attended) and _joins(last, term):
            result[-1] = last._replace(high=term.high, high_slope=term.high_slope)
        else:
            result.append(term)
    return tuple(result)


def _order(term: Term) -> object:
    # values inside have terms of several kinds, which do not compare
    return repr(term) if isinstance(term, Activated) else term


def _continues(first: Product, second: Product) -> bool:
    return first[:-2] == second[:-2] and first.k1 == second.k0


def _joins(first: Attended, second: Attended) -> bool:
    between = (first.high, first.high_slope) == (second.low, second.low_slope)
    return first[:4] == second[:4] and between and first.dc == second.dc


def _shifted(term: Term, dr: int, dc: int) -> Term:
    if isinstance(term, Activated):
        return term._replace(of=tuple(tuple(_shifted(t, dr, dc) for t in v) for v in term.of))
    if isinstance(term, Attended):
        low, high = term.low + term.low_slope * dr, term.high + term.high_slope * dr
        return term._replace(dr=term.dr + dr, dc=term.dc + dc, low=low, high=high)
    if isinstance(term, Row):
        return term._replace(dc=term.dc + dc)
    return term._replace(dr=term.dr + dr, dc=term.dc + dc)


def operand(value: Value, box: Box) -> Cell:
    """The input that a box holds.

    Raises:
        Contradiction: it holds something else.
    """
    if len(value) != 1 or not isinstance(value[0], Cell):
        raise Contradiction(f"operand {box.buffer} of a matmul does not hold an input")
    return value[0]
