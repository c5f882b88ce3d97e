"""Activations behind the matmuls of an operator: where a plan may have one, and what cells hold.

A matmul with the argument "activation", or a move behind partial sums, applies it to what it would
write without one. The proof wants it applied once, to whole sums with the bias in them. A gated
activation has both weights in one step, so a family has it wherever it multiplies by one weight.

A product is rounded to the dtype of y, as without an activation. The activation is computed in fp32
and rounded once. So the result is the same whether one kernel does all of that or several do.
"""

from collections.abc import Sequence
from math import ceil

from counterpoint.plan.boxes import Box
from counterpoint.plan.steps import Plan, Step
from counterpoint.plan.values import Activated, Piece, Value, intersect
from counterpoint.problem import Problem

KINDS = ("matmul", "move")  # of steps that may have one
# rows of x: up to FEW_ROWS the library's two matmuls are as fast as one kernel; above, and up to
# SOME_ROWS, it takes as long as the weights take to be loaded, and one kernel loads them sooner
FEW_ROWS, SOME_ROWS = 32, 64
# the least share of SMs that have a tile of 128x256, on average over waves: of one wave, of several
ONE_WAVE, WAVES = 0.84, 0.95


def one_kernel(p: Problem, rows: int, n: int, num_sms: int) -> bool:
    """Whether x[rows, K] w[K, n] (x up) and its activation are one kernel on a GPU.

    Else they are the library's matmuls and one kernel behind them. Of two weights without scales it
    can be one if they lie as `invariant_matmul.pairs` says. H200, 2026-11, gate and up of Llama-3
    8B, 70B and 405B at TP2 and TP8, 48 to 8192 rows: speedup of one kernel over those three 0.99x
    to 1.58x where this takes it, 0.83x to 1.04x where it does not. Of one weight both are as fast.
    """
    if p.invariant:
        return True
    if not p.gated or p.scales or p.item_bytes != 2 or rows <= FEW_ROWS:
        return False
    if rows <= SOME_ROWS or ceil(rows / 64) * ceil(2 * n / 128) <= 2 * num_sms:
        return True  # all of it is on the SMs at once
    waves = ceil(rows / 128) * ceil(2 * n / 256) / num_sms
    return waves / ceil(waves) >= (ONE_WAVE if waves <= 1 else WAVES)


def misuse_of_activation(plan: Plan, step: Step) -> str:
    """Why a step with an activation cannot run, or ""."""
    name, p = step.arg("activation"), plan.problem
    if not name:
        return ""
    if name != p.activation or step.kind not in KINDS or (p.gated and step.kind != "matmul"):
        which = f"{p.activation!r}, of a {' or '.join(KINDS[: 1 if p.gated else 2])}"
        return f"has the activation {name!r} in a {step.kind}: the problem's is {which}"
    whole = not (step.accumulates or step.arg("contract"))
    if not whole or plan.buffer(step.writes[0].buffer).dtype != p.dtype:
        return f"has an activation of a sum that is not whole, and rounded to {p.dtype}"
    return ""


def activated(name: str, sums: Sequence[list[Piece]]) -> list[Piece]:
    """What a step with an activation writes.

    Args:
        sums: what it would write without it, by each of its weights.
    """
    first, *others = sums
    found: list[tuple[Box, tuple[Value, ...]]] = [(box, (value,)) for box, value in first]
    for other in others:
        both = ((intersect(box, there), of, value) for box, of in found for there, value in other)
        found = [(inside, (*of, value)) for inside, of, value in both if inside is not None]
    return [(box, (Activated(name, of),)) for box, of in found]
