"""The sum of biases that ranks add to their own products, before a reduction, in compiled graphs.

It stands before the operator of the product. Ranks whose graph has no bias there come to that
operator instead: both calls compare their names first, so neither waits for the other.
"""

from typing import Any

import torch
from torch import Tensor

from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import workspace_of
from counterpoint.ops.agreement import note
from counterpoint.ops.register import register

BIAS = "row-parallel bias"  # in errors
OP: Any = torch.ops.counterpoint.sum_of_biases.default


def _sum(bias: Tensor, group_name: str) -> Tensor:
    total = bias.clone(memory_format=torch.contiguous_format)
    workspace = workspace_of(group_of(group_name), total.device)
    with workspace.board.whole():
        note({"op": BIAS, "bias": f"{bias.dtype} {list(bias.shape)}"}, workspace)
        library_of(workspace, Awaited(BIAS, "add its bias", "bias")).all_reduce(total)
    return total


def _fake(bias: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(bias, memory_format=torch.contiguous_format)


register("sum_of_biases", _sum, _fake)
