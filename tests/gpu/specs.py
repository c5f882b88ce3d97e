"""Which plans the tests run: all that an operator's declaration names for a problem."""

from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem


def specs(problem: Problem) -> list[str]:
    """Serial first; without those that refuse the problem. Of other families, one plan each."""
    operation = operation_of(problem.op)
    named = operation.candidates(problem)
    families = {spec.split()[0] for spec in named}
    others = [family.name for family in operation.families if family.name not in families]
    return [
        spec for spec in (*named, *others)
        if not operation.family(spec.split()[0]).refusal(problem)
    ]  # fmt: skip
