"""Which ranks tell each other what, so that all ranks of a model decide alike."""

from collections.abc import Sequence
from typing import Any

import torch

from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.torch_parts import Group
from counterpoint.group.workspace import Workspace, workspace_of


def circles_of(groups: Sequence[Group]) -> list[Workspace]:
    """Those that tell each other so that all ranks of a model hear: of shards, then of replicas."""
    pairs = [(torch_parts.replica_group(g), torch.device(g.device)) for g in groups]
    replicas = [workspace_of(r, device) for r, device in pairs if r and r.size() > 1]
    return [*dict.fromkeys([*workspaces_of(groups), *replicas])]


def gathered(circles: Sequence[Workspace], value: Any) -> list[Any]:
    """What all ranks say, by way of some circles of them."""
    found = [value]
    for workspace in circles:
        found = [each for theirs in workspace.gather(found) for each in theirs]
    return found


def workspaces_of(groups: Sequence[Group]) -> list[Workspace]:
    """Of the ranks that share each, where there are several."""
    ranks = [(g, torch_parts.shard_group(g)) for g in groups]
    return [workspace_of(r, torch.device(g.device)) for g, r in ranks if r and r.size() > 1]
