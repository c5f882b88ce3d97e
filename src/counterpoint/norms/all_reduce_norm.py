"""Sum over ranks, residual and norm: what stands behind each row-parallel layer of a decoder."""

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.norms import launch_norm  # it registers its kernel
from counterpoint.norms.norms import (
    FP8,
    Kind,
    Norm,
    backward,
    check_like,
    check_rows_of,
    empty_results,
    norm_of,
    refuse_gradient,
    save,
)
from counterpoint.ops import call
from counterpoint.ops.agreement import Input, left, refused
from counterpoint.ops.call import Operator, Output, Tensors
from counterpoint.ops.placements import Distributed, placed
from counterpoint.ops.plans import plan_key
from counterpoint.ops.register import register
from counterpoint.ops.samples import Sample, sample_by
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.tensor_parallel.backward import dtype_of

OP = "all_reduce_norm"


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float = 1e-6,
    group: dist.ProcessGroup | None = None, plan: str | Path | Plan = "auto",
    out_dtype: torch.dtype | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """h = residual + the sum of x over the ranks, and h / rms(h) * weight, on every rank.

    In place of `all_reduce`, an addition and `rms_norm`. For few rows it is one kernel, which sums
    in registers and normalises there; for many an all-reduce and one kernel behind it. x is summed
    in fp32 in one order and rounded to its dtype, as by an all-reduce; so is h. All ranks get the
    same bits, and the same call gives them in every run. Runs on the current stream, and captures
    in a CUDA graph after one eager call of the same or a larger size. Differentiable, except that
    an fp8 result wants no gradients: that of x is that of the sum, without communication.

    Args:
        x: bf16, fp16 or fp32 [M, ..., N], on CPU or CUDA; it is not changed.
        residual: dtype of x, [M, ..., N], equal on all ranks; None: h is the sum.
        weight: dtype of x, [N], equal on all ranks.
        eps: added to the mean square.
        group: whose ranks take part; None: the default group.
        plan: "auto": chosen by the model; "serial": the library's all-reduce, then the norm;
            "direct": our all-reduce, then the norm; "fused": all in one kernel, or as a spec "fused
            two_shot warps=8"; a Plan; or a JSON file of one. Direct and fused need a number of
            ranks that is a power of 2, and fused rows of at most 32 KiB. "invariant" behind a spec
            is `batch_invariant` for this call.
        out_dtype: torch.float8_e4m3fn for a result in fp8; None: dtype of x.
        scale: fp32, one number on the device of x: an fp8 result is what is normalised divided by
            it. None: each row has one, by which its largest value is 448.

    Returns:
        What is normalised, [M, ..., N]; h, dtype of x, [M, ..., N]; and, of fp8 without `scale`,
        the scales, fp32 [M, ..., 1]. New tensors.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: the GPU has no fp8, or the grid of `plan` does not fit it.
        PeerTimeoutError: a rank did not come to an earlier call; the group is unusable.

    Example:
        >>> y, residual = counterpoint.all_reduce_rms_norm(x, residual, w)  # doctest: +SKIP
    """
    given = x, residual, weight, None, scale
    return _summed("all_reduce_rms_norm", given, "rms", eps, group, plan, out_dtype)


def all_reduce_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None = None, *,
    eps: float = 1e-5, group: dist.ProcessGroup | None = None, plan: str | Path | Plan = "auto",
    out_dtype: torch.dtype | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """h = residual + the sum of x over the ranks, and its LayerNorm, on every rank.

    `all_reduce_rms_norm` with (h - mean(h)) / sqrt(var(h) + eps) * weight + bias.

    Args:
        x: as for `all_reduce_rms_norm`; so are `residual`, `weight`, `group`, `plan`, `out_dtype`
            and `scale`.
        bias: dtype of x, [N], equal on all ranks; None: none.
        eps: added to the variance.

    Returns:
        As `all_reduce_rms_norm`.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        PlanError, UnsupportedError, PeerTimeoutError: as for `all_reduce_rms_norm`.

    Example:
        >>> y, h = counterpoint.all_reduce_layer_norm(x, h, w, b)  # doctest: +SKIP
    """
    given = x, residual, weight, bias, scale
    return _summed("all_reduce_layer_norm", given, "layer", eps, group, plan, out_dtype)


