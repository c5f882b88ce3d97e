"""matmul_reduce_scatter: y_r = rows of rank r of the sum over ranks of x_s w_s, and its families.

Partial results are pushed into the slot that their owner keeps for the sender, in the output
dtype; the owner sums the slots in fp32 and rounds once. Own rows are computed last and stay.

Of several products, x w is the sum of x_i w_i, rounded after each, as the matmul library adds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from counterpoint.machine import Machine
from counterpoint.plan import names
from counterpoint.plan.bind import Box
from counterpoint.plan.definition import bias, scattered
from counterpoint.plan.names import (
    LANES,
    OWN,
    X,
    Y,
    bias_row,
    collective,
    in_one_lane,
    numbered,
    with_bias,
)
from counterpoint.plan.operation import Operation, Options, Peers, in_a_row
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules import direct, finer, grading, island_matmuls, islands, running_sum
from counterpoint.schedules.makespan import finer_s, scatter_s
from counterpoint.schedules.peers import Chunk, Order, cuts, orders
from counterpoint.schedules.sizes import check_products, wants_one_weight
from counterpoint.tensor_parallel import plan_fused_sum

GROUPS: dict[int, tuple[str, ...]] = {
    2: ("2",),
    4: ("4", "3/1", "2/2", "2/1/1", "1/2/1"),
    8: ("8", "6/2", "4/4", "4/3/1", "4/2/1/1", "3/2/2/1", "2/2/2/1/1", "2/2/2/2", "3/2/1/1/1"),
}  # of owners, worth weighing for so many ranks; for others graded chooses its own


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x has all rows, y this rank's."""
    parts = numbered(p, p.k)
    x = (Buffer(f"x{i}", (p.m, k), p.dtype, "input", split=True) for i, k in parts)
    w = (Buffer(f"w{i}", (k, p.n), p.dtype, "input") for i, k in parts)
    y = Buffer("y", (p.m, p.n), p.dtype, "output", split=True, holds="own")
    return *x, *w, *bias_row(p), y


def products(
    name: str, splits: Sequence[int], operands: tuple[str, str], x: Region, y: Region, *,
    onto: Region | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """x w -> y on the compute lane; of several products their sum, one step for each.

    Args:
        splits: of the problem; empty: one product.
        operands: what the buffers of x and w are called, but for their numbers.
        x: region of the first of them, read in the same way in each.
        y: where their sum goes.
        onto: what it is added to.
    """
    steps: list[Step] = []
    for i in range(len(splits)) or ("",):
        added = (y,) if steps else (onto,) if onto else ()
        left, right = (f"{operand}{i}" for operand in operands)
        reads = replace(x, buffer=left), Region(right), *added
        steps.append(Step(f"{name}_p{i}" if steps else name, "compute", "matmul", reads, (y,)))
    return tuple(steps)


def serial(p: Problem) -> Plan:
    """One matmul, then the library's reduce-scatter: what users do today."""
    partial = Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True)
    total = Buffer("total", (p.m, p.n), p.dtype, "scratch", split=True, holds="own")
    target = Region("total") if p.bias else Y
    steps = [
        *products("matmul", p.splits, ("x", "w"), X, Region("partial")),
        collective("reduce_scatter", "reduce_scatter", (Region("partial"),), target),
    ]
    if p.bias:
        added, args = with_bias(p)
        steps.append(Step("add_bias", "compute", "move", (target, *added), (Y,), args=args))
    buffers = (*operands(p), partial, *((total,) if p.bias else ()))
    return in_one_lane(p, "serial", buffers, *steps)


def graded(p: Problem, groups: tuple[int, ...], peers: Peers, chunks: int = 1) -> Plan:
    """One matmul for each group of owners, whose rows are pushed while the next one computes.

    The last group holds this rank's own rows. With `chunks`, the rows of the first owner, where it
    is a group of its own, are computed in parts, so that its push starts early; and those of the
    last come in parts, each of which is reduced while the next is on its way.
    """
    order = Order(peers, p.ranks)
    distances = [*order.distances, 0]
    steps: list[Step] = [order.barrier("open", "signal", 0)]
    start = 0
    for i, size in enumerate(groups):
        group = distances[start : start + size]
        owners = tuple(order.to(d) for d in group)
        early = chunks > 1 and i == 0 and size == 1
        for suffix, chunk in cuts(chunks if early else 1):
            rows = Region("x", shards=owners, chunk=chunk)
            target = Region("partial", shards=owners, chunk=chunk)
            steps += products(f"matmul_{i}{suffix}", p.splits, ("x", "w"), rows, target)
            if early:
                steps.append(_push(order, group[0], suffix, chunk, (steps[-1].name,)))
        if not early:
            computed = steps[-1].name
            for d in (d for d in group if d > 0):
                # the first push of a group waits for its matmul; the lane orders the others
                after = (computed,) if d == group[0] else ()
                parts = cuts(chunks if d == order.farthest else 1)
                steps += [
                    _push(order, d, *part, after if part[1][0] == 0 else ()) for part in parts
                ]
        start += size
    added, args = with_bias(p)
    for suffix, chunk in cuts(chunks):
        arrivals = [d for d in order.distances if chunk[0] == 0 or d == order.farthest]
        slots = [Region("slots", shards=(order.source(d),), chunk=chunk) for d in order.distances]
        reads = (*slots, Region("partial", shards=OWN, chunk=chunk), *added)
        waits = tuple(
            order.wait(p.ranks + d + (chunk[0] if d == order.farthest else 0), d) for d in arrivals
        )
        after = ("open",) if chunk[0] == 0 else ()
        target = Region("y", chunk=chunk)
        steps.append(Step(f"reduce{suffix}", "compute", "reduce", reads, (target,), after, waits,
                          args=args))  # fmt: skip

    buffers = (
        *operands(p),
        Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True),
        Buffer("slots", (p.m, p.n), p.dtype, "symmetric", split=True, holds="slots"),
    )
    return Plan(p, *grading.named(groups, peers, chunks), peers, buffers, LANES, tuple(steps))


