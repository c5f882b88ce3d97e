"""Activations of products that are there: what is asked for, checked; and their gradients.

Where a gradient is asked for, this is what stands behind a matmul: its products are saved, two of a
gated activation, and its backward is one kernel. So is SwiGLU between the two matmuls of experts.
"""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.problem import GATED, Activation
from counterpoint.run import activated
from counterpoint.run.launch import aligned

SWIGLU = f"silu{GATED}"
NAMES = tuple(name for name in get_args(Activation) if name)


def weights_of(op: str, activation: object, w: Any, bias: object) -> list[Any]:
    """The weights of a matmul with that activation: one, or two.

    Raises:
        InputError: there is no such activation, or it is not of such operands.
    """
    if activation not in NAMES:
        raise InputError(op, "activation", want=f"one of {', '.join(NAMES)}", got=repr(activation))
    gated = str(activation).endswith(GATED)
    several = isinstance(w, list | tuple)
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
    return torch.ops.counterpoint.activated(h, up, activation, None, 0)


def swiglu(gate_up: Tensor, counts: Tensor | None, rank: int) -> Tensor:
    """silu(gate) * up of the rows that there are, in fp32, rounded once. Differentiable.

    Args:
        gate_up: bf16, fp16 or fp32 [room, 2 N], gate before up.
        counts: int32 or int64 [ranks, E], rows of each rank for each expert. None, or elsewhere
            than gate_up: there are as many rows as there is room.
        rank: this one, whose experts have these rows.

    Returns:
        dtype of gate_up, [room, N]; on a GPU rows beyond those of `counts` are not written, and
        those of gate_up and of the gradient neither read nor written.
    """
    if counts is not None and counts.device != gate_up.device:  # the host has sized gate_up by it
        counts = None
    return torch.ops.counterpoint.activated(gate_up, None, SWIGLU, counts, rank)


def activated_by(
    h: Tensor, up: Tensor | None, activation: str, counts: Tensor | None, rank: int
) -> Tensor:  # fmt: skip
    """Activated products, without torch's dispatcher: see `swiglu`."""
    y = _fake(h, up, activation, counts, rank)
    h, up, counts = (_placed(t) for t in (h, up, counts))
    activated.into(activation, h, up, y, counts, rank)
    return y


def gradients_by(
    dy: Tensor, h: Tensor, up: Tensor | None, activation: str, counts: Tensor | None, rank: int
) -> list[Tensor]:
    """Those of `activated_by`, of h and of up if there is one."""
    grads = _fake_gradient(dy, h, up, activation, counts, rank)
    dy, h, up, counts = (_placed(t) for t in (dy, h, up, counts))
    activated.gradients_into(activation, dy, h, up, grads, counts, rank)
    return grads


def _placed(t: Tensor | None) -> Any:
    """Without gaps, from a multiple of 16 bytes on."""
    t = None if t is None else t.contiguous()
    return t if t is None or aligned(t) else t.clone()


def _fake(
    h: Tensor, up: Tensor | None, activation: str, counts: Tensor | None, rank: int
) -> Tensor:  # fmt: skip
    side = activated.side_by_side(activation, up)
    return h.new_empty((h.shape[0], h.shape[1] // 2) if side else h.shape)


def _fake_gradient(
    dy: Tensor, h: Tensor, up: Tensor | None, activation: str, counts: Tensor | None, rank: int
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (h, up) if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, up, ctx.activation, counts, ctx.rank = inputs
    ctx.save_for_backward(h, up, counts)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    h, up, counts = ctx.saved_tensors
    dh, *dup = torch.ops.counterpoint.activated_gradient(
        dy, h, up, ctx.activation, counts, ctx.rank
    )
    return dh, dup[0] if dup else None, None, None, None


register("activated", activated_by, _fake, _backward, _save)
register("activated_gradient", gradients_by, _fake_gradient, refuse_double_matmul)
