"""all_to_all_matmul: rows go to their experts, which multiply them; its families of plans."""

from collections.abc import Iterator
from dataclasses import replace

from counterpoint.machine import Machine
from counterpoint.plan import experts, fused_experts
from counterpoint.plan.bind import Box
from counterpoint.plan.experts import LANES, matmuls, push, rows_of
from counterpoint.plan.makespan import dispatch_s
from counterpoint.plan.names import COMPUTE, OWN
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.peers import Order
from counterpoint.plan.sizes import check_experts
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Value
from counterpoint.problem import Problem


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x by owner, y by expert."""
    x = rows_of(p, "x", p.k, "input", by_expert=False)
    return x, *experts.weights_and_counts(p), rows_of(p, "y", p.n, "output", by_expert=True)


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y on `rank`: for each of its experts what each rank has for it, times its weight."""
    return experts.definition(p, rank, dispatches=True)


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return matmuls(p, 0, range(p.experts), "x", "y")


def serial(p: Problem) -> Plan:
    """The library's all-to-all with a pass that puts rows in order, then the matmuls."""
    between = rows_of(p, "rows", p.k, "scratch", by_expert=True)
    steps = (experts.all_to_all(p, "x", "rows"), *matmuls(p, 0, range(p.experts), "rows", "y"))
    return Plan(p, "serial", "", "ring", (*operands(p), between), (COMPUTE,), steps)


def grouped(p: Problem, options: Options, machine: Machine) -> Plan:
    """Groups of experts: the copies of the next one beside the matmuls of this one.

    Rows go to their place by expert, and a group is multiplied when those of all ranks have come.
    """
    order = Order(options.peers, p.ranks)
    variant, spans = experts.spans_of(p, options, machine, dispatch_s)
    received = rows_of(p, "received", p.k, "symmetric", by_expert=True)
    steps = (order.barrier("open", "signal", 0), *_steps(p, order, spans))
    buffers = (*operands(p), received)
    return Plan(p, "grouped", variant, options.peers, buffers, LANES, steps)


def _steps(p: Problem, order: Order, spans: list[range]) -> tuple[Step, ...]:
    """Each group's rows to their experts, the own ones too; its matmuls when all have come."""
    copies: list[Step] = []
    products: list[Step] = []
    for g, span in enumerate(spans):
        after = () if g else ("open",)
        copies.append(push(p, order, g, span, "x", "received", after))
        kept = [Region("x", shards=OWN, piece=(e, p.experts)) for e in span]
        arrived = [Region("received", shards=OWN, piece=(e, p.experts)) for e in span]
        copies.append(Step(f"keep_{g}", "local", "copy", tuple(kept), tuple(arrived), after))
        first, *rest = matmuls(p, g, span, "received", "y")
        waits = tuple(order.wait((g + 1) * p.ranks + d, d) for d in order.distances)
        products += [replace(first, after=(f"keep_{g}",), waits=waits), *rest]
    return *copies, *products


OPERATION = Operation(
    name="all_to_all_matmul",
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        fused_experts.family(operands),
        Family(name="grouped", takes=("peers", "sizes"), build=grouped,
               refusal=experts.wants_equal_counts),
    ),
    candidates=experts.candidates,
    collectives=("all_to_all",),
    check=check_experts,
    moved=lambda p: (0, p.k),
    matmuls=lambda p: ((p.m, p.n, p.k),),
    overlapped=fused_experts.overlapped,
    gradient="",
    without_serial=fused_experts.without_serial,
    fused_s=fused_experts.seconds,
    rule=lambda p, machine: fused_experts.or_serial(p),
)  # fmt: skip
