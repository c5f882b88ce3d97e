"""Each expert multiplies, and rows go back to their owners: the second half of a layer."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.ops import all_to_all_matmul, call, token_sums
from counterpoint.ops.check import autocast, check_dense, check_group
from counterpoint.ops.expert_gradients import weight_gradient
from counterpoint.ops.experts import operator_of, run, seen
from counterpoint.ops.experts import sample as sample  # what is tuned and compared
from counterpoint.ops.experts_check import Table, check_operands, room_of, table_of
from counterpoint.ops.plans import backward_plan, plan_key
from counterpoint.plan.steps import Plan

OP = "matmul_all_to_all"
on_host: Callable[[Tensor], bool] = attrgetter("is_cpu")
SUM = f"{OP}_sum"

_SCHEMA = "str plan, str group_name, int group_size"
call.LIBRARY.define(
    f"{OP}(Tensor x, Tensor w, Tensor counts, Tensor? add, SymInt rows, bool host, bool clear, "
    f"{_SCHEMA}) -> Tensor"
)
call.LIBRARY.define(
    f"{SUM}(Tensor x, Tensor w, Tensor counts, Tensor index, Tensor weights, SymInt rows, "
    f"bool host, bool keep, {_SCHEMA}) -> (Tensor, Tensor)"
)


def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    *,
    counts: Table,
    group: dist.ProcessGroup | None = None,
    max_rows: int | None = None,
    plan: str | Path | Plan = "auto",
    sum_of: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Multiply by experts and send rows back: the inverse of `all_to_all_matmul`.

    In place of a grouped matmul, the rows' permutation and `all_to_all_single`, and with `sum_of`
    of the weighted sum that follows. Accumulates in fp32, and rounds to the dtype of x for the way.
    Runs on the current stream. Differentiable: its backward is `all_to_all_matmul`.

    Args:
        x: bf16, fp16 or fp32 [R, K], on CPU or CUDA, sorted by local expert, then by source rank.
        w: dtype of x, [E_local, K, N], a unit stride in K or N.
        counts: as for `all_to_all_matmul`, the same table.
        group: whose ranks take part; the default group if None.
        max_rows: rows that a rank may get back at most; needed, and the rows of y, where counts is
            device-known. Give all ranks the same.
        plan: as for `all_to_all_matmul`.
        sum_of: (rows, weights), both [tokens, top_k]: int32 or int64 into the rows of y, and
            floating point. Returned is then, instead of y,
            out[t] = weights[t, 0] y[rows[t, 0]] + weights[t, 1] y[rows[t, 1]] + ...,
            summed in fp32 in that order and rounded once, as its gradients are.

    Returns:
        dtype of x, [T, N], a new tensor: this rank's rows back, sorted by expert, all E of them. T
        is the sum of counts[rank], or max_rows where counts is device-known; rows beyond the sum
        are then not written, and rows of x beyond that of this rank's experts are ignored. With
        sum_of [tokens, N].

    Raises:
        InputError, PlanError, UnsupportedError, PeerTimeoutError: as for `all_to_all_matmul`.

    Example:
        >>> y = counterpoint.matmul_all_to_all(h, w, counts=counts, group=ep)  # doctest: +SKIP
    """
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        group = check_group(OP, group)
    known, key = seen(OP, x, w, counts, max_rows, plan, group), None
    index, weights = sum_of if isinstance(sum_of, tuple) and len(sum_of) == 2 else (None, None)
    at_once = known is not None and known.good
    if at_once and sum_of is not None:  # rows to sum that the host can read are looked at
        at_once = isinstance(index, Tensor) and not on_host(index)
    if known is not None and at_once:
        tensors = (x, w, counts, None, index, weights)
        found, key, _ = call.repeated(OP, tensors, group, plan, known.facts, 0, known.room)  # type: ignore[arg-type]
        if found is not None:
            return found[0]
    x, w = autocast(x, w)  # type: ignore[assignment]
    check_operands(OP, x, w)
    table, spec = table_of(OP, counts, x, w, group.size()), plan_key(OP, plan)
    room, host = room_of(OP, table, max_rows, group)
    if sum_of is not None:
        index, weights = _check_sum(sum_of, x)
    if key is not None and known is not None:
        tensors = (x, w, table, None, index, weights)
        given = call.Given(room)
        return call.first(operator_of(OP), tensors, spec, known.facts, group, key, given)[0]
    where = (spec, group.group_name, group.size())
    ops: Any = torch.ops.counterpoint
    if index is None or weights is None:
        return ops.matmul_all_to_all(x, w, table, None, room, host, False, *where)
    keep = torch.is_grad_enabled() and weights.requires_grad
    return ops.matmul_all_to_all_sum(x, w, table, index, weights, room, host, keep, *where)[0]


