"""How much memory a rank has for the buffers of a plan."""

from typing import TYPE_CHECKING

from counterpoint.errors import PlanError
from counterpoint.problem import ITEM_BYTES

if TYPE_CHECKING:  # a Plan asks this file
    from counterpoint.plan.steps import Buffer, Plan

MAX_BYTES = 2**44  # of all buffers of a rank: more than any machine has


def refuse_vast(plan: "Plan") -> None:
    """Refuse a plan whose buffers no machine has memory for.

    Raises:
        PlanError: says how many bytes a rank would need.
    """
    needs = sum(buffer_bytes(plan, buffer) for buffer in plan.buffers)
    if needs > MAX_BYTES:
        problem = f"needs {needs} bytes on a rank, more than any machine has ({MAX_BYTES})"
        raise PlanError(plan.spec, problem)


def extent(plan: "Plan", buffer: "Buffer", rank: int) -> int:
    """Rows of a buffer, or of a slot of it, that `rank` has memory for."""
    p, rows = plan.problem, buffer.shape[0]
    size = p.ranks // p.islands
    if buffer.split and buffer.holds == "peers":
        rows -= p.rows[rank]
    elif buffer.split and buffer.holds == "island":
        rows = sum(p.rows[rank // size * size :][:size])
    elif buffer.split and buffer.holds != "all":
        rows = p.rows[rank]
    if p.counts == "device_routed" and buffer.space == "scratch":
        return -(-rows // max(1, min(p.top_k, size)))  # of tokens: see experts/plan_islands.py
    return rows


def buffer_bytes(plan: "Plan", buffer: "Buffer") -> int:
    """Bytes of a buffer on the rank that holds most."""
    ranks = plan.problem.ranks
    differ = buffer.split and buffer.holds != "all"
    most = max(extent(plan, buffer, rank) for rank in range(ranks if differ else 1))
    slots = ranks if differ and buffer.holds == "slots" else 1
    # a step of the user's own may have other dtypes
    return slots * most * buffer.shape[1] * ITEM_BYTES.get(buffer.dtype, 1)
