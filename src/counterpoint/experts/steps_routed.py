"""Steps that read the operand "routes": rows of tokens, picked, sent and summed.

Where blocks lie, and which rows are in them: routes.py. What travels has no gaps. A spread is one
gather, a fold one sum, of neighbouring rows at a time; tables are on the host, lists beside x.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.experts import steps_rails
from counterpoint.experts.fused.launch_sums import Source, sum_rows
from counterpoint.experts.routes.lists import Blocks, routes_of
from counterpoint.experts.rows import rows_in
from counterpoint.group.library import Library
from counterpoint.group.notice_board import Awaited
from counterpoint.group.wire import wire_of
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Box
from counterpoint.plan.steps import COUNTS, Region

Action = Callable[[Operands], object]
BY_EXPERT = ("rows", "product")


class _Side(NamedTuple):
    """Blocks that a step reads or writes: neighbouring ones, whole or the same parts of each.

    Args:
        holder: whose memory it is.
        ranks: whose blocks.
        parts: first and last, by first experts, or by experts; None: all.
    """

    buffer: str
    holder: int
    ranks: range
    parts: tuple[int, int] | None

    def slices(self, blocks: Blocks, operands: Operands) -> list[slice]:
        """The rows of a call."""
        if self.buffer in BY_EXPERT:
            edges, ranks = rows_in(operands[COUNTS]).by_expert[self.holder], blocks.ranks
            first, last = self.parts or (0, blocks.local)
            starts = range(first * ranks, last * ranks, ranks)
            each = [(start + self.ranks.start, start + self.ranks.stop) for start in starts]
            return _joined([slice(edges[start], edges[stop]) for start, stop in each])
        if self.parts is None:
            return [blocks.span(self.buffer, self.holder, self.ranks)]
        each = (range(rank, rank + 1) for rank in self.ranks)
        return _joined([blocks.span(self.buffer, self.holder, r, self.parts) for r in each])

    def box(self, blocks: Blocks, operands: Operands, cols: int) -> Box:
        """The one box that they are."""
        (rows,) = self.slices(blocks, operands)
        return Box(self.holder, self.buffer, 0, rows.start, rows.stop, 0, cols)


def _joined(slices: list[slice]) -> list[slice]:
    """Neighbours as one."""
    found = slices[:1]
    for rows in slices[1:]:
        if found[-1].stop == rows.start:
            found[-1] = slice(found[-1].start, rows.stop)
        else:
            found.append(rows)
    return found


class _Step:
    """A step bound to memory: what it reads and writes, and whole buffers as a call has them."""

    def __init__(self, bound: BoundStep, places: Places) -> None:
        self.places, self.step = places, bound.step
        self.p, self.rank = places.plan.problem, places.rank
        reads = [r for r in bound.step.reads if places.plan.buffer(r.buffer).split]
        self.pairs = [*self._joined_pairs(reads, bound.step.writes)]

    def _joined_pairs(
        self, reads: list[Region], writes: tuple[Region, ...]
    ) -> Iterator[tuple[_Side, _Side]]:
        """Parts of the same blocks, one behind the other, are one."""
        each = [(self._side(r), self._side(w)) for r, w in zip(reads, writes, strict=True)]
        for _, same in groupby(each, lambda pair: [side._replace(parts=None) for side in pair]):
            first, last = (pair := [*same])[0], pair[-1]
            sides = [
                a._replace(parts=_whole(a.parts, b.parts, self.p.experts))
                for a, b in zip(first, last, strict=True)
            ]
            yield sides[0], sides[1]

    def _side(self, region: Region) -> _Side:
        plan, (i, of) = self.places.plan, region.chunk
        shards = [plan.resolve(s, self.rank) for s in region.shards] or [0, self.p.ranks - 1]
        assert of in (1, self.p.experts), "parts of blocks are by expert"
        parts = (i, i + 1) if of > 1 else None
        holder = plan.resolve(region.at, self.rank)
        return _Side(region.buffer, holder, range(min(shards), max(shards) + 1), parts)

    def whole(self, buffer: str, operands: Operands) -> Tensor:
        """All rows of a buffer of this rank."""
        if buffer in operands:
            return operands[buffer]
        rows, cols = self.places.plan.buffer(buffer).shape
        memory = self.places.fixed(Box(self.rank, buffer, 0, 0, rows, 0, cols))
        assert memory is not None, "an operand that a call lacks"
        return memory

    def part(self, side: _Side, operands: Operands, blocks: Blocks) -> Tensor:
        """The rows of its blocks."""
        (rows,) = side.slices(blocks, operands)
        return self.whole(side.buffer, operands)[rows]


def _whole(
    first: tuple[int, int] | None, last: tuple[int, int] | None, experts: int
) -> tuple[int, int] | None:
    """Parts from one to another; None: all of them."""
    if first is None or last is None or (first[0], last[1]) == (0, experts):
        return None
    return first[0], last[1]


def boxes(bound: BoundStep, places: Places) -> Callable[[Operands], list[tuple[Box, Box]]]:
    """What a copy step copies in a call, and where it goes; none empty."""
    step = _Step(bound, places)
    cols = [places.plan.buffer(source.buffer).shape[1] for source, _ in step.pairs]

    def found(operands: Operands) -> list[tuple[Box, Box]]:
        blocks = routes_of(operands).blocks
        pairs = [
            (source.box(blocks, operands, n), target.box(blocks, operands, n))
            for (source, target), n in zip(step.pairs, cols, strict=True)
        ]
        return [(source, target) for source, target in pairs if source.r0 < source.r1]

    return found


def exchange(bound: BoundStep, places: Places) -> Action:
    """A block to another island, and one from another."""
    step, plan = _Step(bound, places), places.plan
    wire, ((source, target),) = wire_of(places.workspace), step.pairs
    to, sender = plan.met(bound.step, step.rank)
    deed = f"take part in exchange {bound.step.name!r} of plan {plan.spec} with rank {step.rank}"
    awaited = Awaited(plan.problem.op, deed, bound.step.name)

    def run(operands: Operands) -> None:
        blocks = routes_of(operands).blocks
        sent, kept = (step.part(side, operands, blocks) for side in (source, target))
        wire.exchange([(sent, to)], [(kept, sender)], awaited)

    return run


def all_to_all(bound: BoundStep, places: Places, calls: Library) -> Action:
    """The library's, of blocks to each rank of the plan, which are neighbours in the group."""
    step, workspace = _Step(bound, places), places.workspace
    ((source, target),) = step.pairs
    before = workspace.rank - places.rank

    def of_all(rows: list[int]) -> list[int]:
        return [0] * before + rows + [0] * (workspace.group.size() - before - len(rows))

    def run(operands: Operands) -> None:
        blocks = routes_of(operands).blocks
        sent, kept = (step.part(side, operands, blocks) for side in (source, target))
        gets, gives = (of_all(blocks.rows(side.buffer)) for side in (target, source))
        calls.all_to_all(kept, sent, gets, gives)

    return run


