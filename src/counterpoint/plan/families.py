"""A plan by its spec: the name of a family, and words that choose among its plans.

"serial", "direct", "shard_p2p xor", "graded 1/1/2 ring", "shard_p2p ring chunks=2", "grouped 4/4/8
ring", "fused two_shot 64x64x8 warps=4". A word means the same for every operator. What a spec
leaves out is filled in: ring, and the sizes that fit the machine. `build(problem, plan.spec) ==
plan`.
"""

from dataclasses import replace
from difflib import get_close_matches
from typing import NoReturn

from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.plan.names import COMPUTE
from counterpoint.plan.operation import Family, Options, operation_of
from counterpoint.plan.scaled import scaled
from counterpoint.plan.steps import Plan
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.ranges import instance
from counterpoint.schedules.invariant import said, varies
from counterpoint.schedules.mesh import lane_for_each_peer

PEERS = ("ring", "xor")
SHOTS = ("one_shot", "two_shot", "scatter")
MAX_CHUNKS = 8
MAX_WARPS = 32
MAX_DIGITS = 6  # of a number in a spec


def families(op: str) -> tuple[str, ...]:
    """The names of an operator's families, serial first."""
    return tuple(family.name for family in operation_of(op).families)


def build(problem: Problem, spec: str, machine: MachineLike | None = None) -> Plan:
    """The plan that `spec` names for `problem`.

    Args:
        machine: whose waves size the groups that `spec` leaves out, and whose links say whether
            copies to several peers have a lane each, given as to `choose`; the H200 preset if None.

    Raises:
        InputError: the op has no such family, the spec does not fit the problem, or there is no
            such machine; or bits depend on M by that plan, and the problem, or "invariant" behind
            the spec, wants one by which they do not.
    """
    instance("build", "problem", problem, Problem)
    where = preset(f"h200-{min(problem.ranks, 8)}")
    if machine is not None:
        where = machine_of("build", machine)
    instance(problem.op, "plan", spec, str, "text")
    problem, spec = said(problem, spec)
    family, options = parse(problem, spec)
    if problem.ranks == 1 and not family.alone:
        return alone(problem)
    if options.peers == "xor" and problem.ranks & (problem.ranks - 1):
        want = "for a power of two of ranks where it says xor"
        raise InputError(problem.op, "plan", want=want, got=repr(spec), fix="use ring")
    if want := family.refusal(problem):
        raise InputError(problem.op, "plan", want=f"for {want}", got=repr(spec))
    plan = scaled(family.build(problem, options, where))
    if problem.invariant and (why := varies(plan)):
        fix = f"{why}: bits depend on the rows beside"
        raise InputError(problem.op, "plan", want="batch-invariant", got=repr(spec), fix=fix)
    return lane_for_each_peer(plan) if where.link.topology == "mesh" else plan


def parse(problem: Problem, spec: str) -> tuple[Family, Options]:
    """The family and the options of a spec.

    Raises:
        InputError: the op has no such family, or the family does not take such a word.
    """
    operation = problem.operation
    if not operation.families:
        want = "of an operator: the stages of a pipeline are its user's, see Pipeline.plan"
        raise InputError("build", "problem", want=want, got=problem.op)
    instance(problem.op, "plan", spec, str, "text")
    name, *words = spec.split() or [""]
    family = operation.family(name)
    if family is None:
        want = f"auto or one of {', '.join(families(problem.op))}"
        near = get_close_matches(name, families(problem.op), 1)
        fix = f"did you mean {near[0]!r}?" if near else ""
        raise InputError(problem.op, "plan", want=want, got=repr(spec), fix=fix)
    reader = _Reader(problem, family, spec)
    for word in words:
        reader.take(word)
    return family, reader.options


def alone(problem: Problem) -> Plan:
    """A group of one rank: plain matmuls, whatever family was asked for."""
    operation = problem.operation
    operands, steps = operation.operands(problem), operation.alone(problem)
    return scaled(Plan(problem, "serial", "", "ring", operands, (COMPUTE,), steps))


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= MAX_DIGITS


class _Reader:
    """Reads the words of a spec behind the family."""

    def __init__(self, problem: Problem, family: Family, spec: str) -> None:
        self.problem, self.family, self.spec = problem, family, spec
        self.options = Options(spec=spec)
        self._taken: set[str] = set()

    def take(self, word: str) -> None:
        """Read one word.

        Raises:
            InputError: the family does not take it, or has taken its like.
        """
        option, value = self._read(word)
        if option in self._taken:
            self._refuse(f"a spec that makes each choice once; {word!r} is the second")
        if option not in self.family.takes:
            self._refuse(f"a spec of words that {self.family.name} knows; {word!r} is none", word)
        self._taken.add(option)
        self.options = replace(self.options, **{option: value})

    def _read(self, word: str) -> tuple[str, object]:
        """The option that a word is of, and its value; of one that is none "" ."""
        key, _, value = word.partition("=")
        if word in PEERS:
            return "peers", word
        if word in SHOTS:
            return "shots", word
        if key in ("chunks", "warps") and _is_number(value):
            number = int(value)
            most = MAX_WARPS if key == "warps" else MAX_CHUNKS
            return (key, number) if 0 < number <= most else ("", None)
        if not word[0].isdecimal():
            return "", None
        if "tile" in self.family.takes:
            return "tile", self._numbers(word, "x", 3)
        return "sizes", self._sizes(word)

    def _sizes(self, word: str) -> tuple[int, ...]:
        total = self.problem.experts or self.problem.ranks
        sizes = self._numbers(word, "/")
        if sum(sizes) != total and "sizes" in self.family.takes:
            self._refuse(f"a spec whose sizes add up to {total}; {word!r} do not")
        return sizes

    def _numbers(self, word: str, between: str, count: int = 0) -> tuple[int, ...]:
        parts = word.split(between)
        good = all(_is_number(part) and int(part) > 0 for part in parts)
        if not good or (count and len(parts) != count):
            example = between.join("112"[:count] or "112") if between == "/" else "64x64x8"
            self._refuse(f"a spec with sizes like {example}; {word[:40]!r} are none")
        return tuple(map(int, parts))

    def _refuse(self, want: str, word: str = "") -> NoReturn:
        known = [w for option, words in (("peers", PEERS), ("shots", SHOTS))
                 if option in self.family.takes for w in words]  # fmt: skip
        near = get_close_matches(word, known, 1) if word else []
        fix = f"did you mean {near[0]!r}?" if near else ""
        raise InputError(self.problem.op, "plan", want=want, got=repr(self.spec), fix=fix)
