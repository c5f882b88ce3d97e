"""Groups of experts by routes, inside an island: a token goes once to each rank, beside matmuls.

A rank multiplies its experts group by group. A token's row comes with the group of its first expert
there, and stays for those of later ones: so a group needs what has come by then and no more. A
combine is the mirror, from the last group to the first: when that of a token's first expert there
is done, all of them are, and their sum is sent. Each weight is read once.

    x --spread--> sent  by rank    --copies--> received  by source --spread--> rows     by expert
    product --fold--> sums  by source --copies--> back   by rank   --fold--> y

Which rows these are: runtime/routes.py. What is beyond the proof: routed_experts.py.
"""

from collections.abc import Callable
from dataclasses import replace

from counterpoint.machine import Machine
from counterpoint.plan.experts import LANES, Exchange, guess_of, matmuls, part_of, rows_of, spans_of
from counterpoint.plan.grading import ExpertsMakespan
from counterpoint.plan.names import routes_of
from counterpoint.plan.operation import Family, Options
from counterpoint.plan.peers import Order
from counterpoint.plan.steps import Buffer, Kind, Plan, Region, Step
from counterpoint.problem import Problem

Groups = tuple[str, list[range]]  # the variant of a plan, and the experts of each group


def dispatch(p: Problem, options: Options, users: tuple[Buffer, ...], groups: Groups) -> Plan:
    """Each group is multiplied when its rows have come, while those of later ones do.

    Args:
        users: the user's buffers.
    """
    order, picks, products = Order(options.peers, p.ranks), list[Step](), list[Step]()
    for i, span in enumerate(groups[1]):
        exchange, after = Exchange(p, order, i, span), (f"pick_{i}", *(() if i else ("open",)))
        picks += [
            _rows(p, "spread", f"pick_{i}", ("x", "sent"), span),
            exchange.push("sent", "received", after), exchange.keep("sent", "received", after),
        ]  # fmt: skip
        unfold = _rows(p, "spread", f"unfold_{i}", ("received", "rows"), span)
        products.append(replace(unfold, after=(f"keep_{i}",), waits=exchange.waits))
        products += matmuls(p, i, span, ("rows", "y"))
    between = (
        rows_of(p, "sent", p.k, "scratch", by_expert=False),
        rows_of(p, "received", p.k, "symmetric", by_expert=False),
        rows_of(p, "rows", p.k, "scratch", by_expert=True),
    )
    return _plan(p, options, groups, (*users, *between), [*picks, *products])


def combine(p: Problem, options: Options, users: tuple[Buffer, ...], groups: Groups) -> Plan:
    """What a group has made is summed and goes back, while earlier experts multiply."""
    order, steps, exchanges = Order(options.peers, p.ranks), list[Step](), list[Exchange]()
    for i, span in enumerate(reversed(groups[1])):
        exchanges.append(exchange := Exchange(p, order, i, span))
        steps += matmuls(p, i, span, ("x", "product"))
        steps.append(_rows(p, "fold", f"sum_{i}", ("product", "sums"), span))
        after = (f"sum_{i}", *(() if i else ("open",)))
        steps += [exchange.push("sums", "back", after), exchange.keep("sums", "back", after)]
    collect = _rows(p, "fold", "collect", ("back", "y"), range(p.experts))
    waits = tuple(signal for exchange in exchanges for signal in exchange.waits)
    steps.append(replace(collect, after=(f"keep_{exchanges[-1].i}",), waits=waits))
    between = (
        rows_of(p, "product", p.n, "scratch", by_expert=True),
        rows_of(p, "sums", p.n, "scratch", by_expert=False),
        rows_of(p, "back", p.n, "symmetric", by_expert=False),
    )
    return _plan(p, options, groups, (*users, *between), steps)


def _rows(p: Problem, kind: Kind, name: str, pair: tuple[str, str], span: range) -> Step:
    """A spread or a fold of the rows of some experts, of all blocks."""
    parts = [part_of(e, p.experts, (0, 1)) for e in span]
    reads, writes = (tuple(Region(b, chunk=part) for part in parts) for b in pair)
    return Step(name, "compute", kind, (*reads, *routes_of(p)), writes)


def _plan(
    p: Problem, options: Options, groups: Groups, buffers: tuple[Buffer, ...], steps: list[Step]
) -> Plan:  # fmt: skip
    steps = [Order(options.peers, p.ranks).barrier("open", "signal", 0), *steps]
    return Plan(p, "routed", groups[0], options.peers, buffers, LANES, tuple(steps))


def family(
    build: Callable[[Problem, Options, tuple[Buffer, ...], Groups], Plan],
    operands: Callable[[Problem], tuple[Buffer, ...]],
    predict: ExpertsMakespan,
) -> Family:
    """The family of one of the two operators of experts."""

    def built(p: Problem, options: Options, machine: Machine) -> Plan:
        variant, spans, _ = spans_of(p, options, machine, predict)
        return build(p, options, operands(p), (variant, spans))

    return Family(name="routed", takes=("peers", "sizes"), build=built, wants=wants,
                  guess_s=guess_of(predict))  # fmt: skip


def wants(p: Problem) -> str:
    """What such a plan wants of a problem that it does not have, or ""."""
    return "" if p.counts == "routed" else "routes"
