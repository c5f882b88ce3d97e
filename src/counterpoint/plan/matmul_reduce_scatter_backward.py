"""Families of matmul_reduce_scatter_backward: dx = gather(dy) wt, and dw = x^T gather(dy).

Both need dy gathered. dx is computed shard by shard as they arrive, as in the forward
all_gather_matmul; dw sums over all rows, so it comes last, from what has been gathered for dx.
"""

from dataclasses import replace

from counterpoint.plan import all_gather_matmul
from counterpoint.plan.all_gather_matmul import COMPUTE, COPY, OWN, SIGNAL, Peers, X
from counterpoint.plan.all_gather_matmul_backward import DX, dgrad
from counterpoint.plan.all_gather_matmul_wgrad import DY, FULL, gather, wgrad
from counterpoint.plan.compose import part
from counterpoint.plan.peers import Order
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import Problem


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: dy is the shard, x and dx are the whole."""
    dy = Buffer("dy", (p.m, p.n), p.dtype, "input", split=True, holds="own")
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True)
    wt = Buffer("wt", (p.n, p.k), p.dtype, "input")
    dx = Buffer("dx", (p.m, p.k), p.dtype, "output", split=True)
    return dy, x, wt, dx, Buffer("dw", (p.k, p.n), p.dtype, "output")


def gather_problem(p: Problem) -> Problem:
    """The all_gather_matmul that makes dx: of dy, by wt."""
    return Problem("all_gather_matmul", p.m, p.k, p.n, p.ranks, p.dtype, p.rows)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then two matmuls: what users do today."""
    full = Buffer("full", (p.m, p.n), p.dtype, "scratch", split=True)
    steps = (gather("dy"), dgrad(FULL, DX), wgrad(X, FULL))
    return Plan(p, "serial", "", "ring", (*operands(p), full), (COMPUTE,), steps)


def graded(p: Problem, groups: tuple[int, ...], peers: Peers, pieces: int) -> Plan:
    """The graded all_gather_matmul for dx, then one matmul for dw of what it has gathered."""
    names = {"x": "dy", "w": "wt", "y": "dx"}
    graded_dx = all_gather_matmul.graded(gather_problem(p), groups, peers, "push", pieces)
    dx = part(graded_dx, p, buffers=names, prefix="dx_")
    full = dx.buffer("full")
    lanes = (COMPUTE, SIGNAL, COPY)
    if groups[0] == 1:
        # own rows were read where the user has them, but dw takes all rows from one place. On the
        # copy lane, behind the pushes, this runs beside the matmuls of dx; on compute it would not
        keep = Step("keep", "copy", "copy", (DY,), (Region("full", shards=OWN),), ("open",))
        opening = Order(peers, p.ranks).barrier("open", "signal", 0)
        dx |= Plan(p, "keep", "", peers, (full,), lanes, (opening, keep))
    dw = Plan(p, "wgrad", "", peers, (*operands(p), full), lanes, (wgrad(X, FULL),))
    both = dx >> dw
    sizes = "" if graded_dx.family == "shard_p2p" else "/".join(map(str, groups)) + " "
    tail = f" pieces={pieces}" if pieces > 1 else ""
    return replace(both, family=graded_dx.family, variant=f"{sizes}{peers}{tail}")


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return dgrad(DY, DX), wgrad(X, DY)
