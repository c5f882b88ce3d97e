"""Which plans the tests run, all that an operator declares for a problem; and a bound."""

from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem

SHORT_S = 4.0  # of a group that is to miss a rank: kernels are compiled in it, beside other tests


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
