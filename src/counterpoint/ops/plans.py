"""The plan of a call: the one asked for by name, a user's own, or the one chosen."""

import hashlib
from collections.abc import Sequence

from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops.auto import choose_spec, knowledge_of
from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.problem import Op, Problem
from counterpoint.runtime.workspace import Workspace

PLAN_KEY = "plan:"
# of an operator's backward, where its forward was told to overlap
OVERLAPPED: dict[Op, str] = {
    "all_gather_matmul": "graded",
    "matmul_reduce_scatter": "graded",
    "all_gather_matmul_backward": "side_by_side",
    "matmul_reduce_scatter_backward": "graded",
    "all_gather_matmul_wgrad": "sliced",
}

_plans: dict[str, Plan] = {}  # users' own plans by digest: an operator takes strings only
_keys: dict[int, tuple[Plan, str]] = {}


def plan_key(op: str, plan: str | Plan) -> str:
    """A plan as an operator's string argument; a user's own Plan is proved first.

    Raises:
        InputError: neither a string nor a Plan.
        PlanError: the plan is wrong.
    """
    if isinstance(plan, str):
        return plan
    if not isinstance(plan, Plan):
        raise InputError(op, "plan", want="a family's name or a Plan", got=type(plan).__name__)
    # by identity first: the hash of a plan walks all of it
    known, key = _keys.get(id(plan), (None, ""))
    if known is not plan:
        key = PLAN_KEY + hashlib.sha256(to_json(plan).encode()).hexdigest()[:32]
        if key not in _plans:
            validate(plan)
            _plans[key] = plan
        _keys[id(plan)] = plan, key
    return key


def plan_of(
    problem: Problem, plan: str, workspace: Workspace, tensors: Sequence[Tensor | None]
) -> Plan:
    """The plan that `plan` names for `problem`; "auto" is chosen, equally on all ranks.

    Raises:
        InputError: there is no such plan for this problem.
    """
    if plan.startswith(PLAN_KEY):
        own = _plans.get(plan)
        if own is None:
            fix = "pass the Plan itself to the function"
            raise InputError(problem.op, "plan", want="a known plan", got=plan, fix=fix)
        if own.problem != problem:
            raise InputError(problem.op, "plan", want=f"for {problem}", got=f"for {own.problem}")
        return own
    if plan == "auto":
        plan = choose_spec(problem, workspace, tensors)
    return build(problem, plan, knowledge_of(workspace).machine)


def backward_plan(op: Op, plan: str) -> str:
    """The plan of a backward operator whose forward was asked for with `plan`."""
    return plan if plan in ("auto", "serial") else OVERLAPPED[op]
