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

from counterpoint.plan.steps import Buffer, Plan, Region, Step
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
    if b.name not in (*holders, "w"):
        yield b
        return
    is_w = b.name == "w"
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
        x, w, *rest = step.reads
        x_scale = Region("x" + SCALE) if p.scales == "tensor" else _scale_of(x)
        reads = (x, w, x_scale, _scale_of(w), *rest)
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
