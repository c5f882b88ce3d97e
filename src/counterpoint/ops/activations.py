"""Activations of products that are there: what is asked for, checked; and their gradients.

Where a gradient is asked for, this is what stands behind a matmul: its products are saved, two of a
gated activation, and its backward is one kernel.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, get_args

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.ops.scaled import Scaled
from counterpoint.problem import GATED, Activation
from counterpoint.runtime import activated

NAMES = tuple(name for name in get_args(Activation) if name)


def weights_of(op: str, activation: object, x: object, w: Any, bias: object) -> list[Tensor]:
    """The weights of a matmul with that activation: one, or two.

    Raises:
        InputError: there is no such activation, or it is not of such operands.
    """
    if activation not in NAMES:
        raise InputError(op, "activation", want=f"one of {', '.join(NAMES)}", got=repr(activation))
    gated, several = str(activation).endswith(GATED), isinstance(w, list | tuple)
    if isinstance(x, Scaled) or isinstance(w, Scaled):
        want = "None with counterpoint.Scaled"
        raise InputError(op, "activation", want=want, got=repr(activation))
    found: list[Any] = list(w) if several else [w]
    if len(found) != 1 + gated or (several and not gated):
        want = f"{'(gate, up)' if gated else 'a Tensor'} with activation={activation!r}"
        got = f"{len(found)} weights" if several else type(w).__name__
        raise InputError(op, "w", want=want, got=got)
    if gated and bias is not None:
        want = f"None with activation={activation!r}"
        raise InputError(op, "bias", want=want, got="a Tensor")
    shapes = [tuple(getattr(each, "shape", ())) for each in found]
    if shapes[0] != shapes[-1]:
        raise InputError(op, "w", want="of one shape, gate and up", got=shapes)
    return found


def activate(products: Sequence[Tensor], activation: str) -> Tensor:
    """activation(h) of one product, or gated, activation(h) * up of two. Differentiable.

    Args:
        products: bf16, fp16 or fp32, of one shape.
        activation: one of `NAMES`.
    """
    h, up = products[0], products[1] if len(products) > 1 else None
    return torch.ops.counterpoint.activated(h, up, activation)


def _run(h: Tensor, up: Tensor | None, activation: str) -> Tensor:
    h, up = h.contiguous(), None if up is None else up.contiguous()
    y = torch.empty_like(h)
    with torch.cuda.device(h.device) if h.is_cuda else nullcontext():
        activated.into(activation, h, up, y)
    return y


def _run_gradient(dy: Tensor, h: Tensor, up: Tensor | None, activation: str) -> list[Tensor]:
    dy, h, up = dy.contiguous(), h.contiguous(), None if up is None else up.contiguous()
    grads = [torch.empty_like(t) for t in (h, up) if t is not None]
    with torch.cuda.device(h.device) if h.is_cuda else nullcontext():
        activated.gradients_into(activation, dy, h, up, grads)
    return grads


def _fake(h: Tensor, up: Tensor | None, activation: str) -> Tensor:
    return h.new_empty(h.shape)


def _fake_gradient(dy: Tensor, h: Tensor, up: Tensor | None, activation: str) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (h, up) if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, up, ctx.activation = inputs
    ctx.save_for_backward(h, up)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    h, up = ctx.saved_tensors
    dh, *dup = torch.ops.counterpoint.activated_gradient(dy, h, up, ctx.activation)
    return dh, dup[0] if dup else None, None


_GIVEN = "Tensor h, Tensor? up, str activation"
register(f"activated({_GIVEN}) -> Tensor", _run, _fake, _backward, _save, meets=False)
register(
    f"activated_gradient(Tensor dy, {_GIVEN}) -> Tensor[]",
    _run_gradient, _fake_gradient, refuse_double_matmul, meets=False,
)  # fmt: skip
