"""Families finer than shards: each step exchanges a chunk of every shard with all peers.

A chunk is an n-th of the rows of every shard (1d), n being the ranks, or of its columns (2d). Each
step has copies for all links of a full mesh, where shard_p2p has them for one link at a time.

- uniform: all steps are alike. hetero: rows that need no peer are a matmul of their own, the first
  one of a gather, the last one of a scatter.
- fused: what a step has of all shards is one matmul, of rows that are packed for it and unpacked
  after it; unfused: a matmul for each shard, of rows where they lie. In 2d nothing needs packing
  (hetero scatters multiply rows before and behind their own, two matmuls a step on most ranks).

Names and gathers: FiCCO, arXiv 2512.10236; uniform_unfused, hetero 2d and the mirrors that scatter
are ours.

Of experts the family "grouped" is what these are here, see experts/plan_parts.py: there, an exchange that
reads no weight twice is of a group of experts.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from counterpoint.costs import Tiles
from counterpoint.machine import Machine
from counterpoint.plan.names import LANES, OWN, W, X, Y, weights, with_bias
from counterpoint.plan.operation import Family, Options, takes_all
from counterpoint.plan.scaled import REFUSAL
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Order

NAMES = ("uniform_fused_1d", "uniform_unfused_1d", "hetero_fused_1d", "hetero_unfused_1d",
         "uniform_fused_2d", "hetero_fused_2d")  # fmt: skip


class Kind(NamedTuple):
    """What a family's name says."""

    hetero: bool
    fused: bool
    dims: int

    @classmethod
    def of(cls, family: str) -> "Kind":
        """Read one of NAMES."""
        start, fused, dims = family.split("_")
        return cls(start == "hetero", fused == "fused", int(dims[0]))

    @property
    def holds(self) -> Literal["all", "peers"]:
        """Whose blocks a step has."""
        return "peers" if self.hetero else "all"

    @property
    def one_sum(self) -> bool:
        """Whether a scatter sums once, at its end: rows that are packed lie in chunks."""
        return self.dims == 1 and (self.hetero or not self.fused)


Parts = tuple[tuple[Buffer, ...], tuple[Step, ...]]


def gather(p: Problem, kind: Kind, order: Order) -> Parts:
    """Buffers and steps of an all_gather_matmul."""
    return (_gather_1d if kind.dims == 1 else _gather_2d)(p, kind, order)


def scatter(p: Problem, kind: Kind, order: Order) -> Parts:
    """Buffers and steps of a matmul_reduce_scatter."""
    return (_scatter_1d if kind.dims == 1 else _scatter_2d)(p, kind, order)


def families(
    operands: Callable[[Problem], tuple[Buffer, ...]],
    parts: Callable[[Problem, Kind, Order], Parts],
    seconds: Callable[[Problem, Kind, Machine, Tiles], float],
    refusal: Callable[[Problem], str] = takes_all,
) -> Iterator[Family]:
    """Those of an operator: `gather` or `scatter` behind the barrier that opens a call."""
    for name in NAMES:

        def build(p: Problem, options: Options, _: Machine, name: str = name) -> Plan:
            order = Order(options.peers, p.ranks)
            buffers, steps = parts(p, Kind.of(name), order)
            opened = (order.barrier("open", "signal", 0), *steps)
            return Plan(p, name, order.peers, order.peers, (*operands(p), *buffers), LANES, opened)

        def guess_s(
            p: Problem, _: Options, machine: Machine, tiles: Tiles, name: str = name
        ) -> float:
            return seconds(p, Kind.of(name), machine, tiles)

        def wants(p: Problem, name: str = name) -> str:
            # slices of K would be summed in y, and those of N cut blocks of scales
            if Kind.of(name).dims == 2 and (p.scales or p.gated):
                return REFUSAL if p.scales else "one weight"
            return refusal(p)

        yield Family(name=name, takes=("peers",), build=build, wants=wants, guess_s=guess_s)


