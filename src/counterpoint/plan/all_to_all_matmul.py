"""all_to_all_matmul: rows go to their experts, which multiply them; its families of plans."""

from dataclasses import replace

from counterpoint.machine import Machine
from counterpoint.plan import expert_rails, experts, routed_experts, routed_groups
from counterpoint.plan.experts import LANES, Exchange, matmuls, rows_of
from counterpoint.plan.makespan import dispatch_s
from counterpoint.plan.names import in_one_lane
from counterpoint.plan.operation import Options
from counterpoint.plan.peers import Order, cuts
from counterpoint.plan.steps import Buffer, Plan, Step
from counterpoint.problem import Problem


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x by owner, y by expert."""
    x = rows_of(p, "x", p.k, "input", by_expert=False)
    return x, *experts.weights_and_counts(p), rows_of(p, "y", p.n, "output", by_expert=True)


def serial(p: Problem) -> Plan:
    """The library's all-to-all with a pass that puts rows in order, then the matmuls."""
    if p.by_routes:
        return routed_experts.dispatch_serial(p, operands(p))
    between = rows_of(p, "rows", p.k, "scratch", by_expert=True)
    exchange = experts.all_to_all(p, "x", "rows")
    multiply = matmuls(p, 0, range(p.experts), ("rows", "y"))
    return in_one_lane(p, "serial", (*operands(p), between), exchange, *multiply)


def grouped(p: Problem, options: Options, machine: Machine) -> Plan:
    """Groups of experts: the copies of the next one beside the matmuls of this one.

    Rows go to their place by expert, and a group is multiplied when those of all ranks have come.
    In chunks, an n-th of the rows of each rank for each expert of the group comes at a time.
    """
    order = Order(options.peers, p.ranks)
    variant, spans, chunks = experts.spans_of(p, options, machine, dispatch_s)
    received = rows_of(p, "received", p.k, "symmetric", by_expert=True)
    steps = (order.barrier("open", "signal", 0), *_steps(p, order, spans, chunks))
    buffers = (*operands(p), received)
    return Plan(p, "grouped", variant, options.peers, buffers, LANES, steps)


def _steps(p: Problem, order: Order, spans: list[range], chunks: int) -> tuple[Step, ...]:
    """Each exchange of rows with their experts, own ones too; its matmuls when all have come."""
    copies: list[Step] = []
    products: list[Step] = []
    parts = [(span, *cut) for span in spans for cut in cuts(chunks)]
    for i, (span, suffix, chunk) in enumerate(parts):
        after = () if i else ("open",)
        exchange = Exchange(p, order, i, span, chunk)
        copies += [
            exchange.push("x", "received", after), exchange.keep("x", "received", after)
        ]  # fmt: skip
        first, *rest = matmuls(p, i, span, ("received", "y"), suffix=suffix, chunk=chunk)
        products += [replace(first, after=(f"keep_{i}",), waits=exchange.waits), *rest]
    return *copies, *products


OTHERS = (
    routed_experts.family(routed_experts.dispatch, expert_rails.dispatch, operands),
    routed_groups.family(routed_groups.dispatch, operands, dispatch_s),
)
OPERATION = experts.operation(operands, serial, grouped, dispatch_s, OTHERS, dispatches=True)
