"""Whether shards are published in memory of their own: what two steps as torch runs them leave."""

from collections.abc import Sequence
from typing import Any

import torch

from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.torch_parts import Group

STEPS = 2  # states of an optimizer are there after the first
MOST_FORWARDS = 16  # of a model that nobody trains
SPARE = 0.05  # of a GPU's memory


class Watch:
    """Counts optimizer steps of a model that is not overlapped yet."""

    def __init__(self) -> None:
        self.steps = self.forwards = 0
        self.stepped = False  # an optimizer of torch's has, since the forward before
        self._versions: list[Any] = []

    def over(self, groups: Sequence[Group]) -> bool:
        """Whether enough has run; called before each forward of a root."""
        versions = [torch_parts.versions(g) for g in groups]
        self.steps += self.forwards > 0 and (self.stepped or versions != self._versions)
        self._versions, self.stepped = versions, False
        self.forwards += 1
        return self.trained or self.forwards > MOST_FORWARDS

    @property
    def trained(self) -> bool:
        """Whether so many steps have run that nothing takes more memory later."""
        return self.steps >= STEPS


def left(device: torch.device) -> int | None:
    """Bytes that nothing has used so far at any time, less some to spare; None: of a CPU rank.

    What torch's allocator keeps counts as used: a peak that somebody resets tells less.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(free - SPARE * total)
