"""The sizes of a model's parameter groups, by which its step is predicted."""

from collections.abc import Sequence

from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.predicted_step import Sizes
from counterpoint.fsdp.torch_parts import Group


def sizes_of(groups: Sequence[Group], *, gather: bool, lie: int) -> list[Sizes]:
    """The sizes of a model's groups, which need not have run.

    Args:
        groups: in the order of its modules.
        gather: whether they are gathered in place.
        lie: how many of the last lie where the forward has gathered them.
    """
    found: list[Sizes] = []
    for i, g in enumerate(groups):
        keeps = torch_parts.keeps_gathered(g)
        lies = len(groups) - i <= lie
        ours = gather and not torch_parts.why_not_gathered(g)
        gathers = (1 if keeps else 2, 1 if keeps or lies else 2)
        found.append(Sizes(*torch_parts.size_of(g), gathers, ours))
    return found
