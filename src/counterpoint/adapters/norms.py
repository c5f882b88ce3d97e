"""A norm by RMS behind an all-reduce that no matmul stands before: one operator for both.

As `torch.nn.functional.rms_norm` is in a graph of inference, of the sum or of the sum and a
residual. A norm that rounds before it multiplies by the weight is another one, and is left.
"""

from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from counterpoint.adapters.axes import CONVERT, NotFollowedError, same, value

aten: Any = torch.ops.aten
ADDS = (aten.add.Tensor, aten.add.Scalar)


class Normed(NamedTuple):
    """What stands behind an all-reduce.

    Args:
        total: what is normalised.
        residual: that was added to the sum; None: nothing.
        result: what the norm makes of it.
    """

    total: fx.Node
    residual: fx.Node | None
    weight: fx.Node
    eps: float
    result: fx.Node


def normed(wait: fx.Node) -> Normed:
    """The norm of a sum.

    Args:
        wait: of the all-reduce.

    Raises:
        NotFollowedError: there is none, or something reads what would be gone.
    """
    total, residual = wait, None
    if len(wait.users) == 1 and (node := next(iter(wait.users))).target is aten.add.Tensor:
        others = [n for n in node.args if isinstance(n, fx.Node) and n is not wait]
        if len(others) == 1 and not node.kwargs and _alike(others[0], wait):
            total, residual = node, others[0]
    dtype, dims = value(total).dtype, value(total).dim()
    wide = total if dtype == torch.float32 else _reader(total, CONVERT, torch.float32)
    square = _reader(wide, aten.pow.Tensor_Scalar, 2)
    mean = _only(square, aten.mean.dim)
    if [int(i) % dims for i in cast(list[int], mean.args[1])] != [dims - 1] or mean.args[2:] != (
        True,
    ):
        raise NotFollowedError("its norm is of other dims")
    moved = _only(mean, *ADDS)
    eps = moved.args[1]
    if type(eps) not in (int, float) or not 0 <= cast(float, eps) < inf or moved.kwargs:
        raise NotFollowedError("its norm has no eps")
    unit = _only(_only(moved, aten.rsqrt.default), aten.mul.Tensor)
    scaled = _only(unit, aten.mul.Tensor)
    weight = next((n for n in scaled.all_input_nodes if n is not unit), unit)
    if wide not in unit.all_input_nodes or len(scaled.all_input_nodes) != 2:
        raise NotFollowedError("its norm is of something else, too")
    if weight.target is CONVERT and value(weight).dtype == torch.float32:
        weight = cast(fx.Node, weight.args[0])
    result = scaled if dtype == torch.float32 else _only(scaled, CONVERT)
    if (
        value(result).dtype != dtype
        or dims < 2
        or value(weight).dim() != 1
        or value(weight).dtype != dtype
    ):
        raise NotFollowedError("its norm is of rows of another dtype, or of none")
    if not same(value(weight).shape[0], value(total).shape[-1]):
        raise NotFollowedError("its weight is not of a row")
    return Normed(total, residual, weight, float(cast(float, eps)), result)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = value(one), value(other)
    return a.dtype == b.dtype and a.dim() == b.dim() and all(map(same, a.shape, b.shape))


def _reader(node: fx.Node, target: Any, *args: object) -> fx.Node:
    """The node of that kind that reads another one, among others that may."""
    for user in node.users:
        if user.target is target and user.args == (node, *args) and not user.kwargs:
            return user
    raise NotFollowedError("no norm reads it")


def _only(node: fx.Node, *targets: Any) -> fx.Node:
    """The node of one of these kinds that alone reads another one."""
    user, *more = node.users or (node,)
    if more or user.target not in targets or user.kwargs:
        raise NotFollowedError("its norm is another one, or is read in between")
    return user
