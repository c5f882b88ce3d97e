"""Families of all_gather_matmul_wgrad: dw[K, N] = gather(x)[M, K]^T dy[M, N].

The matmul sums over all ranks' rows, so it cannot start with some of them, as the forward one does,
without a sum in fp32. It can with some of the columns of x: those are rows of dw.
"""

from counterpoint.plan.all_gather_matmul import (
    COMPUTE,
    COPY,
    SIGNAL,
    Peers,
    X,
)
from counterpoint.plan.finer import after_exchange, exchange, slices
from counterpoint.plan.peers import Order
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.problem import Problem

FULL, DY, DW = Region("full"), Region("dy"), Region("dw")
OVER_ROWS = (("contract", "rows"),)


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x is the shard, dy the whole."""
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True, holds="own")
    dy = Buffer("dy", (p.m, p.n), p.dtype, "input", split=True)
    return x, dy, Buffer("dw", (p.k, p.n), p.dtype, "output")


def wgrad(
    x: Region,
    dy: Region,
    *,
    name: str = "wgrad",
    after: tuple[str, ...] = (),
    waits: tuple[Signal, ...] = (),
) -> Step:
    """x^T dy -> dw on the compute lane."""
    return Step(name, "compute", "matmul", (x, dy), (DW,), after, waits, args=OVER_ROWS)


def gather(buffer: str) -> Step:
    """The library's all-gather of an input into `full`."""
    args = (("collective", "all_gather"),)
    return Step("gather", "compute", "collective", (Region(buffer),), (FULL,), args=args)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then one matmul: what users do today."""
    full = Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True)
    steps = (gather("x"), wgrad(FULL, DY, name="matmul"))
    return Plan(p, "serial", "", "ring", (*operands(p), full), (COMPUTE,), steps)


def sliced(p: Problem, peers: Peers, pieces: int) -> Plan:
    """Slices of columns from all ranks; the matmul of each writes its rows of dw, beside the next.

    Strided copies, as of uniform_fused_2d, but nothing is accumulated.
    """
    order = Order(peers, p.ranks)
    steps: list[Step] = [order.barrier("open", "signal", 0)]
    for i, cols in enumerate(slices(p.k, pieces)):
        source, part = Region("x", cols=cols), Region("full", cols=cols)
        steps.append(exchange(order, i, source, part))
        rows = Region("dw", rows=cols)
        steps.append(after_exchange(order, i, (part, DY), rows, OVER_ROWS))
    full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True)
    lanes = (COMPUTE, SIGNAL, COPY)
    variant = f"{peers} pieces={pieces}"
    return Plan(p, "sliced", variant, peers, (*operands(p), full), lanes, tuple(steps))


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return (wgrad(X, DY, name="matmul"),)
