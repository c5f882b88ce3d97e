"""A norm behind a matmul_all_reduce: what a decoder layer needs next."""

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.ops.check import check_tensors
from counterpoint.ops.matmul_all_reduce import matmul_all_reduce
from counterpoint.ops.norms import Kind, check_like, norm_of


def matmul_all_reduce_rms_norm(
    x: Tensor,
    w: Tensor,
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
    decoder layer. Same bits on all ranks. Differentiable unless the result is fp8.

    Args:
        x: as for `matmul_all_reduce`; so are `w`, `group`, `bias` and `plan`.
        residual: dtype of x, [M, ..., N], equal on all ranks; None: h is the sum.
        norm_weight: dtype of x, [N], equal on all ranks.
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
    op, more = "matmul_all_reduce_rms_norm", {"residual": residual, "norm_weight": norm_weight}
    arguments = _checked(op, (x, w, bias), "rms", eps, out_dtype, scale, more)
    y = matmul_all_reduce(x, w, group=group, bias=bias, plan=plan)
    return tuple(torch.ops.counterpoint.add_norm(y, residual, norm_weight, None, *arguments))


def matmul_all_reduce_layer_norm(
    x: Tensor,
    w: Tensor,
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
        norm_bias: dtype of x, [N], equal on all ranks; None: none.
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
    op, more = "matmul_all_reduce_layer_norm", {"residual": residual, "norm_weight": norm_weight}
    more |= {"norm_bias": norm_bias}
    arguments = _checked(op, (x, w, bias), "layer", eps, out_dtype, scale, more)
    y = matmul_all_reduce(x, w, group=group, bias=bias, plan=plan)
    return tuple(torch.ops.counterpoint.add_norm(y, residual, norm_weight, norm_bias, *arguments))


def _checked(
    op: str, tensors: tuple[Tensor, Tensor, Tensor | None], kind: Kind, eps: float,
    out_dtype: torch.dtype | None, scale: Tensor | None, more: dict[str, Tensor | None],
) -> tuple[Tensor | None, str, float, bool]:  # fmt: skip
    """What add_norm takes behind its tensors, where all of them fit.

    Raises:
        InputError, UnsupportedError: they do not.
    """
    x, w, _ = tensors
    check_tensors(op, *tensors)
    check_like(op, x, (*x.shape[:-1], w.shape[-1]), **more)
    norm = norm_of(op, kind, eps, x, out_dtype, scale)
    return scale, norm.kind, norm.eps, norm.fp8
