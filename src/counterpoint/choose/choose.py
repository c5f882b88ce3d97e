"""Which plan for a problem on a machine, and why: on a laptop, for any machine that is known."""

from typing import Literal

from counterpoint.choose.by_model import by_model
from counterpoint.choose.by_rule import by_rule
from counterpoint.choose.choice import Choice
from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.problem import Problem
from counterpoint.ranges import instance

Level = Literal["model", "rule"]


def choose(
    problem: Problem,
    machine: MachineLike | None = None,
    *,
    by: Level = "model",
    eager: bool = False,
) -> Choice:
    """Choose a plan for `problem` without running anything.

    What an operator with `plan="auto"` does, but that there the matmul library's tiles are asked
    for, and a plan that was tuned by measurement goes before.

    Args:
        problem: what is computed, on how many ranks.
        machine: a `Machine`, a preset such as "h200-8" (with the costs measured on such a machine
            where the library has them), what `Machine.to_json` returned, or a file of that or that
            `counterpoint characterize` wrote; None for H200s, as many as there are ranks.
        by: "model" weighs every family by simulation, "rule" compares two sizes.
        eager: count the host's time, as outside of a CUDA graph.

    Returns:
        The choice: `plan`, `table` of all candidates, `timeline`, `explain()`.

    Raises:
        InputError: no such machine or level, or the machine has fewer GPUs than an island has
            ranks, or no `nic` where there are several islands.

    Example:
        >>> problem = Problem("all_gather_matmul", m=8192, n=7168, k=8192, ranks=8)
        >>> choose(problem, "h200-8").plan.family
        'graded'
    """
    instance("choose", "problem", problem, Problem)
    instance("choose", "eager", eager, bool, "True or False")
    if by not in ("model", "rule"):
        raise InputError("choose", "by", want="model or rule", got=repr(by))
    where = machine_of(
        "choose", machine if machine is not None else f"h200-{min(problem.ranks, 8)}"
    )
    ranks = problem.ranks // problem.islands
    if where.num_devices < ranks:
        want = f"a machine of {ranks} GPUs or more, as the problem has ranks"
        raise InputError("choose", "machine", want=want, got=f"{where.name}")
    if problem.islands > 1 and where.nic is None:
        want = (
            "a machine with a nic, where the problem has several islands "
            "(`counterpoint characterize` on such ranks writes one)"
        )
        raise InputError("choose", "machine", want=want, got=f"{where.name}")
    if problem.islands > 1 and by == "rule":
        want = "model, where the problem has several islands"
        raise InputError("choose", "by", want=want, got="rule")
    level = by_model if by == "model" else by_rule
    return level(problem, where.of_ranks(ranks), eager=eager)
