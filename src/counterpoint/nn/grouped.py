"""What the modules of a group have in common: they can be copied and pickled."""

from copy import deepcopy
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterpoint.group.ranks import group_of


def no_view(y: Tensor) -> Tensor:
    """A layer's result, onto which FSDP2 hooks: an addition in place to a view loses the hook."""
    if torch.compiler.is_compiling() or not (y.requires_grad and y._is_view()):
        return y
    return torch.ops.aten._unsafe_view(y, y.shape)  # nobody else has y


class Grouped(nn.Module):
    """A module over the ranks of `group`, which is copied and pickled by its name."""

    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy over the same group. Not by `__getstate__`, which parametrizations refuse."""
        copied = memo[id(self)] = self.__new__(type(self))
        memo[id(self.group)] = self.group
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": self.group.group_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"group": group_of(state["group"])})
