"""Which plans the tests run: all that an operator's declaration names for a problem."""

from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem


def specs(problem: Problem) -> list[str]:
    """Serial first; without those that refuse the problem."""
    operation = operation_of(problem.op)
    return [
        spec for spec in operation.candidates(problem)
        if not operation.family(spec.split()[0]).refusal(problem)
    ]  # fmt: skip