def _gather_1d(p: Problem, kind: Kind, order: Order) -> Parts:
    """One n-th of every shard a step; fused, of one matmul, whose rows are scattered into y."""
    (bias, args), by = with_bias(p), weights(p)
    others = tuple(order.source(d) for d in order.distances)
    steps = [_matmul("own", (X, *by, *bias), Region("y", shards=OWN), args)] if kind.hetero else []
    buffer = "packed" if kind.fused else "full"
    for i in range(p.ranks):
        chunk = (i, p.ranks)
        mine = Region("x", chunk=chunk)
        # a chunk of one's own is copied to where it is packed; else it is read where it is
        copied = kind.fused and not kind.hetero
        arrived = Region(buffer, shards=() if copied else others, chunk=chunk)
        steps.append(exchange(order, i, mine, Region(buffer, chunk=chunk), own=copied))
        if kind.fused:
            product = Region("product", shards=arrived.shards, chunk=chunk)
            steps.append(after_exchange(order, i, (arrived, *by, *bias), product, args, own=copied))
            target = Region("y", shards=arrived.shards, chunk=chunk)
            steps.append(Step(f"scatter_{i}", "compute", "move", (product,), (target,)))
            continue
        if not kind.hetero:
            target = Region("y", shards=OWN, chunk=chunk)
            steps.append(_matmul(f"own_{i}", (mine, *by, *bias), target, args))
        target = Region("y", shards=others, chunk=chunk)
        steps.append(after_exchange(order, i, (arrived, *by, *bias), target, args, own=False))
    if not kind.fused:
        full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True)
        return (full,), tuple(steps)
    packed = Buffer("packed", (p.m, p.k), p.dtype, "symmetric", split=True, holds=kind.holds,
                    chunks=p.ranks)  # fmt: skip
    product = Buffer("product", (p.m, p.y_columns), p.dtype, "scratch", split=True,
                     holds=kind.holds, chunks=p.ranks)  # fmt: skip
    return (packed, product), tuple(steps)


def _gather_2d(p: Problem, kind: Kind, order: Order) -> Parts:
    """A slice of columns of every shard a step: it adds one slice of K to all of y.

    Strided copies, and n passes over an fp32 sum: for weights much larger than x.
    """
    bias, args = with_bias(p)
    others = tuple(order.source(d) for d in order.distances)
    steps = [_matmul("own", (X, W, *bias), Region("y", shards=OWN), args)] if kind.hetero else []
    total = Region("sum")
    for i, cols in enumerate(slices(p.k, p.ranks)):
        source, target = Region("x", cols=cols), Region("full", cols=cols)
        steps.append(exchange(order, i, source, target, own=not kind.hetero))
        reads = (target, Region("w", rows=cols), *((total,) if i else ()))
        steps.append(after_exchange(order, i, reads, total, own=not kind.hetero))
    target = Region("y", shards=others) if kind.hetero else Y
    steps.append(Step("round", "compute", "move", (total, *bias), (target,), args=args))
    full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True, holds=kind.holds)
    sums = Buffer("sum", (p.m, p.n), "float32", "scratch", split=True, holds=kind.holds)
    return (full, sums), tuple(steps)


def _scatter_1d(p: Problem, kind: Kind, order: Order) -> Parts:
    """One n-th of every owner's rows a step, each pushed to its owner, who sums at the end."""
    bias, args = with_bias(p)
    steps: list[Step] = []
    whose = tuple(order.to(d) for d in order.distances) if kind.hetero else ()
    source = "product" if kind.fused else "partial"
    sums = 1 if kind.one_sum else p.ranks
    for i in range(p.ranks):
        chunk = (i, p.ranks)
        rows = Region("x", shards=whose, chunk=chunk)
        if kind.fused:
            packed = Region("packed", shards=whose, chunk=chunk)
            steps.append(Step(f"pack_{i}", "compute", "move", (rows,), (packed,)))
            rows = packed
        steps.append(_matmul(str(i), (rows, W), Region(source, shards=whose, chunk=chunk)))
        signals = sums > 1 or i == p.ranks - 1
        steps.append(_push(order, i, source, "slots", chunk, signals=signals))
    own = Region("own") if kind.fused and kind.hetero else Region(source, shards=OWN)
    if kind.hetero:
        steps.append(_matmul("own", (Region("x", shards=OWN), W), own))
    for i in range(sums):
        chunk = (i, sums)
        sent = (Region("slots", shards=(order.source(d),), chunk=chunk) for d in order.distances)
        reads = (*sent, Region(own.buffer, shards=own.shards, chunk=chunk), *bias)
        last = i if sums > 1 else p.ranks - 1
        waits = tuple(order.wait((last + 1) * p.ranks + d, d) for d in order.distances)
        after, target = ("open",) if i == 0 else (), Region("y", chunk=chunk)
        steps.append(Step(f"reduce_{i}", "compute", "reduce", reads, (target,), after, waits,
                          args=args))  # fmt: skip
    slots = Buffer("slots", (p.m, p.n), p.dtype, "symmetric", split=True, holds="slots")
    if not kind.fused:
        return (Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True), slots), tuple(steps)
    buffers = [
        Buffer(name, (p.m, cols), p.dtype, "scratch", split=True, holds=kind.holds, chunks=p.ranks)
        for name, cols in (("packed", p.k), ("product", p.n))
    ]
    if kind.hetero:
        buffers.append(Buffer("own", (p.m, p.n), p.dtype, "scratch", split=True, holds="own"))
    return (*buffers, slots), tuple(steps)


