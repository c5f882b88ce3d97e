"""The two operators of experts: rows go to them, or what they have made goes back."""

from functools import partial

from counterpoint.experts import plan_groups, plan_islands
from counterpoint.experts.fused import plan_fused
from counterpoint.experts.plan_parts import (
    between,
    candidates,
    definition,
    matmuls,
    operands,
    routed,
    rows_of,
    untold,
    without_serial,
)
from counterpoint.plan.names import collective, in_one_lane, rows_said
from counterpoint.plan.operation import Operation, in_a_row
from counterpoint.plan.steps import Plan, Region, Step
from counterpoint.problem import Problem
from counterpoint.schedules.makespan import combine_s, dispatch_s
from counterpoint.schedules.sizes import check_experts


def dispatch_serial(p: Problem) -> Plan:
    """Rows to their ranks by the library's all-to-all, and to their experts, then the matmuls."""
    users, multiply = operands(p, dispatches=True), matmuls(p, 0, range(p.experts), ("rows", "y"))
    if not p.by_routes:
        rows = rows_of(p, "rows", p.k, "scratch", by_expert=True)
        return in_one_lane(p, "serial", (*users, rows), _all_to_all(p, "x", "rows"), *multiply)
    steps = (
        routed(p, "spread", "pick", ("x", "sent"), shards=_everyone(p)),
        _all_to_all(p, "sent", "received"),
        routed(p, "spread", "unfold", ("received", "rows"), shards=_everyone(p)),
    )
    buffers = between(p, p.k, "sent", "received", "rows")
    return in_one_lane(p, "serial", (*users, *buffers), *steps, *multiply)


def combine_serial(p: Problem) -> Plan:
    """The matmuls, then rows back by the library's all-to-all, to their places in y."""
    users = operands(p, dispatches=False)
    multiply = matmuls(p, 0, range(p.experts), ("x", "product"))
    if not p.by_routes:
        product, back = between(p, p.n, "product"), _all_to_all(p, "product", "y")
        return in_one_lane(p, "serial", (*users, *product), *multiply, back)
    steps = (
        routed(p, "fold", "sum", ("product", "sums"), shards=_everyone(p)),
        _all_to_all(p, "sums", "back"),
        routed(p, "fold", "collect", ("back", "y"), shards=_everyone(p)),
    )
    buffers = between(p, p.n, "sums", "back", "product")
    return in_one_lane(p, "serial", (*users, *buffers), *multiply, *steps)


def _everyone(p: Problem) -> tuple[tuple[int], ...]:
    return tuple((r,) for r in range(p.ranks))


def _all_to_all(p: Problem, source: str, target: str) -> Step:
    """The library's, with the pass that puts rows in order."""
    return collective("all_to_all", "all_to_all", (Region(source), *rows_said(p)), Region(target))


def _operation(*, dispatches: bool) -> Operation:
    if dispatches:
        serial, predict = dispatch_serial, dispatch_s
        groups = plan_groups.dispatch, plan_groups.dispatch_tokens
        far = plan_islands.dispatch, plan_islands.dispatch_on_rails
    else:
        serial, predict = combine_serial, combine_s
        groups = plan_groups.combine, plan_groups.combine_tokens
        far = plan_islands.combine, plan_islands.combine_on_rails
    grouped, by_routes = plan_groups.families(*groups, predict, dispatches=dispatches)
    users = partial(operands, dispatches=dispatches)
    return Operation(
        operands=users,
        definition=partial(definition, dispatches=dispatches),
        alone=lambda p: matmuls(p, 0, range(p.experts), ("x", "y")),
        families=(
            in_a_row("serial", serial), plan_fused.family(users), grouped,
            plan_islands.family(*far, dispatches=dispatches), by_routes,
        ),
        candidates=candidates,
        collectives=("all_to_all",),
        check=check_experts,
        moved=lambda p: (0, p.k if dispatches else p.n),
        overlapped=plan_fused.overlapped,
        gradient="",
        without_serial=without_serial,
        untold=untold,
        fused_s=plan_fused.seconds,
        rule=lambda p, machine: plan_fused.or_serial(p),
    )  # fmt: skip


DISPATCH, COMBINE = _operation(dispatches=True), _operation(dispatches=False)
