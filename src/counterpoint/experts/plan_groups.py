"""Groups of experts inside an island: the copies of one beside the matmuls of another.

By routes, a token goes once to each rank. Its row comes with the group of its first expert there,
and stays for those of later ones: so a group needs what has come by then and no more. A combine is
the mirror, from the last group to the first: when that of a token's first expert there is done, all
of them are, and their sum is sent. Each weight is read once.

    x --spread--> sent  by rank    --copies--> received  by source --spread--> rows     by expert
    product --fold--> sums  by source --copies--> back   by rank   --fold--> y
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from counterpoint.experts.plan_parts import (
    LANES,
    Exchange,
    between,
    guess_of,
    matmuls,
    operands,
    routed,
    rows_of,
    spans_of,
)
from counterpoint.machine import Machine
from counterpoint.plan.operation import Family, Options
from counterpoint.plan.steps import Buffer, Plan, Signal, Step
from counterpoint.problem import Problem
from counterpoint.schedules.finer import slices
from counterpoint.schedules.grading import ExpertsMakespan
from counterpoint.schedules.peers import Order, cuts

Made = tuple[Iterable[Buffer], Iterable[Step]]  # buffers between the steps, and these
Build = Callable[[Problem, Order, list[range], int], Made]  # of the experts of each group, chunks


def dispatch(p: Problem, order: Order, spans: list[range], chunks: int) -> Made:
    """Each exchange of rows with their experts, own ones too; its matmuls when all have come.

    Rows go to their place by expert. In chunks, an n-th of the rows of each rank for each expert of
    the group comes at a time.
    """
    copies, products = list[Step](), list[Step]()
    parts = [(span, *cut) for span in spans for cut in cuts(chunks)]
    for i, (span, suffix, chunk) in enumerate(parts):
        exchange, after = Exchange(p, order, i, span, chunk), () if i else ("open",)
        copies += [
            exchange.push("x", "received", after), exchange.keep("x", "received", after)
        ]  # fmt: skip
        first, *rest = matmuls(p, i, span, ("received", "y"), suffix=suffix, chunk=chunk)
        products += [replace(first, after=(f"keep_{i}",), waits=exchange.waits), *rest]
    return [rows_of(p, "received", p.k, "symmetric", by_expert=True)], [*copies, *products]


def dispatch_tokens(p: Problem, order: Order, spans: list[range], chunks: int) -> Made:
    """Each group is multiplied when its rows have come, while those of later ones do."""
    picks, products = list[Step](), list[Step]()
    for i, span in enumerate(spans):
        exchange, after = Exchange(p, order, i, span), (f"pick_{i}", *(() if i else ("open",)))
        picks += [
            routed(p, "spread", f"pick_{i}", ("x", "sent"), span=span),
            exchange.push("sent", "received", after), exchange.keep("sent", "received", after),
        ]  # fmt: skip
        products.append(routed(p, "spread", f"unfold_{i}", ("received", "rows"), span=span,
                               after=(f"keep_{i}",), waits=exchange.waits))  # fmt: skip
        products += matmuls(p, i, span, ("rows", "y"))
    received = between(p, p.k, "received", space="symmetric")
    return [*between(p, p.k, "sent"), *received, *between(p, p.k, "rows")], [*picks, *products]


def combine(p: Problem, order: Order, spans: list[range], chunks: int) -> Made:
    """The matmuls of a group, then its rows to their owners, who put them into y as they come.

    They go to the owners' symmetric memory: y is the user's. In chunks, a slice of the columns of
    all rows of the group goes at a time; slices lie in buffers of their own, so that no copy to a
    peer is strided.
    """
    steps, unpacked, buffers = list[Step](), tuple[Step, ...](), list[Buffer]()
    cut = [("", None, p.n)] if chunks == 1 else [
        (str(i), cols, cols[1] - cols[0]) for i, cols in enumerate(slices(p.n, chunks))
    ]  # fmt: skip
    for name, _, width in cut:
        buffers.append(rows_of(p, f"product{name}", width, "scratch", by_expert=True))
        buffers.append(rows_of(p, f"returned{name}", width, "symmetric", by_expert=False))
    parts = [(span, name, cols) for span in spans for name, cols, _ in cut]
    for i, (span, name, cols) in enumerate(parts):
        product, returned = f"product{name}", f"returned{name}"
        exchange, suffix = Exchange(p, order, i, span), f"_{name}" if name else ""
        multiplied = matmuls(p, i, span, ("x", product), suffix=suffix, cols=cols)
        after = (multiplied[-1].name, *(() if i else ("open",)))
        # what has come of the exchange before, behind these matmuls: until then nothing has
        steps += [*multiplied, exchange.push(product, returned, after), *unpacked]
        # later ones come behind `unpack` on their lane, and so behind the matmuls
        steps.append(exchange.keep(product, "y", () if i else after[:1], cols))
        unpacked = exchange.unpack(returned, "y", cols)
    return buffers, [*steps, *unpacked]


def combine_tokens(p: Problem, order: Order, spans: list[range], chunks: int) -> Made:
    """What a group has made is summed and goes back, while earlier experts multiply."""
    steps, waits, after = list[Step](), list[Signal](), ()
    for i, span in enumerate(reversed(spans)):
        exchange = Exchange(p, order, i, span)
        steps += matmuls(p, i, span, ("x", "product"))
        steps.append(routed(p, "fold", f"sum_{i}", ("product", "sums"), span=span))
        after = (f"sum_{i}", *(() if i else ("open",)))
        steps += [exchange.push("sums", "back", after), exchange.keep("sums", "back", after)]
        waits += exchange.waits
    steps.append(routed(p, "fold", "collect", ("back", "y"), span=range(p.experts),
                        after=(f"keep_{len(spans) - 1}",), waits=tuple(waits)))  # fmt: skip
    back = between(p, p.n, "back", space="symmetric")
    return [*between(p, p.n, "product", "sums"), *back], steps


def families(
    rows: Build, tokens: Build, predict: ExpertsMakespan, *, dispatches: bool
) -> tuple[Family, Family]:
    """Those of one of the two operators: of rows whose counts the host knows, and by routes."""

    def built(p: Problem, options: Options, machine: Machine) -> Plan:
        variant, spans, chunks = spans_of(p, options, machine, predict)
        name, build = ("routed", tokens) if p.by_routes else ("grouped", rows)
        order = Order(options.peers, p.ranks)
        buffers, steps = build(p, order, spans, chunks)
        return Plan(
            p, name, variant, options.peers, (*operands(p, dispatches=dispatches), *buffers), LANES,
            (order.barrier("open", "signal", 0), *steps),
        )  # fmt: skip

    guess_s = guess_of(predict)
    return (
        Family(name="grouped", takes=("peers", "sizes", "chunks"), build=built,
               wants=wants_known_counts, guess_s=guess_s),
        Family(name="routed", takes=("peers", "sizes"), build=built, wants=wants_routes,
               guess_s=guess_s),
    )  # fmt: skip


def wants_known_counts(p: Problem) -> str:
    """What a family wants whose steps the host lays out."""
    if p.by_routes:
        return "a row for each expert of a token"
    return "" if p.counts != "device" else "counts known to the host"


def wants_routes(p: Problem) -> str:
    """What a family wants whose steps move tokens."""
    return "" if p.counts == "routed" else "routes"
