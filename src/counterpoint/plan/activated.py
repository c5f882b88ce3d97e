"""Activations behind the matmuls of an operator: where a plan may have one, and what cells hold.

A matmul with the argument "activation", or a move behind partial sums, applies it to what it would
write else. The proof wants it once, of whole sums, with the bias in them. A gated one has two
weights in one step, so that a family has one matmul of x wherever it has one for one weight.

Each product is rounded to the dtype of y as without an activation, which is computed in fp32 and
rounded once: so it does not matter to the result whether one kernel does all of that.
"""

from collections.abc import Sequence
from math import ceil

from counterpoint.plan.boxes import Box
from counterpoint.plan.steps import Plan, Step
from counterpoint.plan.values import Activated, Piece, Value, intersect
from counterpoint.problem import Problem

KINDS = ("matmul", "move")  # of steps that may have one
# rows of x: of so few, two matmuls of the library and a kernel behind them are as fast as one
# kernel, which up to SOME_ROWS has loaded both weights sooner
FEW_ROWS, SOME_ROWS = 32, 64
# of the SMs that its waves of large tiles have work for; more rows than that want them all
ONE_WAVE, WAVES = 0.84, 0.95


def one_kernel(p: Problem, rows: int, n: int, num_sms: int) -> bool:
    """Whether x[rows, K] w[K, n] (x up) and its activation are one kernel on a GPU.

    Of two weights, where they lie as `invariant_matmul.pairs` says. H200, 2026-11, gate and up of
    Llama-3 8B, 70B and 405B at TP2 and TP8, 48 to 8192 rows: where it is taken, 0.99 to 1.58 of two
    matmuls of the library and a kernel behind them, as speedup; where it is not, 0.83 to 1.04. Of
    one weight both are as fast as one another.
    """
    if p.invariant or not (p.gated and p.item_bytes == 2 and rows > FEW_ROWS):
        return p.invariant
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
