"""The family "islands": ranks on several islands, with NICs alone between them.

What goes to another island goes once: to the rank of the same place in it, a rail. What has come is
passed on inside, by copy engines. For what is multiplied meanwhile see `island_matmuls`.

Distances are of a grid: (islands on, places on within one). Each shard of another island comes in
`chunks`, so that the last one is passed on and multiplied while none is on its way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from counterpoint.machine import LinkSpec
from counterpoint.plan.names import COMPUTE, COPY, SIGNAL
from counterpoint.plan.operation import Family, Options
from counterpoint.plan.steps import ME, Buffer, Lane, Peer, Plan, Region, Signal, Space, Step
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Chunk, cuts

NIC = Lane("nic", "nic", priority=-1)
CHUNKS = 4
MOST_PIECES = 64  # of what comes to a rank, where plans are weighed
OWN: tuple[Peer, ...] = ((0, 0),)


@dataclass(frozen=True, slots=True)
class Grid:
    """The peers of a rank: `islands` of `size` ranks each.

    Args:
        chunks: of what goes to another island.
        first_slot: of its signals.
        part: what stands behind the names of steps, and of `full`, of one gather of several, for
            all of which is waited at once.
        copies: their lane.
    """

    islands: int
    size: int
    chunks: int
    first_slot: int = 0
    part: str = ""
    copies: Lane = COPY

    @property
    def far(self) -> range:
        """Distances of the other islands, nearest first."""
        return range(1, self.islands)

    @property
    def near(self) -> range:
        """Distances of the other ranks of this one."""
        return range(1, self.size)

    @property
    def cuts(self) -> list[tuple[str, Chunk]]:
        """Parts of what goes to another island, with what stands behind names."""
        return cuts(self.chunks)

    @property
    def pieces(self) -> Iterator[tuple[int, str, Chunk]]:
        """What goes between islands, in the order of all ranks: distance, name, chunk."""
        for suffix, chunk in self.cuts:
            for d in self.far:
                yield d, f"{d}{suffix}", chunk

    @property
    def space(self) -> Space:
        """Of memory that peers of an island write to."""
        return "symmetric" if self.size > 1 else "scratch"

    def slot(self, place: int, d: int = 0, chunk: int = 0) -> int:
        """Of signals between ranks `place` apart about a chunk of an island d on; 0: this one."""
        of = 1 + (d - 1) * self.chunks + chunk if d else 0
        return self.first_slot + self.size * (1 + of) + place

    def post(self, place: int, *of: int) -> Signal:
        """Tell the rank `place` on."""
        return Signal(self.slot(place, *of), (0, place))

    def waits(self, d: int = 0, chunk: int = 0) -> tuple[Signal, ...]:
        """Hear from all others of the island; that from place p on was posted at distance -p."""
        places = () if self.part and d != self.islands - 1 else self.near
        return tuple(Signal(self.slot(p, d, chunk), (0, -p)) for p in places)

    def told(self, place: int, d: int = 0, chunk: int = 0) -> tuple[Signal, ...]:
        """`post` behind a copy; where all is waited for at once, the last one of its lane."""
        return () if self.part and d != self.islands - 1 else (self.post(place, d, chunk),)

    def opening(self) -> tuple[Step, ...]:
        """The barrier of an island, where it has several ranks."""
        if self.size == 1:
            return ()
        posts, waits = (tuple(Signal(p, (0, sign * p)) for p in self.near) for sign in (1, -1))
        return (Step("open", "signal", "barrier", waits=waits, posts=posts),)

    @property
    def opened(self) -> tuple[str, ...]:
        """What uses of shared memory come after."""
        return ("open",) if self.size > 1 else ()


def grid_of(p: Problem, options: Options) -> Grid:
    """Of the ranks of a problem."""
    return Grid(p.islands, p.ranks // p.islands, options.chunks or CHUNKS)


def refusal(p: Problem) -> str:
    """What a gather wants that the problem does not have, or ""."""
    return "" if p.islands > 1 else "ranks of several islands"


def refusal_of_sum(p: Problem) -> str:
    """Likewise, where islands sum blocks of each other: a slot has room for its own rank's rows."""
    return refusal(p) or ("" if p.equal_rows else "equal rows on all ranks")


