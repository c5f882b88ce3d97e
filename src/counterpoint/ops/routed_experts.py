"""The operators of experts on tokens, by routes; each is the other's gradient.

A dispatch takes tokens to the rows of their experts; a combine takes rows, weighted, to the sums of
their tokens. How rows go: plan/routed_experts.py.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops import call, experts
from counterpoint.ops.agreement import Input, refused
from counterpoint.ops.backward import dtype_of
from counterpoint.ops.call import Operator, Output, Tensors, Words, present
from counterpoint.ops.check import autocast
from counterpoint.ops.exchange_routes import Routes
from counterpoint.ops.expert_gradients import weight_gradient
from counterpoint.ops.experts_check import check_operands
from counterpoint.ops.fused_experts import COMBINE, DISPATCH
from counterpoint.ops.plans import backward_plan, plan_key
from counterpoint.ops.register import register
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.runtime.routes import most_rows, routes_in

OPS: Any = torch.ops.counterpoint


Asked = tuple[int | None, str | Path | Plan]  # max_rows and plan, as users give them


def dispatch(
    x: Tensor, w: Tensor, routes: Routes, asked: Asked, group: dist.ProcessGroup, return_rows: bool
) -> Any:
    """The products of the rows that come to this rank's experts; with return_rows these, too.

    Raises:
        InputError: an argument is wrong.
        PlanError: the plan is a Plan that is wrong.
    """
    x, w, spec = _checked(DISPATCH, x, w, routes, asked, group)
    keep = return_rows or (torch.is_grad_enabled() and w.requires_grad)
    where = spec, group.group_name, group.size()
    counts, numbers, rows = routes.counts, routes.numbers, routes.weights.shape[0]
    both = OPS.all_to_all_matmul_routed(x, w, counts, numbers, rows, keep, *where)
    return both if return_rows else both[0]


def combine(
    x: Tensor, w: Tensor, routes: Routes, asked: Asked, group: dist.ProcessGroup, sum_of: object
) -> Tensor:
    """The weighted sums of this rank's tokens.

    Raises:
        InputError: an argument is wrong.
        PlanError: the plan is a Plan that is wrong.
    """
    given = {"sum_of": None if sum_of is None else "some"}
    x, w, spec = _checked(COMBINE, x, w, routes, asked, group, **given)
    counts, numbers, weights, tokens = routes
    keep = torch.is_grad_enabled() and weights.requires_grad
    where = spec, group.group_name, group.size()
    operands = (x, w, counts, numbers, weights, None)
    return OPS.matmul_all_to_all_routed(*operands, tokens, keep, *where)[0]


def _checked(
    op: str, x: Tensor, w: Tensor, routes: Routes, asked: Asked, group: dist.ProcessGroup,
    **also: object,
) -> tuple[Tensor, Tensor, str]:  # fmt: skip
    max_rows, plan = asked
    try:
        for name, given in {"max_rows": max_rows, **also}.items():
            if given is not None:
                raise InputError(op, name, want="left out with routes", got=given)
        x, w = autocast(x, w)  # type: ignore[assignment]
        check_operands(op, x, w)
        ranks, every = routes.counts.shape
        if (ranks, every) != (group.size(), group.size() * w.shape[0]) or x.is_cuda:
            want = f"routes of {every} experts on {ranks} CPU ranks"
            got = f"w of {w.shape[0]} on each of {group.size()}, on {x.device}"
            raise InputError(op, "counts", want=want, got=got)
        return x, w, plan_key(op, plan)
    except CounterpointError as error:
        raise refused(error, group, x) from None


@cache
def _operator(op: str, keep: bool) -> Operator:
    experts.operator_of(op)  # the first of an operator is what is sampled
    aside = (("weights", "plain"), ("add", "rows")) if op == COMBINE else ()
    inputs = (
        Input("x", "rows", fact="columns"), Input("w", "given"), Input("counts", "plain", fact=""),
        Input("routes", "plain", fact=""),
        *(Input(name, form, fact="") for name, form in aside),  # type: ignore[arg-type]
    )  # fmt: skip
    return Operator(op, inputs, partial(_problem, op), partial(_outputs, op, keep), _words)


def _problem(op: str, tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, w, *_ = present(tensors)
    local, k, n = w.shape
    m, top_k = rows
    top_k = min(top_k, local * ranks)  # of more, some are equal
    dtype = dtype_of(x)
    return Problem(op, m, n, k, ranks, dtype, experts=local, counts="routed", top_k=top_k)


def _outputs(
    op: str, keep: bool, tensors: Tensors, rows: Sequence[int], ranks: int, rank: int
) -> tuple[Output, ...]:
    x, w, *_ = present(tensors)
    k, n = w.shape[1:]
    if op == DISPATCH:
        return (Output("y", (-1, n)), *([Output("rows", (-1, k))] if keep else []))
    return (*([Output("product", (x.shape[0], n))] if keep else []), Output("y", (-1, n)))


def _words(tensors: Tensors, rows: Sequence[int], rank: int) -> Words:
    x, w, *_ = present(tensors)
    facts = {"w.shape": str(tuple(w.shape)), "x.dtype": str(x.dtype), "rows": str(rows[0])}
    return facts | {"top_k": str(rows[1])}, None


def _run(
    op: str, tensors: Tensors, keep: bool, plan: str, group_name: str, ranks: int
) -> list[Tensor]:
    """Run a call as torch's dispatcher has it."""
    x, _, counts, numbers, *_ = present(tensors)
    routes = routes_in(numbers, ranks)
    has, room = routes.tokens, len(routes.pairs)
    if op == COMBINE:
        has, room = room, has
    wrong = None
    if x.shape[0] != has:
        want = f"[{has}, K], as the routes of rank {routes.rank} say"
        wrong = InputError(op, "x", want=want, got=tuple(x.shape))
    rows = experts.most(most_rows(routes, counts), counts.shape[1])
    given = call.Given(room, wrong)
    return call.run(_operator(op, keep), tensors, plan, (rows, routes.top), group_name, given)


