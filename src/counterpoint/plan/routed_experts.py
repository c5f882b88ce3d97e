"""Plans of experts by routes: a row of x is a token, and goes once to where it has experts.

A token with several experts is a row for each of them where rows are multiplied, and nowhere else.
To another island it goes once, along the rail, to the rank of its owner's place there; inside an
island once to each rank that has one of its experts. The way back is the mirror: a rank sums what
its experts have made of a token, by the token's weights; the rank of the owner's place sums that
over its island, and sends one row. Rows are summed in fp32, in the order of a token's experts, then
of ranks, then of islands, and rounded to their dtype wherever they travel.

    x --spread--> out     by island   --exchange--> came      by island
    x, came --spread--> passing  by island and place  --copies--> received  by source
    received --spread--> rows    by expert, then source

    product --fold--> sums       by source    --copies--> parts  by island and place
    parts --fold--> gone         by island    --exchange--> got  by island
    parts of this island, got --fold--> y

A spread writes a row again for each place that it goes to; a fold, its transpose, sums them. Which
rows those are differs from call to call: they are an operand, `routes`, see runtime/routes.py. The
boxes of a plan, and so its proof, are those of one expert for each token and equal counts, where a
spread and a fold move rows as they are. What a fold sums is beyond that proof: tests compare it.

By island: a block for each rank of it, as x has them. Without routes, which is equal counts, such a
plan is an all-to-all of rows in two hops.

Far islands come last in a dispatch and first in a combine: exchanges run beside the matmuls of the
rows of this island.

What goes to another island goes in one chunk. Rows of a chunk of tokens would lie apart, a piece
for each source and expert, and the weight would be read again for each: of 24 calls on 2 to 8
islands of 8 H200s, with NICs of 45 GB/s, none is predicted to gain by 2 or 4 chunks. With matmuls
in one piece and all else in chunks, 6 of 12 gain, 3 % to 18 % (2026-11).
"""

from collections.abc import Callable, Iterator

from counterpoint.plan import expert_rails, islands
from counterpoint.plan.experts import WHOLE, matmuls, part_of, rows_of
from counterpoint.plan.islands import NIC, Grid
from counterpoint.plan.names import COMPUTE, COPY, SIGNAL, collective, in_one_lane, routes_of
from counterpoint.plan.operation import Family
from counterpoint.plan.steps import ME, Buffer, Kind, Lane, Peer, Plan, Region, Signal, Space, Step
from counterpoint.problem import Problem

SUM = Lane("sum", "sm", priority=-1)
LANES = (COMPUTE, SIGNAL, COPY, SUM, NIC)


def dispatch_serial(p: Problem, users: tuple[Buffer, ...]) -> Plan:
    """A row to each rank by the library's all-to-all, then the matmuls.

    Args:
        users: the user's buffers.
    """
    steps = (
        _rows(p, "spread", "pick", ("x", "sent")),
        _all_to_all(p, "sent", "received"),
        _rows(p, "spread", "unfold", ("received", "rows")),
        *matmuls(p, 0, range(p.experts), ("rows", "y")),
    )
    between = [_by_owner(p, name, p.k) for name in ("sent", "received")]
    return in_one_lane(p, "serial", (*users, *between, _by_expert(p, "rows", p.k)), *steps)


def combine_serial(p: Problem, users: tuple[Buffer, ...]) -> Plan:
    """The matmuls, then a row from each rank by the library's all-to-all."""
    steps = (
        *matmuls(p, 0, range(p.experts), ("x", "product")),
        _rows(p, "fold", "sum", ("product", "sums")),
        _all_to_all(p, "sums", "back"),
        _rows(p, "fold", "collect", ("back", "y")),
    )
    between = [_by_owner(p, name, p.n) for name in ("sums", "back")]
    return in_one_lane(p, "serial", (*users, *between, _by_expert(p, "product", p.n)), *steps)


