"""Multiply and sum over ranks, everyone gets the sum: a row-parallel linear layer of decoding."""

from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.ops import call, scaled
from counterpoint.ops.agreement import Input, left, refused
from counterpoint.ops.batch_invariant import add_bias
from counterpoint.ops.call import Operator, Output, Tensors, present
from counterpoint.ops.placements import Distributed, placed
from counterpoint.ops.plans import plan_key
from counterpoint.ops.register import once, register
from counterpoint.ops.scaled import NO_SCALES, Scaled
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.tensor_parallel import launch_fused_sum

OP = launch_fused_sum.KERNEL  # the kernel has its name


def matmul_all_reduce(
    x: Tensor | Scaled, w: Tensor | Scaled, *, group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None, plan: str | Path | Plan = "auto",
) -> Tensor:  # fmt: skip
    """Sum the products of all ranks: y = x_0 w_0 + ... + x_{n-1} w_{n-1}, on every rank.

    In place of `matmul` and `all_reduce`. For the few rows of decoding one kernel, which sends each
    tile to its peers as soon as it is computed; for a few more the library's matmul and an
    all-reduce in one kernel of our own; for those of a prefill each rank sums its share, and shares
    are copied beside other matmuls and sums. All ranks get the same bits, and the same call gives
    them in every run, if all store w alike. Partial results travel in the dtype of x (a single row
    in fp32), are summed in fp32 in a fixed order, and rounded once; except in one kernel, the bias
    is added after that. Captures in a CUDA graph after one eager call of the same or a larger size.
    The calls of a group, replays included, run one after another in stream order; graphs that use
    different groups must run one after another, too. Differentiable; its backward needs no
    communication.

    Args:
        x: bf16, fp16, fp32, or as w `Scaled` fp8, [M, ..., K], on CPU or CUDA, K of this rank.
        w: dtype of x, [K, N] of any strides; pass `weight.t()` of a torch.nn.Linear.
        group: whose ranks take part; None: the default group.
        bias: dtype of x, or bf16 with `Scaled`, [N], equal on all ranks; added once.
        plan: "auto": chosen by the model; "serial": the libraries' matmul and all-reduce;
            "direct": our all-reduce behind the library's matmul; "fused": all in one kernel;
            "shard_p2p", "running_sum": shares of rows by copies; or a spec such as "fused two_shot
            64x64x8 warps=4", its tile of w, stages and warps; a Plan; or a JSON file of one.
            "invariant" behind a spec is `batch_invariant` for this call. Direct and fused need a
            number of ranks that is a power of 2.

    Returns:
        dtype of x, or bf16 with `Scaled`, [M, ..., N], a new tensor.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: `plan` is fused and the grid does not fit this GPU.
        PeerTimeoutError: a rank did not come to an earlier call; the group is unusable.

    Example:
        >>> y = counterpoint.matmul_all_reduce(x, w, group=tp)  # doctest: +SKIP
    """
    try:
        scales = NO_SCALES
        if isinstance(x, Scaled) or isinstance(w, Scaled):
            x, w, scales = scaled.apart(OP, x, w, group)
        y, key, of = call.repeated(OP, (x, w, bias, *scales), group, plan)
        if y is not None:
            return y
        return anew(x, w, (bias, *scales), of, plan, key)
    except Distributed:
        pass
    except BaseException as error:
        left(OP, error, group, x)
        raise
    return placed(OP, matmul_all_reduce, x, w, bias, group, plan)


def anew(
    x: Tensor, w: Tensor, added: tuple[Tensor | None, ...], group: dist.ProcessGroup,
    plan: str | Path | Plan, key: tuple[object, ...] | None, behind: str = "",
) -> Tensor:  # fmt: skip
    """The first call like this one, or one that goes through the dispatcher.

    Args:
        added: bias, and the scales of x and of w.
        behind: what the caller does with the sum: see `operator_of`.
    """
    try:
        x, w, bias, scales = scaled.checked(OP, x, w, added)
        spec, name = plan_key(OP, plan), group.group_name
    except CounterpointError as error:
        raise refused(error, group, x) from None
    given = (x, w, bias, spec, name, group.size(), *scales, behind)
    if key is None:
        return torch.ops.counterpoint.matmul_all_reduce(*given)
    operator, tensors = operator_of(behind), (x, w, bias, *scales)
    return call.ran(operator, tensors, spec, (), group, key, shown=(OP, given))[0]


def _problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, w, bias, *scales = tensors
    assert x is not None and w is not None
    (k, n), m = w.shape, prod(x.shape[:-1])
    return Problem(OP, m, n, k, ranks, bias=bias is not None, **scaled.of_problem(x, w, scales))


def _outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
    x, w, *_ = present(tensors)
    return (Output("y", (*x.shape[:-1], w.shape[1]), dtype=scaled.result_of(x)),)


@cache
def operator_of(behind: str) -> Operator:
    """The operator, for a caller who goes on with the sum.

    Args:
        behind: facts of what comes next, which ranks compare as well: "eps=1e-06 residual=True".
    """
    inputs = (
        Input("x", "rows"), Input("w", "matrix"), Input("bias", "row"),
        Input("x_scale", "rows"), Input("w_scale", "matrix"),
    )  # fmt: skip
    settings = tuple((name, value) for name, _, value in (f.partition("=") for f in behind.split()))
    return Operator(OP, inputs, _problem, _outputs, ends=add_bias, settings=settings)


OPERATOR = operator_of("")


def _run(
    x: Tensor, w: Tensor, bias: Tensor | None,
    plan: str, group_name: str, group_size: int, *rest: Any,
) -> Tensor:  # fmt: skip
    given: tuple[Any, ...] = (*rest, *(None, None, "")[len(rest) :])
    x_scale, w_scale, behind = given
    (y,) = call.run(operator_of(behind), (x, w, bias, x_scale, w_scale), plan, (), group_name)
    return y


def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None, plan: str, group_name: str, *_: object
) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1]), dtype=scaled.result_of(x))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, *_ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of this rank's own x and w: dy is the same on all ranks."""
    x, w = ctx.saved_tensors
    dy = once(dy)
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = dy @ w.t() if need_x else None
    dw = x.flatten(0, -2).t() @ dy.flatten(0, -2) if need_w else None
    db = dy.flatten(0, -2).sum(0) if ctx.has_bias and need_bias else None
    return dx, dw, db, None, None, None, None, None, None


def _flops(x: Any, w: Any, *_: object, **__: object) -> int:
    return 2 * prod(x) * w[1]


register(OP, _run, _fake, _backward, _save, flops=_flops)
