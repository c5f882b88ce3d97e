"""Multiply, sum over ranks, keep own rows: the second linear layer under sequence parallelism."""

from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops import call, scaled
from counterpoint.ops.agreement import Input, left, refused
from counterpoint.ops.around import Around
from counterpoint.ops.batch_invariant import add_bias
from counterpoint.ops.call import Operator, Output, Tensors, present
from counterpoint.ops.check import (
    asked_of,
    autocast,
    check_dim,
    check_group,
    check_rows,
    check_tensors,
    is_last,
)
from counterpoint.ops.placements import Distributed, placed
from counterpoint.ops.plans import plan_key
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.ops.scaled import NO_SCALES, Scaled
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.tensor_parallel import launch_fused_sum
from counterpoint.tensor_parallel.backward import (
    flat_rows,
    gradients_of_scatter,
    kept_of,
    operator_of_sum,
)

OP = "matmul_reduce_scatter"
assert launch_fused_sum.KERNEL  # imported: its kernel scatters, too, and is known from then on


def matmul_reduce_scatter(
    x: Tensor | Scaled,
    w: Tensor | Scaled,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str | Path | Plan = "auto",
    rows: Sequence[int] | None = None,
    scatter_dim: int = 0,
) -> Tensor:
    """Sum the products of all ranks: y_r = rows of rank r of (x_0 w_0 + ... + x_{n-1} w_{n-1}).

    In place of `matmul` and `reduce_scatter_tensor`. Partial results are rounded to the dtype of
    x for the way, summed in fp32 in an order fixed by the plan, and rounded once ("running_sum":
    by each rank that adds to them); the bias is added once, after the sum. Streams, graphs and
    repeated bits: see `all_gather_matmul`.
    Differentiable: x and w are what is saved.

    Args:
        x: bf16, fp16 or fp32 [M, ..., K], on CPU or CUDA: all rows, K the part of this rank. Or fp8
            numbers with scales, as w then: see `Scaled`.
        w: dtype of x, [K, N] of any strides; pass `weight.t()` of a torch.nn.Linear.
        group: whose ranks take part; see `all_gather_matmul`.
        bias: dtype of x, or bf16 with `Scaled`, [N]; each rank adds its own to its rows.
        plan: "auto", a family ("serial", "direct", "fused", "shard_p2p", "graded",
            "running_sum", or one finer than shards such as "uniform_fused_2d"), a spec such as
            "graded 1/2/1 ring chunks=2", a Plan, which is validated once, or a JSON file of one.
            "invariant" behind a spec is `batch_invariant` for this call.
        rows: how many of `scatter_dim` of x each rank gets, equal on all ranks; None means equal
            parts, and then the number of ranks must divide that dim.
        scatter_dim: the dim of x of which each rank gets a part. Where it is not 0, x is copied so
            that it comes first, and y is a view with that dim back in its place. Where it is the
            last one, a rank gets columns of y, a copy without gaps; `rows` are then those of N.

    Returns:
        dtype of x, or bf16 with `Scaled`, [rows of this rank, ..., N], a new tensor.

    Raises:
        InputError: an argument is wrong; nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: the machine lacks something, or a gradient of the gradient is asked for.
        PeerTimeoutError: as for `all_gather_matmul`.

    Example:
        >>> y = counterpoint.matmul_reduce_scatter(x, w, group=tp)  # doctest: +SKIP
    """
    try:
        moved = type(scatter_dim) is not int or scatter_dim != 0
        if moved or isinstance(x, Scaled) or isinstance(w, Scaled):
            return scattered(x, w, bias, group, plan, rows, scatter_dim)
        added = bias, *NO_SCALES
        y, key, of = call.repeated(OP, (x, w, *added), group, plan, rows)
        return _anew(x, w, of, added, (plan, rows, 0), key, None) if y is None else y
    except Distributed:
        pass
    except BaseException as error:
        left(OP, error, group, x)
        raise
    return placed(OP, matmul_reduce_scatter, x, w, bias, group, plan, rows, scatter_dim)


