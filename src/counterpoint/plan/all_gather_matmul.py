"""Families of all_gather_matmul: y[M, N] = gather(x)[M, K] w[K, N].

Every family but serial opens with a barrier on the signal lane: it says that all ranks have left
the call before, so peers may write the shared buffers. It hides behind the first matmul, and it
makes calls of any plans, eager or replayed from a graph, safe on one workspace in any order.

Several weights, y_i = gather(x) w_i, are gathered for once and multiplied one after another.
"""

from dataclasses import replace
from itertools import chain
from typing import Literal

from counterpoint.plan.peers import Order, cuts
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Signal, Step
from counterpoint.problem import Problem

Direction = Literal["push", "pull"]
Peers = Literal["ring", "xor"]

COMPUTE = Lane("compute", "sm")
SIGNAL = Lane("signal", "sm", priority=-1)
COPY = Lane("copy", "copy", priority=-1)

OWN = ((0,),)  # the block of this rank
X, W, BIAS, Y = Region("x"), Region("w"), Region("bias"), Region("y")


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x is the shard, y the whole."""
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True, holds="own")
    w = (Buffer(f"w{i}", (p.k, n), p.dtype, "input") for i, n in weights(p))
    y = (Buffer(f"y{i}", (p.m, n), p.dtype, "output", split=True) for i, n in weights(p))
    return x, *w, *bias_row(p), *y


def weights(p: Problem) -> list[tuple[str, int]]:
    """What stands behind the w and the y of each weight, and its columns."""
    return [(str(i), n) for i, n in enumerate(p.splits)] or [("", p.n)]


def bias_row(p: Problem) -> tuple[Buffer, ...]:
    """The bias [1, N], where the problem has one."""
    return (Buffer("bias", (1, p.n), p.dtype, "input"),) if p.bias else ()


def matmuls(
    p: Problem,
    name: str,
    x: Region,
    y: Region,
    *,
    after: tuple[str, ...] = (),
    waits: tuple[Signal, ...] = (),
) -> tuple[Step, ...]:
    """x w (+ bias) -> y on the compute lane, one step for each weight; the first of them waits."""
    bias = (BIAS,) if p.bias else ()
    args = (("bias", 1),) if p.bias else ()
    steps: list[Step] = []
    for i, _ in weights(p):
        reads, writes = (x, Region(f"w{i}"), *bias), (replace(y, buffer=f"y{i}"),)
        full_name = f"{name}_w{i}" if i else name
        steps.append(Step(full_name, "compute", "matmul", reads, writes, after, waits, args=args))
        after, waits = (), ()
    return tuple(steps)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then one matmul: what users do today."""
    full = Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True)
    gather = Step("gather", "compute", "collective", (X,), (Region("full"),),
                  args=(("collective", "all_gather"),))  # fmt: skip
    steps = (gather, *matmuls(p, "matmul", Region("full"), Y))
    return Plan(p, "serial", "", "ring", (*operands(p), full), (COMPUTE,), steps)


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return matmuls(p, "matmul", X, Y)


def graded(
    p: Problem, groups: tuple[int, ...], peers: Peers, direction: Direction, pieces: int = 1
) -> Plan:
    """Gather shard by shard; one matmul for each group of shards, as groups arrive.

    Group 0 holds this rank's own shard; alone, it is read where the user has it. With `pieces`,
    the shard that arrives last, a group of its own, comes and is multiplied in parts: where copies
    take longer than matmuls, only the matmul of its last part is left at the end.

    push: each rank writes its shard into its peers' `full`, straight from the user's tensor, and
    posts a signal; pull: it stages its shard, and its peers read it.
    """
    order = Order(peers, p.ranks)
    own_alone = groups[0] == 1
    pushes = direction == "push"
    multiplied: list[tuple[Step, ...]] = []
    start = 0
    for i, size in enumerate(groups):
        distances = range(start, start + size)
        meet = order.source if pushes else order.to
        shards = tuple(meet(d) for d in distances)
        last = i == len(groups) - 1
        for suffix, piece in cuts(pieces if last else 1):
            after, waits = (), ()
            if pushes:
                waits = tuple(order.wait(p.ranks + d + piece[0], d) for d in distances if d > 0)
                # the lane orders those that wait later
                after = ("open",) if i == 1 and own_alone and piece[0] == 0 else ()
            elif distances[-1] > 0:
                after = (f"pull_{distances[-1]}{suffix}",)
            source = X if i == 0 and own_alone else Region("full", shards=shards, piece=piece)
            target = Region("y", shards=shards, piece=piece)
            name = f"matmul_{i}{suffix}"
            multiplied.append(matmuls(p, name, source, target, after=after, waits=waits))
        start += size

    if not own_alone:
        # what is pushed to is shared: peers may still be at it in the call before
        after = ("open",) if pushes else ()
        kept = Region("full", shards=OWN)
        multiplied.insert(0, (Step("keep", "compute", "move", (X,), (kept,), after),))
    head, *rest = multiplied
    transfers = push_shards(order, pieces) if pushes else pull_shards(order, pieces)
    opening = order.barrier("open", "signal", 0)
    steps = (opening, *head, *transfers, *chain.from_iterable(rest))
    buffers = (*operands(p), *gathered(p, direction))
    family = "shard_p2p" if set(groups) == {1} else "graded"
    sizes = "" if family == "shard_p2p" else "/".join(map(str, groups)) + " "
    tail = f" pieces={pieces}" if pieces > 1 else ""
    lanes = (COMPUTE, SIGNAL, COPY)
    return Plan(p, family, f"{sizes}{peers} {direction}{tail}", peers, buffers, lanes, steps)


def gathered(p: Problem, direction: Direction) -> tuple[Buffer, ...]:
    """The whole of x; with pull also the staged shard, which is then what peers see."""
    if direction == "push":
        return (Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True),)
    return (
        Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True),
        Buffer("stage", (p.m, p.k), p.dtype, "symmetric", split=True, holds="own"),
    )


def push_shards(order: Order, pieces: int) -> tuple[Step, ...]:
    """My shard into each peer's `full`, nearest first, each part with its signal."""
    return tuple(
        Step(f"push_{d}{suffix}", "copy", "copy", (Region("x", piece=piece),),
             (Region("full", order.to(d), OWN, piece),),
             after=("open",) if d == 1 and piece[0] == 0 else (),
             posts=(order.post(order.ranks + d + piece[0], d),))
        for d in order.distances
        for suffix, piece in cuts(pieces if d == order.farthest else 1)
    )  # fmt: skip


def pull_shards(order: Order, pieces: int) -> tuple[Step, ...]:
    """My shard into `stage`; a barrier, all are staged; each peer's into my `full`."""
    stage = Step("stage", "copy", "copy", (X,), (Region("stage"),), after=("open",))
    staged = order.barrier("staged", "signal", order.ranks, after=("stage",))
    pulls = (
        Step(f"pull_{d}{suffix}", "copy", "copy", (Region("stage", order.to(d), piece=piece),),
             (Region("full", shards=(order.to(d),), piece=piece),),
             after=("staged",) if d == 1 and piece[0] == 0 else ())
        for d in order.distances
        for suffix, piece in cuts(pieces if d == order.farthest else 1)
    )  # fmt: skip
    return stage, staged, *pulls