def spread(bound: BoundStep, places: Places) -> Action:
    """Rows again for each place that they go to."""
    step = _Step(bound, places)

    def run(operands: Operands) -> None:
        routes = routes_of(operands)
        for source, target in step.pairs:
            x, y = (step.whole(side.buffer, operands) for side in (source, target))
            picked = routes.list(target.buffer)
            for rows in target.slices(routes.blocks, operands):
                torch.index_select(x, 0, picked[rows], out=y[rows])

    return run


def fold(bound: BoundStep, places: Places) -> Action:
    """Sums of rows that are of one token, in fp32 and in order, rounded once."""
    step = _Step(bound, places)
    first, target = step.pairs[0]

    def run(operands: Operands) -> None:
        blocks, _ = routes = routes_of(operands)
        y, source = step.whole(target.buffer, operands), step.whole(first.buffer, operands)
        index, start, more = routes.list(target.buffer), 0, None
        if target.buffer == "y":
            if first.buffer == "parts":  # of this island, beside what others have summed
                source, start = source[blocks.mine("parts")], blocks.mine("back").start
                more = Source(step.whole("got", operands), routes.list("far"))
            sum_rows(y, Source(source, index, start), more)
            return
        weights = None
        if target.buffer == "sums":
            source, weights = source[: len(routes.list("rows"))], operands.get("weights")
        for rows in target.slices(blocks, operands):
            sum_rows(y[rows], Source(source, index[rows], 0, weights))

    return run


ACTIONS: dict[str, Callable[[BoundStep, Places], Action]] = {
    "exchange": exchange,
    "spread": spread,
    "fold": fold,
}


def action(bound: BoundStep, places: Places) -> Action:
    """What one of these kinds of step does, by whoever knows the routes."""
    on_device = places.plan.problem.counts == "device_routed"
    return (steps_rails.ACTIONS if on_device else ACTIONS)[bound.step.kind](bound, places)
