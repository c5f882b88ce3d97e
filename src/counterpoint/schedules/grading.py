"""Sizes of the groups of a graded plan: few large matmuls, whole waves of tiles, copies hidden.

A matmul runs in waves of one tile per SM, so cutting it may add a part-filled wave to each cut.
The sizes chosen are those with the smallest makespan.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, pairwise

from counterpoint.costs import NO_TILES, Tiles
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan.operation import Family, Option, Options, Peers
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

EQUAL = 1.005  # times that a closed form cannot tell apart
MAX_EXPERT_GROUPS = 5
MAX_EDGES = 16  # of groups of experts: more experts go by twos, by threes and so on
MAX_GROUPS = 4  # above 8 ranks, so that the number of candidates stays in the hundreds
MAX_CUTS = 32  # as many places to cut at

Groups = tuple[int, ...]
GroupsOf = Callable[[Problem, Options, Machine], Groups]
# seconds of a plan whose groups have those sizes, and of which one comes in so many chunks
Makespan = Callable[[Problem, Groups, int, Machine, Tiles], float]
ExpertsMakespan = Callable[[Problem, Groups, int, Machine], float]


def families(
    graded: Callable[[Problem, Groups, Peers, int], Plan],
    predict: Makespan,
    *,
    in_chunks: int,
    beside_s: Callable[[Problem, Machine], float] = lambda problem, machine: 0.0,
) -> tuple[Family, Family]:
    """The families "shard_p2p", where every group is one shard, and "graded".

    Args:
        graded: the plan of groups of those sizes, of which one comes in chunks.
        predict: its makespan.
        in_chunks: the group by index that may come in chunks; it is then one shard.
        beside_s: what the plan takes besides, however it is cut.
    """

    def family(name: str, takes: tuple[Option, ...], groups_of: GroupsOf) -> Family:
        def build(p: Problem, options: Options, machine: Machine) -> Plan:
            groups = groups_of(p, options, machine)
            return graded(p, groups, options.peers, max(options.chunks, 1))

        def guess_s(p: Problem, options: Options, machine: Machine, tiles: Tiles) -> float:
            groups, chunks = groups_of(p, options, machine), max(options.chunks, 1)
            return predict(p, groups, chunks, machine, tiles) + beside_s(p, machine)

        return Family(name=name, takes=takes, build=build, guess_s=guess_s)

    def fitting(p: Problem, options: Options, machine: Machine) -> Groups:
        """Those of the spec; what it leaves out fits the machine."""
        groups = options.sizes or graded_groups(p, machine, predict)
        if options.chunks > 1 and groups[in_chunks] != 1:
            which = "last" if in_chunks else "first"
            want = f"a spec whose {which} group is one shard, where it has chunks"
            raise InputError(p.op, "plan", want=want, got=repr(options.spec))
        return groups

    return (
        family("shard_p2p", ("peers", "chunks"), lambda p, options, machine: (1,) * p.ranks),
        family("graded", ("peers", "sizes", "chunks"), fitting),
    )


def named(groups: Groups, peers: Peers, chunks: int) -> tuple[str, str]:
    """Family and variant of a plan of such groups."""
    tail = f"{peers} chunks={chunks}" if chunks > 1 else peers
    return ("shard_p2p", tail) if set(groups) == {1} else ("graded", f"{sizes(groups)} {tail}")


def sizes(groups: Groups) -> str:
    """Sizes of groups as the word of a spec: "1/1/2"."""
    return "/".join(map(str, groups))


def compositions(ranks: int) -> Iterator[Groups]:
    """Every ordered way to cut `ranks` shards into groups; above 8 ranks at most MAX_GROUPS.

    Above MAX_CUTS ranks they are cut in steps of several shards.
    """
    most = ranks if ranks <= 8 else min(ranks, MAX_GROUPS)
    step = -(-ranks // MAX_CUTS)
    for num_cuts in range(most):
        for cuts in combinations(range(step, ranks, step), num_cuts):
            yield tuple(b - a for a, b in pairwise((0, *cuts, ranks)))


@lru_cache(maxsize=256)
def graded_groups(problem: Problem, machine: Machine, predict: Makespan) -> Groups:
    """Group sizes with the smallest predicted makespan; of equals, the fewest groups."""
    times_s = {
        groups: predict(problem, groups, 1, machine, NO_TILES)
        for groups in compositions(problem.ranks)
    }
    return _fewest(times_s)


@lru_cache(maxsize=256)
def expert_groups(
    problem: Problem, machine: Machine, predict: ExpertsMakespan, chunks: int = 1
) -> Groups:
    """Sizes of groups of experts with the smallest predicted makespan; of equals, the fewest.

    Args:
        chunks: that each group comes in.
    """
    step = -(-problem.experts // MAX_EDGES)
    edges = range(step, problem.experts, step)
    times_s: dict[Groups, float] = {}
    for num_cuts in range(min(len(edges), MAX_EXPERT_GROUPS - 1) + 1):
        for cuts in combinations(edges, num_cuts):
            groups = tuple(b - a for a, b in pairwise((0, *cuts, problem.experts)))
            times_s[groups] = predict(problem, groups, chunks, machine)
    return _fewest(times_s)


def _fewest(times_s: dict[Groups, float]) -> Groups:
    """The sizes of the smallest time; of times that cannot be told apart, the fewest groups."""
    close_s = min(times_s.values()) * EQUAL
    close = [groups for groups, seconds in times_s.items() if seconds <= close_s]
    return min(close, key=lambda groups: (len(groups), times_s[groups]))