def dispatch(p: Problem, grid: Grid, users: tuple[Buffer, ...]) -> Plan:
    """Rows of this island first; those of others are passed on as they come."""
    steps = [*grid.opening()]
    for d in grid.far:
        steps.append(_rows(p, "spread", f"pick_{d}", ("x", "out"), _island(grid, d)))
        steps.append(_exchange(p, grid, f"give_{d}", d, ("out", "came")))
    steps.append(_rows(p, "spread", "pick_own", ("x", "passing"), _island(grid, 0)))
    steps += _unfolded(p, grid, "own", 0, ("pick_own", *grid.opened))
    for d in grid.far:
        relay = ("came", "passing"), _island(grid, -d), (f"give_{d}",)
        steps.append(_rows(p, "spread", f"relay_{d}", *relay))
        steps += _unfolded(p, grid, str(d), d, (f"relay_{d}",))
    between = [_by_owner(p, name, p.k) for name in ("out", "came", "passing")]
    between += [_by_owner(p, "received", p.k, grid.space), _by_expert(p, "rows", p.k)]
    return _plan(p, (*users, *between), steps)


def _unfolded(
    p: Problem, grid: Grid, name: str, d: int, after: tuple[str, ...]
) -> Iterator[Step]:  # fmt: skip
    """What has come from an island d back goes to its ranks, and there to its experts."""
    for place in _places(grid):
        pair = Region("passing", ME, ((-d, place),)), Region("received", _at(place), ((-d, 0),))
        yield _copy(p, grid, f"push_{name}_{place}", (d, place), pair, after)
        after = ()
    last, waits, shards = (f"push_{name}_0",), _waits(grid, d), _island(grid, -d)
    yield _rows(p, "spread", f"unfold_{name}", ("received", "rows"), shards, last, waits)
    yield from matmuls(p, d, range(p.experts), ("rows", "y"), suffix=f"_{name}", shards=shards)


def combine(p: Problem, grid: Grid, users: tuple[Buffer, ...]) -> Plan:
    """Rows of other islands first; each is sent back as it is summed over this one."""
    steps = [*grid.opening()]
    for d in grid.far:
        steps += _folded(p, grid, str(d), d, grid.opened if d == 1 else ())
        last, waits, shards = (f"push_{d}_0",), _waits(grid, d), _island(grid, d)
        steps.append(_rows(p, "fold", f"join_{d}", ("parts", "gone"), shards, last, waits))
        steps.append(_exchange(p, grid, f"return_{d}", d, ("gone", "got")))
    steps += _folded(p, grid, "own", 0, ())
    sources = [("parts", 0), *(("got", -d) for d in grid.far)]
    reads, writes = (
        [Region("y" if of_y else name, ME, _island(grid, d)) for name, d in sources]
        for of_y in (False, True)
    )
    last = (f"return_{grid.far[-1]}", "push_own_0")
    steps.append(Step("collect", "compute", "fold", (*reads, *routes_of(p)), tuple(writes), last,
                      _waits(grid, 0)))  # fmt: skip
    between = [_by_owner(p, name, p.n) for name in ("sums", "gone", "got")]
    between += [_by_owner(p, "parts", p.n, grid.space), _by_expert(p, "product", p.n)]
    return _plan(p, (*users, *between), steps)


def _folded(
    p: Problem, grid: Grid, name: str, d: int, after: tuple[str, ...]
) -> Iterator[Step]:  # fmt: skip
    """Products for an island d on, summed, to the ranks of their owners' places in this one."""
    shards = _island(grid, d)
    yield from matmuls(p, d, range(p.experts), ("x", "product"), suffix=f"_{name}", shards=shards)
    yield _rows(p, "fold", f"sum_{name}", ("product", "sums"), shards)
    after = (f"sum_{name}", *after)
    for place in _places(grid):
        pair = Region("sums", ME, ((d, place),)), Region("parts", _at(place), ((d, 0),))
        yield _copy(p, grid, f"push_{name}_{place}", (d, place), pair, after)
        after = ()


