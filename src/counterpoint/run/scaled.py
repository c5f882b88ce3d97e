"""Matmuls of operands with scales: torch's scaled ones on GPUs, dequantised ones on CPU ranks.

What cuBLAS 13.0 asks on an H200 (torch 2.11, 2026-11), and torch does not check: scales begin at
multiples of 16 bytes; with scales of blocks, rows are a multiple of 4, and the scales of w have a
multiple of 4 rows, else the result is wrong without an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoint.errors import UnsupportedError
from counterpoint.gpu.device_limits import capability_of
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Part
from counterpoint.problem import SCALE_BLOCK
from counterpoint.run import activated

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FIRST_CAPABILITY = (8, 9)
BLOCK_CAPABILITIES = ("9.0",)  # whose library takes fp32 scales of blocks
BLOCK_1X128, BLOCK_128X128 = 4, 5  # torch.nn.functional.ScalingType

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], object]


def matmul(bound: BoundStep, part: Part, places: Places) -> Callable[[Operands], object]:
    """y = (x w, each number times its scale) (+ bias), accumulated in fp32; or its activation.

    Raises:
        UnsupportedError: the GPU has no such product.
    """
    step, by = bound.step, bound.step.weights
    x, *reads = (places.of(box) for box in part.reads)
    (w, *up), (x_scale, w_scale, *up_scale) = reads[:by], reads[by : 2 * by + 1]
    rest, y = reads[2 * by + 1 :], places.of(part.write)
    op, device = places.plan.problem.op, places.workspace.device
    multiply = multiply_of(op, str(step.arg("scales")), device)
    activation = str(step.arg("activation", ""))

    def run(o: Operands) -> None:
        target, bias = y(o), rest[-1](o).view(-1) if rest else None
        multiply(x(o), w(o), x_scale(o), w_scale(o), bias, target)
        product = None
        for factor, scale in zip(up, up_scale, strict=True):
            product = torch.empty_like(target)
            multiply(x(o), factor(o), x_scale(o), scale(o), None, product)
        if activation:
            activated.into(activation, target, product, target)

    return run


def multiply_of(op: str, scales: str, device: torch.device) -> Multiply:
    """What multiplies operands with such scales: of x, w, their scales, a bias or None, and y.

    Raises:
        UnsupportedError: the GPU has no such product.
    """
    if device.type == "cpu":
        return by_reference
    if torch.version.hip or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        what = f"{op}: fp8 needs an NVIDIA GPU of compute capability 8.9 or later"
        raise UnsupportedError(f"{what}, this one is {capability_of(device)}")
    if scales != "block":
        return _whole
    if capability_of(device) not in BLOCK_CAPABILITIES:
        known = ", ".join(BLOCK_CAPABILITIES)
        what = f"{op}: scales of blocks need a GPU of compute capability {known}"
        raise UnsupportedError(f"{what}, this one is {capability_of(device)}")
    return _blocks


def by_reference(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """In fp32, of numbers that have been multiplied by their scales; rounded once."""
    total = torch.empty(y.shape)
    torch.mm(dequantised(x, x_scale), dequantised(w, w_scale), out=total)
    y.copy_(total if bias is None else total + bias)


def dequantised(numbers: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers [rows, columns] times their scales, 2-D as well: of all, of a row or of blocks."""
    scale = scale.to(dtype)
    for dim in (0, 1):
        size = numbers.shape[dim]
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, size)
    return numbers.to(dtype) * scale


# both private: a feature test holds them
_scaled_mm: Any = torch._scaled_mm  # pyright: ignore
_scaled_mm_v2: Any = torch._scaled_mm_v2  # pyright: ignore


def _whole(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """Of scales of tensors or of rows. Its fast accumulation is no faster here, and less exact."""
    given = _aligned(x_scale.contiguous()), _aligned(w_scale.contiguous())
    _scaled_mm(x, w, *given, bias=bias, out_dtype=y.dtype, out=y)


def _blocks(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """Of scales of 1x128 of x, 128x128 of w: both stored column by column."""
    rows, more, target = x.shape[0], -x.shape[0] % 4, y
    if more:
        x = pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
        target = y.new_empty(rows + more, y.shape[1])
    of_x, of_w = [_by_column(x_scale)], [_by_column(w_scale)]
    _scaled_mm_v2(
        x, w, of_x, [BLOCK_1X128], [], of_w, [BLOCK_128X128], [], bias, y.dtype, out=target
    )  # fmt: skip
    if more:
        y.copy_(target[:rows])


def _by_column(scale: Tensor) -> Tensor:
    """Stored column by column, with zeros behind up to a multiple of 4 rows."""
    columns, more = scale.t(), -scale.shape[0] % 4
    return _aligned((pad(columns, (0, more)) if more else columns).contiguous()).t()


def _aligned(scale: Tensor) -> Tensor:
    return scale.clone() if scale.data_ptr() % 16 else scale
