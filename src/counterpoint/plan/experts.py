"""What plans of experts share: rows by owner or by expert, pushes of a group, its matmuls.

Experts have equally many rows of each rank. A step is a group of experts with all its peers: its
copies carry what all ranks have for these experts, or what these have made for all ranks, and each
weight is read once. The rows of one expert for one rank are few; those of a group lie equally far
apart on both sides, so the copy engine takes them as one strided copy for each peer.

Where counts differ they are an operand, and only plans whose steps read it are possible: the boxes
of such a plan, and so its proof, are those of equal counts. A call may pass, beside the operands of
its plan: `rows`, where to put the rows that come to this rank's experts; `add`, what is added to
the products of a combine; `index`, `weights` and `sums`, see ops/matmul_all_to_all.py; and `clear`,
if rows of the results that are none have to be zero.

Rows lie by owner or by expert. By owner: block d is of rank d, and in it part e of the e-th expert
of that rank. By expert: part e of every block, one after the other, which is a buffer in chunks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from counterpoint.machine import Machine
from counterpoint.plan import fused_experts, grading
from counterpoint.plan.bind import Box
from counterpoint.plan.names import COMPUTE, COPY, OWN, SIGNAL, collective, counts_of
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.peers import Order, orders
from counterpoint.plan.sizes import check_experts
from counterpoint.plan.steps import COUNTS, Buffer, Lane, Plan, Region, Space, Step
from counterpoint.plan.values import Product, Value
from counterpoint.problem import Problem

# copies within a GPU, beside those to peers
LOCAL = Lane("local", "copy", priority=-1)
LANES = (COMPUTE, SIGNAL, COPY, LOCAL)


def weights_and_counts(p: Problem) -> tuple[Buffer, ...]:
    """The experts of a rank, one under the other; and how many rows they have, where it varies."""
    table = Buffer(COUNTS, (p.ranks, p.ranks * p.experts), "int64", "input")
    weights = Buffer("w", (p.experts * p.k, p.n), p.dtype, "input")
    return (weights,) if p.counts == "equal" else (weights, table)


def operation(
    operands: Callable[[Problem], tuple[Buffer, ...]],
    serial: Callable[[Problem], Plan],
    grouped: Callable[[Problem, Options, Machine], Plan],
    *,
    dispatches: bool,
) -> Operation:
    """One of the two operators of experts: rows go to them, or what they have made goes back."""
    return Operation(
        operands=operands,
        definition=partial(definition, dispatches=dispatches),
        alone=lambda p: matmuls(p, 0, range(p.experts), "x", "y"),
        families=(
            in_a_row("serial", serial),
            fused_experts.family(operands),
            Family(name="grouped", takes=("peers", "sizes"), build=grouped,
                   refusal=wants_equal_counts),
        ),
        candidates=candidates,
        collectives=("all_to_all",),
        check=check_experts,
        moved=lambda p: (0, p.k if dispatches else p.n),
        overlapped=fused_experts.overlapped,
        gradient="",
        without_serial=fused_experts.without_serial,
        fused_s=fused_experts.seconds,
        rule=lambda p, machine: fused_experts.or_serial(p),
    )  # fmt: skip


def wants_equal_counts(p: Problem) -> str:
    """What a family wants whose steps are laid out before a call."""
    return "" if p.counts == "equal" else "equal counts known to the host"


def push(
    p: Problem, order: Order, g: int, span: range, source: str, target: str, after: tuple[str, ...]
) -> Step:
    """What each peer gets of a group, nearest first, and behind it all the signals."""
    each = [(order.to(d), (e, p.experts)) for d in order.distances for e in span]
    return Step(
        f"push_{g}",
        "copy",
        "copy",
        tuple(Region(source, shards=(peer,), chunk=chunk) for peer, chunk in each),
        tuple(Region(target, peer, OWN, chunk) for peer, chunk in each),
        after,
        posts=tuple(order.post((g + 1) * p.ranks + d, d) for d in order.distances),
    )


def matmuls(p: Problem, g: int, span: range, x: str, y: str) -> tuple[Step, ...]:
    """A matmul for each expert of a group, of one launch where there is one for several."""
    return tuple(
        Step(f"matmul_{e}", "compute", "matmul",
             (Region(x, chunk=(e, p.experts)), Region("w", rows=(e * p.k, (e + 1) * p.k)),
              *counts_of(p)),
             (Region(y, chunk=(e, p.experts)),), args=(("batch", g),))
        for e in span
    )  # fmt: skip


def rows_of(p: Problem, name: str, cols: int, space: Space, *, by_expert: bool) -> Buffer:
    """Rows of all ranks, by owner or by expert."""
    chunks = p.experts if by_expert else 1
    return Buffer(name, (p.m, cols), p.dtype, space, split=True, chunks=chunks)


def all_to_all(p: Problem, source: str, target: str) -> Step:
    """The library's all-to-all, with the pass that puts rows in order."""
    reads = (Region(source), *counts_of(p))
    return collective("all_to_all", "all_to_all", reads, Region(target))


def spans_of(
    p: Problem, options: Options, machine: Machine, predict: grading.ExpertsMakespan
) -> tuple[str, list[range]]:
    """The variant of a grouped plan, and the experts of each of its groups."""
    groups = options.sizes or grading.expert_groups(p, machine, predict)
    starts = [sum(groups[:i]) for i in range(len(groups))]
    spans = [range(start, start + size) for start, size in zip(starts, groups, strict=True)]
    return f"{grading.sizes(groups)} {options.peers}", spans


def definition(p: Problem, rank: int, *, dispatches: bool) -> Iterator[tuple[Box, Value]]:
    """y on `rank`: block e, s is the rows of expert e and of rank s, times that expert's weight.

    Of a dispatch they lie by expert, and the weight is of this rank; of a combine by owner.
    """
    count = p.rows[0] // p.experts
    for e, s in product(range(p.experts), range(p.ranks)):
        multiplies, old, new = rank, rank * p.experts + e, e * p.ranks + s
        if not dispatches:
            multiplies, old, new = s, e * p.ranks + rank, s * p.experts + e
        shift, row = count * (old - new), count * new
        term = Product("x", s, False, shift, "w", multiplies, 0, e * p.k, 0, p.k)
        yield Box(rank, "y", 0, row, row + count, 0, p.n), (term,) if p.k else ()


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    return "serial", "fused", *(f"grouped {peers}" for peers in orders(p.ranks))
