"""Batch-invariant plans, by which the bits of a row do not depend on M: what they may do.

They multiply a row by the whole of K, round the product as x is rounded, and sum all ranks in the
order of their numbers, in fp32, rounded once. A norm adds up the columns of a row in one order. So
they agree with each other, too. Beyond that they cut, copy and send as they like.
"""

from dataclasses import replace

from counterpoint.errors import InputError
from counterpoint.plan.steps import Plan, Step
from counterpoint.problem import Problem

WORD = "invariant"  # behind any spec, "auto" included


def says(spec: str) -> bool:
    """Whether a spec asks for a batch-invariant plan."""
    return spec.split()[-1:] == [WORD]


def said(problem: Problem, spec: str) -> tuple[Problem, str]:
    """The problem, batch-invariant if the spec asks for that, and the spec without the word.

    Raises:
        InputError: nothing stands before the word.
    """
    if not says(spec):
        return problem, spec
    if spec.split() == [WORD]:
        want = f"a plan before {WORD!r}, such as 'auto {WORD}'"
        raise InputError(problem.op, "plan", want=want, got=repr(spec))
    return replace(problem, invariant=True), " ".join(spec.split()[:-1])


def varies(plan: Plan) -> str:
    """Why bits may depend on M by this plan, or ""."""
    for step in plan.steps:
        summed = sum(len(region.shards) or 1 for region in step.reads)
        if step.kind == "matmul" and _is_part(plan, step):
            return "it multiplies slices of K"
        if step.kind == "matmul" and step.accumulates:
            return "it adds products to a sum that is rounded"
        if step.kind == "reduce" and summed < plan.problem.ranks:
            return "it sums some ranks before the others"
        if step.arg("shots") == "two_shot" and plan.problem.norm and not even_parts(plan.problem):
            return "it adds up the columns of a row in another order than other kernels do"
    return ""


def even_parts(p: Problem) -> bool:
    """Whether each rank's part of a row of x is of 1, 2, 4, 8, ... words, so that parts behind one
    another, each with zeros up to a power of 2, are the row."""
    words, rest = divmod(p.n * p.item_bytes, 4 * p.ranks)
    return not rest and words & (words - 1) == 0


def _is_part(plan: Plan, step: Step) -> bool:
    """Whether a matmul sums over a part of K, or leaves its sum unrounded."""
    x, w = step.reads[:2]
    rounded = plan.buffer(step.writes[0].buffer).dtype == plan.problem.dtype
    return bool(step.arg("contract") or x.cols or w.rows or not rounded)
