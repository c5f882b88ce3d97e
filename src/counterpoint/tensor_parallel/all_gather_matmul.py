"""Gather the rows of all ranks and multiply: the first linear layer under sequence parallelism."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.group.ranks import group_of
from counterpoint.ops import activations, call, scaled
from counterpoint.ops.agreement import Input, left, refused
from counterpoint.ops.around import Around
from counterpoint.ops.call import Operator, Output, Tensors, present
from counterpoint.ops.check import (
    asked_of,
    autocast,
    check_dense,
    check_dim,
    check_group,
    check_rows,
    check_tensors,
    is_last,
)
from counterpoint.ops.placements import Distributed, placed
from counterpoint.ops.plans import plan_key
from counterpoint.ops.register import register
from counterpoint.ops.scaled import NO_SCALES, Scaled
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.tensor_parallel.backward import (
    dtype_of,
    flat_rows,
    gradients_of_gather,
    numbered,
    splits_of,
    wgrad_of,
)

OP = "all_gather_matmul"
SEVERAL = f"{OP}_list"  # of several weights
ACTIVATED = f"{OP}_activated"


@overload
def all_gather_matmul(
    x: Tensor | Scaled, w: Tensor | Scaled, *,
    group: dist.ProcessGroup | None = None, bias: Tensor | None = None,
    plan: str | Path | Plan = "auto", rows: Sequence[int] | None = None, gather_dim: int = 0,
    activation: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def all_gather_matmul(
    x: Tensor, w: Sequence[Tensor], *, group: dist.ProcessGroup | None = None, bias: None = None,
    plan: str | Path | Plan = "auto", rows: Sequence[int] | None = None, gather_dim: int = 0,
    activation: None = None,
) -> list[Tensor]: ...  # fmt: skip
@overload
def all_gather_matmul(
    x: Tensor | Scaled, w: Tensor | Scaled | Sequence[Tensor] | Sequence[Scaled], *,
    group: dist.ProcessGroup | None = None, bias: Tensor | None = None,
    plan: str | Path | Plan = "auto", rows: Sequence[int] | None = None, gather_dim: int = 0,
    activation: str,
) -> Tensor: ...  # fmt: skip
def all_gather_matmul(
    x: Tensor | Scaled, w: Tensor | Scaled | Sequence[Tensor] | Sequence[Scaled], *,
    group: dist.ProcessGroup | None = None, bias: Tensor | None = None,
    plan: str | Path | Plan = "auto", rows: Sequence[int] | None = None, gather_dim: int = 0,
    activation: str | None = None,
) -> Tensor | list[Tensor]:  # fmt: skip
    """Multiply the gathered x: y = concat(x_0, ..., x_{n-1}) w + bias.

    In place of `all_gather_into_tensor` and `matmul`. Accumulates in fp32. Runs on the current
    stream and is done in stream order; captures in a CUDA graph after one call outside of it at
    the same or a larger size. The same plan and shape give the same bits in every run.
    Differentiable: x and w are saved, and x is gathered again beside the gradient's matmuls.

    Args:
        x: bf16, fp16 or fp32 [rows of this rank, ..., K], on CPU or CUDA; copied first where it is
            not contiguous. Or fp8 numbers with scales, as w then: see `Scaled`.
        w: dtype of x, [K, N] of any strides; pass `weight.t()` of a torch.nn.Linear. Or several
            of them, of one K: x is gathered once for all.
        group: whose ranks take part, all with the same arguments, also on several islands, such as
            hosts; the default group if None. CPU tensors take a gloo group, CUDA tensors NCCL.
        bias: dtype of x, or bf16 with `Scaled`, [N], added once; not with several weights.
        plan: "auto", a family ("serial", "direct", "shard_p2p", "graded", or one finer than shards
            such as "uniform_fused_1d"), a spec such as "graded 1/1/2 ring", a Plan, which is
            validated once, or a JSON file of one. The backward of "auto" and "serial" is chosen in
            the same way, that of all others overlaps. "invariant" behind a spec is
            `batch_invariant` for this call.
        rows: `gather_dim` of x on each rank, equal on all ranks; None means that all are equal.
        gather_dim: the dim of x that the ranks have parts of. Where it is not 0, x is copied so
            that it comes first, and y is a view with that dim back in its place. Where it is the
            last one, the parts are of K, w is [K of all ranks, N], y has no gaps, and `plan` is
            one of `all_gather_matmul_wgrad`, which then computes it.
        activation: of y: "relu", "silu", "gelu", or "gelu_tanh", its approximation by tanh. Or of
            w = (gate, up), two of one shape, y = activation(gather(x) gate) * (gather(x) up):
            "silu_mul", "gelu_tanh_mul", "gelu_mul", "relu_mul". In fp32, of products rounded as
            without it. A gradient saves them; it is a kernel behind them then, and with `Scaled`.

    Returns:
        dtype of x, or bf16 with `Scaled`, [sum of rows, ..., N], a new tensor; of several weights,
        gate and up of an activation aside, a list.

    Raises:
        InputError, PlanError: an argument or a Plan is wrong; nothing was launched.
        UnsupportedError: the machine lacks something, or a gradient of a gradient is asked for.
        PeerTimeoutError: a rank is dead, has left the call, or is late. On a GPU it is raised by
            the next call, or by `counterpoint.check`.

    Example:
        >>> y = counterpoint.all_gather_matmul(x_shard, w, group=tp)  # doctest: +SKIP
        >>> h = cp.all_gather_matmul(x, (gate, up), activation="silu_mul")  # doctest: +SKIP
    """
    try:
        if activation is not None:
            return _activated(x, w, bias, activation, group, plan, rows, (gather_dim, 0))
        return plain(x, w, bias, group, plan, rows, gather_dim)
    except Distributed:
        pass
    except BaseException as error:
        left(OP, error, group, x)
        raise
    return placed(OP, all_gather_matmul, x, w, bias, group, plan, rows, gather_dim, activation)


def plain(
    x: Any, w: Any, bias: Tensor | None, group: Any, plan: str | Path | Plan,
    rows: Sequence[int] | None, gather_dim: int, around: Around | None = None,
) -> Any:  # fmt: skip
    """Without an activation.

    Args:
        around: of a caller who has moved the dim to the front; `gather_dim` is 0 then.
    """
    scales = NO_SCALES
    if isinstance(x, Scaled) or isinstance(w, Scaled):
        if gather_dim:

            def again(x: Scaled, dim: int) -> Tensor:
                return plain(x, w, bias, group, plan, rows, 0, Around(dim))

            return scaled.along(OP, ("gather_dim", gather_dim), x, w, group, again)
        x, w, scales = scaled.apart(OP, x, w, group)
        scales = scaled.by_rows(x, w, scales)
    if gather_dim and is_last(gather_dim, x):
        return _contracted(x, w, group, bias, plan, rows)
    if isinstance(w, list | tuple):
        return _several(x, w, group, bias, plan, rows, gather_dim)
    tensors = (x, w, bias, *scales)
    if around is None:
        y, key, group = call.repeated(OP, tensors, group, plan, rows, gather_dim)
    else:
        found, key, group = call.repeated(OP, tensors, group, plan, rows, settings=around)
        y = found[0] if found else None
    if y is not None:
        return y
    return _anew(x, w, group, (bias, *scales), (plan, rows, gather_dim), key, around)


def _anew(
    x: Tensor, w: Tensor, group: dist.ProcessGroup, added: tuple[Tensor | None, ...],
    how: tuple[str | Path | Plan, Sequence[int] | None, int],
    key: tuple[object, ...] | None, around: Around | None,
) -> Tensor:  # fmt: skip
    """The first call like this one, or one that goes through the dispatcher.

    Args:
        added: bias, and the scales of x and of w.
        how: plan, rows and gather_dim.
        around: see `plain`.
    """
    plan, rows, gather_dim = how
    try:
        x, w, bias, scales = scaled.checked(OP, x, w, added)
        front, dim, counts = _shards(x, rows, gather_dim, group)
        spec, where = plan_key(OP, plan), (group.group_name, group.size())
    except CounterpointError as error:
        raise refused(error, group, x) from None
    around = around or Around(dim, asked_of(x=x, w=w))
    given = (front, w, bias, spec, counts, *where, *scales, *around)
    if key is not None:
        operator, tensors = operator_of(*around), (front, w, bias, *scales)
        y = call.ran(operator, tensors, spec, counts, group, key, shown=(OP, given))[0]
    else:
        y = torch.ops.counterpoint.all_gather_matmul(*given)
    return y.movedim(0, dim) if dim else y


def _activated(
    x: Any, w: Any, bias: Tensor | None, activation: str, group: dist.ProcessGroup | None,
    plan: str | Path | Plan, rows: Sequence[int] | None, dims: tuple[int, int],
) -> Tensor:  # fmt: skip
    """The activation of y, or gated, of the first of two times the second.

    Args:
        dims: gather_dim, and the dim that a caller has moved to the front.
    """
    gather_dim, moved = dims
    several = isinstance(w, list | tuple) and not isinstance(w, Scaled)
    weights: list[Any] = [*w] if several else [w]
    scales: tuple[Tensor | None, ...] = (None,) * (1 + len(weights))
    if weights and any(isinstance(each, Scaled) for each in (x, *weights)):
        if gather_dim:

            def again(x: Scaled, dim: int) -> Tensor:
                return _activated(x, w, bias, activation, group, plan, rows, (0, dim))

            return scaled.along(OP, ("gather_dim", gather_dim), x, weights[0], group, again)
        apart = [scaled.apart(OP, x, each, group) for each in weights]
        x, weights = apart[0][0], [data for _, data, _ in apart]
        by_rows = [scaled.by_rows(x, data, both) for _, data, both in apart]
        scales = by_rows[0][0], *(of_w for _, of_w in by_rows)
    given: Any = (x, *weights, bias, *scales)
    key: tuple[object, ...] | None = None
    if not gather_dim and isinstance(activation, str):
        settings = (activation, moved)
        found, key, group = call.repeated(OP, given, group, plan, rows, settings=settings)
        if found is not None:
            return found[0]
    try:
        weights = activations.weights_of(OP, activation, weights if several else weights[0], bias)
    except CounterpointError as error:
        raise refused(error, group, x.data if isinstance(x, Scaled) else x) from None
    grad = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in given)
    if scales[0] is not None or not (grad or (gather_dim and is_last(gather_dim, x))):
        operands = x, weights, bias, scales
        key = None if grad else key
        return _activated_anew(operands, activation, group, plan, rows, gather_dim, key, moved)
    # the products are results of their own, which a backward needs
    of: Any = weights[0] if len(weights) == 1 else weights
    y = plain(x, of, bias, group, plan, rows, gather_dim)
    return activations.activate(y if isinstance(y, list) else [y], activation)


def _activated_anew(
    given: tuple[Tensor, list[Tensor], Tensor | None, tuple[Tensor | None, ...]], activation: str,
    group: dist.ProcessGroup | None, plan: str | Path | Plan, rows: Sequence[int] | None,
    gather_dim: int, key: tuple[object, ...] | None, moved: int,
) -> Tensor:  # fmt: skip
    """As `_anew`, of x, the weights, a bias, and the scales of x and of each weight."""
    x, factors, bias, (x_scale, *w_scales) = given
    weights: list[Tensor] = []
    try:
        for each, w_scale in zip(factors, w_scales, strict=True):
            x, w, bias, _ = scaled.checked(OP, x, each, (bias, x_scale, w_scale))
            weights.append(w)
        scaled.check_alike(OP, w_scales)
        group = check_group(OP, group)
        front, dim, counts = _shards(x, rows, gather_dim, group)
        spec, where = plan_key(OP, plan), (group.group_name, group.size())
    except CounterpointError as error:
        raise refused(error, group, x) from None
    scales = x_scale, *w_scales
    if key is not None:
        operator = operator_of_activated(activation, len(weights), dim or moved)
        tensors = front, *weights, bias, *scales
        y = call.ran(operator, tensors, spec, counts, group, key)[0]
    else:
        op = torch.ops.counterpoint.all_gather_matmul_activated
        scales = *scales, *[None] * (3 - len(scales))
        y = op(front, weights, bias, activation, spec, counts, *where, *scales, dim or moved)
    return y.movedim(0, dim) if dim else y


def _contracted(
    x: Tensor, w: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None,
    bias: Tensor | None, plan: str | Path | Plan, rows: Sequence[int] | None,
) -> Any:  # fmt: skip
    """y = concat(x_0, ..., x_{n-1} along K) w + bias: x^T is what is gathered, rows of it."""
    if isinstance(w, list | tuple):
        if bias is not None or not w:
            return _several(x, w, group, bias, plan, rows, 0)  # refuses it
        return [_contracted(x, each, group, None, plan, rows) for each in w]
    x, w, bias = autocast(x, w, bias)  # type: ignore[assignment, arg-type]
    group = check_group(OP, group)
    check_dense(OP, x=x)
    counts = check_rows(OP, rows, group.size())
    columns = sum(counts) if counts else x.shape[-1] * group.size()
    check_tensors(OP, x, w, bias, columns)  # type: ignore[arg-type]
    if counts and x.shape[-1] != counts[group.rank()]:
        want = f"[..., {counts[group.rank()]}] as rows[{group.rank()}] says"
        raise InputError(OP, "x", want=want, got=tuple(x.shape))
    where = (plan_key(OP, plan), counts, group.group_name, group.size(), group.rank())
    op, around = torch.ops.counterpoint.all_gather_matmul_contracted, (x.dim() - 1,)
    y = op(x.flatten(0, -2).t(), w, *where, *around, asked_of(x=x, w=w))  # type: ignore[arg-type]
    y = y.view(*x.shape[:-1], w.shape[1])  # type: ignore[union-attr]
    return y if bias is None else y + bias


def _shards(
    x: Tensor, rows: Sequence[int] | None, gather_dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, int, list[int]]:
    """x with the gathered dim first, that dim, and the rows of each rank where they are given.

    Raises:
        InputError: x has no such dim, or not as many rows as this rank is said to have.
    """
    dim = check_dim(OP, "gather_dim", gather_dim, x)
    counts = check_rows(OP, rows, group.size())
    if counts and x.shape[dim] != counts[group.rank()]:
        want = f"[{counts[group.rank()]}, ..., K] as rows[{group.rank()}] says"
        raise InputError(OP, "x", want=want, got=tuple(x.shape))
    return x.movedim(dim, 0) if dim else x, dim, counts


def _several(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None,
    bias: Tensor | None, plan: str | Path | Plan, rows: Sequence[int] | None, gather_dim: int,
) -> list[Tensor]:  # fmt: skip
    known: Any = None
    key: tuple[object, ...] | None = None
    if bias is None and len(weights) > 1 and not gather_dim:
        tensors, count = (x, *weights), (len(weights),)
        known, key, group = call.repeated(SEVERAL, tensors, group, plan, rows, settings=count)
    if known is not None:
        return known
    if not weights:
        raise InputError(OP, "w", want="a Tensor or several", got="none")
    if bias is not None:
        fix = "add it to the result, or make one weight of them"
        raise InputError(OP, "bias", want="None with several weights", got="a Tensor", fix=fix)
    x, *weights = autocast(x, *weights)  # type: ignore[assignment]
    for w in weights:
        check_tensors(OP, x, w, None)
    group = check_group(OP, group)
    front, dim, counts = _shards(x, rows, gather_dim, group)
    if len(weights) == 1:
        return [all_gather_matmul(x, weights[0], group=group, plan=plan, rows=rows, gather_dim=dim)]
    spec, where = plan_key(OP, plan), (group.group_name, group.size())
    asks = asked_of(x=x, **dict(zip(numbered("w", len(weights)), weights, strict=True)))
    asks = " ".join(dict.fromkeys(name.rstrip("0123456789") for name in asks.split()))
    given = (front, weights, spec, counts, *where, dim, asks)
    if key is not None:
        operator, shown = operator_of_several(len(weights), dim, asks), (SEVERAL, given)
        return call.ran(operator, (front, *weights), spec, counts, group, key, shown=shown)
    results = torch.ops.counterpoint.all_gather_matmul_list(*given)
    return [y.movedim(0, dim) if dim else y for y in results]


def _problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, w, bias, *scales = tensors
    assert x is not None and w is not None
    gathered = prod(_gathered(x, rows, ranks, 1))
    return Problem(
        OP, gathered, w.shape[1], w.shape[0], ranks, rows=flat_rows(x, rows),
        bias=bias is not None, **scaled.of_problem(x, w, scales),
    )  # fmt: skip


def _problem_of_several(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, *weights = present(tensors)
    gathered = prod(_gathered(x, rows, ranks, 1))
    columns = [w.shape[1] for w in weights]
    return Problem(
        OP, gathered, sum(columns), x.shape[-1], ranks, dtype_of(x),
        flat_rows(x, rows), splits=splits_of(columns),
    )  # fmt: skip


def _gathered(x: Tensor, rows: Sequence[int], group_size: int, n: int) -> tuple[int, ...]:
    return (sum(rows) if rows else x.shape[0] * group_size, *x.shape[1:-1], n)


def _outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
    x, w, *_ = present(tensors)
    return (Output("y", _gathered(x, rows, ranks, w.shape[1]), dtype=scaled.result_of(x)),)


def _outputs_of_several(
    tensors: Tensors, rows: Sequence[int], ranks: int, rank: int
) -> tuple[Output, ...]:
    x, *weights = present(tensors)
    shapes = [_gathered(x, rows, ranks, w.shape[1]) for w in weights]
    return tuple(Output(f"y{i}", shape) for i, shape in enumerate(shapes))


@cache
def operator_of(*around: Any) -> Operator:
    """With what is around, see `Around`."""
    inputs = (
        Input("x", "rows", own=True), Input("w", "matrix"), Input("bias", "row"),
        Input("x_scale", "rows", own=True), Input("w_scale", "matrix"),
    )  # fmt: skip
    return Operator(OP, inputs, _problem, _outputs, compares=Around(*around).words("gather_dim"))


OPERATOR = operator_of()


@cache
def operator_of_several(count: int, *around: Any) -> Operator:
    """Of that many weights."""
    inputs = (Input("x", "rows", own=True), *(Input(f"w{i}", "matrix") for i in range(count)))
    compares = Around(*around).words("gather_dim")
    return Operator(OP, inputs, _problem_of_several, _outputs_of_several, compares=compares)


@cache
def operator_of_contracted(*around: Any) -> Operator:
    """Of parts of K: rows of x^T are gathered."""
    return replace(wgrad_of(1, False), name=OP, compares=Around(*around).words("gather_dim"))


@cache
def operator_of_activated(activation: str, count: int, dim: int = 0) -> Operator:
    """Of that many weights."""

    def problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
        x, *weights = present(tensors[: 1 + count])
        bias, *scales = tensors[1 + count :]
        columns, gathered = [w.shape[1] for w in weights], prod(_gathered(x, rows, ranks, 1))
        return Problem(
            OP, gathered, sum(columns), x.shape[-1], ranks, rows=flat_rows(x, rows),
            splits=splits_of(columns), bias=bias is not None, activation=activation,  # type: ignore[arg-type]
            **scaled.of_problem(x, weights[0], scales),
        )  # fmt: skip

    names = numbered("w", count)
    inputs = (
        Input("x", "rows", own=True), *(Input(name, "matrix") for name in names),
        Input("bias", "row"), Input("x_scale", "rows", own=True),
        *(Input(f"{name}_scale", "matrix") for name in names),
    )  # fmt: skip
    settings = (("activation", activation),)
    compares = Around(dim).words("gather_dim")
    return Operator(OP, inputs, problem, _outputs, settings=settings, compares=compares)


def _run(
    x: Tensor, w: Tensor, bias: Tensor | None,
    plan: str, rows: list[int], group_name: str, *more: Any,
) -> Tensor:  # fmt: skip
    defaults: Any = (None, None, *Around())[len(more) - 1 :]  # torch leaves them out
    _, x_scale, w_scale, *around = (*more, *defaults)
    tensors = (x, w, bias, x_scale, w_scale)
    (y,) = call.run(operator_of(*around), tensors, plan, rows, group_name)
    return y


def _run_several(
    x: Tensor, w: list[Tensor], plan: str, rows: list[int], group_name: str, group_size: int,
    *around: Any,
) -> list[Tensor]:  # fmt: skip
    return call.run(operator_of_several(len(w), *around), (x, *w), plan, rows, group_name)


def _run_contracted(xt: Tensor, w: Tensor, *where: Any) -> Tensor:
    plan, rows, group_name, _, _, *around = where
    (y,) = call.run(operator_of_contracted(*around), (xt, w), plan, rows, group_name)
    return y


def _run_activated(
    x: Tensor, w: list[Tensor], bias: Tensor | None, activation: str,
    plan: str, rows: list[int], group_name: str, *more: Any,
) -> Tensor:  # fmt: skip
    defaults: Any = (None, None, None, 0)[len(more) - 1 :]  # torch leaves them out
    _, x_scale, w_scale, up_scale, gather_dim = (*more, *defaults)
    operator, scales = operator_of_activated(activation, len(w), gather_dim), (w_scale, up_scale)
    tensors = (x, *w, bias, x_scale, *scales[: len(w)])
    (y,) = call.run(operator, tensors, plan, rows, group_name)
    return y


# the size is an argument: what a fake looks up in the group is not in the compiler's cache key
def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None,
    plan: str, rows: list[int], group_name: str, group_size: int, *_: object,
) -> Tensor:  # fmt: skip
    return x.new_empty(_gathered(x, rows, group_size, w.shape[1]), dtype=scaled.result_of(x))


def _fake_several(
    x: Tensor, w: list[Tensor], plan: str, rows: list[int], group_name: str, group_size: int,
    *_: object,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(_gathered(x, rows, group_size, each.shape[1])) for each in w]


def _fake_contracted(xt: Tensor, w: Tensor, *_: object) -> Tensor:
    return xt.new_empty(xt.shape[1], w.shape[1])


def _fake_activated(
    x: Tensor, w: list[Tensor], bias: Tensor | None, activation: str, *where: Any
) -> Tensor:
    _, rows, _, group_size, *_ = where
    return x.new_empty(_gathered(x, rows, group_size, w[0].shape[1]), dtype=scaled.result_of(x))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, ctx.plan, ctx.rows, ctx.group_name, ctx.group_size, *_ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    where = (ctx.group_name, ctx.group_size, _rank(ctx.group_name))
    needs = need_x, need_w
    dx, dws = gradients_of_gather([dy], x, [w], needs, ctx.plan, ctx.rows, where)
    dw = dws[0] if dws else None
    db = dy.flatten(0, -2).sum(0) if ctx.has_bias and need_bias else None
    return dx, dw, db, *[None] * 8


def _save_several(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, ctx.plan, ctx.rows, ctx.group_name, ctx.group_size, *_ = inputs
    ctx.save_for_backward(x, *weights)


def _backward_of_several(ctx: Any, dys: Sequence[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    where = (ctx.group_name, ctx.group_size, _rank(ctx.group_name))
    needs = (ctx.needs_input_grad[0], any(each.requires_grad for each in weights))
    dx, dws = gradients_of_gather(dys, x, weights, needs, ctx.plan, ctx.rows, where)
    # in the structure of the inputs; torch takes an empty list for one of tensors
    rows = None if ctx.rows else []
    return dx, dws or [None] * len(weights), None, rows, None, None, None, None


def _save_contracted(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xt, w, *ctx.where, _, _ = inputs
    ctx.save_for_backward(xt, w)


def _backward_of_contracted(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The two operators of a pair of layers."""
    xt, w = ctx.saved_tensors
    plan, rows, name, size, rank = ctx.where
    ops: Any = torch.ops.counterpoint
    plan = plan if plan in ("auto", "serial") else "serial"
    dxt = dw = None
    if ctx.needs_input_grad[0]:
        dxt = ops.matmul_reduce_scatter(w, dy.t(), None, plan, rows, name, size, rank)
    if ctx.needs_input_grad[1]:
        dw = ops.all_gather_matmul(xt, dy, None, plan, rows, name, size)
    return dxt, dw, *[None] * 7


def _rank(group_name: str) -> int:
    return dist.get_rank(group_of(group_name))


def _flops(x: Any, w: Any, *_: object, out_shape: Any, **__: object) -> int:
    weights, results = (w, out_shape) if isinstance(w, list) else ([w], [out_shape])
    results = results if isinstance(results[0], Sequence) else [results] * len(weights)
    return sum(2 * prod(y) * each[0] for y, each in zip(results, weights, strict=True))


register(OP, _run, _fake, _backward, _save, flops=_flops)
register(SEVERAL, _run_several, _fake_several, _backward_of_several, _save_several, flops=_flops)
register(f"{OP}_contracted", _run_contracted, _fake_contracted, _backward_of_contracted,
         _save_contracted, flops=_flops)  # fmt: skip
register(ACTIVATED, _run_activated, _fake_activated, flops=_flops)
