"""Sizes of the groups of a graded plan: few large matmuls, whole waves of tiles, copies hidden.

A matmul runs in waves of one tile per SM, so cutting it may add a part-filled wave to each cut.
The sizes chosen are those with the smallest makespan.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise

from counterpoint.machine import Machine
from counterpoint.plan.makespan import experts_s, gather_s, scatter_s
from counterpoint.problem import Problem

EQUAL = 1.005  # times that a closed form cannot tell apart
MAX_EXPERT_GROUPS = 5
MAX_EDGES = 16  # of groups of experts: more experts go by twos, by threes and so on
MAX_GROUPS = 4  # above 8 ranks, so that the number of candidates stays in the hundreds


def compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to cut `ranks` shards into groups; above 8 ranks at most MAX_GROUPS."""
    most = ranks if ranks <= 8 else min(ranks, MAX_GROUPS)
    for num_cuts in range(most):
        for cuts in combinations(range(1, ranks), num_cuts):
            yield tuple(b - a for a, b in pairwise((0, *cuts, ranks)))


@lru_cache(maxsize=256)
def graded_groups(problem: Problem, machine: Machine) -> tuple[int, ...]:
    """Group sizes with the smallest predicted makespan; of equals, the fewest groups."""
    predict = gather_s if problem.op == "all_gather_matmul" else scatter_s
    times_s = {
        groups: predict(problem, groups, 1, machine) for groups in compositions(problem.ranks)
    }
    close_s = min(times_s.values()) * EQUAL
    close = [groups for groups, seconds in times_s.items() if seconds <= close_s]
    return min(close, key=lambda groups: (len(groups), times_s[groups]))


@lru_cache(maxsize=256)
def expert_groups(problem: Problem, machine: Machine) -> tuple[int, ...]:
    """Sizes of groups of experts with the smallest predicted makespan; of equals, the fewest."""
    step = -(-problem.experts // MAX_EDGES)
    edges = range(step, problem.experts, step)
    times_s: dict[tuple[int, ...], float] = {}
    for num_cuts in range(min(len(edges), MAX_EXPERT_GROUPS - 1) + 1):
        for cuts in combinations(edges, num_cuts):
            groups = tuple(b - a for a, b in pairwise((0, *cuts, problem.experts)))
            times_s[groups] = experts_s(problem, groups, machine)
    close_s = min(times_s.values()) * EQUAL
    close = [groups for groups, seconds in times_s.items() if seconds <= close_s]
    return min(close, key=lambda groups: (len(groups), times_s[groups]))