def _summed(
    name: str, given: tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None],
    kind: Kind, eps: float, group: dist.ProcessGroup | None, plan: str | Path | Plan,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    try:
        # what is of another kind is refused below, and may not be hashed
        good = type(eps) in (int, float) and isinstance(out_dtype, torch.dtype | None)
        settings = (kind, eps, out_dtype) if good else (None,)
        found, key, of = call.repeated(OP, given, group, plan, settings=settings)
        if found is not None:
            return tuple(found)
        x, residual, weight, bias, scale = given
        try:
            check_rows_of(name, x)
            check_like(name, x, x.shape, residual=residual, weight=weight, bias=bias)
            norm = norm_of(name, kind, eps, x, out_dtype, scale)
            refuse_gradient(name, norm, x=x, residual=residual, weight=weight, bias=bias)
            spec = plan_key(OP, plan)
        except CounterpointError as error:
            raise refused(error, of, x) from None
        if key is None:
            return tuple(torch.ops.counterpoint.all_reduce_norm(*given, *norm, spec, of.group_name))
        return tuple(call.ran(operator_of(norm), given, spec, (), of, key))
    except Distributed:
        pass
    except BaseException as error:
        left(name, error, group, given[0])
        raise

    return placed(name, partial(_again, name, kind, eps, plan, out_dtype), *given, group)


def _again(
    name: str, kind: Kind, eps: float, plan: str | Path | Plan, out_dtype: torch.dtype | None, *,
    group: dist.ProcessGroup, **own: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`_summed` of this rank's parts, by name."""
    return _summed(name, (*own.values(),), kind, eps, group, plan, out_dtype)  # type: ignore[arg-type]


@cache
def operator_of(norm: Norm) -> Operator:
    """With these settings."""

    def problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
        x, residual, _, bias, scale = tensors
        assert x is not None
        return Problem(
            OP, prod(x.shape[:-1]), x.shape[-1], 0, ranks, dtype_of(x), bias=bias is not None,
            norm=norm.kind, residual=residual is not None, quantized=norm.quantized(scale),
            eps=norm.eps,
        )  # fmt: skip

    def outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
        x, scale = tensors[0], tensors[-1]
        assert x is not None
        shape = tuple(x.shape)
        y, h = Output("y", shape, dtype=FP8 if norm.fp8 else None), Output("h", shape)
        scales = Output("scales", (*shape[:-1], 1), dtype=torch.float32)
        return y, h, *([scales] * (norm.quantized(scale) == "rows"))

    inputs = (
        Input("x", "rows"), Input("residual", "rows"), Input("weight", "row"),
        Input("bias", "row"), Input("scale", "row"),
    )  # fmt: skip
    settings = (
        ("norm", norm.kind),
        ("eps", norm.eps),
        ("out_dtype", str(FP8 if norm.fp8 else None)),
    )
    return Operator(OP, inputs, problem, outputs, settings=settings)


operator_of(Norm("rms", 1e-6))  # the first of its op


def _run(*arguments: Any) -> list[Tensor]:
    *tensors, kind, eps, fp8, plan, group_name = arguments
    return call.run(operator_of(Norm(kind, eps, fp8)), tensors, plan, (), group_name)


def _fake(*arguments: Any) -> list[Tensor]:
    x, _, _, _, scale, *settings = arguments
    return empty_results(Norm(*settings[:3]), x, scale)


register(OP, _run, _fake, backward, save)


def sample(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """Calls on random tensors: see samples.py."""
    return sample_by(operator_of(launch_norm.norm_of(problem)), problem, group, device)
