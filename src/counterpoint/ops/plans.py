"""The plan of a call: asked for by name, a user's own or a file of one, or chosen."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from counterpoint.choose.taken import Pick, Taken
from counterpoint.errors import InputError, PlanError
from counterpoint.group.workspace import Workspace
from counterpoint.log import say
from counterpoint.ops.auto import choose_spec, knowledge_of
from counterpoint.ops.batch_invariant import in_mode
from counterpoint.ops.register import as_a_constant
from counterpoint.plan.families import build
from counterpoint.plan.operation import operation_of
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem
from counterpoint.run.execute import Code
from counterpoint.schedules.invariant import WORD, said, says

PLAN_KEY = "plan:"
BY_MODE = "auto by mode"  # in a compiled graph: "auto", as `batch_invariant` is when it runs

_plans: dict[str, Plan] = {}  # users' own plans by digest: an operator takes strings only
# the same by identity, as the hash of a plan walks all of it. What has gone is looked up anew: an
# identity alone is no key, as another plan may get it
KEYS: dict[int, tuple[Plan, str]] = {}
MAX_KEYS = 256


def plan_key(op: str, plan: str | Path | Plan) -> str:
    """A plan as an operator's string argument; a user's own Plan is proved first.

    In `batch_invariant` text ends by saying so, and a Plan has to be for such a problem.

    Args:
        plan: text, a Plan, or a file that has one as JSON: a Path, or text that ends in ".json".
            A call of known facts does not read it again.

    Raises:
        InputError: something else, a file that cannot be read, or in that mode another Plan.
        PlanError: the plan is wrong.
    """
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        plan = _read(op, Path(plan))
    if isinstance(plan, str):
        return f"{plan} {WORD}" if in_mode() and not says(plan) else plan
    if not isinstance(plan, Plan):
        raise InputError(op, "plan", want="a family's name or a Plan", got=type(plan).__name__)
    if in_mode() and not plan.problem.invariant:
        want = "a Plan for a problem with invariant=True in counterpoint.batch_invariant"
        raise InputError(op, "plan", want=want, got=f"for {plan.problem}")
    known, key = KEYS.get(id(plan), (None, ""))
    if known is not plan:
        key = PLAN_KEY + hashlib.sha256(to_json(plan).encode()).hexdigest()[:32]
        if key not in _plans:
            validate(plan)
            _plans[key] = plan
        if len(KEYS) >= MAX_KEYS:
            KEYS.pop(next(iter(KEYS)))
        KEYS[id(plan)] = plan, key
    return key


def in_force(plan: str) -> str:
    """A plan as an operator's string argument, where it may say `BY_MODE`."""
    return plan if plan != BY_MODE else f"auto {WORD}" if in_mode() else "auto"


def _read(op: str, path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, PlanError):
            raise PlanError(str(path), str(error)) from error
        raise InputError(op, "plan", want="a file that can be read", got=str(error)) from error


def plan_of(
    problem: Problem, plan: str, workspace: Workspace, tensors: Sequence[Tensor | None]
) -> Taken:
    """The plan that `plan` names for `problem`; "auto" is chosen, equally on all ranks.

    Raises:
        InputError: there is no such plan for this problem.
    """
    if plan.startswith(PLAN_KEY):
        own = _plans.get(plan)
        if own is None:
            fix = "pass the Plan itself to the function"
            raise InputError(problem.op, "plan", want="a known plan", got=plan, fix=fix)
        if own.problem.invariant:
            problem = replace(_without_bias(problem), invariant=True)
        if not _fits(own.problem, problem):
            raise InputError(problem.op, "plan", want=f"for {problem}", got=f"for {own.problem}")
        return Taken(own, Pick(own.spec, "asked for"))
    problem, plan = said(_without_bias(problem) if says(plan) else problem, plan)
    auto = plan == "auto"
    pick = choose_spec(problem, workspace, tensors) if auto else Pick(plan, "asked for")
    return Taken(build(problem, pick.spec, knowledge_of(workspace).machine), pick)


def noted(taken: Taken, code: Code, workspace: Workspace) -> Taken:
    """Where calls of a plan count themselves; it is logged where the plan, or its source, is new.

    Args:
        code: what was compiled: serial, where the plan that "auto" took does not run here.
    """
    ran = code.program.plan
    if ran.spec != taken.spec:
        taken = Taken(ran, Pick(ran.spec, "not weighed", f"{taken.spec} does not run here"))
    known: Taken | None = workspace.plans.get((ran.problem, ran.spec))
    if known is not None and known.pick.source == taken.pick.source:
        return known
    if known is None:
        known = workspace.take(ran, taken)
    known.know(taken.pick)
    say(workspace.rank, "group %s: %s", workspace.group.group_name, known)
    return known


def _without_bias(problem: Problem) -> Problem:
    """Of products summed over ranks, to which such a call adds its bias: see `add_bias`."""
    _, summed = problem.operation.moved(problem)
    added = problem.bias and summed and not problem.norm
    return replace(problem, bias=False) if added else problem


def of_islands(problem: Problem, workspace: Workspace) -> Problem:
    """The problem on the ranks of a workspace, as far as they are on several islands."""
    number = workspace.islands.number
    return replace(problem, islands=number) if number > 1 else problem


def _fits(planned: Problem, problem: Problem) -> bool:
    """Whether a plan for `planned` is one for `problem`: what differs from call to call may differ.

    That is how many indices there are, and experts of a token; of counts that differ how many rows,
    up to the planned.
    """
    on_device = problem.counts == "device_routed"  # kernels are compiled for that many experts
    top_k = problem.top_k if on_device else planned.top_k
    wanted = replace(problem, indices=planned.indices, top_k=top_k)
    if problem.counts != "equal" and planned.m >= problem.m:
        wanted = replace(wanted, m=planned.m, rows=())
    return planned == wanted


def family_of(plan: str) -> str:
    """The family of a plan as an operator's string argument."""
    own = _plans.get(plan)
    return own.family if own else (plan.split() or [""])[0]


@as_a_constant  # of a layer's own backward, which a compiler traces
def backward_plan(op: str, plan: str, rows: Sequence[int] = ()) -> str:
    """The plan of a backward operator whose forward was asked for with `plan`.

    Args:
        rows: of each rank; empty: equal, or of no account.
    """
    plan = plan.removesuffix(f" {WORD}")
    if plan in ("auto", "serial"):
        return plan
    family = family_of(plan)
    if family == "islands":  # of an operator that has none the library's way
        found, own = operation_of(op).family(family), _plans.get(plan)
        if found and len(set(rows)) > 1:  # as rows may be: of other sizes it takes any
            ranks = len(rows)
            asked = Problem(op, sum(rows), 1, 1, ranks, rows=tuple(rows), islands=ranks)
            found = None if found.refusal(asked) else found
        return (own.spec if own else plan) if found else "serial"
    return operation_of(op).gradient or family
