"""Operands with scales: a plan of any family for x and w in fp8.

Families build their plans as if x and w had none. `scaled` gives each buffer that holds rows of x a
second one that holds their scales, and lets scales travel with their rows: the same regions in the
same copy, under the same signal; a move, a collective or an exchange of them just before. Matmuls
read both. A scale of the whole tensor is one for all ranks, and does not travel. Partial results
are those of any plan: in the dtype of y, summed in fp32.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from counterpoint.plan.boxes import Box
from counterpoint.plan.names import weights
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Contradiction, Memory, operand
from counterpoint.problem import SCALE_BLOCK, W_DTYPE, Problem

SCALE = "_scale"  # behind the name of a buffer of fp8 numbers: that of their scales
REFUSAL = "operands without scales"  # of families that have no kernel or no sum for them


def operands_of(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors; behind those that have scales, their scales."""
    users = p.operation.operands(p)
    return tuple(each for b in users for each in _with_scales(p, b, {"x"})) if p.scales else users


def scaled(plan: Plan) -> Plan:
    """The plan, where its problem has scales, for operands that have them."""
    p = plan.problem
    if not p.scales:
        return plan
    holders = {"x"}
    for step in plan.steps:
        if step.kind in ("copy", "move", "collective", "exchange"):
            pairs = zip(step.reads, step.writes, strict=False)
            holders |= {target.buffer for source, target in pairs if source.buffer in holders}
    buffers = (each for b in plan.buffers for each in _with_scales(p, b, holders))
    steps = (each for step in plan.steps for each in _scaled_step(p, step, holders))
    return replace(plan, buffers=tuple(buffers), steps=tuple(steps))


def _with_scales(p: Problem, b: Buffer, holders: set[str]) -> Iterator[Buffer]:
    """A buffer as it is with scales, and that of its scales, if it has any."""
    is_w = b.name in {region.buffer for region in weights(p)}
    if not is_w and b.name not in holders:
        yield b
        return
    yield replace(b, dtype=W_DTYPE if is_w else p.x_dtype)
    shape = shapes_of(p.scales, b.shape, b.shape)[is_w]
    scales = replace(b, name=b.name + SCALE, shape=shape, dtype="float32")
    if p.scales != "tensor":
        yield scales
    elif b.space == "input":
        yield replace(scales, split=False, holds="all")


def shapes_of(
    scales: object, x: tuple[int, int], w: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the scales of x[M, K], and of those of w[K, N], by their kind."""
    if scales == "tensor":
        return (1, 1), (1, 1)
    if scales == "row":
        return (x[0], 1), (1, w[1])
    columns, blocks = (ceil(each[1] / SCALE_BLOCK) for each in (x, w))
    return (x[0], columns), (ceil(w[0] / SCALE_BLOCK), blocks)


def _scaled_step(p: Problem, step: Step, holders: set[str]) -> Iterator[Step]:
    """A step of a plan with scales, and before it what moves them by themselves."""
    source = step.reads[0] if step.reads else Region("")
    if source.buffer not in holders:
        yield step
    elif step.kind == "matmul":
        (x, *by), rest = step.reads[: 1 + step.weights], step.reads[1 + step.weights :]
        x_scale = Region("x" + SCALE) if p.scales == "tensor" else _scale_of(x)
        reads = (x, *by, x_scale, *map(_scale_of, by), *rest)
        yield replace(step, reads=reads, args=(*step.args, ("scales", p.scales)))
    elif p.scales == "tensor":
        yield step
    else:
        reads, writes = (tuple(map(_scale_of, each)) for each in (step.reads, step.writes))
        if step.kind == "copy":
            yield replace(step, reads=step.reads + reads, writes=step.writes + writes)
        else:  # a lane is in order, so that whoever waits for the step waits for both
            yield replace(step, name=step.name + SCALE, reads=reads, writes=writes, posts=())
            yield replace(step, after=(), waits=())


def _scale_of(region: Region) -> Region:
    return replace(region, buffer=region.buffer + SCALE)


def misuse_of_scales(plan: Plan, step: Step, operands: list[Buffer], target: str) -> str:
    """Why a matmul of a plan with scales cannot run, or "".

    Args:
        operands: that it reads, without a bias.
        target: the dtype that it writes.
    """
    p, dtypes, by = plan.problem, [b.dtype for b in operands], step.weights
    wanted = [p.x_dtype, *[W_DTYPE] * by, *["float32"] * (1 + by)]
    if step.arg("scales") != p.scales or dtypes != wanted:
        return f"a matmul with {p.scales} scales reads x, w, and the scales of both"
    # slices of K would be rounded one by one, and a block's scale is not cut
    cut = step.arg("contract") or any(r.cols or r.rows for r in step.reads[: 2 + 2 * by])
    if cut or step.accumulates or target != p.dtype:
        return f"a matmul with scales takes all of K and of w, and rounds once, to {p.dtype}"
    return ""


def check_scaled(memory: Memory, box: Box, scale: Box, *, by_row: bool) -> None:
    """Refuse scales that are not those of the operand; `by_row`: of the same rows of the same rank.

    Raises:
        Contradiction: they are not.
    """

    def origins(of: Box, suffix: str) -> list[tuple[int, ...] | str]:
        """Of rows here: the first and the last, and the rank, input and first row there."""
        found: list[Any] = []
        for piece, value in sorted(memory.read(of)):
            cell, first = operand(value, of), piece.r0 - of.r0
            last, row, name = piece.r1 - of.r0, piece.r0 + cell.dr, cell.buffer + suffix
            before = found[-1] if found else None
            follows = (first, cell.rank, name, row - first)
            if before and (before[1], *before[2:4], before[4] - before[0]) == follows:
                found[-1] = (before[0], last, *before[2:])
            else:
                found.append((first, last, cell.rank, name, row))
        return found if by_row else sorted({each[3] for each in found})

    if origins(box, SCALE) != origins(scale, ""):
        raise Contradiction(f"{scale.buffer} does not hold the scales of {box.buffer}")
