"""all_gather_matmul_backward: dx_r = rows of rank r of the sum of dy_s wt_s, and dw.

Two matmuls and two transfers, of which neither matmul needs the other's transfer: dgrad needs no
transfer and its result is scattered, wgrad needs x gathered and stays. So the gather of x hides
behind dgrad, and the scatter of dx behind wgrad.

Of several weights, dx is of the sum of dy_i wt_i, and each has its dw_i.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.compose import part
from counterpoint.plan.definition import scattered, weight_gradient
from counterpoint.plan.names import LANES, OWN, X, collective, in_one_lane, numbered
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Step
from counterpoint.plan.values import Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules import islands
from counterpoint.schedules.peers import Order, orders
from counterpoint.schedules.sizes import check_gradients
from counterpoint.tensor_parallel import plan_all_gather_matmul_wgrad, plan_matmul_reduce_scatter
from counterpoint.tensor_parallel.plan_all_gather_matmul import push_shards
from counterpoint.tensor_parallel.plan_all_gather_matmul_wgrad import (
    DY,
    FULL,
    gather,
    wgrad,
    wgrads,
)

DX, WT = Region("dx"), Region("wt")
GATHER = Lane("gather", "copy", priority=-1)


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: dy is the whole, x and dx are shards."""
    dx = Buffer("dx", (p.m, p.k), p.dtype, "output", split=True, holds="own")
    wt = (Buffer(f"wt{i}", (n, p.k), p.dtype, "input") for i, n in numbered(p, p.n))
    return *plan_all_gather_matmul_wgrad.operands(p), *wt, dx


def dgrad(dy: Region, dx: Region) -> Step:
    """dy wt -> dx on the compute lane."""
    return Step("dgrad", "compute", "matmul", (dy, WT), (dx,))


def _dgrads(p: Problem, dx: Region) -> tuple[Step, ...]:
    """The sum of dy_i wt_i -> dx on the compute lane."""
    return plan_matmul_reduce_scatter.products("dgrad", p.splits, ("dy", "wt"), DY, dx)


def scatter_problem(p: Problem) -> Problem:
    """The matmul_reduce_scatter that makes dx: of dy, by wt."""
    return Problem(
        "matmul_reduce_scatter", p.m, p.k, p.n, p.ranks, p.dtype, p.rows, splits=p.splits,
        islands=p.islands,
    )  # fmt: skip


def serial(p: Problem) -> Plan:
    """The library's collectives and two matmuls, one after another: what users do today."""
    full = Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True)
    partial = Buffer("partial", (p.m, p.k), p.dtype, "scratch", split=True)
    scatter = collective("reduce_scatter", "reduce_scatter", (Region("partial"),), DX)
    dgrads, dws = _dgrads(p, Region("partial")), wgrads(p, wgrad(FULL, DY))
    steps = gather("x"), *dgrads, *dws, scatter
    return in_one_lane(p, "serial", (*operands(p), full, partial), *steps)


def side_by_side(p: Problem, options: Options, machine: Machine) -> Plan:
    """dgrad beside the gather of x, then wgrad beside the scatter of dx, and its sum.

    With `chunks`, the partial rows that come last come in parts, each summed while the next is on
    its way: where copies take longer than matmuls, only the sum of its last part is at the end.
    """
    peers, chunks = options.peers, max(options.chunks, 1)
    order = Order(peers, p.ranks)
    # behind the pushes, which peers wait for; on the copy lane, where it takes no time of dgrad's
    keep = Step("x_keep", "copy", "copy", (X,), (Region("full", shards=OWN),))
    pushes = tuple(replace(s, name=f"x_{s.name}") for s in push_shards(order, 1))
    waits = tuple(order.wait(p.ranks + d, d) for d in order.distances)
    steps = (
        order.barrier("open", "signal", 0), *pushes, keep,
        *wgrads(p, wgrad(FULL, DY, after=("x_keep",), waits=waits)),
    )  # fmt: skip
    full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True)
    buffers = (*plan_all_gather_matmul_wgrad.operands(p), full)
    dw = Plan(p, "gather", "", peers, buffers, LANES, steps)
    dx = plan_matmul_reduce_scatter.graded(scatter_problem(p), (p.ranks,), peers, chunks)
    tail = f" chunks={chunks}" if chunks > 1 else ""
    return replace(_both(p, dw, dx), family="side_by_side", variant=f"{peers}{tail}")


def _both(p: Problem, dw: Plan, dx: Plan) -> Plan:
    """A plan for each dw_i, beside one for dx."""
    names = {"y": "dx"}
    for i, _ in numbered(p, p.n):
        names |= {f"x{i}": f"dy{i}", f"w{i}": f"wt{i}"}
    return dw | part(dx, p, buffers=names, prefix="dx_")


def _of_islands(p: Problem, grid: islands.Grid) -> Plan:
    dx = plan_matmul_reduce_scatter.of_islands(scatter_problem(p), grid)
    # sums are not to wait until what comes for dw has been passed on
    dw = plan_all_gather_matmul_wgrad.of_islands(p, replace(grid, copies=GATHER))
    return replace(_both(p, dw, dx), family=dx.family, variant=dx.variant)


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return *_dgrads(p, DX), *wgrads(p, wgrad(X, DY))


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """dx and dw_i on `rank`."""
    parts = numbered(p, p.n)
    terms = (scattered(p, f"dy{i}", f"wt{i}", rank, n) for i, n in parts)
    yield Box(rank, "dx", 0, 0, p.rows[rank], 0, p.k), normal(chain.from_iterable(terms))
    for i, n in parts:
        yield Box(rank, f"dw{i}", 0, 0, p.k, 0, n), weight_gradient(p, rank, "x", f"dy{i}")


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    if p.islands > 1:
        return islands.candidates(p)
    tails = "", " chunks=2"
    return "serial", *(f"side_by_side {o}{tail}" for o in orders(p.ranks) for tail in tails)


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        Family(name="side_by_side", takes=("peers", "chunks"), build=side_by_side),
        islands.family(_of_islands),
    ),
    candidates=candidates,
    collectives=("all_gather", "reduce_scatter"),
    check=check_gradients,
    moved=lambda p: (p.k, p.k),
    matmuls=lambda p: ((p.m, p.k, p.n), (p.k, p.n, p.m)),
    overlapped=lambda p, copy_longer: "side_by_side",
    gradient="side_by_side",
)
