"""matmul_all_to_all: experts multiply, and rows go back to their owners; its families of plans."""

from counterpoint.machine import Machine
from counterpoint.plan import experts
from counterpoint.plan.experts import LANES, matmuls, push, rows_of
from counterpoint.plan.makespan import combine_s
from counterpoint.plan.names import OWN, in_one_lane
from counterpoint.plan.operation import Options
from counterpoint.plan.peers import Chunk, Order
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import Problem


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x by expert, y by owner."""
    x = rows_of(p, "x", p.k, "input", by_expert=True)
    return x, *experts.weights_and_counts(p), rows_of(p, "y", p.n, "output", by_expert=False)


def serial(p: Problem) -> Plan:
    """The matmuls, then the library's all-to-all behind a pass that puts rows in order."""
    between = rows_of(p, "product", p.n, "scratch", by_expert=True)
    exchange = experts.all_to_all(p, "product", "y")
    multiply = matmuls(p, 0, range(p.experts), "x", "product")
    return in_one_lane(p, "serial", (*operands(p), between), *multiply, exchange)


def grouped(p: Problem, options: Options, machine: Machine) -> Plan:
    """Groups of experts: what one has made goes to its owners beside the matmuls of the next one.

    It goes to the owners' symmetric memory, and from there to y, which is the user's, as it comes.
    """
    order = Order(options.peers, p.ranks)
    variant, spans = experts.spans_of(p, options, machine, combine_s)
    between = (
        rows_of(p, "product", p.n, "scratch", by_expert=True),
        rows_of(p, "returned", p.n, "symmetric", by_expert=False),
    )
    steps = (order.barrier("open", "signal", 0), *_steps(p, order, spans))
    buffers = (*operands(p), *between)
    return Plan(p, "grouped", variant, options.peers, buffers, LANES, steps)


def _steps(p: Problem, order: Order, spans: list[range]) -> tuple[Step, ...]:
    """The matmuls of a group, then its rows to their owners, who put them into y."""
    steps: list[Step] = []
    unpacked: tuple[Step, ...] = ()
    for g, span in enumerate(spans):
        multiplied = matmuls(p, g, span, "x", "product")
        after = (multiplied[-1].name, *(() if g else ("open",)))
        steps += [*multiplied, push(p, order, g, span, "product", "returned", after)]
        # behind the next group's matmuls: until then nothing has come
        steps += unpacked
        chunks = [(e, p.experts) for e in span]
        own, mine = (
            tuple(Region(name, shards=OWN, chunk=chunk) for chunk in chunks)
            for name in ("product", "y")
        )
        # later ones come behind `unpack` on their lane, and so behind the matmuls
        steps.append(Step(f"keep_{g}", "local", "copy", own, mine, () if g else after[:1]))
        unpacked = _unpack(p, order, g, chunks)
    return *steps, *unpacked


def _unpack(p: Problem, order: Order, g: int, chunks: list[Chunk]) -> tuple[Step, ...]:
    """What peers have sent of a group, into y.

    Waited for between matmuls: a kernel that waits beside one takes a place where it would run.
    """
    waits = tuple(order.wait((g + 1) * p.ranks + d, d) for d in order.distances)
    sources = [(order.source(d),) for d in order.distances]
    come, mine = (
        tuple(Region(name, shards=source, chunk=chunk) for source in sources for chunk in chunks)
        for name in ("returned", "y")
    )
    return (
        Step(f"come_{g}", "compute", "barrier", after=() if g else ("open",), waits=waits),
        Step(f"unpack_{g}", "local", "copy", come, mine, (f"come_{g}",)),
    )


OPERATION = experts.operation(operands, serial, grouped, dispatches=False)
