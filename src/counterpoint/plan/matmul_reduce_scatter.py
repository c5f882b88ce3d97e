"""Families of matmul_reduce_scatter: y_r = rows of rank r of the sum over ranks of x_s w_s.

Partial results are pushed into the slot that their owner keeps for the sender, in the output
dtype; the owner sums the slots in fp32 and rounds once. Own rows are computed last and stay.
"""

from counterpoint.plan.all_gather_matmul import (
    BIAS,
    COMPUTE,
    COPY,
    OWN,
    SIGNAL,
    Peers,
    W,
    Y,
    bias_row,
)
from counterpoint.plan.peers import Order, Piece, cuts
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import Problem

X = Region("x")


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x has all rows, y this rank's."""
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True)
    y = Buffer("y", (p.m, p.n), p.dtype, "output", split=True, holds="own")
    return x, Buffer("w", (p.k, p.n), p.dtype, "input"), *bias_row(p), y


def serial(p: Problem) -> Plan:
    """One matmul, then the library's reduce-scatter: what users do today."""
    partial = Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True)
    total = Buffer("total", (p.m, p.n), p.dtype, "scratch", split=True, holds="own")
    target = Region("total") if p.bias else Y
    steps = [
        Step("matmul", "compute", "matmul", (X, W), (Region("partial"),)),
        Step("reduce_scatter", "compute", "collective", (Region("partial"),), (target,),
             args=(("collective", "reduce_scatter"),)),
    ]  # fmt: skip
    if p.bias:
        steps.append(Step("add_bias", "compute", "move", (target, BIAS), (Y,), args=(("bias", 1),)))
    buffers = (*operands(p), partial, *((total,) if p.bias else ()))
    return Plan(p, "serial", "", "ring", buffers, (COMPUTE,), tuple(steps))


def graded(p: Problem, groups: tuple[int, ...], peers: Peers, pieces: int = 1) -> Plan:
    """One matmul for each group of owners, whose rows are pushed while the next one computes.

    The last group holds this rank's own rows. With `pieces`, the rows of the first owner, where it
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
        early = pieces > 1 and i == 0 and size == 1
        for suffix, piece in cuts(pieces if early else 1):
            rows = Region("x", shards=owners, piece=piece)
            target = Region("partial", shards=owners, piece=piece)
            name = f"matmul_{i}{suffix}"
            steps.append(Step(name, "compute", "matmul", (rows, W), (target,)))
            if early:
                steps.append(_push(order, group[0], suffix, piece, (name,)))
        if not early:
            for d in (d for d in group if d > 0):
                # the first push of a group waits for its matmul; the lane orders the others
                after = (f"matmul_{i}",) if d == group[0] else ()
                parts = cuts(pieces if d == order.farthest else 1)
                steps += [
                    _push(order, d, *part, after if part[1][0] == 0 else ()) for part in parts
                ]
        start += size
    for suffix, piece in cuts(pieces):
        arrivals = [d for d in order.distances if piece[0] == 0 or d == order.farthest]
        slots = [Region("slots", shards=(order.source(d),), piece=piece) for d in order.distances]
        reads = (*slots, Region("partial", shards=OWN, piece=piece), *((BIAS,) if p.bias else ()))
        waits = tuple(
            order.wait(p.ranks + d + (piece[0] if d == order.farthest else 0), d) for d in arrivals
        )
        args = (("bias", 1),) if p.bias else ()
        after = ("open",) if piece[0] == 0 else ()
        target = Region("y", piece=piece)
        steps.append(Step(f"reduce{suffix}", "compute", "reduce", reads, (target,), after, waits,
                          args=args))  # fmt: skip

    buffers = (
        *operands(p),
        Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True),
        Buffer("slots", (p.m, p.n), p.dtype, "symmetric", split=True, holds="slots"),
    )
    family = "shard_p2p" if set(groups) == {1} else "graded"
    sizes = "" if family == "shard_p2p" else "/".join(map(str, groups)) + " "
    tail = f" pieces={pieces}" if pieces > 1 else ""
    lanes = (COMPUTE, SIGNAL, COPY)
    return Plan(p, family, f"{sizes}{peers}{tail}", peers, buffers, lanes, tuple(steps))


def _push(order: Order, d: int, suffix: str, piece: Piece, after: tuple[str, ...]) -> Step:
    """Partial rows of the rank at distance d into my slot there.

    Of the farthest rank's rows each part has its signal, of others the last part.
    """
    if d == 1 and piece[0] == 0:
        after = (*after, "open")
    source = Region("partial", shards=(order.to(d),), piece=piece)
    target = Region("slots", order.to(d), OWN, piece)
    posts = ()
    if d == order.farthest:
        posts = (order.post(order.ranks + d + piece[0], d),)
    elif piece[0] == piece[1] - 1:
        posts = (order.post(order.ranks + d, d),)
    return Step(f"push_{d}{suffix}", "copy", "copy", (source,), (target,), after, posts=posts)
