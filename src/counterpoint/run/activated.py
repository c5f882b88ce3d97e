"""Steps with an activation: in one kernel with their matmuls, or behind what they do without it.

By both the bits are those of the products as they are rounded: see kernels/activation.py. On CPU
ranks, and on GPUs that run no kernels of ours, by torch.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.gpu.device_limits import refused_on
from counterpoint.group.workspace import Operands, Places
from counterpoint.kernels.activation import activation_gradient_kernel, activation_kernel
from counterpoint.plan.activated import one_kernel
from counterpoint.plan.bind import BoundStep, Part
from counterpoint.problem import GATED, Problem
from counterpoint.run import invariant_matmul
from counterpoint.run.launch import Grid, Launch, aligned
from counterpoint.tensor_parallel.plan_fused_sum import padded

BLOCK, NUM_WARPS = 4096, 8
ROW_BLOCK, ROW_WARPS = 512, 2  # of rows: 16 bytes of 16-bit numbers for each thread
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
}  # fmt: skip
aten: Any = torch.ops.aten
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, h: aten.threshold_backward(dy, h, 0), "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda dy, h: aten.gelu_backward(dy, h, approximate="tanh"),
}  # fmt: skip


def matmul(bound: BoundStep, part: Part, places: Places) -> Callable[[Operands], None]:
    """y = activation(x w (+ bias)), or gated, activation(x w) * (x up)."""
    step, problem = bound.step, places.plan.problem
    x, w, *rest = (places.of(box) for box in part.reads)
    y = places.of(part.write)
    up = rest[0] if problem.gated else None
    bias = rest[-1] if step.arg("bias") else None

    def run(o: Operands) -> None:
        multiplied(problem, x(o), w(o), bias(o) if bias else None, y(o), up(o) if up else None)

    return run


def multiplied(
    p: Problem, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, up: Tensor | None
) -> None:
    """The same of tensors.

    Args:
        x: [rows, K]; so are the others as of `invariant_matmul.by_kernel`.
        up: [K, N], of a gated activation.
    """
    kernels = x.is_cuda and not refused_on(x.device)
    if kernels and _in_one_kernel(p, x, w, y, up):
        name = p.activation.removesuffix(GATED)
        invariant_matmul.by_kernel(x, w, bias, y, activation=name, up=up)
        return
    multiply = _multiply
    if p.invariant:
        multiply = invariant_matmul.by_kernel if x.is_cuda else invariant_matmul.by_torch
    multiply(x, w, bias, y)
    product = None
    if up is not None:
        product = torch.empty_like(y)
        multiply(x, up, None, product)
    into(p.activation, y, product, y)


def _in_one_kernel(p: Problem, x: Tensor, w: Tensor, y: Tensor, up: Tensor | None) -> bool:
    rows, n = y.shape
    if not one_kernel(p, rows, n, invariant_matmul.num_sms(x.device)):
        return False
    return up is None or invariant_matmul.pairs(x, w, up, y)


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    if bias is None:
        torch.mm(x, w, out=y)
    else:
        torch.addmm(bias, x, w, out=y)


def side_by_side(activation: str, up: Tensor | None) -> bool:
    """Whether gate and up are one tensor, [rows, 2 N]."""
    return up is None and activation.endswith(GATED)


def into(
    activation: str, h: Tensor, up: Tensor | None, y: Tensor, counts: Tensor | None = None,
    rank: int = 0,
) -> None:  # fmt: skip
    """y = activation(h), or gated, activation(h) * up.

    Args:
        h: of the shape of y, or gate and up side by side.
        y: it may be h.
        counts: int32 or int64 [ranks, E], rows of each rank for each expert: on a GPU, of rows with
            gate and up side by side, only those of this rank's experts are read and written.
        rank: this one.
    """
    tensors = (h, y) if up is None else (h, up, y)
    if not _launchable(tensors):
        y.copy_(by_torch(activation, h, up))
    elif y.numel():
        given = (h, h if up is None else up, y)
        launch(activation, given, side_by_side(activation, up), counts, rank)


def gradients_into(
    activation: str, dy: Tensor, h: Tensor, up: Tensor | None, grads: list[Tensor],
    counts: Tensor | None = None, rank: int = 0,
) -> None:  # fmt: skip
    """Into `grads`, of h and of up if there is one; tensors without gaps.

    Args:
        counts, rank: as of `into`.
    """
    side, wide = side_by_side(activation, up), _dtype(h, activation, up)
    tensors = (dy, h, *grads) if up is None else (dy, h, up, *grads)
    if _launchable(tensors):
        if h.numel():
            given = (h, h if up is None else up, dy, grads[0], grads[-1])
            launch(activation, given, side, counts, rank)
        return
    if side:
        (h, up), grads = h.chunk(2, -1), [*grads[0].chunk(2, -1)]
    dy, h = dy.to(wide), h.to(wide)
    if up is not None:
        grads[1].copy_(dy * _wide(activation, h))
        dy = dy * up
    grads[0].copy_(GRADIENTS[activation.removesuffix(GATED)](dy, h))


def _launchable(tensors: tuple[Tensor, ...]) -> bool:
    first = tensors[0]
    if not first.is_cuda or refused_on(first.device):
        return False
    return all(t.is_contiguous() and t.dtype == first.dtype and aligned(t) for t in tensors)


def launch(
    activation: str, given: tuple[Tensor, ...], side: bool, counts: Tensor | None, rank: int
) -> None:
    """The kernel of (h, up, y), or that of the gradients of (h, up, dy, dh, dup).

    Args:
        side: gate and up lie side by side.
    """
    h = given[0]
    n, rows = (h.shape[1] // 2, h.shape[0]) if side else (h.numel(), 1)
    table = None if counts is None else (counts.dtype, *counts.shape)
    run = _launch(len(given) > 3, activation, n, side, h.dtype, h.device, table, rank)
    run(*given, h if counts is None else counts, rows)


@lru_cache(maxsize=1024)
def _launch(
    backward: bool, activation: str, n: int, side: bool, dtype: torch.dtype,
    device: torch.device, counts: tuple[torch.dtype, int, int] | None, rank: int,
) -> Launch:  # fmt: skip
    """The kernel compiled: of rows of `n` products side by side, or of all products as one row."""
    kernel = activation_gradient_kernel if backward else activation_kernel
    given = ["h_ptr", "up_ptr", *(["dy_ptr", "dh_ptr", "dup_ptr"] if backward else ["y_ptr"])]
    dtypes = [dtype] * len(given)
    of_counts, ranks, experts = counts or (dtype, 1, 0)
    fixed = {
        "N": n, "E": experts, "rank": rank, "NAME": activation.removesuffix(GATED),
        "GATED": activation.endswith(GATED), "SIDE": side, "WORLD": ranks,
        "EXPERTS": padded(experts // ranks) if counts else 0,
    }  # fmt: skip
    if side:  # programs that are resident share the rows; nothing waits in them
        fixed["BLOCK"], grid = min(ROW_BLOCK, padded(n)), Grid(None, reserve=False)
    else:
        fixed["BLOCK"], grid = BLOCK, Grid(-(-n // BLOCK), reserve=False, each=True)
    options = {"num_warps": ROW_WARPS if side else NUM_WARPS}
    names = (*given, "counts_ptr", "room")
    found = Launch(kernel, names, fixed, grid, device, activation, options)
    return found.compile(*dtypes, of_counts, 0)


def by_torch(activation: str, h: Tensor, up: Tensor | None) -> Tensor:
    """As `into`, of all rows."""
    wide = _dtype(h, activation, up)
    if side_by_side(activation, up):
        h, up = h.chunk(2, -1)
    return _wide(activation, h.to(wide), None if up is None else up.to(wide)).to(h.dtype)


def _dtype(h: Tensor, activation: str, up: Tensor | None) -> torch.dtype:
    # on a CPU, torch's functions of numbers at the end of a tensor may differ in the last bit, and
    # parts of one product are to be as the whole
    parts = h.device.type == "cpu" and not side_by_side(activation, up)
    return torch.float64 if parts else torch.float32


def _wide(activation: str, h: Tensor, up: Tensor | None = None) -> Tensor:
    y = FUNCTIONS[activation.removesuffix(GATED)](h)
    return y if up is None else y * up