def giving(grid: Grid, own: Region, after: tuple[str, ...]) -> Iterator[Step]:
    """My rows into `full` of all ranks: to rails by the NIC, to peers, what has come to peers."""
    full, part = f"full{grid.part}", grid.part
    for d, name, chunk in grid.pieces:
        source, arrived = replace(own, chunk=chunk), Region(full, ME, ((-d, 0),), chunk)
        first = after if (d, chunk[0]) == (1, 0) else ()
        yield exchange(f"give_{name}{part}", d, source, arrived, first)
    for place in grid.near:
        target = Region(full, (0, place), OWN)
        first = after if place == 1 else ()
        yield copied(grid, f"push_{place}{part}", own, target, first, grid.told(place))
    for d, name, chunk in grid.pieces:
        arrived = Region(full, ME, ((-d, 0),), chunk)
        for place in grid.near:
            target = replace(arrived, at=(0, place))
            first = (f"give_{name}{part}",) if place == 1 else ()
            told = grid.told(place, d, chunk[0])
            yield copied(grid, f"pass_{name}_{place}{part}", arrived, target, first, told)


Arrival = tuple[str, tuple[Peer, ...], Chunk, tuple[str, ...], tuple[Signal, ...]]


def arrivals(grid: Grid, first: tuple[str, ...] = ()) -> Iterator[Arrival]:
    """What there is in `full` as it comes: name, shards, chunk, and what says that it is there.

    Args:
        first: what the first of them comes after.
    """
    if grid.size > 1:
        yield "near", tuple((0, -p) for p in grid.near), (0, 1), first, grid.waits()
    for d, name, chunk in grid.pieces:
        shards = tuple((-d, -place) for place in range(grid.size))
        given = (f"give_{name}{grid.part}",)
        yield f"far_{name}", shards, chunk, given, grid.waits(d, chunk[0])


def exchange(name: str, d: int, source: Region, target: Region, after: tuple[str, ...]) -> Step:
    """What goes to the rail d islands on, and comes from the one as many back."""
    args = (("to", d),)
    return Step(name, "nic", "exchange", (source,), (target,), after, args=args)


def copied(
    grid: Grid, name: str, source: Region, target: Region, after: tuple[str, ...] = (),
    posts: tuple[Signal, ...] = (),
) -> Step:  # fmt: skip
    """A copy inside the island."""
    return Step(name, grid.copies.name, "copy", (source,), (target,), after, posts=posts)


def plan_of(p: Problem, grid: Grid, buffers: tuple[Buffer, ...], steps: list[Step]) -> Plan:
    """The plan of those steps, on the lanes that they use."""
    used = {step.lane for step in steps}
    lanes = tuple(lane for lane in (COMPUTE, SIGNAL, grid.copies, NIC) if lane.name in used)
    return Plan(p, "islands", f"chunks={grid.chunks}", "grid", buffers, lanes, tuple(steps))


def family(
    build: Callable[[Problem, Grid], Plan], refusal: Callable[[Problem], str] = refusal_of_sum
) -> Family:
    """The family of an operator whose plans `build` makes."""
    return Family(
        name="islands", takes=("chunks",), islands=True, wants=refusal,
        build=lambda p, options, machine: build(p, grid_of(p, options)),
    )  # fmt: skip


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing on ranks of several islands, serial first; many are chunks enough."""
    chunks = (n for n in (1, 2, 4, 8) if n == 1 or n * p.islands <= MOST_PIECES)
    return ("serial", *(f"islands chunks={n}" for n in chunks))


def all_to_all_s(p: Problem, nic: LinkSpec, num_bytes: float) -> float:
    """Seconds of the library's all-to-all by NICs, of what a rank has for all other ranks.

    Its messages are under way together: the latency counts twice, from NIC to switch to NIC.
    """
    far = (p.ranks - p.ranks // p.islands) / (p.ranks - 1)
    return 2 * nic.latency_s + num_bytes * far / nic.bytes_per_s
