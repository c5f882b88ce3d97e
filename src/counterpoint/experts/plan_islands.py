"""Plans of experts on several islands: a token goes once to another island, along its rail.

There it comes to the rank of its owner's place; inside an island once to each rank that has one of
its experts. The way back is the mirror: a rank sums what its experts have made of a token, by the
token's weights; the rank of the owner's place sums that over its island, and sends one row. Rows
are summed in fp32, in the order of a token's experts, then of ranks, then of islands, and rounded
to their dtype wherever they travel.

    x --spread--> out     by island   --exchange--> came      by island
    x, came --spread--> passing  by island and place  --copies--> received  by source
    received --spread--> rows    by expert, then source

    product --fold--> sums       by source    --copies--> parts  by island and place
    parts --fold--> gone         by island    --exchange--> got  by island
    parts of this island, got --fold--> y

By island: a block for each rank of it, as x has them. Without routes, which is equal counts, such a
plan is an all-to-all of rows in two hops. Far islands come last in a dispatch and first in a
combine: exchanges run beside the matmuls of the rows of this island.

What goes to another island goes in one chunk. Rows of a chunk of tokens would lie apart, a piece
for each source and expert, and the weight would be read again for each: of 24 calls on 2 to 8
islands of 8 H200s, with NICs of 45 GB/s, none is predicted to gain by 2 or 4 chunks. With matmuls
in one piece and all else in chunks, 6 of 12 gain, 3 % to 18 % (2026-11).

**Routes that the device alone knows.** What a NIC sends has a size that the host knows, and no host
knows which tokens have experts where. So each rank sends all of its tokens once to each other
island, along the rail: all ranks have equally many. Then an island has the problem of one island,
see plan_fused.py: the tokens of a rank are those of its rail, in order of islands, and experts
of other islands are none. A combine is the mirror, its own island first, and rounds once:

    x --keep, exchange--> rail --experts--> y      a dispatch
    x --experts--> rail    by island   --exchange--> got    a combine
    rail of this island, got --collect--> y

M is the most rows that a rank gets, or gets back. A token is one row of `rail` and of `got`, which
so have less memory than boxes: see extents.py.

Tokens go also where they have no expert. Of 8 experts that are drawn among 256 on 2 islands nearly
none are such; where a router keeps tokens on few of many islands most are, and plans whose counts
the host knows send less, and wait. The exchange is not beside the kernel: that takes an expert's
rows of all islands together and reads its weight once. One kernel for the tokens of this island and
one for the others would read the weights again, and leave the rows of an expert in two places.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from counterpoint.experts.fused import plan_fused
from counterpoint.experts.plan_parts import Pair, between, matmuls, operands, routed
from counterpoint.plan.names import COMPUTE, COPY, SIGNAL, X, Y, routes_of
from counterpoint.plan.operation import Family
from counterpoint.plan.steps import ME, Buffer, Lane, Peer, Plan, Region, Signal, Step
from counterpoint.problem import Problem
from counterpoint.schedules import islands
from counterpoint.schedules.islands import NIC, Grid

SUM = Lane("sum", "sm", priority=-1)
LANES = (COMPUTE, SIGNAL, COPY, SUM, NIC)
Made = tuple[Iterable[Buffer], list[Step]]  # buffers between the steps, and these
Build = Callable[[Problem, Grid], Made]


def dispatch(p: Problem, grid: Grid) -> Made:
    """Rows of this island first; those of others are passed on as they come."""
    steps = [*grid.opening()]
    for d in grid.far:
        steps.append(routed(p, "spread", f"pick_{d}", ("x", "out"), shards=_island(grid, d)))
        steps.append(_exchange(p, grid, f"give_{d}", d, ("out", "came"), (f"pick_{d}",)))
    own = _island(grid, 0)
    steps.append(routed(p, "spread", "pick_own", ("x", "passing"), shards=own))
    steps += _unfolded(p, grid, "own", 0, ("pick_own", *grid.opened))
    for d in grid.far:
        steps.append(routed(p, "spread", f"relay_{d}", ("came", "passing"),
                            shards=_island(grid, -d), after=(f"give_{d}",)))  # fmt: skip
        steps += _unfolded(p, grid, str(d), d, (f"relay_{d}",))
    received = between(p, p.k, "received", space=grid.space)
    return [*between(p, p.k, "out", "came", "passing"), *received, *between(p, p.k, "rows")], steps


def _unfolded(
    p: Problem, grid: Grid, name: str, d: int, after: tuple[str, ...]
) -> Iterator[Step]:  # fmt: skip
    """What has come from an island d back goes to its ranks, and there to its experts."""
    yield from _passed(p, grid, name, d, ("passing", "received"), -d, after)
    last, waits, shards = (f"push_{name}_0",), _waits(grid, d), _island(grid, -d)
    yield routed(p, "spread", f"unfold_{name}", ("received", "rows"), shards=shards, after=last,
                 waits=waits)  # fmt: skip
    yield from matmuls(p, d, range(p.experts), ("rows", "y"), suffix=f"_{name}", shards=shards)


def combine(p: Problem, grid: Grid) -> Made:
    """Rows of other islands first; each is sent back as it is summed over this one."""
    steps = [*grid.opening()]
    for d in grid.far:
        steps += _folded(p, grid, str(d), d, grid.opened if d == 1 else ())
        island, waits = _island(grid, d), _waits(grid, d)
        join = routed(p, "fold", f"join_{d}", ("parts", "gone"), shards=island,
                      after=(f"push_{d}_0",), waits=waits)  # fmt: skip
        steps.append(replace(join, lane=SUM.name))
        steps.append(_exchange(p, grid, f"return_{d}", d, ("gone", "got"), (f"join_{d}",)))
    steps += _folded(p, grid, "own", 0, ())
    last = (f"return_{grid.far[-1]}", "push_own_0")
    steps.append(_collect(p, grid, "parts", last, _waits(grid, 0)))
    parts = between(p, p.n, "parts", space=grid.space)
    return [*between(p, p.n, "sums", "gone", "got"), *parts, *between(p, p.n, "product")], steps


def _folded(
    p: Problem, grid: Grid, name: str, d: int, after: tuple[str, ...]
) -> Iterator[Step]:  # fmt: skip
    """Products for an island d on, summed, to the ranks of their owners' places in this one."""
    shards = _island(grid, d)
    yield from matmuls(p, d, range(p.experts), ("x", "product"), suffix=f"_{name}", shards=shards)
    yield routed(p, "fold", f"sum_{name}", ("product", "sums"), shards=shards)
    yield from _passed(p, grid, name, d, ("sums", "parts"), d, (f"sum_{name}", *after))


