"""Sizes of the groups of a graded plan: few large matmuls, whole waves of tiles, copies hidden.

A matmul runs in waves of one tile per SM, so cutting it may add a part-filled wave to each cut.
The sizes chosen are those with the smallest makespan.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Protocol

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan.operation import Options
from counterpoint.problem import Problem

EQUAL = 1.005  # times that a closed form cannot tell apart
MAX_EXPERT_GROUPS = 5
MAX_EDGES = 16  # of groups of experts: more experts go by twos, by threes and so on
MAX_GROUPS = 4  # above 8 ranks, so that the number of candidates stays in the hundreds


ExpertsMakespan = Callable[[Problem, tuple[int, ...], Machine], float]


def compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to cut `ranks` shards into groups; above 8 ranks at most MAX_GROUPS."""
    most = ranks if ranks <= 8 else min(ranks, MAX_GROUPS)
    for num_cuts in range(most):
        for cuts in combinations(range(1, ranks), num_cuts):
            yield tuple(b - a for a, b in pairwise((0, *cuts, ranks)))


class Makespan(Protocol):
    """Seconds of a plan whose groups have those sizes: `makespan.gather_s` or `scatter_s`."""

    def __call__(
        self, problem: Problem, groups: tuple[int, ...], pieces: int, machine: Machine, /
    ) -> float:
        """Predict."""
        ...


def sizes_of(
    problem: Problem, options: Options, machine: Machine, predict: Makespan, *, in_pieces: int
) -> tuple[int, ...]:
    """Sizes of the groups of a graded plan; those that are left out fit the machine.

    Args:
        predict: the makespan of such a plan.
        in_pieces: the group by index that may come in pieces; it is then one shard.

    Raises:
        InputError: it has pieces and is not one shard.
    """
    groups = options.sizes or graded_groups(problem, machine, predict)
    if options.pieces > 1 and groups[in_pieces] != 1:
        which = "last" if in_pieces else "first"
        want = f"a spec whose {which} group is one shard, where it has pieces"
        raise InputError(problem.op, "plan", want=want, got=repr(options.spec))
    return groups


@lru_cache(maxsize=256)
def graded_groups(problem: Problem, machine: Machine, predict: Makespan) -> tuple[int, ...]:
    """Group sizes with the smallest predicted makespan; of equals, the fewest groups."""
    times_s = {
        groups: predict(problem, groups, 1, machine) for groups in compositions(problem.ranks)
    }
    return _fewest(times_s)


@lru_cache(maxsize=256)
def expert_groups(problem: Problem, machine: Machine, predict: ExpertsMakespan) -> tuple[int, ...]:
    """Sizes of groups of experts with the smallest predicted makespan; of equals, the fewest."""
    step = -(-problem.experts // MAX_EDGES)
    edges = range(step, problem.experts, step)
    times_s: dict[tuple[int, ...], float] = {}
    for num_cuts in range(min(len(edges), MAX_EXPERT_GROUPS - 1) + 1):
        for cuts in combinations(edges, num_cuts):
            groups = tuple(b - a for a, b in pairwise((0, *cuts, problem.experts)))
            times_s[groups] = predict(problem, groups, machine)
    return _fewest(times_s)


def _fewest(times_s: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    """The sizes of the smallest time; of times that cannot be told apart, the fewest groups."""
    close_s = min(times_s.values()) * EQUAL
    close = [groups for groups, seconds in times_s.items() if seconds <= close_s]
    return min(close, key=lambda groups: (len(groups), times_s[groups]))
