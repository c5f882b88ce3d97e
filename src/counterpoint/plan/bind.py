"""From a Plan to the Program of one rank: concrete boxes, peers and slots. Pure and cached."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, NoReturn

from counterpoint.errors import PlanError
from counterpoint.plan.attended import ATTENTION, attended
from counterpoint.plan.boxes import Box as Box
from counterpoint.plan.boxes import Part as Part
from counterpoint.plan.boxes import hull, merged
from counterpoint.plan.scaled import shapes_of
from counterpoint.plan.steps import VARYING, Buffer, Plan, Region, Step
from counterpoint.ranges import instance, whole


class Arrival(NamedTuple):
    """A slot, and the rank that I post it to or wait for."""

    slot: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class BoundStep:
    """A step of one rank. A region of many blocks becomes as few parts as memory allows."""

    step: Step
    parts: tuple[Part, ...]
    waits: tuple[Arrival, ...]
    posts: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What one rank executes."""

    plan: Plan
    rank: int
    steps: tuple[BoundStep, ...]

    @property
    def opens(self) -> int:
        """Index of the first step that signals: the barrier that opens a call; -1 if none does."""
        signals = (i for i, bound in enumerate(self.steps) if bound.waits or bound.posts)
        return next(signals, -1)


def bind(plan: Plan, rank: int) -> Program:
    """Make `plan` concrete for `rank`.

    Args:
        plan: of all ranks.
        rank: of the program.

    Raises:
        InputError: `plan` is no Plan, or has no such rank.
        PlanError: a region is outside its buffer, paired regions differ in shape, or the plan uses
            XOR peers on a group that has none.
    """
    instance("bind", "plan", plan, Plan)
    return _bound(plan, whole("bind", "rank", rank, 0, plan.problem.ranks - 1))


@lru_cache(maxsize=256)
def _bound(plan: Plan, rank: int) -> Program:
    binder = _Binder(plan)
    return Program(plan, rank, tuple(binder.step(step, rank) for step in plan.steps))


