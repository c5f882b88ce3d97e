"""What a combine's gradient does with rows by expert, as an operator: by a kernel, or by torch."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.experts.fused.kernel_weighted_rows import (
    gathered_rows_kernel,
    weighted_rows_kernel,
    weighted_swiglu_kernel,
)
from counterpoint.gpu.device_limits import refused_on
from counterpoint.group.ranks import group_of
from counterpoint.ops import activations
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.run.launch import At, Grid, Launch, aligned
from counterpoint.tensor_parallel.plan_fused_sum import padded

BLOCK_N = 1024  # columns at a time
OPTIONS = {"num_warps": 4}


def weighted_rows(
    rows: Tensor, weights: Tensor, other: Tensor | None, counts: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    """Rows times their weights, and the sum of each row times that of `other`; in fp32.

    Args:
        rows: bf16, fp16 or fp32 [room, N], by expert.
        weights: fp32 [room].
        other: dtype of rows, [room, N].
        counts: int64 [ranks, E], rows of each rank for each expert. Elsewhere than rows: there are
            as many rows as there is room.
        group_name: whose rank has these rows.

    Returns:
        dtype of rows, [room, N], and fp32 [room]; rows beyond those of `counts` are 0. Without
        `other` these are left as they are, and of the second there is none.
    """
    known = counts if counts.device == rows.device else None
    return torch.ops.counterpoint.weighted_rows(rows, weights, other, known, group_name)


def _run(
    rows: Tensor, weights: Tensor, other: Tensor | None, counts: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    return weigh(rows, weights, other, counts, dist.get_rank(group_of(group_name)))


def weigh(
    rows: Tensor, weights: Tensor, other: Tensor | None, counts: Tensor | None, rank: int
) -> tuple[Tensor, Tensor]:
    """`weighted_rows` without torch's dispatcher; `counts` are where rows are, or None."""
    if rows.is_cuda and not refused_on(rows.device):
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dots = weights.new_empty(0 if other is None else len(rows))
        into(y, dots, rows, weights, other, counts, rank)
        return y, dots
    wide = rows.float()
    y = (wide * weights[:, None]).to(rows.dtype)
    if other is None:
        return y, weights.new_empty(0)
    dots = (wide * other.float()).sum(1)
    if counts is not None:
        ranks = len(counts)
        none = torch.arange(len(rows), device=rows.device)
        none = none >= counts.view(ranks, ranks, -1)[:, rank].sum()
        y.masked_fill_(none[:, None], 0)
        dots.masked_fill_(none, 0)
    return y, dots


def into(
    y: Tensor, dots: Tensor, rows: Tensor, weights: Tensor, other: Tensor | None,
    counts: Tensor | None, rank: int,
) -> None:  # fmt: skip
    """By the kernel; without `other` no `dots` are written."""
    if not len(rows):
        return
    if other is None:
        dots = weights
    given = (rows, weights, rows if other is None else other, weights if counts is None else counts)
    tensors = [t if aligned(t) else t.clone() for t in (each.contiguous() for each in given)]
    shape = None if counts is None else tuple(counts.shape)
    dtypes = tuple(t.dtype for t in (*tensors, y))
    sizes = rows.shape[1], rank, other is not None
    _launch(dtypes, shape, sizes, rows.device)(*tensors, y, dots, len(rows))