def _scatter_2d(p: Problem, kind: Kind, order: Order) -> Parts:
    """A slice of columns of y a step, in buffers of its own, so that no copy is strided."""
    bias, args = with_bias(p)
    steps: list[Step] = []
    buffers: list[Buffer] = []
    whose = tuple(order.to(d) for d in order.distances) if kind.hetero else ()
    cuts = slices(p.n, p.ranks)
    for i, cols in enumerate(cuts):
        shape = (p.m, cols[1] - cols[0])
        buffers += [
            Buffer(f"partial_{i}", shape, p.dtype, "scratch", split=True, holds=kind.holds),
            Buffer(f"slots_{i}", shape, p.dtype, "symmetric", split=True, holds="slots"),
        ]
        target = Region(f"partial_{i}", shards=whose)
        steps.append(_matmul(str(i), (Region("x", shards=whose), Region("w", cols=cols)), target))
        steps.append(_push(order, i, f"partial_{i}", f"slots_{i}"))
    if kind.hetero:
        steps.append(_matmul("own", (Region("x", shards=OWN), W), Region("own")))
        buffers.append(Buffer("own", (p.m, p.n), p.dtype, "scratch", split=True, holds="own"))
    for i, cols in enumerate(cuts):
        sent = (Region(f"slots_{i}", shards=(order.source(d),)) for d in order.distances)
        own = Region("own", cols=cols) if kind.hetero else Region(f"partial_{i}", shards=OWN)
        reads = (*sent, own, *(Region(b.buffer, cols=cols) for b in bias))
        waits = tuple(order.wait((i + 1) * p.ranks + d, d) for d in order.distances)
        steps.append(Step(f"reduce_{i}", "compute", "reduce", reads, (Region("y", cols=cols),),
                          ("open",) if i == 0 else (), waits, args=args))  # fmt: skip
    return tuple(buffers), tuple(steps)


def exchange(order: Order, i: int, source: Region, target: Region, *, own: bool = True) -> Step:
    """Chunk i from me to every rank, me included where `own`, as one batch of copies."""

    def at(d: int) -> Region:
        where = order.to(d) if d else ()
        return Region(target.buffer, where, OWN, target.chunk, cols=target.cols)

    distances = (*order.distances, *((0,) if own else ()))
    return Step(
        f"push_{i}",
        "copy",
        "copy",
        (source,) * len(distances),
        tuple(at(d) for d in distances),
        after=("open",) if i == 0 else (),
        posts=tuple(order.post((i + 1) * order.ranks + d, d) for d in order.distances),
    )


def after_exchange(
    order: Order,
    i: int,
    reads: tuple[Region, ...],
    write: Region,
    args: tuple[tuple[str, int | str], ...] = (),
    *,
    own: bool = True,
) -> Step:
    """The matmul that reads chunk i of all ranks, or of all but this one."""
    waits = tuple(order.wait((i + 1) * order.ranks + d, d) for d in order.distances)
    # the lane orders those that wait later
    after = (f"push_{i}",) if own else ("open",) if i == 0 else ()
    return Step(f"matmul_{i}", "compute", "matmul", reads, (write,), after, waits, args=args)


def slices(k: int, of: int) -> list[tuple[int, int]]:
    """Columns [start, stop) of about equal slices of K; fewer where there are not that many."""
    edges = [k * i // of for i in range(of + 1)]
    if k >= 64 * of:
        # multiples of 64 elements keep the copies and the tensor cores on aligned addresses
        edges = [*(edge // 64 * 64 for edge in edges[:-1]), k]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if a < b] or [(0, 0)]


def _push(
    order: Order, i: int, source: str, slots: str, chunk: tuple[int, int] = (0, 1), *,
    signals: bool = True,
) -> Step:  # fmt: skip
    """Each peer's part of step i into my slot there."""
    posts = tuple(order.post((i + 1) * order.ranks + d, d) for d in order.distances)
    return Step(
        f"push_{i}",
        "copy",
        "copy",
        tuple(Region(source, shards=(order.to(d),), chunk=chunk) for d in order.distances),
        tuple(Region(slots, order.to(d), OWN, chunk) for d in order.distances),
        after=(f"matmul_{i}", *(("open",) if i == 0 else ())),
        posts=posts if signals else (),
    )


def _matmul(
    name: str,
    reads: tuple[Region, ...],
    write: Region,
    args: tuple[tuple[str, int | str], ...] = (),
) -> Step:
    return Step(f"matmul_{name}", "compute", "matmul", reads, (write,), args=args)
