"""Matmuls in turns with exchanges between islands: a gather, a reduce-scatter, an all-reduce.

A matmul takes all SMs, and an exchange that becomes ready beside it waits for its end. So each turn
begins with an exchange, and a matmul that comes after the exchange before. Neither then waits for
the other in vain, whichever is longer.

In a gather, rows of this island are multiplied while those of others are on their way. A
reduce-scatter is the mirror of that: what another island owns is multiplied first and summed inside
this one, and one block of it is sent.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise

from counterpoint.plan.compose import without_implied_edges
from counterpoint.plan.names import Y, with_bias
from counterpoint.plan.steps import ME, Buffer, Peer, Plan, Region, Signal, Step
from counterpoint.problem import Problem
from counterpoint.schedules.islands import OWN, Grid, arrivals, copied, exchange, giving, plan_of
from counterpoint.schedules.peers import Chunk, cuts

Matmuls = Callable[..., tuple[Step, ...]]
Steps = tuple[Step, ...]


def gather(p: Problem, grid: Grid, buffers: tuple[Buffer, ...], matmuls: Matmuls) -> Plan:
    """An all-gather beside its matmuls: rows of this island first, those of others as they come.

    Rows of another island are multiplied a turn after they were given; where they have to be passed
    on inside, two turns after.

    Args:
        buffers: the user's.
        matmuls: steps of the compute lane: name, region of x, region of y, after=, waits=.
    """

    def multiply(
        name: str, shards: tuple[Peer, ...], chunk: Chunk,
        after: tuple[str, ...] = (), waits: tuple[Signal, ...] = (),
    ) -> Steps:  # fmt: skip
        x = Region("x", chunk=chunk) if shards == OWN else Region("full", ME, shards, chunk)
        y = Region("y", ME, shards, chunk)
        return matmuls(f"matmul_{name}", x, y, after=after, waits=waits)

    given = [*giving(grid, Region("x"), grid.opened)]
    exchanges = [step for step in given if step.kind == "exchange"]
    copies = iter([step for step in given if step.kind == "copy"])
    far = [multiply(*each) for each in arrivals(grid) if each[0] != "near"]
    late = 2 if grid.near else 1
    near: list[Steps] = []
    # so many that there is one until the first rows of another island are there
    for name, places, chunk in own_island(grid, min(len(exchanges), max(grid.chunks, late))):
        shards = tuple((0, -place) for place in places) or OWN
        heard = [Signal(grid.slot(place), (0, -place)) for place in places if chunk[0] == 0]
        after = () if near else grid.opened
        near.append(multiply(name, shards, chunk, after, tuple(heard)))
    steps = [*grid.opening()]
    for i, step in enumerate(exchanges):
        turn = [*near[i : i + 1], *far[max(i - late, 0) : max(i - late + 1, 0)]]
        if grid.near and i == 0:
            turn.insert(0, multiply("own", OWN, (0, 1)))
        steps += [step, *begun(turn[:1], exchanges[:i])]
        # of its own rows to all others, then of what came in the turn before
        steps += [*islice(copies, len(grid.near)), *chain.from_iterable(turn[1:])]
    steps += [*copies, *chain.from_iterable(far[max(len(exchanges) - late, 0) :])]
    full = Buffer("full", (p.m, p.k), p.dtype, grid.space, split=True)
    return plan_of(p, grid, (*buffers, full), [*without_implied_edges(steps)])


def scatter(
    p: Problem, grid: Grid, buffers: tuple[Buffer, ...], matmuls: Matmuls, y: Region = Y
) -> Plan:
    """A reduce-scatter beside its matmuls: others' rows first, summed inside, sent as one block.

    A slot is for the partial rows of (islands on, places on) from that place: own rows of an island
    d on are summed where they were computed, and what comes from an island d back takes their slot.
    While peers push what is to be summed, one more block is multiplied.

    Args:
        buffers: the user's.
        matmuls: steps of the compute lane: name, region of x, region of the product.
        y: own rows of the result.
    """

    def multiply(name: str, d: int, places: Iterable[int], chunk: Chunk = (0, 1)) -> Steps:
        """Partial rows of ranks of the island d on, and those to the rank of that place in this."""
        shards = tuple((d, place) for place in places)
        rows = (Region(buffer, ME, shards, chunk) for buffer in ("x", "partial"))
        product = matmuls(f"matmul_{name}", *rows)
        after, pushed = (product[-1].name, *grid.opened), list[Step]()
        of = name.removeprefix("far_").replace("near", "0")
        for _, place in shards:
            if place:
                source = Region("partial", ME, ((d, place),), chunk)
                target = Region("slots", (0, place), ((d, 0),), chunk)
                # of this island's rows the last part tells of all
                told = grid.told(place, d, chunk[0]) if d or chunk[0] == chunk[1] - 1 else ()
                pushed.append(copied(grid, f"push_{of}_{place}", source, target, after, told))
                after = ()
        return *product, *pushed

    pieces = [*grid.pieces]
    far = [multiply(f"far_{name}", d, range(grid.size), chunk) for d, name, chunk in pieces]
    here = [multiply(name, 0, places or (0,), chunk)
            for name, places, chunk in own_island(grid, grid.chunks)]  # fmt: skip
    here += [multiply("own", 0, (0,))] if grid.near else []
    first, turns = in_turns(far, here, 2 if grid.near else 1)
    steps, sent = [*grid.opening(), *chain.from_iterable(first)], list[Step]()
    for (d, name, chunk), product, turn in zip(pieces, far, turns, strict=True):
        own, come = (Region(*of, chunk) for of in (("partial", ME, ((d, 0),)),
                                                   ("slots", ME, ((-d, 0),))))  # fmt: skip
        done = next(step.name for step in reversed(product) if step.kind == "matmul")
        if grid.near:
            slots = (Region("slots", ME, ((d, -place),), chunk) for place in grid.near)
            done = f"sum_{name}"
            steps.append(Step(done, "compute", "reduce", (*slots, own), (own,), grid.opened,
                              grid.waits(d, chunk[0])))  # fmt: skip
        sent.append(exchange(f"send_{name}", d, own, come, (done,)))
        steps += [sent[-1], *begun(turn, sent[:-1])]
    slots = [(0, -place) for place in grid.near] + [(-d, 0) for d in grid.far]
    added, args = with_bias(p)
    reads = (*(Region("slots", ME, (each,)) for each in slots), Region("partial", ME, OWN), *added)
    steps.append(Step("reduce", "compute", "reduce", reads, (y,), (sent[-1].name,),
                      grid.waits(), args=args))  # fmt: skip
    partial = Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True)
    inbox = Buffer("slots", (p.m, p.n), p.dtype, grid.space, split=True, holds="slots")
    return plan_of(p, grid, (*buffers, partial, inbox), [*without_implied_edges(steps)])


def own_island(grid: Grid, parts: int) -> list[tuple[str, tuple[int, ...], Chunk]]:
    """The blocks of this island in parts that run beside exchanges: names, whose, which part.

    They are other ranks', some in each part: rows of one block lie together. Of few ranks, parts
    are of all blocks, and of an island of one rank, of its own.
    """
    if len(grid.near) < parts or not grid.near:
        name = "near" if grid.near else "own"
        return [(f"{name}{suffix}", (*grid.near,), chunk) for suffix, chunk in cuts(parts)]
    bounds = [1 + i * len(grid.near) // parts for i in range(parts + 1)]
    return [
        (f"near{suffix}", (*range(first, end),), (0, 1))
        for (suffix, _), (first, end) in zip(cuts(parts), pairwise(bounds), strict=True)
    ]


def in_turns(
    far: list[Steps], here: list[Steps], ahead: int
) -> tuple[list[Steps], list[list[Steps]]]:
    """Blocks that are multiplied before the first exchange, `ahead` of them, and beside each.

    Args:
        far: of other islands; each has an exchange.
        here: of this one: the last exchanges have them beside them.
    """
    first, rest = [*far, *here][:ahead], [*far, *here][max(len(far), ahead) :]
    turns = [far[i + ahead : i + ahead + 1] for i in range(len(far))]
    for i, steps in enumerate(rest, max(len(far) - len(rest), 0)):
        turns[min(i, len(far) - 1)].append(steps)
    return first, turns


def begun(turn: Iterable[Steps], before: Sequence[Step]) -> list[Step]:
    """The steps of a turn, the first of which comes after the last exchange before."""
    steps = [*chain.from_iterable(turn)]
    if steps and before:
        steps[0] = replace(steps[0], after=(*steps[0].after, before[-1].name))
    return steps


def all_reduce(
    p: Problem, grid: Grid, buffers: tuple[Buffer, ...], matmuls: Matmuls, last: Iterable[Step]
) -> Plan:
    """A reduce-scatter beside its matmuls, whose sums go on to all ranks.

    Args:
        buffers: the user's.
        matmuls: as of `scatter`.
        last: what is done when all are there.
    """
    shares = replace(p, op="matmul_reduce_scatter", bias=False)
    own = Region("y", ME, OWN)
    first = scatter(shares, grid, buffers, matmuls, own)
    again = replace(grid, first_slot=first.num_slots)
    steps = [*first.steps, *giving(again, own, ("reduce",))]
    for name, shards, chunk, after, waits in arrivals(again):
        source, target = (Region(b, ME, shards, chunk) for b in ("full", "y"))
        steps.append(Step(f"take_{name}", "compute", "move", (source,), (target,), after, waits))
    pushed = (f"push_{grid.size - 1}",) if grid.size > 1 else ()
    steps += (replace(step, after=pushed) for step in last)
    full = Buffer("full", (p.m, p.n), p.dtype, grid.space, split=True)
    return plan_of(p, grid, (*first.buffers, full), steps)