def scattered(
    x: Any, w: Any, bias: Tensor | None, group: Any, plan: str | Path | Plan,
    rows: Sequence[int] | None, scatter_dim: int, around: Around | None = None,
) -> Tensor:  # fmt: skip
    """`matmul_reduce_scatter`.

    Args:
        around: of a caller who has moved the dim to the front; `scatter_dim` is 0 then.
    """
    scales = NO_SCALES
    if isinstance(x, Scaled) or isinstance(w, Scaled):
        if scatter_dim:

            def again(x: Scaled, dim: int) -> Tensor:
                return scattered(x, w, bias, group, plan, rows, 0, Around(dim))

            return scaled.along(OP, ("scatter_dim", scatter_dim), x, w, group, again)
        x, w, scales = scaled.apart(OP, x, w, group)
    if scatter_dim and is_last(scatter_dim, x):
        return _columns(x, w, group, bias, plan, rows)
    tensors = (x, w, bias, *scales)
    if around is None:
        y, key, group = call.repeated(OP, tensors, group, plan, rows, scatter_dim)
    else:
        found, key, group = call.repeated(OP, tensors, group, plan, rows, settings=around)
        y = found[0] if found else None
    if y is not None:
        return y
    return _anew(x, w, group, (bias, *scales), (plan, rows, scatter_dim), key, around)


def _anew(
    x: Tensor, w: Tensor, group: dist.ProcessGroup, added: tuple[Tensor | None, ...],
    how: tuple[str | Path | Plan, Sequence[int] | None, int],
    key: tuple[object, ...] | None, around: Around | None,
) -> Tensor:  # fmt: skip
    """The first call like this one, or one that goes through the dispatcher.

    Args:
        added: bias, and the scales of x and of w.
        how: plan, rows and scatter_dim.
        around: see `scattered`.
    """
    plan, rows, scatter_dim = how
    try:
        x, w, bias, scales = scaled.checked(OP, x, w, added)
        front, dim, counts = _parts(x, rows, scatter_dim, group)
        spec = plan_key(OP, plan)
    except CounterpointError as error:
        raise refused(error, group, x) from None
    around = around or Around(dim, asked_of(x=x, w=w))
    where = group.group_name, group.size(), group.rank()
    given = (front, w, bias, spec, counts, *where, *scales, *around)
    if key is not None:
        operator, tensors = operator_of(*around), (front, w, bias, *scales)
        y = call.ran(operator, tensors, spec, counts, group, key, shown=(OP, given))[0]
    else:
        y = torch.ops.counterpoint.matmul_reduce_scatter(*given)
    return y.movedim(0, dim) if dim else y