@lru_cache(maxsize=1024)
def _launch(
    dtypes: tuple[torch.dtype, ...], counts: tuple[int, ...] | None, sizes: tuple[int, int, bool],
    device: torch.device,
) -> Launch:  # fmt: skip
    """The kernel, compiled for tensors like these; programs that are resident share the rows."""
    ranks, experts = counts or (1, 1)
    n, rank, dots = sizes
    fixed = {
        "E": experts, "rank": rank, "N": n, "WORLD": ranks, "DOTS": dots,
        "EXPERTS": padded(experts // ranks) if counts else 0,
        "BLOCK_N": min(BLOCK_N, padded(max(n, 1))),
    }  # fmt: skip
    kernel: Any = weighted_rows_kernel
    given = tuple(name for name in kernel.arg_names if name not in fixed)
    grid = Grid(None, reserve=False)  # nothing waits in it
    launch = Launch(kernel, given, fixed, grid, device, "weighted_rows", OPTIONS)
    return launch.compile(*dtypes, torch.float32, 0)


def gathered(received: Tensor, index: At, room: int, counts: Tensor, rank: int) -> Tensor:
    """Rows by expert [room, N] of tokens that have come once; without torch's dispatcher.

    Args:
        received: bf16, fp16 or fp32 [tokens that may come, N].
        index: int32 [room], of each row which of these it is, or more; on a GPU, where it begins.
        counts: int64 [ranks, E], where the others are.
    """
    if isinstance(index, Tensor) and (not received.is_cuda or refused_on(received.device)):
        if not len(received):
            return received.new_zeros(room, received.shape[1])
        return received[index[:room].clamp(max=len(received) - 1).long()]
    y = received.new_empty(room, received.shape[1])
    gather_into(y, received, index, counts, rank)
    return y


def gather_into(y: Tensor, received: Tensor, start: At, counts: Tensor, rank: int) -> None:
    """As `gathered`, by the kernel."""
    dtypes = received.dtype, torch.int32, counts.dtype, y.dtype
    launch = _shared(gathered_rows_kernel, dtypes, counts.shape, rank, y.shape[1], y.device)
    launch(received, start, counts, y, len(y), len(received))


def swiglu_back(
    dhidden: Tensor, weights: Tensor, products: Tensor, counts: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, and of the weights, of rows of weights * silu(gate) * up.

    Args:
        dhidden: bf16, fp16 or fp32 [room, N], of these rows.
        weights: fp32 [room].
        products: as dhidden, [room, 2 N], gate, then up.
        counts: int64 [ranks, E].

    Returns:
        As products, and fp32 [room], 0 behind the rows that there are; the same numbers as of
        `weigh` and `activations.gradients_by`.
    """
    if not dhidden.is_cuda or refused_on(dhidden.device):
        hidden = activations.activated_by(products, None, activations.SWIGLU, counts, rank)
        dhidden, dots = weigh(dhidden, weights, hidden, counts, rank)
        given = dhidden, products, None, activations.SWIGLU, counts, rank
        return activations.gradients_by(*given)[0], dots
    dproducts, dots = torch.empty_like(products), weights.new_empty(len(products))
    swiglu_back_into(dproducts, dots, dhidden, weights, products, counts, rank)
    return dproducts, dots


def swiglu_back_into(
    dproducts: Tensor, dots: Tensor, dhidden: Tensor, weights: Tensor, products: Tensor,
    counts: Tensor, rank: int,
) -> None:  # fmt: skip
    """As `swiglu_back`, by the kernel."""
    tensors = [t if aligned(t) else t.clone() for t in (dhidden, weights, products)]
    dtypes = *(t.dtype for t in tensors), counts.dtype, dproducts.dtype, dots.dtype
    n = dhidden.shape[1]
    launch = _shared(weighted_swiglu_kernel, dtypes, counts.shape, rank, n, dots.device)
    launch(*tensors, counts, dproducts, dots, len(dots))


@lru_cache(maxsize=1024)
def _shared(
    kernel: Any, dtypes: tuple[torch.dtype, ...], counts: torch.Size, rank: int, n: int,
    device: torch.device,
) -> Launch:  # fmt: skip
    """A kernel whose resident programs share the rows, compiled for tensors like these."""
    ranks, experts = counts
    fixed = {
        "E": experts, "rank": rank, "N": n, "WORLD": ranks, "EXPERTS": padded(experts // ranks),
        "BLOCK_N": min(BLOCK_N, padded(max(n, 1))),
    }  # fmt: skip
    given = tuple(name for name in kernel.arg_names if name not in fixed)
    grid = Grid(None, reserve=False)  # nothing waits in it
    launch = Launch(kernel, given, fixed, grid, device, kernel.__name__, OPTIONS)
    return launch.compile(*dtypes, *(0,) * (len(given) - len(dtypes)))


def _fake(
    rows: Tensor, weights: Tensor, other: Tensor | None, counts: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return y, weights.new_empty(0 if other is None else rows.shape[0])


register("weighted_rows", _run, _fake, refuse_double_matmul)
