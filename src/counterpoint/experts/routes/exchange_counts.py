"""How many rows each rank sends to each expert: what a router knows of itself, told to all."""

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import workspace_of
from counterpoint.ops.agreement import left, note, refused
from counterpoint.ops.check import check_dense, check_group, check_place
from counterpoint.ops.register import register

OP = "exchange_counts"


def exchange_counts(counts: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather the counts of all ranks: table[s, e] = rows that rank s has for expert e.

    One all-gather of the library, in stream order; the host does not wait for it. `.cpu()` of the
    table makes it host-known, which waits.

    Args:
        counts: int32 or int64 [E], rows of this rank for each expert of all ranks, in order; on the
            CPU or a GPU as the group serves.
        group: whose ranks take part; the default group if None.

    Returns:
        dtype of counts, [ranks, E], on its device, equal on all ranks.

    Raises:
        InputError: counts is something else, or E is no multiple of the ranks.

    Example:
        >>> each = torch.arange(num_experts, device=expert_of_row.device)  # doctest: +SKIP
        >>> own = (expert_of_row == each[:, None]).sum(1)  # doctest: +SKIP
        >>> counts = counterpoint.exchange_counts(own, group=ep)  # doctest: +SKIP
    """
    try:
        try:
            group = _checked(counts, group)
        except CounterpointError as error:
            raise refused(error, group, counts) from None
        return torch.ops.counterpoint.exchange_counts(counts, group.group_name, group.size())
    except BaseException as error:
        left(OP, error, group, counts)
        raise


def _checked(counts: Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = check_group(OP, group)
    check_dense(OP, counts=counts)
    check_place(OP, counts=counts)
    if counts.dtype not in (torch.int32, torch.int64) or counts.dim() != 1:
        got = f"{counts.dtype} {list(counts.shape)}"
        raise InputError(OP, "counts", want="int32 or int64 [E]", got=got)
    if counts.shape[0] % group.size():
        want = f"[E], E a multiple of the {group.size()} ranks"
        raise InputError(OP, "counts", want=want, got=list(counts.shape))
    return group


def _run(counts: Tensor, group_name: str, group_size: int) -> Tensor:
    table = counts.new_empty(group_size, counts.shape[0])
    workspace = workspace_of(group_of(group_name), counts.device)
    with workspace.board.whole():
        note({"op": OP, "counts": f"{counts.dtype} {list(counts.shape)}"}, workspace)
        calls = library_of(workspace, Awaited(OP, "exchange its counts", OP))
        calls.all_gather(table.view(-1), counts.contiguous())
    return table


def _fake(counts: Tensor, group_name: str, group_size: int) -> Tensor:
    return counts.new_empty(group_size, counts.shape[0])


register(OP, _run, _fake)
