"""Residual and RMSNorm behind a matmul_all_reduce: what a decoder layer needs next."""

from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.kernels.rms_norm import add_rms_norm_kernel
from counterpoint.ops.check import check_dense, check_tensors
from counterpoint.ops.matmul_all_reduce import matmul_all_reduce
from counterpoint.ops.register import LIBRARY
from counterpoint.runtime.device_limits import refused_on

OP = "matmul_all_reduce_rms_norm"
MAX_COLUMNS = 1 << 15  # of a row that one program holds

LIBRARY.define(
    "add_rms_norm(Tensor y, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
)


def matmul_all_reduce_rms_norm(
    x: Tensor,
    w: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h = residual + sum of x_r w_r over the ranks, and h / rms(h) * norm_weight.

    `matmul_all_reduce`, and one more kernel for all that stands between it and the next matmul of a
    decoder layer. Same bits on all ranks. Not differentiable on GPUs.

    Args:
        x: as for `matmul_all_reduce`; so are `w`, `group`, `bias` and `plan`.
        residual: dtype of x, [M, ..., N], equal on all ranks.
        norm_weight: dtype of x, [N], equal on all ranks.
        eps: added to the mean square.

    Returns:
        The normalised sum and h, both dtype of x, [M, ..., N], new tensors.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        UnsupportedError, PeerTimeoutError: as for `matmul_all_reduce`.

    Example:
        >>> y, residual = counterpoint.matmul_all_reduce_rms_norm(  # doctest: +SKIP
        ...     x, w, residual=residual, norm_weight=norm.weight, group=tp
        ... )
    """
    check_tensors(OP, x, w, bias)
    check_dense(OP, residual=residual, norm_weight=norm_weight)
    for name, tensor in (("residual", residual), ("norm_weight", norm_weight)):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            got = f"{tensor.dtype} on {tensor.device}"
            raise InputError(OP, name, want=f"{x.dtype} on {x.device} as x", got=got)
    shape = (*x.shape[:-1], w.shape[-1])
    if tuple(residual.shape) != shape:
        raise InputError(OP, "residual", want=f"{shape}", got=tuple(residual.shape))
    if tuple(norm_weight.shape) != shape[-1:]:
        raise InputError(OP, "norm_weight", want=f"[N={shape[-1]}]", got=tuple(norm_weight.shape))
    if type(eps) not in (int, float) or not 0 <= eps < inf:
        raise InputError(OP, "eps", want="a number >= 0", got=eps)
    if x.is_cuda and shape[-1] > MAX_COLUMNS:
        raise InputError(OP, "w", want=f"of at most {MAX_COLUMNS} columns", got=shape[-1])
    y = matmul_all_reduce(x, w, group=group, bias=bias, plan=plan)
    return torch.ops.counterpoint.add_rms_norm(y, residual, norm_weight, eps)


def _run(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if refused_on(y.device):
        return _by_torch(y, residual, weight, eps)
    y, residual, weight = (t.contiguous() for t in (y, residual, weight))
    out, total = torch.empty_like(y), torch.empty_like(y)
    if y.numel():
        n = y.shape[-1]
        block = 1 << (n - 1).bit_length()
        launch: Any = add_rms_norm_kernel
        launch[(y.numel() // n,)](
            y, residual, weight, out, total, n, eps, block, num_warps=max(1, min(16, block // 512))
        )
    return out, total


def _by_torch(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (y.float() + residual.float()).to(y.dtype)
    h = total.float()
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * weight.float()).to(y.dtype), total


def _fake(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(y)


LIBRARY.impl("add_rms_norm", _run, "CUDA")
LIBRARY.impl("add_rms_norm", _by_torch, "CPU")
torch.library.register_fake("counterpoint::add_rms_norm", _fake, lib=LIBRARY)
