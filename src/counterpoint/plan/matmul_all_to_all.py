"""matmul_all_to_all: experts multiply, and rows go back to their owners; its families of plans."""

from counterpoint.machine import Machine
from counterpoint.plan import expert_rails, experts, routed_experts, routed_groups
from counterpoint.plan.experts import LANES, Exchange, matmuls, rows_of
from counterpoint.plan.finer import slices
from counterpoint.plan.makespan import combine_s
from counterpoint.plan.names import in_one_lane
from counterpoint.plan.operation import Options
from counterpoint.plan.peers import Order
from counterpoint.plan.steps import Buffer, Plan, Step
from counterpoint.problem import Problem


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x by expert, y by owner."""
    x = rows_of(p, "x", p.k, "input", by_expert=True)
    return x, *experts.weights_and_counts(p), rows_of(p, "y", p.n, "output", by_expert=False)


def serial(p: Problem) -> Plan:
    """The matmuls, then the library's all-to-all behind a pass that puts rows in order."""
    if p.by_routes:
        return routed_experts.combine_serial(p, operands(p))
    between = rows_of(p, "product", p.n, "scratch", by_expert=True)
    exchange = experts.all_to_all(p, "product", "y")
    multiply = matmuls(p, 0, range(p.experts), ("x", "product"))
    return in_one_lane(p, "serial", (*operands(p), between), *multiply, exchange)


def grouped(p: Problem, options: Options, machine: Machine) -> Plan:
    """Groups of experts: what one has made goes to its owners beside the matmuls of the next one.

    It goes to the owners' symmetric memory, and from there to y, which is the user's, as it comes.
    In chunks, a slice of the columns of all rows of the group goes at a time; slices lie in buffers
    of their own, so that no copy to a peer is strided.
    """
    order = Order(options.peers, p.ranks)
    variant, spans, chunks = experts.spans_of(p, options, machine, combine_s)
    cut = slices(p.n, chunks)
    names = [str(i) if chunks > 1 else "" for i, _ in enumerate(cut)]
    between = (
        buffer
        for name, (start, stop) in zip(names, cut, strict=True)
        for buffer in (
            rows_of(p, f"product{name}", stop - start, "scratch", by_expert=True),
            rows_of(p, f"returned{name}", stop - start, "symmetric", by_expert=False),
        )
    )
    parts = [(span, name, cols if chunks > 1 else None)
             for span in spans for name, cols in zip(names, cut, strict=True)]  # fmt: skip
    steps = (order.barrier("open", "signal", 0), *_steps(p, order, parts))
    buffers = (*operands(p), *between)
    return Plan(p, "grouped", variant, options.peers, buffers, LANES, steps)


def _steps(
    p: Problem, order: Order, parts: list[tuple[range, str, tuple[int, int] | None]]
) -> tuple[Step, ...]:
    """The matmuls of a group, then its rows to their owners, who put them into y.

    Args:
        parts: of each exchange its experts, what stands behind the names of its buffers, and its
            columns of y.
    """
    steps: list[Step] = []
    unpacked: tuple[Step, ...] = ()
    for i, (span, name, cols) in enumerate(parts):
        product, returned = f"product{name}", f"returned{name}"
        exchange = Exchange(p, order, i, span)
        suffix = f"_{name}" if name else ""
        multiplied = matmuls(p, i, span, ("x", product), suffix=suffix, cols=cols)
        after = (multiplied[-1].name, *(() if i else ("open",)))
        steps += [*multiplied, exchange.push(product, returned, after)]
        # behind the next exchange's matmuls: until then nothing has come
        steps += unpacked
        # later ones come behind `unpack` on their lane, and so behind the matmuls
        steps.append(exchange.keep(product, "y", () if i else after[:1], cols))
        unpacked = exchange.unpack(returned, "y", cols)
    return *steps, *unpacked


OTHERS = (
    routed_experts.family(routed_experts.combine, expert_rails.combine, operands),
    routed_groups.family(routed_groups.combine, operands, combine_s),
)
OPERATION = experts.operation(operands, serial, grouped, combine_s, OTHERS, dispatches=False)
