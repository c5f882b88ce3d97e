"""What the modules of a group have in common: they can be copied and pickled."""

from typing import Any

import torch.distributed as dist
from torch import nn

from counterpoint.runtime.ranks import group_of


class Grouped(nn.Module):
    """A module over the ranks of `group`, which is copied and pickled by its name."""

    group: dist.ProcessGroup

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": self.group.group_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"group": group_of(state["group"])})
