"""Parameters that every rank has a copy of, used on its own part of the sequence.

The gradient that a rank computes is then of its rows only. The sum over the group is the whole
one, and the same bits on all ranks, so that the copies stay copies.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import workspace_of
from counterpoint.ops.agreement import note
from counterpoint.ops.check import check_dense, check_group
from counterpoint.ops.register import refuse_double, register


def copy_to_group(parameter: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Use a replicated parameter: itself, and its gradient is summed over the group.

    The sum is one all-reduce of the library's, on the stream of the backward, of each use: so take
    the copy once where a parameter is used twice.

    Args:
        parameter: of equal values on all ranks, such as the weight of a norm between two layers.
        group: whose ranks have the parts of the sequence; the default group if None.

    Returns:
        A view of `parameter`; `parameter` where no gradient is asked for.

    Raises:
        InputError: `parameter` is no dense tensor, there is no group, or this rank is not in it.

    Example:
        >>> y = F.rms_norm(x, (dim,), cnn.copy_to_group(self.weight, group=tp))  # doctest: +SKIP
    """
    group = check_group("copy_to_group", group)
    check_dense("copy_to_group", parameter=parameter)
    if group.size() == 1 or not torch.is_grad_enabled():
        return parameter
    use = 0  # a graph's are in its order
    if not torch.compiler.is_compiling():
        # those without a gradient, too: ranks that differ in what they train then number alike
        use = _uses[group] = _uses.get(group, 0) + 1
    if not parameter.requires_grad:
        return parameter
    return _CopyToGroup.apply(parameter, group.group_name, use)  # pyright: ignore[reportReturnType]


# of each group, so far: gradients are summed with those of the same use
_uses: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(parameter: Tensor, group_name: str, use: int) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
        _, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return torch.ops.counterpoint.sum_over_group(grad, *ctx.where), None, None


def _sum(x: Tensor, group_name: str, use: int) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    workspace, op = workspace_of(group_of(group_name), total.device), "copy_to_group"
    with workspace.board.whole():
        note({"op": op, "parameter": f"{x.dtype} {list(x.shape)}"}, workspace)
        workspace.board.note_op(f"{op} backward", use=str(use))
        library_of(workspace, Awaited(op, "add its gradient", "backward")).all_reduce(total)
    return total


def _fake_sum(x: Tensor, group_name: str, use: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# an operator of its own, so that a compiled graph holds it as one node
register("sum_over_group", _sum, _fake_sum, refuse_double)
