"""The gradient of the weights of experts: a product for each, of rows by expert on both sides."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts import steps_counted
from counterpoint.experts.steps_counted import Here, rows_here
from counterpoint.group.ranks import group_of
from counterpoint.ops.register import refuse_double_matmul, register

OP = "experts_weight_gradient"


def weight_gradient(
    x: Tensor, dy: Tensor, counts: Tensor, w: Tensor, group_name: str, group_size: int
) -> Tensor:
    """dw [E_local, K, N], stored as w is, of rows by expert on both sides."""
    op: Any = torch.ops.counterpoint.experts_weight_gradient
    transposed = w.stride(1) == 1 and w.shape[1] > 1
    return op(x, dy, counts, transposed, group_name, group_size)


def _run(
    x: Tensor, dy: Tensor, counts: Tensor, transposed: bool, group_name: str, group_size: int
) -> Tensor:
    rank = dist.get_rank(group_of(group_name))
    here = rows_here(counts, rank, group_size, min(len(x), len(dy)))
    return gradient_of(dy, x, here).transpose(1, 2) if transposed else gradient_of(x, dy, here)


def gradient_of(x: Tensor, dy: Tensor, here: Here) -> Tensor:
    """dw[e] = x[rows of e]^T dy[rows of e], [E_local, K, N], zero where there are none."""
    dw = steps_counted.weight_gradient(x, dy, here)
    if dw is not None:
        return dw
    experts = here.rows
    dw, start = x.new_zeros(len(experts), x.shape[1], dy.shape[1]), 0
    if not len(x) or not len(dy):
        return dw
    if experts.is_cuda and torch.cuda.is_current_stream_capturing():
        want, got = "bf16 on Hopper or later where a graph is captured", str(x.dtype)
        raise InputError("gradient of experts", "w", want=want, got=got)
    for e, rows in enumerate(experts.tolist()):
        if rows and dw.numel():
            torch.mm(x[start : start + rows].t(), dy[start : start + rows], out=dw[e])
        start += rows
    return dw


def _fake(
    x: Tensor, dy: Tensor, counts: Tensor, transposed: bool, group_name: str, group_size: int
) -> Tensor:
    experts, k, n = counts.shape[1] // group_size, x.shape[1], dy.shape[1]
    if transposed:
        return x.new_empty(experts, n, k).transpose(1, 2)
    return x.new_empty(experts, k, n)


def _flops(x: Any, dy: Any, *_: object, **__: object) -> int:
    return 2 * prod(x) * dy[1]


register(OP, _run, _fake, refuse_double_matmul, flops=_flops)
