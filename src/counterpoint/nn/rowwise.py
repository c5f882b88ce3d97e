"""Linear layers that multiply in fp8: torchao's rowwise recipe, over the ranks of a group.

x and the weight are quantised anew in each forward, to float8_e4m3fn, with a scale for each row of
x and for each feature of the result, a power of 2. What is gathered is fp8, with its scales. The
backward is that of the bf16 operators, in bf16: what is saved is x and the weight as they were.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.ops.around import Around
from counterpoint.ops.check import asked_of, check_dense
from counterpoint.ops.register import forward_of, its_backward
from counterpoint.ops.scaled import Scaled
from counterpoint.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from counterpoint.tensor_parallel.backward import gradients_of_gather, gradients_of_scatter

DTYPE, RESULT = torch.float8_e4m3fn, torch.bfloat16
LARGEST = torch.finfo(DTYPE).max
LEAST = 1e-12  # of a row, so that one of zeros has a scale


def quantised(t: Tensor) -> Scaled:
    """t [..., K] in fp8, with a scale for each row [..., 1], a power of 2."""
    largest = t.detach().abs().amax(-1, keepdim=True).float().clamp(min=LEAST)
    _, exponent = torch.frexp(largest / LARGEST)  # of a mantissa below 1: nothing overflows
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return Scaled((t.detach().float() / scale).to(DTYPE), scale)


def by_columns(weight: Tensor) -> Scaled:
    """The transpose of a weight [N, K] in fp8, with a scale for each column [1, N]."""
    data, scale = quantised(weight)
    return Scaled(data.t(), scale.t())


def result_of(x: Tensor) -> torch.dtype:
    """The dtype of a layer's result: that of autocast where it is on, else of x."""
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else x.dtype


def gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, plan: str, dim: int
) -> Tensor:
    """gather(x) W^T + b, of x [S / n, ..., in] and W [out / n, in]; bf16 [S, ..., out / n].

    Args:
        dim: of the caller's x that has been moved to the front.
    """
    return _Gathered.apply(*_given(x=x, weight=weight, bias=bias), group, plan, dim)  # pyright: ignore


def scattered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, plan: str, dim: int
) -> Tensor:
    """Own rows of the sum over ranks of x W^T, plus b; bf16 [S / n, ..., out].

    Args:
        dim: see `gathered`.
    """
    return _Scattered.apply(*_given(x=x, weight=weight, bias=bias), group, plan, dim)  # pyright: ignore


def _given(**named: Tensor | None) -> tuple[Any, ...]:
    """In bf16, and of which of x and the weight a gradient is asked for."""
    check_dense("to_fp8", **{name: t for name, t in named.items() if t is not None})
    x, weight, bias = (t if t is None else t.to(RESULT) for t in named.values())
    return x, weight, bias, asked_of(x=x, w=weight)


class _InFp8(torch.autograd.Function):
    """In fp8, whose gradients are those of the bf16 operators."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, _, ctx.group, ctx.plan, _ = inputs
        ctx.forward = forward_of(ctx.group.group_name, x.device)
        ctx.save_for_backward(x, weight)


class _Gathered(_InFp8):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, asks: str,
        group: dist.ProcessGroup, plan: str, dim: int,
    ) -> Tensor:  # fmt: skip
        x8, w8 = quantised(x), by_columns(weight)
        return all_gather_matmul.plain(x8, w8, bias, group, plan, None, 0, Around(dim, asks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        needs = ctx.needs_input_grad[:2]
        where = ctx.group.group_name, ctx.group.size(), ctx.group.rank()
        with its_backward(ctx.forward):
            dx, dws = gradients_of_gather([dy], x, [weight.t()], needs, ctx.plan, [], where)
        return dx, dws[0].t() if dws else None, _of_bias(ctx, dy), *[None] * 4


class _Scattered(_InFp8):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, asks: str,
        group: dist.ProcessGroup, plan: str, dim: int,
    ) -> Tensor:  # fmt: skip
        x8, w8 = quantised(x), by_columns(weight)
        around = Around(dim, asks)
        return matmul_reduce_scatter.scattered(x8, w8, bias, group, plan, None, 0, around)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        needs = ctx.needs_input_grad[:2]
        where = ctx.group.group_name, ctx.group.size(), ctx.group.rank()
        with its_backward(ctx.forward):
            dx, dw = gradients_of_scatter(dy, x, weight.t(), needs, ctx.plan, [], where)
        return dx, None if dw is None else dw.t(), _of_bias(ctx, dy), *[None] * 4


def _of_bias(ctx: Any, dy: Tensor) -> Tensor | None:
    return dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
