"""Ask a group whether all its waits were answered."""

import torch
import torch.distributed as dist

from counterpoint.runtime.workspace import workspaces_of


def check(group: dist.ProcessGroup | None = None) -> None:
    """Wait for the GPU, then raise if a peer did not answer in an earlier call of `group`.

    On CPU ranks an op raises by itself; on a GPU it returns before its work has run.

    Args:
        group: the default group if None.

    Raises:
        PeerTimeoutError: names the ranks and the step; the group is unusable.
    """
    for workspace in workspaces_of(group if group is not None else dist.group.WORLD):
        if workspace.device.type == "cuda":
            torch.cuda.synchronize(workspace.device)
        workspace.check()