def _island(grid: Grid, d: int) -> tuple[Peer, ...]:
    """The ranks of the island d on."""
    return tuple((d, place) for place in range(grid.size))


def _places(grid: Grid) -> tuple[int, ...]:
    """Of this island's ranks, own one last."""
    return (*grid.near, 0)


def _at(place: int) -> Peer:
    return (0, place) if place else ME


def _waits(grid: Grid, d: int) -> tuple[Signal, ...]:
    return grid.waits(d, 0) if d else grid.waits()


def _by_owner(p: Problem, name: str, cols: int, space: Space = "scratch") -> Buffer:
    return rows_of(p, name, cols, space, by_expert=False)


def _by_expert(p: Problem, name: str, cols: int) -> Buffer:
    return rows_of(p, name, cols, "scratch", by_expert=True)


def _rows(
    p: Problem, kind: Kind, name: str, pair: tuple[str, str], shards: tuple[Peer, ...] = (),
    after: tuple[str, ...] = (), waits: tuple[Signal, ...] = (),
) -> Step:  # fmt: skip
    """A spread or a fold of the blocks of these ranks, expert by expert where one side lies so."""
    experts = p.experts if {*pair} & {"rows", "product"} else 1
    shards = shards or tuple((r,) for r in range(p.ranks))
    parts = [part_of(e, experts, WHOLE) for e in range(experts)]
    reads, writes = (tuple(Region(b, ME, shards, part) for part in parts) for b in pair)
    lane = SUM if pair[1] == "gone" else COMPUTE
    return Step(name, lane.name, kind, (*reads, *routes_of(p)), writes, after, waits)


def _copy(
    p: Problem, grid: Grid, name: str, of: tuple[int, int], pair: tuple[Region, Region],
    after: tuple[str, ...],
) -> Step:  # fmt: skip
    """To a neighbour, who is told of it, or within this rank.

    Args:
        of: which island's rows they are, and how many places on the neighbour is.
    """
    d, place = of
    post = (grid.post(place, d, 0) if d else grid.post(place),) if place else ()
    return Step(name, "copy", "copy", (pair[0], *routes_of(p)), pair[1:], after, posts=post)


def _exchange(p: Problem, grid: Grid, name: str, d: int, pair: tuple[str, str]) -> Step:
    """What a step before it has made for the island d on; and what that many back has for this."""
    source, target = Region(pair[0], ME, _island(grid, d)), Region(pair[1], ME, _island(grid, -d))
    made = (f"pick_{d}" if pair[0] == "out" else f"join_{d}",)
    reads = source, *routes_of(p)
    return Step(name, "nic", "exchange", reads, (target,), made, args=(("to", d),))


def _all_to_all(p: Problem, source: str, target: str) -> Step:
    reads = Region(source), *routes_of(p)
    return collective("all_to_all", "all_to_all", reads, Region(target))


def _plan(p: Problem, buffers: tuple[Buffer, ...], steps: list[Step]) -> Plan:
    used = {step.lane for step in steps}
    lanes = tuple(lane for lane in LANES if lane.name in used)
    return Plan(p, "islands", "", "grid", buffers, lanes, tuple(steps))


def wants(p: Problem) -> str:
    """What such a plan wants of a problem that it does not have, or ""."""
    if why := islands.refusal(p):
        return why
    if p.counts == "device_routed":
        return expert_rails.refusal(p)
    return "" if p.counts in ("equal", "routed") else "equal counts, or routes"


Build = Callable[[Problem, Grid, tuple[Buffer, ...]], Plan]


def family(
    build: Build, on_rails: Build, operands: Callable[[Problem], tuple[Buffer, ...]]
) -> Family:
    """The family of one of the two operators of experts.

    Args:
        on_rails: where the device alone knows the routes.
    """

    def built(p: Problem, *_: object) -> Plan:
        grid = Grid(p.islands, p.ranks // p.islands, chunks=1)
        return (on_rails if p.counts == "device_routed" else build)(p, grid, operands(p))

    return Family(name="islands", islands=True, wants=wants, build=built)
