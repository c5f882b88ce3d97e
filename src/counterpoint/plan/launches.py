"""What of a bound plan is one launch: matmuls of a batch, and parts of a step equally far apart.

A batch of matmuls is one launch where its operands are boxes of one size that follow one another.
Parts of a copy that lie equally far apart on both sides are one strided copy, whose rows are long;
those of an expert's matmul are one batched matmul, whose weight is one. And which matmul is held
back, so that an exchange that is launched with it gets its SMs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.plan.bind import BoundStep, Box, Part, Program
from counterpoint.plan.steps import Plan, same_batch

# words and changes of stream come before NCCL's kernel; without this a matmul that began with an
# exchange had all SMs first every time (2xH100, 2026-11). Not timed yet
HELD_BACK_S = 30e-6


class Run(NamedTuple):
    """`times` parts like `part`, each so many rows behind the one before: where read, and written.

    A run of one part has no distances.
    """

    part: Part
    times: int = 1
    read_step: int = 0
    write_step: int = 0


def batches(program: Program) -> list[tuple[int, ...]]:
    """The steps by index, those of one launch together; in the order in which launches begin."""
    found: list[list[int]] = []
    last: dict[str, int] = {}  # of each lane, its last launch
    for i, bound in enumerate(program.steps):
        before = last.get(bound.step.lane)
        ahead = program.steps[found[before][-1]] if before is not None else None
        if before is not None and ahead and _continues(ahead, bound, program.plan):
            found[before].append(i)
            continue
        last[bound.step.lane] = len(found)
        found.append([i])
    return [tuple(launch) for launch in found]


def held_back(program: Program, index: int) -> bool:
    """Whether a matmul begins with the exchange before it, which is to have its SMs first.

    That is so where the exchange waits for nothing that the matmul does not wait for; the barrier
    that opens a call is passed sooner than that.
    """
    before, own = program.steps[max(index - 1, 0)].step, program.steps[index].step
    if (before.kind, own.kind) != ("exchange", "matmul"):
        return False
    names = {bound.step.name: bound.step for bound in program.steps}
    opens = program.steps[program.opens].step.name if program.opens >= 0 else ""
    others = [n for n in before.after if n not in (opens, *own.after)]
    return all(names[n].lane in (own.lane, before.lane) for n in others)


def runs(bound: BoundStep, plan: Plan) -> list[Run]:
    """The parts of a step as runs, in order; neighbours are joined wherever that can be.

    That is in copies, and in matmuls of experts; where counts differ it is nowhere.
    """
    joins = bound.step.kind == "copy" or (plan.problem.experts and _is_product(bound, plan))
    if bound.step.counted or not joins:
        return [Run(part) for part in bound.parts]
    found: list[Run] = []
    for part in bound.parts:
        last = found[-1] if found and _whole_rows((*part.reads, part.write), plan) else None
        steps = _steps(last, part) if last else None
        if last and steps:
            found[-1] = Run(last.part, last.times + 1, *steps)
        else:
            found.append(Run(part))
    return found


def _continues(before: BoundStep, bound: BoundStep, plan: Plan) -> bool:
    """Whether two matmuls are one launch: see `form.check_form` on what a batch is."""
    if not (_batched(before, plan) and same_batch(before.step, bound.step)):
        return False
    if not _batched(bound, plan):
        return False
    (first,), (second,) = before.parts, bound.parts
    pairs = zip((*first.reads, first.write), (*second.reads, second.write), strict=True)
    return all(_alike(a, b) and a.r1 == b.r0 for a, b in pairs)


def _batched(bound: BoundStep, plan: Plan) -> bool:
    """Whether a step may be one of several: y = x w of one box each, by the weight of an expert."""
    p, step = plan.problem, bound.step
    if not p.experts or [name for name, _ in step.args] != ["batch"] or len(bound.parts) != 1:
        return False
    return bound.parts[0].reads[1].shape[0] == p.k and _is_product(bound, plan)


def _is_product(bound: BoundStep, plan: Plan) -> bool:
    """Whether a step is y = x w alone, in the dtype of the problem."""
    own = plan.buffer(bound.step.writes[0].buffer).dtype == plan.problem.dtype
    adds = bound.step.accumulates or bound.step.arg("bias") or bound.step.arg("contract")
    return bound.step.kind == "matmul" and own and not adds


def _steps(run: Run, part: Part) -> tuple[int, int] | None:
    """How far apart parts of `run` are if `part` is the next of it; None where it is not."""
    (read, *shared), write = run.part.reads, run.part.write
    if not (_alike(read, part.reads[0]) and _alike(write, part.write)):
        return None
    if tuple(shared) != part.reads[1:]:  # a matmul's weight
        return None
    apart = (part.reads[0].r0 - read.r0, part.write.r0 - write.r0)
    if run.times == 1:
        # a pitch goes upwards, and rows do not overlap
        return apart if min(apart) >= read.r1 - read.r0 else None
    steps = (run.read_step, run.write_step)
    return steps if apart == (run.times * steps[0], run.times * steps[1]) else None


def _alike(a: Box, b: Box) -> bool:
    """Whether two boxes differ in their first row alone."""
    return a._replace(r0=0, r1=a.r1 - a.r0) == b._replace(r0=0, r1=b.r1 - b.r0)


def _whole_rows(boxes: Sequence[Box], plan: Plan) -> bool:
    return all(box.c1 - box.c0 == plan.buffer(box.buffer).shape[1] for box in boxes)


def in_no_graph(plan: Plan) -> bool:
    """Whether the host lays out copies of a plan at each call, by counts that differ."""
    return any(step.kind == "copy" and step.counted for step in plan.steps)


def has_kernels(plan: Plan) -> bool:
    """Whether a GPU runs kernels of this library for a plan: signals, sums, merges, fused steps."""
    return plan.problem.invariant or any(
        s.kind in ("fused", "reduce", "barrier")
        or s.waits
        or s.posts
        or s.arg("transport")
        or (s.kind == "attention" and s.accumulates)
        for s in plan.steps
    )


def made_whole(program: Program) -> set[str]:
    """Outputs that one step makes whole: what the library returns takes their places."""
    buffers = {b.name for b in program.plan.buffers if b.space == "output"}
    rows = program.plan.problem.rows[program.rank]
    return {
        part.write.buffer
        for bound in program.steps
        if bound.step.kind == "attention" and not bound.step.accumulates
        for part in bound.parts
        if part.write.buffer in buffers and part.write.shape[0] == rows
    }
