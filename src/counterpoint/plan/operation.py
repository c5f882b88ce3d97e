"""What one operator is: its operands, its definition and its families of plans, in one declaration.

Whoever builds, proves, prices, chooses or runs a plan asks the declaration. operators.py lists all.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from counterpoint.costs import Tiles
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.operators import declaration
from counterpoint.plan.bind import Box
from counterpoint.plan.steps import Buffer, Plan, Step
from counterpoint.plan.values import Value
from counterpoint.problem import Problem

Peers = Literal["ring", "xor"]
Option = Literal["peers", "sizes", "chunks", "shots", "tile", "warps"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the words behind a family's name say; a word that is left out has the value here.

    Args:
        peers: in which order ranks meet.
        sizes: of groups of shards, or of experts.
        chunks: how many of the shard that is moved last.
        shots: of one kernel that sums: "one_shot", "two_shot", or "scatter" of own rows alone.
        tile: of one kernel: columns, contracted size, and stages of loads.
        warps: of a program of one kernel.
        spec: the whole text, for errors.
    """

    peers: Peers = "ring"
    sizes: tuple[int, ...] = ()
    chunks: int = 0
    shots: str = ""
    tile: tuple[int, int, int] | None = None
    warps: int = 0
    spec: str = ""


def takes_all(problem: Problem) -> str:
    """The refusal of a family that has a plan for every problem of its op."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of plans of an operator.

    Args:
        name: the first word of a spec.
        takes: options that may stand behind it.
        build: the plan; the machine sizes what a spec leaves out. Of two ranks or more.
        wants: what it wants of a problem that it does not have, or "". Such a plan is an error.
        guess_s: seconds by a closed form, where there is one.
        in_a_row: its plans are kernels one after another, with no side stream.
        alone: has plans for one rank, too. Of other families that is plain matmuls.
        islands: has plans for ranks of several islands, too; so has every serial family.
    """

    name: str
    build: Callable[[Problem, Options, Machine], Plan]
    takes: tuple[Option, ...] = ()
    wants: Callable[[Problem], str] = takes_all
    guess_s: Callable[[Problem, Options, Machine, Tiles], float] | None = None
    in_a_row: bool = False
    alone: bool = False
    islands: bool = False

    def refusal(self, problem: Problem) -> str:
        """What it wants of a problem that it does not have, or ""."""
        if problem.islands > 1 and not (self.islands or self.name == "serial"):
            return "ranks of one island"
        return self.wants(problem)


def in_a_row(
    name: str, build: Callable[[Problem], Plan], refusal: Callable[[Problem], str] = takes_all
) -> Family:
    """A family of one plan, whose kernels run one after another."""

    def only(problem: Problem, options: Options, machine: Machine) -> Plan:
        return build(problem)

    return Family(name=name, build=only, wants=refusal, in_a_row=True)


def refuse_tables(problem: Problem) -> None:
    """Refuse fields of ops with tables.

    Raises:
        InputError: the problem has one.
    """
    for name in ("tables", "indices", "out"):
        if given := getattr(problem, name):
            raise InputError(problem.op, name, want="left out: the op has no tables", got=given)


def refuse_heads(problem: Problem) -> None:
    """Refuse fields of an attention.

    Raises:
        InputError: the problem has one.
    """
    for name in ("head_dim", "causal", "scale"):
        if given := getattr(problem, name):
            raise InputError(problem.op, name, want="left out: the op has no heads", got=given)


def refuse_norm(problem: Problem) -> None:
    """Refuse fields of a norm.

    Raises:
        InputError: the problem has one.
    """
    for name in ("norm", "residual", "quantized", "eps"):
        if given := getattr(problem, name):
            raise InputError(problem.op, name, want="left out: the op has no norm", got=given)


def nothing(problem: Problem) -> Mapping[str, object]:
    """Of most operators nothing is filled in, and they have no tables, no heads and no norm.

    Raises:
        InputError: the problem has some.
    """
    refuse_tables(problem)
    refuse_heads(problem)
    refuse_norm(problem)
    return {}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an operator is; its name is that of the file that declares it.

    Args:
        operands: the user's tensors as buffers.
        definition: the boxes of the outputs on a rank, and what each cell of them has to hold; and
            of other buffers that a kernel fills.
        alone: the steps of a group of one rank.
        families: of its plans, serial first.
        candidates: specs worth weighing, or timing, for a problem; serial first.
        collectives: of the library that its plans may name.
        check: refuses sizes that are not its own.
        moved: columns of what is gathered, and of what is scattered.
        matmuls: (rows, columns, contracted) of each matmul of one rank, in one piece.
        invariant: whether it has plans by which no row's bits depend on M.
        shares_rows: whether M is shared out over the ranks.
        overlapped: the spec of the plan that overlaps which a rule takes; where none overlaps, what
            is faster than serial, or "". The second argument: a shard's copy takes longer than its
            matmul.
        gradient: the family that it takes as a gradient whose forward was asked for by name; "":
            that of the forward.
        without_serial: the spec that is taken whatever it costs, and why serial is not; or "", "".
        untold: the spec that is taken where nothing is known of the machine.
        fused_s: seconds of a step of kind "fused" whose kernel has the operator's name.
        rule: the spec that static sizes say, where the shorter side is not worth overlapping;
            "" is serial.
        filled: fields of a problem that follow from others; refuses those that the op has none of.
        described: what text says of a problem beside its sizes.
        exchange_s: seconds of its library's all-to-all, where that is not of equal blocks.
        computed_s: seconds of what is computed and is no matmul.
        sliced_s: of a backward that goes by slices of tables: seconds of (problem, machine, number
            of slices), and of (problem, machine, columns of each rank) that are one slice.
        scales: its x and w may have scales, see plan/scaled.py.
        activations: its y may have an activation, see plan/activated.py.
    """

    operands: Callable[[Problem], tuple[Buffer, ...]]
    definition: Callable[[Problem, int], Iterator[tuple[Box, Value]]]
    alone: Callable[[Problem], tuple[Step, ...]]
    families: tuple[Family, ...]
    candidates: Callable[[Problem], tuple[str, ...]]
    collectives: tuple[str, ...]
    check: Callable[[Problem], None]
    moved: Callable[[Problem], tuple[int, int]]
    overlapped: Callable[[Problem, bool], str]
    matmuls: Callable[[Problem], tuple[tuple[int, int, int], ...]] = lambda p: ((p.m, p.n, p.k),)
    gradient: str = "graded"
    without_serial: Callable[[Problem], tuple[str, str]] = lambda problem: ("", "")
    untold: Callable[[Problem], str] = lambda problem: "serial"
    invariant: bool = False
    shares_rows: bool = True
    fused_s: Callable[[Problem, Step, Machine], float] | None = None
    rule: Callable[[Problem, Machine], str] = lambda problem, machine: ""
    filled: Callable[[Problem], Mapping[str, object]] = nothing
    described: Callable[[Problem], str] = lambda problem: ""
    exchange_s: Callable[[Problem, Machine], float] | None = None
    computed_s: Callable[[Problem, Machine], float] | None = None
    sliced_s: tuple[Callable[..., float], Callable[..., float]] | None = None
    scales: bool = False
    activations: bool = False

    def family(self, name: str) -> Family | None:
        """The family of that name, if it has one."""
        return next((f for f in self.families if f.name == name), None)


def operation_of(op: str) -> Operation:
    """The declaration of an operator that exists, as that of every Problem does."""
    return declaration(op)
