"""The family "islands" of embedding bags: chunks of what goes to another island, beside lookups.

A lookup pools a chunk of the bags of another island, as it is sent, into memory of this rank. The
NIC's lane then exchanges it with the rank of the same place there, a rail, while the lookup of the
next chunk runs: the lane sends, not the kernel. What has come is one rank's columns for all bags of
this island, and each rank copies the rows of its own to their place, as it does what its own
island's ranks have pooled. A row crosses between islands once by any plan; rails make of it one
message of an island's bags, where a library sends one to each rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from counterpoint.plan.steps import ME, Buffer, Peer, Plan, Region, Step
from counterpoint.problem import Problem
from counterpoint.schedules.islands import OWN, Grid, exchange, plan_of
from counterpoint.schedules.peers import Chunk

# a step by its name, and the bags that it pools and where they go
Lookup = Callable[[str, Region, Region], Step]


def build(p: Problem, grid: Grid, buffers: tuple[Buffer, ...], lookup: Lookup) -> Plan:
    """Lookups for other islands, each with its exchange, then own bags and what has come.

    Args:
        buffers: the user's; the first has all bags, as wide as the widest rank's.
    """
    bags, _ = buffers
    steps = [*grid.opening(), *_sent(grid, lookup)]
    here = tuple((0, place) for place in range(grid.size))
    near = Region("near", ME, here, cols="own")
    if grid.size == 1:
        near = Region("y", cols="own")
    posts = tuple(grid.post(place) for place in grid.near)
    own = lookup("lookup_near", Region("bags", ME, here, cols="own"), near)
    steps.append(replace(own, after=grid.opened, posts=posts))
    taken = [_taken(grid, f"take_{name}", f"come_{d}", d, chunk) for d, name, chunk in grid.pieces]
    if grid.size > 1:  # before the last chunk of each island, for which it then does not wait
        taken.insert(-len(grid.far), _taken(grid, "take_near", "near", 0, (0, 1)))
    island = replace(bags, name="near", space=grid.space, holds="island")
    own_memory = [replace(bags, name="far", space="scratch", chunks=grid.chunks)]
    own_memory += [island] if grid.size > 1 else []
    own_memory += (replace(island, name=f"come_{d}", chunks=grid.chunks) for d in grid.far)
    return plan_of(p, grid, (*buffers, *own_memory), [*steps, *taken])


def _sent(grid: Grid, lookup: Lookup) -> Iterator[Step]:
    """Each chunk for another island: pooled, and exchanged for one of this island's."""
    for d, name, chunk in grid.pieces:
        there, here = (tuple((to, place) for place in range(grid.size)) for to in (d, 0))
        far = Region("far", ME, there, chunk, cols="own")
        yield lookup(f"lookup_{name}", replace(far, buffer="bags"), far)
        come = Region(f"come_{d}", ME, here, chunk, cols="own", of=(-d, 0))
        after = (f"lookup_{name}", *(grid.opened if (d, chunk[0]) == (1, 0) else ()))
        posts = tuple(grid.post(place, d, chunk[0]) for place in grid.near)
        yield replace(exchange(f"give_{name}", d, far, come, after), posts=posts)


def _taken(grid: Grid, name: str, buffer: str, d: int, chunk: Chunk) -> Step:
    """Rows of own bags, of what each rank of this island has pooled, or has got from its rail."""
    reads: list[Region] = []
    writes: list[Region] = []
    for place in range(grid.size):
        at: Peer = (0, -place) if place else ME
        reads.append(Region(buffer, at, OWN, chunk, cols="own", of=(-d, -place)))
        writes.append(Region("y", chunk=chunk, cols="own", of=(-d, -place)))
    after = (name.replace("take", "give" if d else "lookup"),)
    waits = grid.waits(d, chunk[0]) if d else grid.waits()
    return Step(name, "copy", "copy", tuple(reads), tuple(writes), after, waits)
