"""The families of plans by name, and the spec string that names one plan of a family.

A spec is the family and its variant: "serial", "serial direct", "shard_p2p xor push",
"graded 1/1/2 ring pull", "shard_p2p ring pieces=2", "grouped 4/4/8 ring". What a spec leaves out is
filled in: ring, push, and for graded and grouped the sizes that fit the machine.
`build(problem, plan.spec) == plan`.
"""

from collections.abc import Callable

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan import (
    all_gather_matmul,
    all_gather_matmul_backward,
    all_gather_matmul_wgrad,
    experts,
    matmul_reduce_scatter,
    matmul_reduce_scatter_backward,
)
from counterpoint.plan.direct import FUSED, SPECS, refusal, with_our_collective
from counterpoint.plan.finer import FINER, finer
from counterpoint.plan.grading import expert_groups, graded_groups
from counterpoint.plan.steps import Buffer, Plan, Step
from counterpoint.presets import preset
from counterpoint.problem import EXPERTS, Op, Problem

FAMILIES: dict[Op, tuple[str, ...]] = {
    "all_gather_matmul": ("serial", "shard_p2p", "graded", *FINER),
    "matmul_reduce_scatter": ("serial", "shard_p2p", "graded", *FINER),
    "all_gather_matmul_wgrad": ("serial", "sliced"),
    "all_gather_matmul_backward": ("serial", "side_by_side"),
    "matmul_reduce_scatter_backward": ("serial", "shard_p2p", "graded"),
    "all_to_all_matmul": ("serial", "grouped"),
    "matmul_all_to_all": ("serial", "grouped"),
}  # fmt: skip
OPERANDS: dict[Op, Callable[[Problem], tuple[Buffer, ...]]] = {
    "all_gather_matmul": all_gather_matmul.operands,
    "matmul_reduce_scatter": matmul_reduce_scatter.operands,
    "all_gather_matmul_wgrad": all_gather_matmul_wgrad.operands,
    "all_gather_matmul_backward": all_gather_matmul_backward.operands,
    "matmul_reduce_scatter_backward": matmul_reduce_scatter_backward.operands,
    "all_to_all_matmul": experts.operands,
    "matmul_all_to_all": experts.operands,
}
ALONE: dict[Op, Callable[[Problem], tuple[Step, ...]]] = {
    "all_gather_matmul": all_gather_matmul.alone,
    "matmul_reduce_scatter": all_gather_matmul.alone,
    "all_gather_matmul_wgrad": all_gather_matmul_wgrad.alone,
    "all_gather_matmul_backward": all_gather_matmul_backward.alone,
    "matmul_reduce_scatter_backward": matmul_reduce_scatter_backward.alone,
    "all_to_all_matmul": experts.alone,
    "matmul_all_to_all": experts.alone,
}
PEERS = ("ring", "xor")
DIRECTIONS = ("push", "pull")
PIECES = tuple(f"pieces={i}" for i in range(1, 9))
IN_PIECES = ("shard_p2p", "graded", "sliced", "side_by_side")


