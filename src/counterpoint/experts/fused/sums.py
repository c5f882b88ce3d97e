"""Sums of a token's rows and their gradients, as operators: by a kernel on GPUs, else by torch."""

from typing import Any

import torch
import triton
from torch import Tensor

from counterpoint.experts.fused.kernel_sums import name_rows_kernel, token_sum_gradient_kernel
from counterpoint.experts.fused.launch_sums import BLOCK_N, NUM_WARPS, PROGRAMS, Source, sum_rows
from counterpoint.gpu.device_limits import refused_on
from counterpoint.ops.register import refuse_double_matmul, register

NAMES = 512  # entries that a program looks at


def sum_of_tokens(rows: Tensor, index: Tensor) -> Tensor:
    """out[t] = rows[index[t, 0]] + rows[index[t, 1]] + ..., in fp32, rounded once.

    Args:
        rows: [R, N].
        index: int32 or int64 [tokens, top], 0 to R - 1.
    """
    return torch.ops.counterpoint.token_sum(rows, index)


def sum_of_rows(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """out[t] = sum over j of weights[t, j] y[index[t, j]], in fp32 and in order, rounded once."""
    total = torch.zeros(index.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(index.shape[1]):
        total += weights[:, j, None].float() * y.index_select(0, index[:, j])
    return total.to(y.dtype)


def gradients(
    dout: Tensor, index: Tensor, weights: Tensor, rows: int, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Those of `sum_of`: (of the rows [rows, N], dtype of dout; of the weights, as they are).

    Each a sum in fp32, rounded once; of rows that no token names zero. The forward has refused what
    is named beyond `rows`, or, on a GPU, has said so: the kernel leaves it out.

    Args:
        dout: [tokens, N].
        index: int32 or int64 [tokens, top].
        weights: of that shape.
        y: [rows, N], what was summed; None: the weights need no gradient, and it is empty.
    """
    return torch.ops.counterpoint.token_sum_gradient(dout, index, weights, rows, y)


def _sum(rows: Tensor, index: Tensor) -> Tensor:
    out = rows.new_empty(index.shape[0], rows.shape[1])
    sum_rows(out, Source(rows.contiguous(), index.contiguous()))
    return out


def _gradient(
    dout: Tensor, index: Tensor, weights: Tensor, rows: int, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    if dout.is_cuda and not refused_on(dout.device):
        dy = dout.new_empty(rows, dout.shape[1])
        dweights = weights.new_zeros(weights.shape if y is not None else 0)
        y = None if y is None else y.contiguous()
        gradient_into(dy, dweights, dout.contiguous(), index, weights.contiguous(), y)
        return dy, dweights
    exact = dout.float()
    dy = exact.new_zeros(rows, dout.shape[1])
    columns: list[Tensor] = []
    for j, which in enumerate(index.unbind(1)):
        dy.index_add_(0, which, weights[:, j, None].float() * exact)
        if y is not None:
            columns.append((exact * y.index_select(0, which)).sum(1))
    dweights = torch.stack(columns, 1) if columns else weights.new_zeros(0)
    if y is not None and not columns:
        dweights = weights.clone()
    return dy.to(dout.dtype), dweights.to(weights.dtype)


def gradient_into(
    dy: Tensor, dweights: Tensor, dout: Tensor, index: Tensor, weights: Tensor, y: Tensor | None
) -> None:
    """`gradients` by the kernel; tensors without gaps, and of entries out of range no dweights."""
    rows, n = dy.shape
    if not dy.numel():
        return
    index, entries = index.contiguous(), index.numel()
    named = torch.zeros(2, rows, dtype=torch.int32, device=index.device)
    names: Any = name_rows_kernel
    kernel: Any = token_sum_gradient_kernel
    if entries:
        names[(triton.cdiv(entries, NAMES),)](index, named, entries, rows, NAMES)
    kernel[(min(PROGRAMS, rows),)](
        dout, weights, dout if y is None else y, index, named, dy, dweights, entries, rows, n,
        max(index.shape[1], 1), min(BLOCK_N, triton.next_power_of_2(n)), y is not None,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def _fake_sum(rows: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty(index.shape[0], rows.shape[1])


def _fake_gradient(
    dout: Tensor, index: Tensor, weights: Tensor, rows: int, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = weights.shape if y is not None else (0,)
    return dout.new_empty(rows, dout.shape[1]), weights.new_empty(shape)


# operators of their own, so that a compiled backward holds each as one node
register("token_sum", _sum, _fake_sum, refuse_double_matmul)
register("token_sum_gradient", _gradient, _fake_gradient, refuse_double_matmul)
