"""all_gather_matmul: y[M, N] = gather(x)[M, K] w[K, N], and its families of plans.

Every family that signals opens with a barrier on the signal lane: it says that all ranks have left
the call before, so peers may write the shared buffers. It hides behind the first matmul, and it
makes calls of any plans, eager or replayed from a graph, safe on one workspace in any order.

Several weights, y_i = gather(x) w_i, are gathered for once and multiplied one after another. With a
gated activation two of them are one step: see activated.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from counterpoint.plan.bind import Box
from counterpoint.plan.definition import bias, gathered
from counterpoint.plan.names import (
    LANES,
    OWN,
    X,
    Y,
    bias_row,
    collective,
    in_one_lane,
    numbered,
    weights,
    with_bias,
)
from counterpoint.plan.operation import Operation, Peers, in_a_row, nothing
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.plan.values import Activated, Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules import direct, finer, grading, island_matmuls, islands
from counterpoint.schedules.makespan import finer_s, gather_s
from counterpoint.schedules.peers import Order, cuts, orders
from counterpoint.schedules.sizes import check_activated, wants_one_weight

GROUPS: dict[int, tuple[str, ...]] = {
    2: ("2",),
    4: ("4", "1/3", "2/2", "1/1/2", "1/2/1"),
    8: ("8", "2/6", "1/7", "1/2/5", "1/3/4", "1/1/6", "1/1/2/4", "2/2/4", "1/1/1/2/3"),
}  # of shards, worth weighing for so many ranks; for others graded chooses its own
LARGE_COPY = 16 << 20  # bytes of a shard of x that is worth two copies


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x is the shard, y the whole."""
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True, holds="own")
    w = (Buffer(f"w{i}", (p.k, n), p.dtype, "input") for i, n in numbered(p, p.n))
    y = (Buffer(f"y{i}", (p.m, n), p.dtype, "output", split=True) for i, n in results(p))
    return x, *w, *bias_row(p), *y


def results(p: Problem) -> list[tuple[str, int]]:
    """What stands behind the name of each y, and its columns."""
    return [("", p.y_columns)] if p.gated else numbered(p, p.n)