def build(problem: Problem, spec: str, machine: Machine | None = None) -> Plan:
    """The plan that `spec` names for `problem`.

    Args:
        machine: whose waves size the groups that `spec` leaves out; the H200 preset if None.

    Raises:
        InputError: the op has no such family, or the spec does not fit the number of ranks.
    """
    if spec == "fused" and problem.op in EXPERTS:
        spec = FUSED  # as the operators call it
    if problem.op == "pipeline":
        want = "of an operator: the stages of a pipeline are its user's, see Pipeline.plan"
        raise InputError("build", "problem", want=want, got="a pipeline")
    family, *words = spec.split() or [""]
    known = FAMILIES[problem.op]
    if family not in known:
        want = f"auto or one of {', '.join(known)}"
        raise InputError(problem.op, "plan", want=want, got=repr(spec))
    options = _Options(problem, spec)
    for word in words:
        options.take(word)
    if problem.splits and family in FINER:
        options.refuse("serial, shard_p2p or graded for several weights")
    if problem.ranks == 1:
        return alone(problem)
    if options.peers == "xor" and problem.ranks & (problem.ranks - 1):
        fix = "use ring"
        options.refuse("for a power of two of ranks where it says xor", fix=fix)
    if options.ours:
        return with_our_collective(build(problem, "serial"), options.ours)
    if family in FINER:
        return finer(problem, family, options.peers)
    match problem.op:
        case "all_gather_matmul":
            return _all_gather_matmul(problem, family, options, machine)
        case "matmul_reduce_scatter":
            if family == "serial":
                return matmul_reduce_scatter.serial(problem)
            groups, pieces = options.grades(family, problem, machine), options.pieces
            return matmul_reduce_scatter.graded(problem, groups, options.peers, pieces)
        case "all_gather_matmul_wgrad":
            if family == "serial":
                return all_gather_matmul_wgrad.serial(problem)
            return all_gather_matmul_wgrad.sliced(problem, options.peers, options.pieces)
        case "all_gather_matmul_backward":
            if family == "serial":
                return all_gather_matmul_backward.serial(problem)
            return all_gather_matmul_backward.side_by_side(problem, options.peers, options.pieces)
        case "matmul_reduce_scatter_backward":
            if family == "serial":
                return matmul_reduce_scatter_backward.serial(problem)
            forward = matmul_reduce_scatter_backward.gather_problem(problem)
            groups, pieces = options.grades(family, forward, machine), options.pieces
            return matmul_reduce_scatter_backward.graded(problem, groups, options.peers, pieces)
        case "all_to_all_matmul" | "matmul_all_to_all":
            if family == "serial":
                return experts.serial(problem)
            where = machine or preset(f"h200-{min(problem.ranks, 8)}")
            groups = options.groups or expert_groups(problem, where)
            return experts.grouped(problem, groups, options.peers)


def _all_gather_matmul(
    problem: Problem, family: str, options: "_Options", machine: Machine | None
) -> Plan:
    match family:
        case "serial":
            return all_gather_matmul.serial(problem)
        case _:
            groups = options.grades(family, problem, machine)
            return all_gather_matmul.graded(
                problem, groups, options.peers, options.direction, options.pieces
            )


def alone(problem: Problem) -> Plan:
    """A group of one rank: plain matmuls, whatever family was asked for."""
    operands, steps = OPERANDS[problem.op](problem), ALONE[problem.op](problem)
    return Plan(problem, "serial", "", "ring", operands, (all_gather_matmul.COMPUTE,), steps)


class _Options:
    """The words of a spec behind the family."""

    def __init__(self, problem: Problem, spec: str) -> None:
        self.problem = problem
        self.spec = spec
        self.groups: tuple[int, ...] | None = None
        self.ours = ""
        self.pieces = 2 if spec.split()[0] == "sliced" else 1
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
        if f"{family} {word}" in SPECS:
            self.ours = f"{family} {word}"
            if want := refusal(self.problem, self.ours):
                self.refuse(f"for {want}")
        elif word in PEERS and family != "serial":
            self.peers = "xor" if word == "xor" else "ring"
        elif word in DIRECTIONS and gathers and family in ("shard_p2p", "graded"):
            self.direction = "pull" if word == "pull" else "push"
        elif word in PIECES and family in IN_PIECES:
            self.pieces = PIECES.index(word) + 1
        elif word[0].isdecimal() and family == "graded":
            self.groups = self.sizes(word, self.problem.ranks)
        elif word[0].isdecimal() and family == "grouped":
            self.groups = self.sizes(word, self.problem.experts)
        else:
            self.refuse(f"a spec of words that {family} knows; {word!r} is none")

    def grades(self, family: str, problem: Problem, machine: Machine | None) -> tuple[int, ...]:
        """The sizes of groups; those that are left out fit `problem`, a forward op."""
        groups = (1,) * problem.ranks if family == "shard_p2p" else self.groups
        groups = groups or graded_groups(
            problem, machine or preset(f"h200-{min(problem.ranks, 8)}")
        )
        edge = -1 if problem.op == "all_gather_matmul" else 0
        if self.pieces > 1 and groups[edge] != 1:
            which = "last" if edge else "first"
            self.refuse(f"a spec whose {which} group is one shard, where it has pieces")
        return groups

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