def _check_sum(sum_of: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_of` as two tensors of one shape beside x.

    Raises:
        InputError: it is something else.
    """
    want = "(rows, weights), int32 or int64 and floating point, both [tokens, top_k]"
    if not isinstance(sum_of, tuple | list) or len(sum_of) != 2:
        raise InputError(OP, "sum_of", want=want, got=type(sum_of).__name__)
    index, weights = sum_of
    if not isinstance(index, Tensor) or not isinstance(weights, Tensor):
        raise InputError(OP, "sum_of", want=want, got="no Tensors")
    check_dense(OP, sum_of=index)
    check_dense(OP, sum_of=weights)
    kinds = index.dtype in (torch.int32, torch.int64) and weights.is_floating_point()
    if not kinds or index.dim() != 2 or index.shape != weights.shape:
        got = f"{index.dtype} {list(index.shape)} and {weights.dtype} {list(weights.shape)}"
        raise InputError(OP, "sum_of", want=want, got=got)
    if index.device != x.device or weights.device != x.device:
        got = f"{index.device} and {weights.device}"
        raise InputError(OP, "sum_of", want=f"on {x.device} as x", got=got)
    return index, weights


def returned(*arguments: Any) -> Tensor:
    """The operator as the dispatcher has it: what a backward calls."""
    return torch.ops.counterpoint.matmul_all_to_all(*arguments)


def _run(
    x: Tensor, w: Tensor, counts: Tensor, add: Tensor | None, rows: int, host: bool, clear: bool,
    plan: str, group_name: str, group_size: int,
) -> Tensor:  # fmt: skip
    operator = operator_of(OP, False, clear)
    return run(operator, (x, w, counts, add, None, None), plan, group_name, rows, host)[0]


def _run_sum(
    x: Tensor, w: Tensor, counts: Tensor, index: Tensor, weights: Tensor, rows: int,
    host: bool, keep: bool, plan: str, group_name: str, group_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = (x, w, counts, None, index, weights)
    refused = _outside(index, rows)
    sums, y = run(operator_of(OP, keep), tensors, plan, group_name, rows, host, refused)
    return sums, y if keep else x.new_empty(0, w.shape[2])


def _outside(index: Tensor, rows: int) -> InputError | None:
    """What is wrong with the rows to sum; on a GPU the kernel that reads them finds it."""
    if index.is_cuda or not index.numel():
        return None
    low, high = (int(n) for n in index.aminmax())
    if low >= 0 and high < rows:
        return None
    return InputError(OP, "sum_of", want=f"of rows 0 to {rows - 1}", got=f"{low} to {high}")


def _fake(
    x: Tensor, w: Tensor, counts: Tensor, add: Tensor | None, rows: int, host: bool, clear: bool,
    plan: str, group_name: str, group_size: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(rows, w.shape[2])


def _fake_sum(
    x: Tensor, w: Tensor, counts: Tensor, index: Tensor, weights: Tensor, rows: int,
    host: bool, keep: bool, plan: str, group_name: str, group_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n = w.shape[2]
    return x.new_empty(index.shape[0], n), x.new_empty(rows if keep else 0, n)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, counts, add, _, ctx.host, _, *ctx.where = inputs
    ctx.save_for_backward(x, w, counts)
    ctx.has_add = add is not None


def _gradients(ctx: Any, dy: Tensor, x: Tensor, w: Tensor, counts: Tensor) -> tuple[Any, Any]:
    """(dx, dw): the gradient goes to the experts as the rows did."""
    need_x, need_w = ctx.needs_input_grad[:2]
    if not (need_x or need_w):
        return None, None
    clear, (plan, *group) = not ctx.host, ctx.where
    dx, rows = all_to_all_matmul.received(
        dy.contiguous(), w.transpose(1, 2), counts, x.shape[0], ctx.host, need_w, False, clear,
        backward_plan(OP, plan), *group,
    )  # fmt: skip
    dw = weight_gradient(x, rows, counts, w, *group) if need_w else None
    return dx if need_x else None, dw


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.has_add and ctx.needs_input_grad[3]:
        raise UnsupportedError(f"{OP}: what is added to the products has no gradient")
    return *_gradients(ctx, dy, *ctx.saved_tensors), *(None,) * 8


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, index, weights, ctx.rows, ctx.host, keep, *ctx.where = inputs
    ctx.save_for_backward(x, w, counts, index, weights, output[1] if keep else None)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_sum(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w, counts, index, weights, y = ctx.saved_tensors
    none: tuple[None, ...] = (None,) * 6
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


for _op, _impl, _meta, _grad, _setup in (
    (OP, _run, _fake, _backward, _save),
    (SUM, _run_sum, _fake_sum, _backward_sum, _save_sum),
):
    call.declare(_op, _impl, _meta)
    torch.library.register_autograd(
        f"counterpoint::{_op}", _grad, setup_context=_setup, lib=call.LIBRARY
    )
