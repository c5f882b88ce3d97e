"""The operators of experts as torch has them: registered together, as each is the other's gradient.

The public functions stand in `all_to_all_matmul.py` and `matmul_all_to_all.py`.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.experts.facts import operator_of, run
from counterpoint.experts.fused import sums as token_sums
from counterpoint.experts.fused.launch import COMBINE, DISPATCH
from counterpoint.experts.gradients import weight_gradient
from counterpoint.ops.plans import backward_plan
from counterpoint.ops.register import register

OPS: Any = torch.ops.counterpoint


def _dispatch(
    x: Tensor, w: Tensor, counts: Tensor, rows: int, host: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    keep, _, clear, plan, group_name, _, *asks = options
    operator = operator_of(DISPATCH, keep, clear, *asks)
    y, *kept = run(operator, (x, w, counts), plan, group_name, rows, host)
    return y, kept[0] if keep else x.new_empty(0, x.shape[1])


def _fake_dispatch(
    x: Tensor, w: Tensor, counts: Tensor, rows: int, host: bool, keep: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows, w.shape[2]), x.new_empty(rows if keep else 0, x.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, _, ctx.host, keep, ctx.shown, _, *ctx.where, _ = inputs
    ctx.save_for_backward(w, counts, output[1] if keep else None)
    ctx.rows = x.shape[0]
    if not keep:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # nobody asks for the gradient of rows that are only kept


def _backward_dispatch(
    ctx: Any, dy: Tensor | None, drows: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dx: the gradients of the rows go back to their owners; dw: of the rows that came here."""
    w, counts, rows = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    plan, *group = ctx.where
    none = (None,) * 10
    if dy is None and drows is None:
        return None, None, *none
    if dy is None:
        assert drows is not None
        dy = drows.new_zeros(drows.shape[0], w.shape[2])
    dy = dy.contiguous()  # autograd hands over expanded tensors
    if drows is None and ctx.shown and ctx.host:
        # whether there is one may differ between ranks, what runs may not
        drows = dy.new_zeros(dy.shape[0], w.shape[1])
    dx = dw = None
    if need_x:
        dx = OPS.matmul_all_to_all(
            dy, w.transpose(1, 2), counts, drows, ctx.rows, ctx.host, not ctx.host,
            backward_plan(DISPATCH, plan), *group,
        )  # fmt: skip
    if need_w:
        dw = weight_gradient(rows, dy, counts, w, *group)
    return dx, dw, *none


def _combine(
    x: Tensor, w: Tensor, counts: Tensor, add: Tensor | None, rows: int, host: bool, *options: Any
) -> Tensor:
    clear, plan, group_name, _, *asks = options
    operator = operator_of(COMBINE, False, clear, *asks)
    return run(operator, (x, w, counts, add, None, None), plan, group_name, rows, host)[0]


def _fake_combine(
    x: Tensor, w: Tensor, counts: Tensor, add: Tensor | None, rows: int, *_: Any
) -> Tensor:
    return x.new_empty(rows, w.shape[2])


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, counts, add, _, ctx.host, _, *ctx.where, _ = inputs
    ctx.save_for_backward(x, w, counts)
    ctx.has_add = add is not None


def _backward_combine(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.has_add and ctx.needs_input_grad[3]:
        raise UnsupportedError(f"{COMBINE}: what is added to the products has no gradient")
    return *_gradients(ctx, dy, *ctx.saved_tensors), *(None,) * 9


def _gradients(ctx: Any, dy: Tensor, x: Tensor, w: Tensor, counts: Tensor) -> tuple[Any, Any]:
    """(dx, dw) of a combine: the gradient goes to the experts as the rows did."""
    need_x, need_w = ctx.needs_input_grad[:2]
    if not (need_x or need_w):
        return None, None
    plan, *group = ctx.where
    dx, rows = OPS.all_to_all_matmul(
        dy.contiguous(), w.transpose(1, 2), counts, x.shape[0], ctx.host, need_w, False,
        not ctx.host, backward_plan(COMBINE, plan), *group,
    )  # fmt: skip
    dw = weight_gradient(x, rows, counts, w, *group) if need_w else None
    return dx if need_x else None, dw


def _combine_sum(
    x: Tensor, w: Tensor, counts: Tensor, index: Tensor, weights: Tensor, rows: int, *options: Any
) -> tuple[Tensor, Tensor]:
    host, keep, plan, group_name, _, *asks = options
    tensors = (x, w, counts, None, index, weights)
    refused = _outside(index, rows)
    sums, y = run(
        operator_of(COMBINE, keep, False, *asks), tensors, plan, group_name, rows, host, refused
    )
    return sums, y if keep else x.new_empty(0, w.shape[2])


def _outside(index: Tensor, rows: int) -> InputError | None:
    """What is wrong with the rows to sum; on a GPU the kernel that reads them finds it."""
    if index.is_cuda or not index.numel():
        return None
    low, high = (int(n) for n in index.aminmax())
    if low >= 0 and high < rows:
        return None
    return InputError(COMBINE, "sum_of", want=f"of rows 0 to {rows - 1}", got=f"{low} to {high}")


def _fake_sum(
    x: Tensor, w: Tensor, counts: Tensor, index: Tensor, weights: Tensor, rows: int, *options: Any
) -> tuple[Tensor, Tensor]:
    _, keep, *_ = options
    n = w.shape[2]
    return x.new_empty(index.shape[0], n), x.new_empty(rows if keep else 0, n)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, index, weights, ctx.rows, ctx.host, keep, *ctx.where, _ = inputs
    ctx.save_for_backward(x, w, counts, index, weights, output[1] if keep else None)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_sum(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w, counts, index, weights, y = ctx.saved_tensors
    none: tuple[None, ...] = (None,) * 7
    if dout is None:
        return None, None, None, None, None, *none
    dx = dw = dweights = None
    need_weights = ctx.needs_input_grad[4]
    if any(ctx.needs_input_grad[:2]) or need_weights:
        dy, dweights = token_sums.gradients(
            dout, index, weights, ctx.rows, y if need_weights else None
        )
        dx, dw = _gradients(ctx, dy, x, w, counts)
    dweights = dweights if need_weights else None
    return dx, dw, None, None, dweights, *none


def flops_of_dispatch(x: Any, w: Any, *_: object, out_shape: Any, **__: object) -> int:
    """Of the rows that there are, or that there is room for."""
    return 2 * prod(out_shape[0]) * w[1]


def flops_of_combine(x: Any, w: Any, *_: object, **__: object) -> int:
    """Likewise."""
    return 2 * prod(x) * w[2]


# rows: of y. host: counts are host-known. keep: the rows that came here are the second result; if
# they are shown to the caller, they may have a gradient. clear: rows of y beyond counts are zero
register(
    DISPATCH, _dispatch, _fake_dispatch, _backward_dispatch, _save_dispatch, flops=flops_of_dispatch
)
# add: to the products, row by row
register(COMBINE, _combine, _fake_combine, _backward_combine, _save_combine, flops=flops_of_combine)
# keep: the rows that are summed are the second result
register(
    f"{COMBINE}_sum", _combine_sum, _fake_sum, _backward_sum, _save_sum, flops=flops_of_combine
)
