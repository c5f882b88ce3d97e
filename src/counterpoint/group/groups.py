"""What a user asks of a group: were all its waits answered, and to give its memory back."""

import time

import torch
import torch.distributed as dist

from counterpoint.group.notice_board import HeldUp
from counterpoint.group.ranks import check_group
from counterpoint.group.workspace import Workspace, forget, workspaces_of

POLL_S = 2e-3


def check(group: dist.ProcessGroup | None = None) -> None:
    """Wait for the GPU, then raise if a peer did not answer in an earlier call of `group`.

    On CPU ranks an op raises by itself; on a GPU it returns before its work has run.

    Args:
        group: the default group if None.

    Raises:
        InputError: `group` is none.
        PeerTimeoutError: names the ranks and the step; the group is unusable. Also where a rank
            that has died, or makes no more calls, held up the library's collectives on the GPU for
            COUNTERPOINT_TIMEOUT_S: these may wait for ever, so end the process then.
        InputError: ranks have called different things; likewise.
    """
    for workspace in _workspaces("check", group):
        workspace.check()
        if workspace.device.type == "cuda":
            _await(workspace)
        workspace.check()


def _await(workspace: Workspace) -> None:
    """Wait for the GPU; not for work that waits in vain, once that is known."""
    with torch.cuda.device(workspace.device):
        event = torch.cuda.Event()
        event.record()
        workspace.board.raise_what_is_wrong()
        held_up = HeldUp(workspace.board)
        while not event.query():
            time.sleep(POLL_S)
            workspace.board.raise_what_is_wrong()
            held_up.look()
        torch.cuda.synchronize()


def release(group: dist.ProcessGroup | None = None) -> None:
    """Free the memory that `group` has here, before it is destroyed.

    All its ranks call this, when no graph that was captured with it will be replayed again. A
    later call with the group starts anew. What NCCL has for exchanges between islands stays, and
    is found by that call.

    Args:
        group: the default group if None.

    Raises:
        InputError: `group` is none.
        PeerTimeoutError: a rank did not come, to this or to an earlier call; the memory of this
            rank is free all the same.
        InputError: a rank calls something else; likewise.
    """
    for workspace in _workspaces("release", group):
        if workspace.device.type == "cuda":
            torch.cuda.synchronize(workspace.device)
        try:
            with workspace.board.whole():
                workspace.board.note_op("release")
                workspace.gather(None)  # no rank frees what another one still uses
        finally:
            forget(workspace)


def _workspaces(op: str, group: dist.ProcessGroup | None) -> list[Workspace]:
    """Those of a group; of no group at all none."""
    if group is None and not dist.is_initialized():
        return []
    return workspaces_of(check_group(op, group))