class _Binder:
    """Binding of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def step(self, step: Step, rank: int) -> BoundStep:
        try:
            parts = self.parts(step, rank)
            waits = tuple(Arrival(s.slot, self.plan.resolve(s.at, rank)) for s in step.waits)
            posts = tuple(Arrival(s.slot, self.plan.resolve(s.at, rank)) for s in step.posts)
        except PlanError as error:
            problem = str(error).removeprefix(str(PlanError(self.plan.spec, "")))
            raise PlanError(self.plan.spec, problem, step=step.name) from error
        return BoundStep(step, parts, waits, posts)

    def parts(self, step: Step, rank: int) -> tuple[Part, ...]:
        if step.kind == "barrier":
            return ()
        whole = step.kind in ("collective", "fused") and not step.looks_up
        reads = [
            self.cells(region, rank, whole=whole)
            for region in step.reads
            if region.buffer not in VARYING or step.kind == "fused"
        ]
        writes = [self.cells(region, rank, whole=whole) for region in step.writes]
        if step.kind == "reduce" and self.plan.problem.invariant:
            reads.sort(key=lambda cells: self.sender(cells[0]))
        if step.kind in ATTENTION:
            boxes = [[self.one(cells) for cells in each] for each in (reads, writes)]
            owner = self.plan.resolve((int(step.arg("peer")),), rank)
            try:
                return attended(self.plan.problem, step, (rank, owner), *boxes)
            except ValueError as error:
                self.fail(str(error))
        if step.kind in ("fused", "opaque") and not step.looks_up:
            boxes = tuple(box for cells in reads for box in hull(cells))
            return tuple(Part(boxes, box) for cells in writes for box in hull(cells))
        if step.kind == "exchange":
            return (self.exchanged(step, reads[0], writes[0], rank),)
        if step.kind in ("copy", "spread", "fold"):
            if len(reads) != len(writes):
                self.fail(f"copies {len(reads)} regions into {len(writes)}")
            pairs = [self.zipped([r], w) for r, w in zip(reads, writes, strict=True)]
            parts = [part for pair in pairs for part in pair]
        elif step.kind == "collective":
            # the library sees the whole of both sides, in one call; words of a transport of ours
            # are behind that part
            parts = [Part(tuple(hull(reads[0])), write) for write in hull(writes[0])]
            parts += [Part((), box) for cells in writes[1:] for box in cells]
        else:
            if len(writes) != 1:
                self.fail(f"a {step.kind} writes one region, got {len(writes)}")
            if step.arg("contract"):
                # a sum over rows: matmuls of some of the rows would each write a part of the sum
                reads, writes = [[self.one(r)] for r in reads], [[self.one(w)] for w in writes]
            parts = self.zipped(reads, writes[0])
        self.check_shapes(step, parts)
        if step.kind == "collective":
            return tuple(parts)  # a rank without rows takes part all the same
        if step.kind == "fused":
            return tuple(merged(parts, set()))  # also a rank without tables
        # the weight of a matmul and the bias serve every part; all other boxes go on with it
        shared = {*range(1, 1 + step.weights)} if step.kind == "matmul" else set[int]()
        if scales := step.arg("scales"):
            first = 1 + step.weights + (scales != "tensor")  # the scale of a whole x is one, too
            shared |= {*range(first, 2 + 2 * step.weights)}
        if step.arg("bias"):
            shared.add(len(reads) - 1)
        return tuple(merged([p for p in parts if not p.write.empty], shared))

    def exchanged(self, step: Step, sent: list[Box], kept: list[Box], rank: int) -> Part:
        """What goes to one rank, and what another sends in return: a box each."""
        sender = self.plan.met(step, rank)[1]
        theirs = self.cells(step.reads[0], sender)
        boxes = [box for cells in (sent, kept, theirs) for box in hull(cells)]
        if len(boxes) != 3:
            self.fail("exchanges a box for a box: a part of a buffer is several")
        source, target, theirs = boxes
        if theirs.shape != target.shape:
            self.fail(f"rank {sender} sends {theirs.shape}, there is room for {target.shape}")
        return Part((source,), target)

    def zipped(self, reads: list[list[Box]], write: list[Box]) -> list[Part]:
        """Pair the cells of regions of many blocks; a region of one cell serves all of them."""
        lengths = {len(cells) for cells in [*reads, write]} - {1}
        if lengths - {len(write)}:
            self.fail(f"pairs regions of {sorted(lengths)} blocks")
        wide = [cells if len(cells) == len(write) else cells * len(write) for cells in reads]
        return [Part(boxes[:-1], boxes[-1]) for boxes in zip(*wide, write, strict=True)]

    def sender(self, box: Box) -> int:
        """The rank whose partial sum a box has."""
        return box.slot if self.plan.buffer(box.buffer).holds == "slots" else box.rank

    def one(self, cells: list[Box]) -> Box:
        """The cells of a region that has to be one box; blocks without rows are none."""
        boxes = hull([box for box in cells if box.r0 < box.r1] or cells[:1])
        if len(boxes) > 1:
            place = f"{boxes[0].buffer} on rank {boxes[0].rank}"
            self.fail(f"contracts over rows, so it takes one box: its part of {place} is several")
        return boxes[0]

    def check_shapes(self, step: Step, parts: list[Part]) -> None:
        for part in parts:
            shapes = [box.shape for box in part.reads]
            (rows, cols), want = part.write.shape, part.write.shape
            match step.kind:
                case "collective":
                    continue
                case "matmul":
                    x, w = shapes[:2]
                    if step.arg("contract"):
                        x = x[1], x[0]
                    ok = (x[0], w[1]) == want and x[1] == w[0]
                    ok = ok and all(up == w for up in shapes[2 : 1 + step.weights])
                    rest = shapes[1 + step.weights :]
                    if scales := step.arg("scales"):
                        of_x, of_w = shapes_of(scales, x, w)
                        ok = ok and rest[: 1 + step.weights] == [of_x, *[of_w] * step.weights]
                        rest = rest[1 + step.weights :]
                case _:
                    ok, rest = True, shapes
            if step.arg("bias"):
                ok, rest = ok and rest[-1] == (1, cols), rest[:-1]
            if not ok or any(shape != want for shape in rest):
                self.fail(f"shapes {shapes} -> {(rows, cols)} do not fit a {step.kind}")

    def cells(self, region: Region, rank: int, *, whole: bool = False) -> list[Box]:
        """One box for each block of the region, in the order of absolute ranks.

        Args:
            whole: all of a buffer is one box, however it is stored.
        """
        buffer = self.plan.buffer(region.buffer)
        holder = self.plan.resolve(region.at, rank)
        cols = self.columns(region, buffer, rank)
        if not buffer.split:
            if region.shards or region.chunk != (0, 1):
                self.fail(f"{region.buffer} is not split: it has no shards and no chunks")
            rows = self.interval(region.rows, buffer.shape[0], "rows")
            return [Box(holder, buffer.name, 0, *rows, *cols)]
        if whole and region == Region(buffer.name) and buffer.chunks > 1:
            return [Box(holder, buffer.name, 0, 0, sum(self.block_rows(buffer, holder)), *cols)]
        if whole and region.chunk == (0, 1) and buffer.chunks > 1:
            chunks = (replace(region, chunk=(i, buffer.chunks)) for i in range(buffer.chunks))
            return [box for chunk in chunks for box in self.cells(chunk, rank)]
        if region.rows is not None:
            self.fail(f"{region.buffer} is split: name blocks by shards and chunk, not rows")
        i, of = region.chunk
        if not 0 <= i < of or of % buffer.chunks:
            self.fail(f"{region.buffer} has no chunk {i} of {of}")
        sizes = list(self.block_rows(buffer, holder))
        if buffer.holds == "own":
            if region.shards:
                self.fail(f"{region.buffer} holds one block: it has no shards")
            rows = _chunk(sizes[holder], i, of)
            return [Box(holder, buffer.name, 0, *rows, *cols)]
        ranks = self.plan.problem.ranks
        shards = [self.plan.resolve(s, rank) for s in region.shards] or list(range(ranks))
        if len(set(shards)) != len(shards):
            self.fail(f"{region.buffer} names a shard twice")
        if buffer.holds == "slots":
            rows = _chunk(sizes[holder], i, of)
            return [Box(holder, buffer.name, s, *rows, *cols) for s in sorted(shards)]
        if buffer.holds in ("peers", "island"):
            size = ranks // self.plan.problem.islands
            mates = {b for b in range(ranks) if b // size == holder // size}
            held = mates if buffer.holds == "island" else {*range(ranks)} - {holder}
            if region.shards and not held.issuperset(shards):
                which = "its island" if buffer.holds == "island" else "peers"
                self.fail(f"{region.buffer} holds the blocks of {which} only")
            sizes = [rows if b in held else 0 for b, rows in enumerate(sizes)]
            shards = [shard for shard in shards if shard in held]
        parts = [_chunk(n, i, of) for n in sizes]
        # chunk-major: part 0 of every block, then part 1; what is asked for lies in one of them
        stored = [(0, n) for n in sizes]
        if buffer.chunks > 1:
            stored = [_chunk(n, i * buffer.chunks // of, buffer.chunks) for n in sizes]
        ahead = sum([start for start, _ in stored])
        firsts = accumulate([stop - start for start, stop in stored], initial=ahead)
        shifts = [first - start for first, (start, _) in zip(firsts, stored, strict=False)]
        return [
            Box(holder, buffer.name, 0, shifts[b] + parts[b][0], shifts[b] + parts[b][1], *cols)
            for b in sorted(shards)
        ]

    def block_rows(self, buffer: Buffer, holder: int) -> Sequence[int]:
        """Rows of each block of a split buffer, as `holder` stores it."""
        problem = self.plan.problem
        rows, shares = buffer.shape[0], problem.rows
        if buffer.space in ("words", "flags") or (buffer.space == "turns" and rows != problem.m):
            if rows % problem.ranks:
                self.fail(f"{buffer.name} is split, so it needs equally many rows for each rank")
            shares = (rows // problem.ranks,) * problem.ranks
        elif rows != problem.m:
            self.fail(f"{buffer.name} is split, so it needs {problem.m} rows")
        return shares

    def columns(self, region: Region, buffer: Buffer, rank: int) -> tuple[int, int]:
        if region.cols != "own":
            return self.interval(region.cols, buffer.shape[1], "cols")
        starts, whose = self.plan.problem.column_starts, self.plan.resolve(region.of, rank)
        first, last = starts[whose], starts[whose + 1]
        if buffer.shape[1] == starts[-1]:
            return first, last
        return self.interval((0, last - first), buffer.shape[1], "cols")

    def interval(self, interval: tuple[int, int] | None, size: int, name: str) -> tuple[int, int]:
        if interval is None:
            return 0, size
        if not 0 <= interval[0] <= interval[1] <= size:
            self.fail(f"{name} {interval} are outside 0..{size}")
        return interval

    def fail(self, problem: str) -> NoReturn:
        raise PlanError(self.plan.spec, problem)


def _chunk(rows: int, i: int, of: int) -> tuple[int, int]:
    return rows * i // of, rows * (i + 1) // of
