"""What "auto" would take here, and every plan that it weighs: the one place that asks the
library."""

from benchmarks.declare import Bench
from counterpoint.choose.by_model import by_model
from counterpoint.choose.choice import Choice
from counterpoint.choose.known import Knowledge
from counterpoint.group.ranks import gather_object
from counterpoint.group.workspace import workspace_of
from counterpoint.ops.auto import knowledge_of, known_tiles
from counterpoint.problem import Problem


def forget_tuned(bench: Bench) -> None:
    """Have "auto" go by the model alone: it is what is scored, not what was tuned here before."""
    workspace = workspace_of(bench.group, bench.device)
    workspace.knowledge = Knowledge(knowledge_of(workspace).machine, {})


def choice_of(problem: Problem, bench: Bench) -> Choice | None:
    """The model's choice with what this machine knows; None where nothing is known of it."""
    machine = knowledge_of(workspace_of(bench.group, bench.device)).machine
    if machine is None:
        return None
    return by_model(problem, machine, tiles=known_tiles(problem, bench.device))


def candidates(problem: Problem, bench: Bench) -> list[str]:
    """Every plan that "auto" weighs but serial, equal on all ranks."""
    choice = choice_of(problem, bench)
    table = choice.table if choice else ()
    specs = [c.spec for c in table if c.spec != "serial" and c.basis != "refused"]
    # tiles are asked of each GPU by itself; all ranks time the same in one order
    return gather_object(specs, bench.group)[0]
