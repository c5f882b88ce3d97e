"""matmul_reduce_scatter_backward: dx = gather(dy) wt, and dw = x^T gather(dy).

Both need dy gathered. dx is computed shard by shard as they arrive, as in the forward
all_gather_matmul; dw sums over all rows, so it comes last, from what has been gathered for dx.
"""

from collections.abc import Iterator
from dataclasses import replace

from counterpoint.costs import Tiles
from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.compose import part
from counterpoint.plan.definition import gathered, weight_gradient
from counterpoint.plan.names import COMPUTE, COPY, OWN, SIGNAL, X, in_one_lane
from counterpoint.plan.operation import Operation, Peers, in_a_row
from counterpoint.plan.steps import Buffer, Peer, Plan, Region, Step
from counterpoint.plan.values import Value
from counterpoint.problem import Problem
from counterpoint.schedules import grading, islands
from counterpoint.schedules.makespan import gather_s
from counterpoint.schedules.peers import Order, orders
from counterpoint.schedules.sizes import check_gradient
from counterpoint.tensor_parallel import plan_all_gather_matmul
from counterpoint.tensor_parallel.plan_all_gather_matmul_backward import DX, alone, dgrad
from counterpoint.tensor_parallel.plan_all_gather_matmul_wgrad import DY, FULL, gather, wgrad


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: dy is the shard, x and dx are the whole."""
    dy = Buffer("dy", (p.m, p.n), p.dtype, "input", split=True, holds="own")
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True)
    wt = Buffer("wt", (p.n, p.k), p.dtype, "input")
    dx = Buffer("dx", (p.m, p.k), p.dtype, "output", split=True)
    return dy, x, wt, dx, Buffer("dw", (p.k, p.n), p.dtype, "output")


def gather_problem(p: Problem) -> Problem:
    """The all_gather_matmul that makes dx: of dy, by wt."""
    return Problem("all_gather_matmul", p.m, p.k, p.n, p.ranks, p.dtype, p.rows, islands=p.islands)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then two matmuls: what users do today."""
    full = Buffer("full", (p.m, p.n), p.dtype, "scratch", split=True)
    steps = gather("dy"), dgrad(FULL, DX), wgrad(X, FULL)
    return in_one_lane(p, "serial", (*operands(p), full), *steps)


def graded(p: Problem, groups: tuple[int, ...], peers: Peers, chunks: int) -> Plan:
    """The graded all_gather_matmul for dx, then one matmul for dw of what it has gathered."""
    dx = plan_all_gather_matmul.graded(gather_problem(p), groups, peers, chunks)
    opening = Order(peers, p.ranks).barrier("open", "signal", 0)
    return _with_dw(p, dx, (opening,), OWN if groups[0] == 1 else ())


def _of_islands(p: Problem, grid: islands.Grid) -> Plan:
    dx = plan_all_gather_matmul.of_islands(gather_problem(p), grid)
    return _with_dw(p, dx, grid.opening(), islands.OWN)


def _with_dw(
    p: Problem, gathered_dx: Plan, opening: tuple[Step, ...], own: tuple[Peer, ...]
) -> Plan:  # fmt: skip
    """A plan for dx, then one matmul for dw of what it has gathered.

    Args:
        opening: its barrier, if any.
        own: this rank's block, where dx reads it as the user has it: dw takes all from one place.
    """
    names = {"x": "dy", "w": "wt", "y": "dx"}
    dx = part(gathered_dx, p, buffers=names, prefix="dx_")
    full, peers = dx.buffer("full"), dx.peers
    if own:
        # on the copy lane, behind the pushes, this runs beside the matmuls of dx; on compute it
        # would not
        opened = tuple(step.name for step in opening)
        keep = Step("keep", "copy", "copy", (DY,), (Region("full", shards=own),), opened)
        lanes = (SIGNAL, COPY) if opening else (COPY,)
        dx |= Plan(p, "keep", "", peers, (full,), lanes, (*opening, keep))
    dw = Plan(p, "wgrad", "", peers, (*operands(p), full), (COMPUTE,), (wgrad(X, FULL),))
    return replace(dx >> dw, family=gathered_dx.family, variant=gathered_dx.variant)


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """dx and dw on `rank`."""
    for s in range(p.ranks):
        rows = p.row_starts[s], p.row_starts[s + 1]
        yield Box(rank, "dx", 0, *rows, 0, p.k), gathered(p, "dy", s, "wt", rank, p.n)
    yield Box(rank, "dw", 0, 0, p.k, 0, p.n), weight_gradient(p, rank, "dy")


def _dx_s(
    p: Problem, groups: tuple[int, ...], chunks: int, machine: Machine, tiles: Tiles
) -> float:
    return gather_s(gather_problem(p), groups, chunks, machine, tiles)


def _dw_s(p: Problem, machine: Machine) -> float:
    return machine.costs.matmul_s(p.k, p.n, p.m, p.item_bytes, machine.sms)


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    if p.islands > 1:
        return islands.candidates(p)
    groups = plan_all_gather_matmul.GROUPS.get(p.ranks, ())
    found = ["serial", *(f"shard_p2p {peers}" for peers in orders(p.ranks))]
    found += [f"graded {g} ring" for g in groups if "/" in g][-4:] or ["graded ring"]
    return (*found, "shard_p2p ring chunks=2")


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        *grading.families(graded, _dx_s, in_chunks=-1, beside_s=_dw_s),
        islands.family(_of_islands, islands.refusal),
    ),
    candidates=candidates,
    collectives=("all_gather",),
    check=check_gradient,
    moved=lambda p: (p.n, 0),
    matmuls=lambda p: ((p.m, p.k, p.n), (p.k, p.n, p.m)),
    overlapped=lambda p, copy_longer: "graded",
)  # fmt: skip