def _push(order: Order, d: int, suffix: str, chunk: Chunk, after: tuple[str, ...]) -> Step:
    """Partial rows of the rank at distance d into my slot there.

    Of the farthest rank's rows each part has its signal, of others the last part.
    """
    if d == 1 and chunk[0] == 0:
        after = (*after, "open")
    source = Region("partial", shards=(order.to(d),), chunk=chunk)
    target = Region("slots", order.to(d), OWN, chunk)
    posts = ()
    if d == order.farthest:
        posts = (order.post(order.ranks + d + chunk[0], d),)
    elif chunk[0] == chunk[1] - 1:
        posts = (order.post(order.ranks + d, d),)
    return Step(f"push_{d}{suffix}", "copy", "copy", (source,), (target,), after, posts=posts)


def of_islands(p: Problem, grid: islands.Grid) -> Plan:
    """Rows of other islands first, summed inside this one."""
    return island_matmuls.scatter(p, grid, operands(p), _multiplied(p))


def _in_a_ring(p: Problem, options: Options, machine: Machine) -> Plan:
    return running_sum.scatter(p, operands(p), _multiplied(p), Y, options.chunks)


def _multiplied(p: Problem) -> Callable[..., tuple[Step, ...]]:
    """The steps of a product by its name and its regions of x and y."""

    def multiplied(name: str, x: Region, y: Region, onto: Region | None = None) -> tuple[Step, ...]:
        return products(name, p.splits, ("x", "w"), x, y, onto=onto)

    return multiplied


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return products("matmul", p.splits, ("x", "w"), X, Y) if p.splits else names.alone(p)


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y on `rank`: its rows of the sum of all ranks' products, plus its bias."""
    terms = (scattered(p, f"x{i}", f"w{i}", rank, k) for i, k in numbered(p, p.k))
    value = normal((*chain.from_iterable(terms), *bias(p, rank)))
    yield Box(rank, "y", 0, 0, p.rows[rank], 0, p.n), value


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing on so many ranks, serial first."""
    if p.islands > 1:
        return islands.candidates(p)
    groups = GROUPS.get(p.ranks, ())
    powers = len(orders(p.ranks)) > 1
    found = ["serial", "direct", "fused", *(f"shard_p2p {peers}" for peers in orders(p.ranks))]
    found += [f"graded {g} ring" for g in groups] or ["graded ring"]
    found += [f"graded {g} xor" for g in groups if "/" in g][2:6] if powers else []
    found += [f"shard_p2p ring chunks={n}" for n in (2, 4)]
    # of more ranks each further matmul that adds takes what the sum would
    found += ["running_sum chunks=2"] if p.ranks == 2 else []
    found += [f"graded {g} ring chunks=2" for g in groups if g.startswith("1/")]
    return (*found, *(f"{name} ring" for name in finer.NAMES))


def _overlapped(p: Problem, copy_longer: bool) -> str:
    return "shard_p2p ring chunks=2" if copy_longer else "shard_p2p ring"


def _rule(p: Problem, machine: Machine) -> str:
    if not plan_fused_sum.refusal_of_scatter(p) and plan_fused_sum.is_few(p, machine):
        return "fused"
    return "" if direct.refusal_of_scatter(p) else "direct"


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        direct.family(serial, direct.refusal_of_scatter),
        plan_fused_sum.family(operands, scatters=True),
        *grading.families(graded, scatter_s, in_chunks=0),
        *finer.families(
            operands, finer.scatter, partial(finer_s, gathers=False), wants_one_weight
        ),
        running_sum.family(_in_a_ring, running_sum.guess_s),
        islands.family(of_islands),
    ),
    candidates=candidates,
    collectives=("reduce_scatter",),
    check=check_products,
    moved=lambda p: (0, p.n),
    overlapped=_overlapped,
    invariant=True,
    rule=_rule,
    scales=True,
)  # fmt: skip
