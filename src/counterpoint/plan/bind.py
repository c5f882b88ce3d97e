"""From a Plan to the Program of one rank: concrete boxes, peers and slots. Pure and cached."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, NoReturn

from counterpoint.errors import PlanError
from counterpoint.plan.attended import blocks
from counterpoint.plan.steps import ATTENTION, COUNTS, Buffer, Plan, Region, Step
from counterpoint.ranges import instance, whole


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
        whole = step.kind in ("collective", "fused")
        reads = [
            self.cells(region, rank, whole=whole)
            for region in step.reads
            if region.buffer != COUNTS or step.kind == "fused"
        ]
        writes = [self.cells(region, rank, whole=whole) for region in step.writes]
        if step.kind in ATTENTION:
            given, made = ([self.one(cells) for cells in each] for each in (reads, writes))
            return tuple(self.attended(step, rank, given, made))
        if step.kind in ("fused", "opaque"):
            boxes = tuple(box for cells in reads for box in cells)
            return tuple(Part(boxes, box) for cells in writes for box in _hull(cells))
        if step.kind == "copy":
            if len(reads) != len(writes):
                self.fail(f"copies {len(reads)} regions into {len(writes)}")
            pairs = [self.zipped([r], w) for r, w in zip(reads, writes, strict=True)]
            parts = [part for pair in pairs for part in pair]
        elif step.kind == "collective":
            # the library sees the whole of both sides, in one call; words of a transport of ours
            # are behind that part
            parts = [Part(tuple(_hull(reads[0])), write) for write in _hull(writes[0])]
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
        # the weight of a matmul and the bias serve every part; all other boxes go on with it
        shared = {1} if step.kind == "matmul" else set[int]()
        if step.arg("bias"):
            shared.add(len(reads) - 1)
        return tuple(_merged([p for p in parts if not p.write.empty], shared))

    def attended(
        self, step: Step, rank: int, reads: list[Box], writes: list[Box]
    ) -> Iterator[Part]:
        """Of each block of queries and keys its y and lse, or its dq; then dk and dv."""
        p, forward = self.plan.problem, step.kind == "attention"
        q, k, v, *rest = reads
        self.check_attention(step, reads, writes)
        owner = self.plan.resolve((int(step.arg("peer")),), rank)
        found = blocks(p, rank, owner, int(step.arg("first")), k.shape[0])
        targets = writes if forward else writes[:1]
        of_rows = rest if forward else rest[:3]
        for queries, keys, diagonal in found:
            given = _rows(q, queries), _rows(k, keys), _rows(v, keys)
            beside = tuple(_rows(box, queries) for box in of_rows)
            if forward:
                for i, target in enumerate(targets):
                    merged = beside[i : i + 1] if beside else ()
                    yield Part((*given[: 3 - i], *merged), _rows(target, queries), diagonal)
            else:
                added = tuple(_rows(box, queries) for box in rest[3:])
                yield Part((*given, *beside, *added), _rows(targets[0], queries), diagonal)
        if forward:
            return
        last = found[-1].keys[1] if found else 0
        if found:  # all of one step have the same keys, and their queries follow one another
            queries, keys = (found[0].queries[0], found[-1].queries[1]), found[0].keys
            beside = tuple(_rows(box, queries) for box in of_rows)
            given = _rows(q, queries), _rows(k, keys), _rows(v, keys)
            for target in writes[1:]:
                yield Part((*given, *beside), _rows(target, keys), found[0].diagonal)
        for target in writes[1:]:
            if last < target.shape[0]:
                yield Part((), _rows(target, (last, target.shape[0])))

    def check_attention(self, step: Step, reads: list[Box], writes: list[Box]) -> None:
        """Refuse boxes that are not all own queries, or do not fit their keys."""
        p, (q, k, _, *rest) = self.plan.problem, reads
        rows, lse = q.shape[0], (q.shape[0], p.n // max(p.head_dim, 1))
        want = [q.shape, k.shape, k.shape]
        want += [q.shape, lse][: len(rest)] if step.kind == "attention" else []
        want += [] if step.kind == "attention" else [q.shape, q.shape, lse, q.shape][: len(rest)]
        made = [q.shape, lse] if step.kind == "attention" else [q.shape, k.shape, k.shape]
        shapes = [box.shape for box in (*reads, *writes)]
        if shapes != want + made or (q.shape[1], k.shape[1]) != (p.n, p.k) or rows != max(p.rows):
            self.fail(f"shapes {shapes} do not fit an attention of {p.n} and {p.k} columns")

    def zipped(self, reads: list[list[Box]], write: list[Box]) -> list[Part]:
        """Pair the cells of regions of many blocks; a region of one cell serves all of them."""
        lengths = {len(cells) for cells in [*reads, write]} - {1}
        if lengths - {len(write)}:
            self.fail(f"pairs regions of {sorted(lengths)} blocks")
        wide = [cells if len(cells) == len(write) else cells * len(write) for cells in reads]
        return [Part(boxes[:-1], boxes[-1]) for boxes in zip(*wide, write, strict=True)]

    def one(self, cells: list[Box]) -> Box:
        """The cells of a region that has to be one box; blocks without rows are none."""
        boxes = _hull([box for box in cells if box.r0 < box.r1] or cells[:1])
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
                        x = x[::-1]
                    ok = (x[0], w[1]) == want and x[1] == w[0]
                    rest = shapes[2:]
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
        if not 0 <= i < of or buffer.chunks not in (1, of):
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
        if buffer.holds == "peers":
            sizes[holder] = 0
            if region.shards and holder in shards:
                self.fail(f"{region.buffer} holds the blocks of peers only")
            shards = [shard for shard in shards if shard != holder]
        parts = [_chunk(n, i, of) for n in sizes]
        rows = [stop - start for start, stop in parts]
        if buffer.chunks > 1:
            # chunk-major: part 0 of every block, then part 1
            starts = list(accumulate(rows, initial=sum(start for start, _ in parts)))
        else:
            blocks = accumulate(sizes, initial=0)
            starts = [first + start for first, (start, _) in zip(blocks, parts, strict=False)]
        return [
            Box(holder, buffer.name, 0, starts[b], starts[b] + rows[b], *cols)
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
        starts = self.plan.problem.column_starts
        first, last = starts[rank], starts[rank + 1]
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


def _rows(box: Box, rows: tuple[int, int]) -> Box:
    return box._replace(r0=box.r0 + rows[0], r1=box.r0 + rows[1])


def _hull(boxes: list[Box]) -> list[Box]:
    """Boxes that follow one another as one."""
    merged = _merged([Part((), box) for box in boxes], set())
    return [part.write for part in merged]


def _merged(parts: list[Part], shared: set[int]) -> list[Part]:
    """Join neighbours whose boxes follow one another in memory; `shared` reads are equal."""
    merged: list[Part] = []
    for part in parts:
        if merged and _joins(merged[-1], part, shared):
            reads = zip(merged[-1].reads, part.reads, strict=True)
            joined = tuple(
                a if i in shared else a._replace(r1=b.r1) for i, (a, b) in enumerate(reads)
            )
            merged[-1] = Part(joined, merged[-1].write._replace(r1=part.write.r1))
        else:
            merged.append(part)
    return merged


def _joins(first: Part, second: Part, shared: set[int]) -> bool:
    def follows(a: Box, b: Box) -> bool:
        return a._replace(r0=0, r1=0) == b._replace(r0=0, r1=0) and a.r1 == b.r0

    reads = enumerate(zip(first.reads, second.reads, strict=True))
    return follows(first.write, second.write) and all(
        a == b if i in shared else follows(a, b) for i, (a, b) in reads
    )
