"""What plans of experts share: rows by owner or by expert, exchanges of a group, its matmuls.

expert_groups.py has the plans inside an island, expert_islands.py those of several, and
expert_operators.py the two operators.

A step is a group of experts with all its peers: its copies carry what all ranks have for these
experts, or what these have made for all ranks, and each weight is read once. So every step is an
exchange with all peers that is finer than a shard, as those of schedules/finer.py, and on a mesh all
links work at each. Chunks of rows would read every weight in each of them.

Where experts are fewer than exchanges worth having, groups come in chunks. Of a combine these are
slices of columns, of the results and of the weight: it is still read once. Of a dispatch they are
rows, an n-th of those of each rank for each expert, and the weight is read again for each: slices
of K would be summed in fp32, in passes over all of y.

Where counts are equal, rows of a group lie equally far apart on both sides: the copy engine takes
them as one strided copy for each peer, and the rows of a chunk are one batched matmul.

Where counts differ they are an operand, and only plans whose steps read it are possible: the boxes
of such a plan, and so its proof, are those of equal counts. A call may pass, beside the operands of
its plan: `rows`, where to put the rows that come to this rank's experts; `add`, what is added to
the products of a combine; `index`, `weights` and `sums`, see experts/matmul_all_to_all.py; and `clear`,
if rows of the results that are none have to be zero.

By routes, x is tokens, of which one may have several experts. A spread writes a row again for each
place that it goes to; a fold, its transpose, sums them in fp32. Which rows those are differs from
call to call: they are an operand, `routes`, see experts/routes/lists.py. The boxes of a plan, and so its
proof, are those of one expert for each token and equal counts, where a spread and a fold move rows
as they are. What a fold sums is beyond that proof: tests compare it.

Rows lie by owner or by expert. By owner: block d is of rank d, and in it part e of the e-th expert
of that rank. By expert: part e of every block, one after the other, which is a buffer in chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from counterpoint.costs import Tiles
from counterpoint.experts.fused import plan_fused
from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.names import COMPUTE, COPY, OWN, SIGNAL, counts_of, routes_of, rows_said
from counterpoint.plan.operation import Options
from counterpoint.plan.steps import (
    COUNTS,
    ME,
    ROUTES,
    Buffer,
    Kind,
    Lane,
    Peer,
    Region,
    Signal,
    Space,
    Step,
)
from counterpoint.plan.values import Cell, Product, Value
from counterpoint.problem import Problem
from counterpoint.schedules import grading
from counterpoint.schedules.peers import Chunk, Order, orders

# copies within a GPU, beside those to peers
LOCAL = Lane("local", "copy", priority=-1)
LANES = (COMPUTE, SIGNAL, COPY, LOCAL)
WHOLE: Chunk = (0, 1)
BY_EXPERT = {"rows", "product"}  # what is multiplied, and what that makes
EXCHANGES = 8  # from as many experts on, groups of them are enough
Pair = tuple[str, str]  # names of the buffers that a step reads and writes


def operands(p: Problem, *, dispatches: bool) -> tuple[Buffer, ...]:
    """The user's tensors: x and y, one by owner and one by expert, and what is between them.

    The experts of a rank lie one under the other. Where counts differ, a table says how many rows
    each has, and routes which.
    """
    weights = Buffer("w", (p.experts * p.k, p.n), p.dtype, "input")
    table = Buffer(COUNTS, (p.ranks, p.ranks * p.experts), "int64", "input")
    routes = Buffer(ROUTES, (1, p.m), "int64", "input")
    differ = () if p.counts == "equal" else (table, *((routes,) if p.by_routes else ()))
    x = rows_of(p, "x", p.k, "input", by_expert=not dispatches)
    return x, weights, *differ, rows_of(p, "y", p.n, "output", by_expert=dispatches)


def guess_of(
    predict: grading.ExpertsMakespan,
) -> Callable[[Problem, Options, Machine, Tiles], float]:
    """Seconds of a family of groups of experts, by its closed form."""

    def guess_s(p: Problem, options: Options, machine: Machine, tiles: Tiles) -> float:
        _, spans, chunks = spans_of(p, options, machine, predict)
        return predict(p, tuple(map(len, spans)), chunks, machine)

    return guess_s


def without_serial(p: Problem) -> tuple[str, str]:
    """What is taken whatever it costs, and why serial is not."""
    if p.islands == 1 or p.counts == "device_routed":
        name, why = plan_fused.without_serial(plan_fused.inside(p))
        return "islands" if name and p.islands > 1 else name, why
    if p.counts != "routed" or p.top_k:
        return "", ""
    return "islands", "sends a row once to each rank of another island, not once to the island"


def untold(p: Problem) -> str:
    """What is taken where nothing is known of the machine: the fewest bytes between islands."""
    return without_serial(replace(p, top_k=0))[0] or "serial"


@dataclass(frozen=True)
class Exchange:
    """The i-th exchange of a plan: rows of some experts, or a chunk of them, with all peers."""

    p: Problem
    order: Order
    i: int
    span: range
    chunk: Chunk = WHOLE

    @property
    def waits(self) -> tuple[Signal, ...]:
        """For what all peers have sent."""
        slot = (self.i + 1) * self.p.ranks
        return tuple(self.order.wait(slot + d, d) for d in self.order.distances)

    def push(self, source: str, target: str, after: tuple[str, ...]) -> Step:
        """What each peer gets, nearest first, and behind it all the signals."""
        each = [(self.order.to(d), part) for d in self.order.distances for part in self._parts()]
        reads = (Region(source, shards=(peer,), chunk=chunk) for peer, chunk in each)
        writes = (Region(target, peer, OWN, chunk) for peer, chunk in each)
        slot = (self.i + 1) * self.p.ranks
        posts = tuple(self.order.post(slot + d, d) for d in self.order.distances)
        return Step(f"push_{self.i}", "copy", "copy", (*reads, *rows_said(self.p)),
                    tuple(writes), after, posts=posts)  # fmt: skip

    def keep(
        self, source: str, target: str, after: tuple[str, ...], cols: tuple[int, int] | None = None
    ) -> Step:
        """Own rows, which stay on this rank; into these columns."""
        return self._local(f"keep_{self.i}", source, target, [OWN], after, cols)

    def unpack(
        self, source: str, target: str, cols: tuple[int, int] | None = None
    ) -> tuple[Step, Step]:
        """What peers have sent, to its place, once it has come; into these columns.

        Waited for between matmuls: a kernel that waits beside one takes a place where it would run.
        """
        come = f"come_{self.i}"
        after = () if self.i else ("open",)
        sources = [(self.order.source(d),) for d in self.order.distances]
        return (
            Step(come, "compute", "barrier", after=after, waits=self.waits),
            self._local(f"unpack_{self.i}", source, target, sources, (come,), cols),
        )

    def _local(
        self, name: str, source: str, target: str, sources: list[tuple[Peer, ...]],
        after: tuple[str, ...], cols: tuple[int, int] | None,
    ) -> Step:  # fmt: skip
        each = [(shards, part) for shards in sources for part in self._parts()]
        reads = (Region(source, shards=shards, chunk=chunk) for shards, chunk in each)
        writes = (Region(target, shards=shards, chunk=chunk, cols=cols) for shards, chunk in each)
        return Step(name, "local", "copy", (*reads, *rows_said(self.p)), tuple(writes), after)

    def _parts(self) -> list[Chunk]:
        """What is exchanged of each block."""
        return [part_of(e, self.p.experts, self.chunk) for e in self.span]


def part_of(e: int, experts: int, chunk: Chunk) -> Chunk:
    """That chunk of the rows of an expert, as a part of the block of all experts."""
    return e * chunk[1] + chunk[0], experts * chunk[1]


def matmuls(
    p: Problem, i: int, span: range, pair: Pair, *,
    suffix: str = "", chunk: Chunk = WHOLE, cols: tuple[int, int] | None = None,
    shards: tuple[Peer, ...] = (),
) -> tuple[Step, ...]:  # fmt: skip
    """A matmul for each expert of a group, of one launch where there is one for several.

    Args:
        i: of the launch.
        pair: of x, and of y.
        suffix: behind the name of each.
        chunk: of the rows of each rank.
        cols: of the weight.
        shards: whose rows; those of all ranks if there are none.
    """
    found: list[Step] = []
    for e in span:
        rows, weight = part_of(e, p.experts, chunk), (e * p.k, (e + 1) * p.k)
        source, target = (Region(b, shards=shards, chunk=rows) for b in pair)
        reads = (source, Region("w", rows=weight, cols=cols), *counts_of(p))
        found.append(Step(f"matmul_{e}{suffix}", "compute", "matmul", reads, (target,),
                          args=(("batch", i),)))  # fmt: skip
    return tuple(found)


def rows_of(p: Problem, name: str, cols: int, space: Space, *, by_expert: bool) -> Buffer:
    """Rows of all ranks, by owner or by expert."""
    chunks = p.experts if by_expert else 1
    return Buffer(name, (p.m, cols), p.dtype, space, split=True, chunks=chunks)


def between(p: Problem, cols: int, *names: str, space: Space = "scratch") -> list[Buffer]:
    """Buffers between two steps: by expert what is multiplied, by owner what travels."""
    return [rows_of(p, name, cols, space, by_expert=name in BY_EXPERT) for name in names]


def routed(
    p: Problem, kind: Kind, name: str, pair: Pair, *, shards: tuple[Peer, ...] = (),
    span: range | None = None, after: tuple[str, ...] = (), waits: tuple[Signal, ...] = (),
) -> Step:  # fmt: skip
    """A spread or a fold of rows, expert by expert where one side lies so.

    Args:
        shards: of these ranks.
        span: of these experts; None: of all.
    """
    experts = p.experts if span or {*pair} & BY_EXPERT else 1
    parts = [part_of(e, experts, WHOLE) for e in span or range(experts)]
    reads, writes = (tuple(Region(b, ME, shards, part) for part in parts) for b in pair)
    return Step(name, COMPUTE.name, kind, (*reads, *routes_of(p)), writes, after, waits)


def spans_of(
    p: Problem, options: Options, machine: Machine, predict: grading.ExpertsMakespan
) -> tuple[str, list[range], int]:
    """The variant of a grouped plan, the experts of each of its groups, and their chunks."""
    chunks = max(options.chunks, 1)
    groups = options.sizes or grading.expert_groups(p, machine, predict, chunks)
    starts = [sum(groups[:i]) for i in range(len(groups))]
    spans = [range(start, start + size) for start, size in zip(starts, groups, strict=True)]
    tail = f" chunks={chunks}" if chunks > 1 else ""
    return f"{grading.sizes(groups)} {options.peers}{tail}", spans, chunks


def definition(p: Problem, rank: int, *, dispatches: bool) -> Iterator[tuple[Box, Value]]:
    """y on `rank`: block e, s is the rows of expert e and of rank s, times that expert's weight.

    Of a dispatch they lie by expert, and the weight is of this rank; of a combine by owner.
    """
    count = p.rows[0] // p.experts
    for e, s in product(range(p.experts), range(p.ranks)):
        multiplies, old, new = rank, rank * p.experts + e, e * p.ranks + s
        if not dispatches:
            multiplies, old, new = s, e * p.ranks + rank, s * p.experts + e
        shift, row = count * (old - new), count * new
        term = Product("x", s, False, shift, "w", multiplies, 0, e * p.k, 0, p.k)
        yield Box(rank, "y", 0, row, row + count, 0, p.n), (term,) if p.k else ()
    if p.counts == "device_routed" and p.islands > 1:
        yield from _rail(p, rank, dispatches=dispatches)


def _rail(p: Problem, rank: int, *, dispatches: bool) -> Iterator[tuple[Box, Value]]:
    """The buffer `rail` of expert_islands.py: block i, q is of the rank of this place in island i.

    It is its rows for place q of this island, or what that has made of them.
    """
    size, count = p.ranks // p.islands, p.rows[0] // p.experts
    island, place = divmod(rank, size)
    for i, q, e in product(range(p.islands), range(size), range(p.experts)):
        owner, mate, row = i * size + place, island * size + q, count * (i * size + q) * p.experts
        row += count * e
        box = Box(rank, "rail", 0, row, row + count, 0, p.k if dispatches else p.n)
        if dispatches:
            yield box, (Cell(owner, "x", count * (mate * p.experts + e) - row, 0),)
            continue
        shift = count * (e * p.ranks + owner) - row
        term = Product("x", mate, False, shift, "w", mate, 0, e * p.k, 0, p.k)
        yield box, (term,) if p.k else ()


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first; chunks where experts alone make few exchanges."""
    if p.islands > 1:
        return "serial", "islands"
    if p.counts == "routed":
        return ("serial", *(f"routed {peers}" for peers in orders(p.ranks)))
    chunks = [n for n in (2, 4, 8) if n * p.experts <= EXCHANGES]
    found = ("serial", "fused", *(f"grouped {peers}" for peers in orders(p.ranks)))
    return *found, *(f"grouped ring chunks={n}" for n in chunks)
