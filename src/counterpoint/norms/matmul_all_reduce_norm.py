"""A norm behind a matmul_all_reduce: what a decoder layer needs next."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.norms.norms import FP8, Kind, Norm, check_like, norm_of, refuse_gradient
from counterpoint.ops import call, scaled
from counterpoint.ops.agreement import left, refused
from counterpoint.ops.check import autocast
from counterpoint.ops.placements import Distributed, placed
from counterpoint.ops.scaled import NO_SCALES, Scaled
from counterpoint.tensor_parallel.matmul_all_reduce import OP, anew


def matmul_all_reduce_rms_norm(
    x: Tensor | Scaled,
    w: Tensor | Scaled,
    *,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float = 1e-6,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str = "auto",
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """h = residual + sum of x_r w_r over the ranks, and h / rms(h) * norm_weight.

    `matmul_all_reduce`, and one more kernel for all that stands between it and the next matmul of a
    decoder layer. Same bits on all ranks. Differentiable; an fp8 result wants no gradients.

    Args:
        x: as for `matmul_all_reduce`; so are `w`, `group`, `bias` and `plan`. Under autocast all
            tensors but `scale` are cast, or with `Scaled` none.
        residual: dtype of x, or bf16 with `Scaled`, [M, ..., N], equal on all ranks; None: h is the
            sum.
        norm_weight: dtype of x, or bf16 with `Scaled`, [N], equal on all ranks.
        eps: added to the mean square.
        out_dtype: as for `all_reduce_rms_norm`; so is `scale`.

    Returns:
        The normalised sum and h, both [M, ..., N], and the scales of an fp8 result, all as of
        `all_reduce_rms_norm`; new tensors.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        UnsupportedError, PeerTimeoutError: as for `matmul_all_reduce`; or the GPU has no fp8.

    Example:
        >>> y, residual = counterpoint.matmul_all_reduce_rms_norm(  # doctest: +SKIP
        ...     x, w, residual=residual, norm_weight=norm.weight, group=tp
        ... )
    """
    given = x, w, bias, residual, norm_weight, None
    settings = "rms", eps, out_dtype, scale
    return _normed("matmul_all_reduce_rms_norm", given, settings, group, plan)


def matmul_all_reduce_layer_norm(
    x: Tensor | Scaled,
    w: Tensor | Scaled,
    *,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str = "auto",
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """h = residual + sum of x_r w_r over the ranks, and its LayerNorm.

    Args:
        x: as for `matmul_all_reduce_rms_norm`; so are all others but `norm_bias` and `eps`.
        norm_bias: dtype of x, or bf16 with `Scaled`, [N], equal on all ranks; None: none.
        eps: added to the variance.

    Returns:
        As `matmul_all_reduce_rms_norm`.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        UnsupportedError, PeerTimeoutError: as for `matmul_all_reduce_rms_norm`.

    Example:
        >>> y, h = counterpoint.matmul_all_reduce_layer_norm(  # doctest: +SKIP
        ...     x, w, residual=h, norm_weight=norm.weight, norm_bias=norm.bias, group=tp
        ... )
    """
    given = x, w, bias, residual, norm_weight, norm_bias
    settings = "layer", eps, out_dtype, scale
    return _normed("matmul_all_reduce_layer_norm", given, settings, group, plan)


def _normed(
    op: str, given: tuple[Any, ...], settings: tuple[Kind, float, torch.dtype | None, Any],
    group: dist.ProcessGroup | None, plan: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The product, summed and normalised, in the dtype of autocast, but for fp8.

    Raises:
        InputError, UnsupportedError: tensors do not fit one another, or this GPU; on all ranks.
    """
    try:
        kind, eps, out_dtype, scale = settings
        (x, w, *others), scales = given, NO_SCALES
        if isinstance(x, Scaled) or isinstance(w, Scaled):
            x, w, scales = scaled.apart(op, x, w, group)
        else:
            x, w, *others = autocast(*given)
        bias, residual, weight, norm_bias = others
        try:
            x, w, bias, scales = scaled.checked(op, x, w, (bias, *scales))  # type: ignore[arg-type]
            more = {"residual": residual, "norm_weight": weight, "norm_bias": norm_bias}
            check_like(op, x, (*x.shape[:-1], w.shape[-1]), **more)
            norm = norm_of(op, kind, eps, x, out_dtype, scale)
            refuse_gradient(op, norm, x=x, w=w, bias=bias, **more)
        except CounterpointError as error:
            raise refused(error, group, x) from None
        behind = _facts(norm, residual is not None, norm_bias is not None, scale is not None)
        tensors = x, w, bias, *scales
        found, key, of = call.repeated(OP, tensors, group, plan, settings=(behind,))
        y = found[0] if found else anew(x, w, tensors[2:], of, plan, key, behind)
        return tuple(torch.ops.counterpoint.add_norm(y, residual, weight, norm_bias, scale, *norm))
    except Distributed:
        pass
    except BaseException as error:
        left(op, error, group, given[0])
        raise

    return placed(op, partial(_again, op, settings[:-1], plan), *given, settings[-1], group)


def _again(
    op: str, settings: tuple[Any, ...], plan: str, *, group: dist.ProcessGroup, scale: Any,
    **own: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`_normed` of this rank's parts, by name."""
    return _normed(op, (*own.values(),), (*settings, scale), group, plan)


def _facts(norm: Norm, residual: bool, norm_bias: bool, scale: bool) -> str:
    """What ranks have to do alike with the sum."""
    there = f"residual={residual} norm_bias={norm_bias} scale={scale}"
    return f"norm={norm.kind} eps={norm.eps} out_dtype={FP8 if norm.fp8 else None} {there}"