def dispatch_on_rails(p: Problem, grid: Grid) -> Made:
    """All tokens along rails, then the kernel."""
    steps = [_exchange(p, grid, f"give_{d}", d, ("x", "rail")) for d in grid.far]
    source, target = (Region(name, ME, _island(grid, 0)) for name in ("x", "rail"))
    steps.append(Step("keep", "compute", "spread", (source, *routes_of(p)), (target,)))
    kernel, memory = plan_fused.one_kernel(p, Region("rail"), Y, (steps[-2].name,))
    return [*between(p, p.k, "rail"), *memory], [*steps, kernel]


def combine_on_rails(p: Problem, grid: Grid) -> Made:
    """The kernel, then its sums back along rails to the owners of their tokens."""
    kernel, memory = plan_fused.one_kernel(p, X, Region("rail"))
    steps = [kernel]
    for d in grid.far:
        after = (kernel.name,) if d == 1 else ()
        steps.append(_exchange(p, grid, f"return_{d}", d, ("rail", "got"), after))
    steps.append(_collect(p, grid, "rail", (steps[-1].name,)))
    return [*between(p, p.n, "rail", "got"), *memory], steps


def _island(grid: Grid, d: int) -> tuple[Peer, ...]:
    """The ranks of the island d on."""
    return tuple((d, place) for place in range(grid.size))


def _waits(grid: Grid, d: int) -> tuple[Signal, ...]:
    return grid.waits(d, 0) if d else grid.waits()


def _passed(
    p: Problem, grid: Grid, name: str, d: int, pair: Pair, of: int, after: tuple[str, ...]
) -> Iterator[Step]:
    """Rows of the island `of` on to each rank of this one, own ones last; neighbours are told."""
    for place in (*grid.near, 0):
        at = (0, place) if place else ME
        source, target = Region(pair[0], ME, ((of, place),)), Region(pair[1], at, ((of, 0),))
        post = (grid.post(place, d, 0) if d else grid.post(place),) if place else ()
        yield Step(f"push_{name}_{place}", "copy", "copy", (source, *routes_of(p)), (target,),
                   after, posts=post)  # fmt: skip
        after = ()


def _exchange(
    p: Problem, grid: Grid, name: str, d: int, pair: Pair, after: tuple[str, ...] = ()
) -> Step:
    """What is for the island d on; and what that many back has for this one."""
    source, target = Region(pair[0], ME, _island(grid, d)), Region(pair[1], ME, _island(grid, -d))
    reads = source, *routes_of(p)
    return Step(name, "nic", "exchange", reads, (target,), after, args=(("to", d),))


def _collect(
    p: Problem, grid: Grid, own: str, after: tuple[str, ...], waits: tuple[Signal, ...] = ()
) -> Step:
    """What all islands have made of own tokens, summed into y."""
    sources = [(own, 0), *(("got", -d) for d in grid.far)]
    reads = (Region(name, ME, _island(grid, d)) for name, d in sources)
    writes = tuple(Region("y", ME, _island(grid, d)) for _, d in sources)
    return Step("collect", "compute", "fold", (*reads, *routes_of(p)), writes, after, waits)


def family(build: Build, on_rails: Build, *, dispatches: bool) -> Family:
    """That of one of the two operators.

    Args:
        on_rails: where the device alone knows the routes.
    """

    def built(p: Problem, *_: object) -> Plan:
        grid = Grid(p.islands, p.ranks // p.islands, chunks=1)
        buffers, steps = (on_rails if p.counts == "device_routed" else build)(p, grid)
        used = {step.lane for step in steps}
        lanes = tuple(lane for lane in LANES if lane.name in used)
        every = (*operands(p, dispatches=dispatches), *buffers)
        return Plan(p, "islands", "", "grid", every, lanes, tuple(steps))

    return Family(name="islands", islands=True, wants=wants, build=built)


def wants(p: Problem) -> str:
    """What such a plan wants of a problem that it does not have, or ""."""
    if why := islands.refusal(p):
        return why
    if p.counts == "device_routed":
        return plan_fused.refusal(plan_fused.inside(p))
    return "" if p.counts in ("equal", "routed") else "equal counts, or routes"
