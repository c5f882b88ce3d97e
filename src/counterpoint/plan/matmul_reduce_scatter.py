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
from counterpoint.plan.peers import Order
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


def graded(p: Problem, groups: tuple[int, ...], peers: Peers, reduces: tuple[int, ...]) -> Plan:
    """One matmul for each group of owners, whose rows are pushed while the next one computes.

    The last group holds this rank's own rows. `reduces` are the numbers of slots of each
    reduction, in order of arrival: with more than one, those that arrive first are summed (in
    fp32) while the others are on their way; the own partial belongs to the last.
    """
    order = Order(peers, p.ranks)
    distances = [*order.distances, 0]
    steps: list[Step] = [order.barrier("open", "signal", 0)]
    start = 0
    for i, size in enumerate(groups):
        group = distances[start : start + size]
        owners = tuple(order.to(d) for d in group)
        rows = Region("x", shards=owners)
        target = Region("partial", shards=owners)
        steps.append(Step(f"matmul_{i}", "compute", "matmul", (rows, W), (target,)))
        # the first push of a group waits for its matmul; the lane orders the others
        steps.extend(
            _push(order, d, after=(f"matmul_{i}",) if d == group[0] else ()) for d in group if d > 0
        )
        start += size
    steps.extend(_reductions(p, order, reduces))

    buffers = [
        *operands(p),
        Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True),
        Buffer("slots", (p.m, p.n), p.dtype, "symmetric", split=True, holds="slots"),
    ]
    if len(reduces) > 1:
        sums = Buffer("sum", (p.m, p.n), "float32", "scratch", split=True, holds="own")
        buffers.append(sums)
    family = "shard_p2p" if set(groups) == {1} else "graded"
    sizes = "" if family == "shard_p2p" else "/".join(map(str, groups)) + " "
    staged = f" reduce={'/'.join(map(str, reduces))}" if len(reduces) > 1 else ""
    lanes = (COMPUTE, SIGNAL, COPY)
    return Plan(p, family, f"{sizes}{peers}{staged}", peers, tuple(buffers), lanes, tuple(steps))


def _push(order: Order, d: int, after: tuple[str, ...]) -> Step:
    """The partial rows of the rank at distance d into my slot there."""
    if d == 1:
        after = (*after, "open")
    source, target = Region("partial", shards=(order.to(d),)), Region("slots", order.to(d), OWN)
    posts = (order.post(order.ranks + d, d),)
    return Step(f"push_{d}", "copy", "copy", (source,), (target,), after=after, posts=posts)


def _reductions(p: Problem, order: Order, reduces: tuple[int, ...]) -> list[Step]:
    steps: list[Step] = []
    arrivals = list(order.distances)
    for i, size in enumerate(reduces):
        last = i == len(reduces) - 1
        now, arrivals = arrivals[:size], arrivals[size:]
        reads = [Region("sum")] if i else []
        reads += [Region("slots", shards=(order.source(d),)) for d in now]
        reads += [Region("partial", shards=OWN)] if last else []
        reads += [BIAS] if last and p.bias else []
        waits = tuple(order.wait(p.ranks + d, d) for d in now)
        args = (("bias", 1),) if last and p.bias else ()
        write = Y if last else Region("sum")
        after = () if i else ("open",)
        steps.append(Step(f"reduce_{i}", "compute", "reduce", tuple(reads), (write,), after,
                          waits, args=args))  # fmt: skip
    return steps
