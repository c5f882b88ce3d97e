"""all_gather_matmul_wgrad: dw[K, N] = gather(x)[M, K]^T dy[M, N], and its families of plans.

The matmul sums over all ranks' rows, so it cannot start with some of them, as the forward one does,
without a sum in fp32. It can with some of the columns of x: those are rows of dw.
"""

from collections.abc import Iterator

from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.definition import weight_gradient
from counterpoint.plan.finer import after_exchange, exchange, slices
from counterpoint.plan.names import LANES, X, collective, in_one_lane
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.peers import Order, orders
from counterpoint.plan.sizes import check_gradient
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.plan.values import Value
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
    return collective("gather", "all_gather", (Region(buffer),), FULL)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then one matmul: what users do today."""
    full = Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True)
    multiply = wgrad(FULL, DY, name="matmul")
    return in_one_lane(p, "serial", (*operands(p), full), gather("x"), multiply)


def sliced(p: Problem, options: Options, machine: Machine) -> Plan:
    """Slices of columns from all ranks; the matmul of each writes its rows of dw, beside the next.

    Strided copies, as of uniform_fused_2d, but nothing is accumulated.
    """
    peers, chunks = options.peers, options.chunks or 2
    order = Order(peers, p.ranks)
    steps: list[Step] = [order.barrier("open", "signal", 0)]
    for i, cols in enumerate(slices(p.k, chunks)):
        source, part = Region("x", cols=cols), Region("full", cols=cols)
        steps.append(exchange(order, i, source, part))
        rows = Region("dw", rows=cols)
        steps.append(after_exchange(order, i, (part, DY), rows, OVER_ROWS))
    full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True)
    variant = f"{peers} chunks={chunks}"
    return Plan(p, "sliced", variant, peers, (*operands(p), full), LANES, tuple(steps))


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return (wgrad(X, DY, name="matmul"),)


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """dw on `rank`."""
    yield Box(rank, "dw", 0, 0, p.k, 0, p.n), weight_gradient(p, rank, "x")


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    xor = [f"sliced {order} chunks=2" for order in orders(p.ranks)[1:]]
    return "serial", *(f"sliced ring chunks={n}" for n in (2, 3, 4)), *xor


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        Family(name="sliced", takes=("peers", "chunks"), build=sliced),
    ),
    candidates=candidates,
    collectives=("all_gather",),
    check=check_gradient,
    moved=lambda p: (p.k, 0),
    matmuls=lambda p: ((p.k, p.n, p.m),),
    overlapped=lambda p, copy_longer: "sliced",
    gradient="sliced",
)
