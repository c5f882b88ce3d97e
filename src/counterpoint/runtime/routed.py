"""Steps that read the operand "routes": rows of tokens, picked, sent and summed. On CPU ranks.

Where blocks lie: routes.py. What is picked is a list of rows; what travels has no gaps.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from counterpoint.plan.bind import BoundStep, Box
from counterpoint.plan.steps import COUNTS, Region
from counterpoint.runtime.library import Library
from counterpoint.runtime.notice_board import Awaited
from counterpoint.runtime.routes import Routes, routes_of
from counterpoint.runtime.rows_of_experts import rows_in
from counterpoint.runtime.wire import wire_of
from counterpoint.runtime.workspace import Operands, Places

Action = Callable[[Operands], object]


class _Step:
    """A step bound to memory: its blocks, and whole buffers as a call has them."""

    def __init__(self, bound: BoundStep, places: Places) -> None:
        self.places, self.step = places, bound.step
        self.p, self.rank = places.plan.problem, places.workspace.rank
        self.reads = [r for r in bound.step.reads if places.plan.buffer(r.buffer).split]
        self.pairs = list(zip(self.reads, bound.step.writes, strict=True))

    def holder(self, region: Region) -> int:
        """Whose memory it is."""
        return self.places.plan.resolve(region.at, self.rank)

    def units(self, region: Region, routes: Routes) -> list[int]:
        """Its blocks."""
        shards = [self.places.plan.resolve(s, self.rank) for s in region.shards]
        return routes.units(region.buffer, shards or range(self.p.ranks))

    def whole(self, region: Region, operands: Operands) -> Tensor:
        """All rows of a buffer."""
        holder = self.holder(region)
        if holder == self.rank and region.buffer in operands:
            return operands[region.buffer]
        buffer = self.places.plan.buffer(region.buffer)
        rows, cols = buffer.shape
        memory = self.places.fixed(Box(holder, buffer.name, 0, 0, rows, 0, cols))
        assert memory is not None, "an operand that a call lacks"
        return memory

    def part(self, region: Region, operands: Operands, routes: Routes) -> Tensor:
        """The rows of its blocks."""
        span = routes.span(region.buffer, self.holder(region), self.units(region, routes))
        return self.whole(region, operands)[span]

    def by_expert(self, region: Region, operands: Operands) -> list[slice]:
        """The rows of each expert, of the ranks that it names."""
        edges = rows_in(operands[COUNTS]).by_expert[self.rank]
        shards = [self.places.plan.resolve(s, self.rank) for s in region.shards]
        first, last = min(shards), max(shards) + 1
        starts = range(0, self.p.experts * self.p.ranks, self.p.ranks)
        return [slice(edges[start + first], edges[start + last]) for start in starts]


def copy(bound: BoundStep, places: Places) -> Action:
    """Blocks to a neighbour."""
    step = _Step(bound, places)

    def run(operands: Operands) -> None:
        routes = routes_of(operands, step.p.ranks)
        for source, target in step.pairs:
            step.part(target, operands, routes).copy_(step.part(source, operands, routes))

    return run


def exchange(bound: BoundStep, places: Places) -> Action:
    """A block to another island, and one from another."""
    step, plan = _Step(bound, places), places.plan
    wire, ((source, target),) = wire_of(places.workspace), step.pairs
    to, sender = plan.met(bound.step, step.rank)
    deed = f"take part in exchange {bound.step.name!r} of plan {plan.spec} with rank {step.rank}"
    awaited = Awaited(plan.problem.op, deed, bound.step.name)

    def run(operands: Operands) -> None:
        routes = routes_of(operands, step.p.ranks)
        sent, kept = (step.part(region, operands, routes) for region in (source, target))
        wire.exchange(sent, to, kept, sender, awaited)

    return run


def all_to_all(bound: BoundStep, places: Places, calls: Library) -> Action:
    """The library's, of blocks to each rank."""
    step = _Step(bound, places)
    ((source, target),) = step.pairs

    def run(operands: Operands) -> None:
        routes = routes_of(operands, step.p.ranks)
        gives, gets = (routes.sizes(r.buffer, step.rank) for r in (source, target))
        sent, kept = (step.part(region, operands, routes) for region in (source, target))
        calls.all_to_all(kept, sent, gets, gives)

    return run


def spread(bound: BoundStep, places: Places) -> Action:
    """Rows again for each place that they go to."""
    step = _Step(bound, places)
    source, target = step.pairs[0]

    def run(operands: Operands) -> None:
        routes = routes_of(operands, step.p.ranks)
        x, y = (step.whole(region, operands) for region in (source, target))
        if target.buffer == "rows":
            slots = routes.slots
            for rows in step.by_expert(target, operands):
                torch.index_select(x, 0, slots[rows], out=y[rows])
            return
        for unit in step.units(target, routes):
            rows = routes.span(target.buffer, step.rank, [unit])
            torch.index_select(x, 0, routes.picked(target.buffer, unit), out=y[rows])

    return run


def fold(bound: BoundStep, places: Places) -> Action:
    """Sums of rows that are of one token, in fp32 and in order, rounded once."""
    step = _Step(bound, places)
    first, target = step.pairs[0]

    def run(operands: Operands) -> None:
        routes = routes_of(operands, step.p.ranks)
        y, start = step.whole(target, operands), 0
        if target.buffer != "y":
            span = routes.span(target.buffer, step.rank, step.units(target, routes))
            y, start = y[span], span.start
        total = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
        for source, index, weights in _summed(step, first, operands, routes):
            rows = source.float() if weights is None else source.float() * weights[:, None]
            total.index_add_(0, index - start, rows)
        y.copy_(total)

    return run


def _summed(
    step: _Step, first: Region, operands: Operands, routes: Routes
) -> Sequence[tuple[Tensor, Tensor, Tensor | None]]:
    """What a fold adds, in order: rows, where they go, and their weights."""
    if first.buffer == "product":
        x, slots, weights = step.whole(first, operands), routes.slots, operands.get("weights")
        return [(x[rows], slots[rows], None if weights is None else weights[rows])
                for rows in step.by_expert(first, operands)]  # fmt: skip
    return [
        (step.whole(region, operands)[routes.span(region.buffer, step.rank, [unit])],
         routes.picked(region.buffer, unit), None)
        for region in step.reads for unit in step.units(region, routes)
    ]  # fmt: skip