def _dispatch(
    x: Tensor, w: Tensor, counts: Tensor, routes: Tensor, rows: int, keep: bool, *where: Any
) -> tuple[Tensor, Tensor]:
    y, *kept = _run(DISPATCH, (x, w, counts, routes), keep, *where)
    return y, kept[0] if keep else x.new_empty(0, x.shape[1])


def _fake_dispatch(
    x: Tensor, w: Tensor, counts: Tensor, routes: Tensor, rows: int, keep: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows, w.shape[2]), x.new_empty(rows if keep else 0, x.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, routes, _, keep, *ctx.where = inputs
    ctx.save_for_backward(w, counts, routes, output[1] if keep else None)
    ctx.tokens = x.shape[0]
    if not keep:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_dispatch(
    ctx: Any, dy: Tensor | None, drows: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dx: the sums of the gradients of a token's rows; dw: of the rows that came here."""
    w, counts, routes, rows = ctx.saved_tensors
    plan, *group = ctx.where
    none = (None,) * 7
    if dy is None and drows is None:
        return None, None, *none
    if dy is None:
        assert drows is not None
        dy = drows.new_zeros(drows.shape[0], w.shape[2])
    dy, dx, dw = dy.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        operands = (dy, w.transpose(1, 2), counts, routes, None, drows)
        where = backward_plan(DISPATCH, plan), *group
        dx = OPS.matmul_all_to_all_routed(*operands, ctx.tokens, False, *where)[0]
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(rows, dy, counts, w, *group)
    return dx, dw, *none


def _combine(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    counts, routes, weights, add, _, keep, *where = rest
    *kept, y = _run(COMBINE, (x, w, counts, routes, weights, add), keep, *where)
    return y, kept[0] if keep else x.new_empty(0, w.shape[2])


def _fake_combine(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, tokens, keep, _, _, _ = rest
    n = w.shape[2]
    return x.new_empty(tokens, n), x.new_empty(x.shape[0] if keep else 0, n)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, routes, weights, _, _, keep, *ctx.where = inputs
    ctx.save_for_backward(x, w, counts, routes, weights, output[1] if keep else None)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_combine(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of rows, weights of experts and of rows: a token's gradient goes to all of its rows."""
    x, w, counts, routes, weights, product = ctx.saved_tensors
    plan, *group = ctx.where
    need_x, need_w, need_weights = (ctx.needs_input_grad[i] for i in (0, 1, 4))
    none, dx, dw, dweights = (None,) * 6, None, None, None
    if dy is None or not (need_x or need_w or need_weights):
        return (None,) * 11
    operands = (dy.contiguous(), w.transpose(1, 2), counts, routes, x.shape[0])
    where = backward_plan(COMBINE, plan), *group
    dx, rows = OPS.all_to_all_matmul_routed(*operands, need_w or need_weights, *where)
    if need_weights:
        dweights = (rows.float() * product.float()).sum(1)
    if need_w:
        dw = weight_gradient(x, _weighted(rows, weights), counts, w, *group)
    dx = _weighted(dx, weights) if need_x else None
    return dx, dw, None, None, dweights, *none


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else (rows.float() * weights[:, None]).to(rows.dtype)


_WHERE = "str plan, str group_name, int group_size"
# rows: of y. keep: the rows that came here are the second result
register(
    "all_to_all_matmul_routed(Tensor x, Tensor w, Tensor counts, Tensor routes, SymInt rows, "
    f"bool keep, {_WHERE}) -> (Tensor, Tensor)",
    _dispatch, _fake_dispatch, _backward_dispatch, _save_dispatch,
)  # fmt: skip
# weights: of rows; None is 1. add: to the products, row by row. tokens: rows of y. keep: the
# products are the second result
register(
    "matmul_all_to_all_routed(Tensor x, Tensor w, Tensor counts, Tensor routes, Tensor? weights, "
    f"Tensor? add, SymInt tokens, bool keep, {_WHERE}) -> (Tensor, Tensor)",
    _combine, _fake_combine, _backward_combine, _save_combine,
)  # fmt: skip