def _columns(
    x: Tensor, w: Tensor, group: dist.ProcessGroup | None, bias: Tensor | None,
    plan: str | Path | Plan, rows: Sequence[int] | None,
) -> Tensor:  # fmt: skip
    """y_r = columns of rank r of the sum: its transpose has them as rows."""
    x, w, bias = autocast(x, w, bias)  # type: ignore[assignment]
    check_tensors(OP, x, w, bias)
    group = check_group(OP, group)
    columns, ranks = w.shape[1], group.size()
    counts = check_rows(OP, rows, ranks)
    if counts and sum(counts) != columns:
        raise InputError(OP, "rows", want=f"counts that add up to {columns}", got=counts)
    if not counts and columns % ranks:
        want = f"[K, N] with N a multiple of the {ranks} ranks"
        fix = "pass rows=, one count per rank"
        raise InputError(OP, "w", want=want, got=tuple(w.shape), fix=fix)
    own = counts or [columns // ranks] * ranks
    around = Around(x.dim() - 1, asked_of(x=x, w=w))
    yt = scattered(w.t(), x.flatten(0, -2).t(), None, group, plan, rows, 0, around)
    y = yt.t().contiguous().view(*x.shape[:-1], own[group.rank()])
    return y if bias is None else y + bias.split(own)[group.rank()]


def _parts(
    x: Tensor, rows: Sequence[int] | None, scatter_dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, int, list[int]]:
    """x with the scattered dim first, that dim, and the rows of each rank where they are given.

    Raises:
        InputError: x has no such dim, or cannot be parted so.
    """
    dim = check_dim(OP, "scatter_dim", scatter_dim, x)
    counts = check_rows(OP, rows, group.size())
    if counts and sum(counts) != x.shape[dim]:
        raise InputError(OP, "rows", want=f"counts that add up to {x.shape[dim]}", got=counts)
    if not counts and x.shape[dim] % group.size():
        want = f"[M, ..., K] with M a multiple of the {group.size()} ranks"
        fix = "pass rows=, one count per rank"
        raise InputError(OP, "x", want=want, got=tuple(x.shape), fix=fix)
    return x.movedim(dim, 0) if dim else x, dim, counts


def _problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, w, bias, *scales = tensors
    assert x is not None and w is not None
    return Problem(
        OP, prod(x.shape[:-1]), w.shape[1], w.shape[0], ranks, rows=flat_rows(x, rows),
        bias=bias is not None, **scaled.of_problem(x, w, scales),
    )  # fmt: skip


def _outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
    x, w, *_ = present(tensors)
    return (Output("y", kept_of(x, rows, ranks, rank, w.shape[1]), dtype=scaled.result_of(x)),)


@cache
def operator_of(*around: Any) -> Operator:
    """With what is around, see `Around`."""
    inputs = (
        Input("x", "rows"), Input("w", "matrix"), Input("bias", "row"),
        Input("x_scale", "rows"), Input("w_scale", "matrix"),
    )  # fmt: skip
    compares = Around(*around).words("scatter_dim")
    return Operator(OP, inputs, _problem, _outputs, ends=add_bias, compares=compares)


OPERATOR = operator_of()


def _run(
    x: Tensor, w: Tensor, bias: Tensor | None,
    plan: str, rows: list[int], group_name: str, *rest: Any,
) -> Tensor:  # fmt: skip
    # behind size and rank
    scales, around = rest[2:4] or NO_SCALES, rest[4:]
    (y,) = call.run(operator_of(*around), (x, w, bias, *scales), plan, rows, group_name)
    return y


# size and rank are arguments: what a fake looks up in the group is not in the compiler's cache key
def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None,
    plan: str, rows: list[int], group_name: str, *rest: Any,
) -> Tensor:  # fmt: skip
    group_size, rank, *_ = rest
    return x.new_empty(kept_of(x, rows, group_size, rank, w.shape[1]), dtype=scaled.result_of(x))


def _run_sum(
    x: list[Tensor], w: list[Tensor], plan: str, rows: list[int], group_name: str, *_: int
) -> Tensor:
    (y,) = call.run(operator_of_sum(len(x)), (*x, *w), plan, rows, group_name)
    return y


def _fake_sum(
    x: list[Tensor], w: list[Tensor],
    plan: str, rows: list[int], group_name: str, group_size: int, rank: int,
) -> Tensor:  # fmt: skip
    return x[0].new_empty(kept_of(x[0], rows, group_size, rank, w[0].shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, ctx.plan, ctx.rows, *ctx.where, _, _, _, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    where = tuple(ctx.where)
    needs = need_x, need_w
    dx, dw = gradients_of_scatter(dy, x, w, needs, ctx.plan, ctx.rows, where)
    db = dy.flatten(0, -2).sum(0) if ctx.has_bias and need_bias else None
    return dx, dw, db, *[None] * 9


def _flops(x: Any, w: Any, *_: object, **__: object) -> int:
    return 2 * prod(x) * w[1]


def _flops_of_sum(x: Any, w: Any, *_: object, **__: object) -> int:
    return sum(map(_flops, x, w))


register(OP, _run, _fake, _backward, _save, flops=_flops)
register(f"{OP}_sum", _run_sum, _fake_sum, refuse_double_matmul, flops=_flops_of_sum)