def matmuls(
    p: Problem,
    name: str,
    x: Region,
    y: Region,
    *,
    after: tuple[str, ...] = (),
    waits: tuple[Signal, ...] = (),
) -> tuple[Step, ...]:
    """x w (+ bias) -> y on the compute lane, one step for each y; the first of them waits."""
    added, args = with_bias(p)
    steps: list[Step] = []
    for i, _ in results(p):
        by = weights(p) if p.gated else (Region(f"w{i}"),)
        reads, writes = (x, *by, *added), (replace(y, buffer=f"y{i}"),)
        full_name = f"{name}_w{i}" if i else name
        steps.append(Step(full_name, "compute", "matmul", reads, writes, after, waits, args=args))
        after, waits = (), ()
    return tuple(steps)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then one matmul: what users do today."""
    full = Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True)
    gather = collective("gather", "all_gather", (X,), Region("full"))
    multiply = matmuls(p, "matmul", Region("full"), Y)
    return in_one_lane(p, "serial", (*operands(p), full), gather, *multiply)


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return matmuls(p, "matmul", X, Y)


def graded(p: Problem, groups: tuple[int, ...], peers: Peers, chunks: int = 1) -> Plan:
    """Gather shard by shard; one matmul for each group of shards, as groups arrive.

    Group 0 holds this rank's own shard; alone, it is read where the user has it. With `chunks`,
    the shard that arrives last, a group of its own, comes and is multiplied in chunks: where copies
    take longer than matmuls, only the matmul of its last chunk is left at the end.

    Each rank pushes its shard into its peers' `full`, straight from the user's tensor, and posts a
    signal behind it.
    """
    order = Order(peers, p.ranks)
    own_alone = groups[0] == 1
    multiplied: list[tuple[Step, ...]] = []
    start = 0
    for i, size in enumerate(groups):
        distances = range(start, start + size)
        shards = tuple(order.source(d) for d in distances)
        last = i == len(groups) - 1
        for suffix, chunk in cuts(chunks if last else 1):
            waits = tuple(order.wait(p.ranks + d + chunk[0], d) for d in distances if d > 0)
            # the lane orders those that wait later
            after = ("open",) if i == 1 and own_alone and chunk[0] == 0 else ()
            source = X if i == 0 and own_alone else Region("full", shards=shards, chunk=chunk)
            target = Region("y", shards=shards, chunk=chunk)
            name = f"matmul_{i}{suffix}"
            multiplied.append(matmuls(p, name, source, target, after=after, waits=waits))
        start += size

    if not own_alone:
        # what is pushed to is shared: peers may still be at it in the call before
        kept = Region("full", shards=OWN)
        multiplied.insert(0, (Step("keep", "compute", "move", (X,), (kept,), ("open",)),))
    head, *rest = multiplied
    opening = order.barrier("open", "signal", 0)
    steps = (opening, *head, *push_shards(order, chunks), *chain.from_iterable(rest))
    full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True)
    buffers = (*operands(p), full)
    return Plan(p, *grading.named(groups, peers, chunks), peers, buffers, LANES, steps)


def push_shards(order: Order, chunks: int) -> tuple[Step, ...]:
    """My shard into each peer's `full`, nearest first, each chunk with its signal."""
    return tuple(
        Step(f"push_{d}{suffix}", "copy", "copy", (Region("x", chunk=chunk),),
             (Region("full", order.to(d), OWN, chunk),),
             after=("open",) if d == 1 and chunk[0] == 0 else (),
             posts=(order.post(order.ranks + d + chunk[0], d),))
        for d in order.distances
        for suffix, chunk in cuts(chunks if d == order.farthest else 1)
    )  # fmt: skip


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y_i on `rank`: for each shard its product with my weight, plus my bias; or its activation."""
    for suffix, n in results(p):
        factors = weights(p) if p.gated else (Region(f"w{suffix}"),)
        for s in range(p.ranks):
            rows = p.row_starts[s], p.row_starts[s + 1]
            of = tuple(
                normal((*gathered(p, "x", s, w.buffer, rank, p.k), *bias(p, rank))) for w in factors
            )
            value = (Activated(p.activation, of),) if p.activation else of[0]
            yield Box(rank, f"y{suffix}", 0, *rows, 0, n), value


def filled(p: Problem) -> Mapping[str, object]:
    """Gate and up are the halves of N."""
    halves = p.gated and not p.splits and p.n % 2 == 0
    return {**nothing(p), **({"splits": (p.n // 2,) * 2} if halves else {})}


def of_islands(p: Problem, grid: islands.Grid) -> Plan:
    """Rows of other islands as they come."""
    return island_matmuls.gather(p, grid, operands(p), partial(matmuls, p))


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing on so many ranks, serial first."""
    if p.islands > 1:
        return islands.candidates(p)
    groups = GROUPS.get(p.ranks, ())
    powers = len(orders(p.ranks)) > 1
    found = ["serial", "direct", *(f"shard_p2p {peers}" for peers in orders(p.ranks))]
    found += [f"graded {g} ring" for g in groups] or ["graded ring"]
    # ring groups wrap on some ranks, xor groups are contiguous on all
    finest = sorted(groups, key=lambda g: -g.count("/"))[:4]
    found += [f"graded {g} xor" for g in finest if powers and "/" in g]
    found += ["shard_p2p ring chunks=2", "shard_p2p xor chunks=4"][: 1 + powers]
    return (*found, *(f"{name} ring" for name in finer.NAMES))


def _overlapped(p: Problem, copy_longer: bool) -> str:
    large = max(p.rows) * p.x_row_bytes >= LARGE_COPY
    return "shard_p2p ring chunks=2" if copy_longer and large else "shard_p2p ring"


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        direct.family(serial, direct.refusal_of_gather),
        *grading.families(graded, gather_s, in_chunks=-1),
        *finer.families(operands, finer.gather, partial(finer_s, gathers=True), wants_one_weight),
        islands.family(of_islands, islands.refusal),
    ),
    candidates=candidates,
    collectives=("all_gather",),
    check=check_activated,
    moved=lambda p: (p.x_row_bytes // p.item_bytes, 0),
    overlapped=_overlapped,
    invariant=True,
    rule=lambda p, machine: "" if direct.refusal_of_gather(p) else "direct",
    filled=filled,
    scales=True,
    activations=True,
)  # fmt: skip
