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

from counterpoint.kernels.activation import activation_gradient_kernel, activation_kernel
from counterpoint.plan.activated import one_kernel
from counterpoint.plan.bind import BoundStep, Part
from counterpoint.problem import GATED, Problem
from counterpoint.runtime import invariant_matmul
from counterpoint.runtime.device_limits import refused_on
from counterpoint.runtime.launch import Grid, Launch, aligned
from counterpoint.runtime.workspace import Operands, Places

BLOCK, NUM_WARPS = 4096, 8
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


def into(activation: str, h: Tensor, up: Tensor | None, y: Tensor) -> None:
    """y = activation(h), or gated, activation(h) * up; y may be h."""
    tensors = (h, y) if up is None else (h, up, y)
    if not _launchable(tensors):
        y.copy_(by_torch(activation, h, up))
    elif y.numel():
        launch = launch_of(False, activation, y.numel(), y.dtype, y.device)
        launch(h, h if up is None else up, y)


def gradients_into(
    activation: str, dy: Tensor, h: Tensor, up: Tensor | None, grads: list[Tensor]
) -> None:
    """Into `grads`, of h, and gated of up; tensors without gaps."""
    tensors = (dy, h, *grads) if up is None else (dy, h, up, *grads)
    if not _launchable(tensors):
        wide = _dtype(h)
        dy, h = dy.to(wide), h.to(wide)
        if up is not None:
            grads[1].copy_(dy * _wide(activation, h))
            dy = dy * up
        grads[0].copy_(GRADIENTS[activation.removesuffix(GATED)](dy, h))
    elif h.numel():
        launch = launch_of(True, activation, h.numel(), h.dtype, h.device)
        launch(h, h if up is None else up, dy, grads[0], grads[-1])


def _launchable(tensors: tuple[Tensor, ...]) -> bool:
    first = tensors[0]
    if not first.is_cuda or refused_on(first.device):
        return False
    return all(t.is_contiguous() and t.dtype == first.dtype and aligned(t) for t in tensors)


@lru_cache(maxsize=1024)
def launch_of(
    backward: bool, activation: str, numel: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """The kernel of that many products, compiled; or that of the gradients."""
    kernel = activation_gradient_kernel if backward else activation_kernel
    given = ["h_ptr", "up_ptr", *(["dy_ptr", "dh_ptr", "dup_ptr"] if backward else ["y_ptr"])]
    name, gated = activation.removesuffix(GATED), activation.endswith(GATED)
    fixed = {"N": numel, "NAME": name, "GATED": gated, "BLOCK": BLOCK}
    grid = Grid(-(-numel // BLOCK), reserve=False, each=True)
    launch = Launch(kernel, given, fixed, grid, device, activation, {"num_warps": NUM_WARPS})
    return launch.compile(*[dtype] * len(given))


def by_torch(activation: str, h: Tensor, up: Tensor | None) -> Tensor:
    """As `into`."""
    wide = _dtype(h)
    return _wide(activation, h.to(wide), None if up is None else up.to(wide)).to(h.dtype)


def _dtype(t: Tensor) -> torch.dtype:
    # on a CPU, torch's functions of numbers at the end of a tensor may differ in the last bit
    return torch.float64 if t.device.type == "cpu" else torch.float32


def _wide(activation: str, h: Tensor, up: Tensor | None = None) -> Tensor:
    y = FUNCTIONS[activation.removesuffix(GATED)](h)
    return y if up is None else y * up
