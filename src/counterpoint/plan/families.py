"""The families of plans by name, and the spec string that names one plan of a family.

A spec is the family and its variant: "serial", "shard_p2p xor push", "graded 1/1/2 ring pull",
"shard_p2p ring pieces=2". What a spec leaves out is filled in: ring, push, and for graded
the group sizes that fit the machine's waves. `build(problem, plan.spec) == plan`.
"""

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan import all_gather_matmul, matmul_reduce_scatter
from counterpoint.plan.grading import graded_groups
from counterpoint.plan.steps import Plan, Region
from counterpoint.presets import preset
from counterpoint.problem import Op, Problem

FAMILIES: dict[Op, tuple[str, ...]] = {
    "all_gather_matmul": (
        "serial", "shard_p2p", "graded", "uniform_fused_2d", "uniform_fused_1d",
    ),
    "matmul_reduce_scatter": ("serial", "shard_p2p", "graded"),
}  # fmt: skip
OPERANDS = {
    "all_gather_matmul": all_gather_matmul.operands,
    "matmul_reduce_scatter": matmul_reduce_scatter.operands,
}
PEERS = ("ring", "xor")
DIRECTIONS = ("push", "pull")
PIECES = tuple(f"pieces={i}" for i in range(1, 9))


def build(problem: Problem, spec: str, machine: Machine | None = None) -> Plan:
    """The plan that `spec` names for `problem`.

    Args:
        machine: whose waves size the groups that `spec` leaves out; the H200 preset if None.

    Raises:
        InputError: the op has no such family, or the spec does not fit the number of ranks.
    """
    family, *words = spec.split() or [""]
    known = FAMILIES[problem.op]
    if family not in known:
        want = f"auto or one of {', '.join(known)}"
        raise InputError(problem.op, "plan", want=want, got=repr(spec))
    options = _Options(problem, spec)
    for word in words:
        options.take(word)
    groups = options.groups
    if family == "shard_p2p":
        groups = (1,) * problem.ranks
    elif family == "graded" and groups is None:
        groups = graded_groups(problem, machine or preset(f"h200-{min(problem.ranks, 8)}"))
    if problem.ranks == 1:
        return alone(problem)
    if options.peers == "xor" and problem.ranks & (problem.ranks - 1):
        fix = "use ring"
        options.refuse("for a power of two of ranks where it says xor", fix=fix)

    edge = -1 if problem.op == "all_gather_matmul" else 0
    if options.pieces > 1 and groups is not None and groups[edge] != 1:
        which = "last" if edge else "first"
        options.refuse(f"a spec whose {which} group is one shard, where it has pieces")

    if problem.op == "all_gather_matmul":
        match family:
            case "serial":
                return all_gather_matmul.serial(problem)
            case "uniform_fused_2d":
                return all_gather_matmul.uniform_fused_2d(problem, options.peers)
            case "uniform_fused_1d":
                return all_gather_matmul.uniform_fused_1d(problem, options.peers)
            case _:
                assert groups is not None
                return all_gather_matmul.graded(
                    problem, groups, options.peers, options.direction, options.pieces
                )
    if family == "serial":
        return matmul_reduce_scatter.serial(problem)
    assert groups is not None
    return matmul_reduce_scatter.graded(problem, groups, options.peers, options.pieces)


def alone(problem: Problem) -> Plan:
    """A group of one rank: a plain matmul, whatever family was asked for."""
    step = all_gather_matmul.matmul(problem, "matmul", Region("x"), Region("y"))
    operands = OPERANDS[problem.op](problem)
    return Plan(problem, "serial", "", "ring", operands, (all_gather_matmul.COMPUTE,), (step,))


class _Options:
    """The words of a spec behind the family."""

    def __init__(self, problem: Problem, spec: str) -> None:
        self.problem = problem
        self.spec = spec
        self.groups: tuple[int, ...] | None = None
        self.pieces = 1
        self.peers: all_gather_matmul.Peers = "ring"
        self.direction: all_gather_matmul.Direction = "push"
        self._taken: set[str] = set()

    def take(self, word: str) -> None:
        family = self.spec.split()[0]
        gathers = self.problem.op == "all_gather_matmul"
        kind = "peers" if word in PEERS else "direction" if word in DIRECTIONS else word[:1]
        kind = "groups" if kind.isdecimal() else kind
        if kind in self._taken:
            self.refuse(f"a spec that makes each choice once; {word!r} is the second")
        self._taken.add(kind)
        if word in PEERS and family != "serial":
            self.peers = "xor" if word == "xor" else "ring"
        elif word in DIRECTIONS and gathers and family in ("shard_p2p", "graded"):
            self.direction = "pull" if word == "pull" else "push"
        elif word in PIECES and family in ("shard_p2p", "graded"):
            self.pieces = PIECES.index(word) + 1
        elif word[0].isdecimal() and family == "graded":
            self.groups = self.sizes(word, self.problem.ranks)
        else:
            self.refuse(f"a spec of words that {family} knows; {word!r} is none")

    def sizes(self, word: str, total: int) -> tuple[int, ...]:
        parts = word.split("/")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.refuse(f"a spec with sizes like 1/1/2; {word!r} are none")
        sizes = tuple(int(part) for part in parts)
        if sum(sizes) != total:
            self.refuse(f"a spec whose sizes add up to {total}; {word!r} do not")
        return sizes

    def refuse(self, want: str, fix: str = "") -> None:
        raise InputError(self.problem.op, "plan", want=want, got=repr(self.spec), fix=fix)
