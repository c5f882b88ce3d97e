"""Arguments that both operators of experts share, refused before anything is launched."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.experts.steps_counted import DISPATCH, rows_by_rank
from counterpoint.ops.agreement import refused
from counterpoint.ops.check import DTYPES, autocast, check_dense, check_place, is_fake
from counterpoint.ops.plans import plan_key
from counterpoint.plan.steps import Plan
from counterpoint.ranges import MAX_COUNT, Range, misfit, plain, whole

Table = Tensor | Sequence[Sequence[int]]
COUNTS = Range(-MAX_COUNT, MAX_COUNT)  # those below 0 are refused on all ranks, where they meet
# `host_known` of a call that may be known already: no function of ours, but none for compilers
host_known_at_once: Callable[[Tensor], bool] = attrgetter("is_cpu")


def host_known(counts: Tensor) -> bool:
    """Whether the host may read the table at each call."""
    return counts.is_cpu


class Checked(NamedTuple):
    """The arguments of a call that have passed their checks, as torch's operators take them.

    Args:
        room: rows of the result on this rank.
        host: counts are host-known.
    """

    x: Tensor
    w: Tensor
    counts: Tensor
    plan: str
    group: dist.ProcessGroup
    room: int
    host: bool


def checked(
    op: str, x: Tensor, w: Tensor, counts: Table, max_rows: int | None,
    plan: str | Path | Plan, group: dist.ProcessGroup,
) -> Checked:  # fmt: skip
    """Check what a rank can see by itself; the values of counts are not looked at.

    Raises:
        InputError: an argument is wrong.
        PlanError: `plan` is a Plan that is wrong.
    """
    try:
        x, w = autocast(x, w)  # type: ignore[assignment]
        check_operands(op, x, w)
        table, spec = table_of(op, counts, x, w, group.size()), plan_key(op, plan)
        return Checked(x, w, table, spec, group, *room_of(op, table, max_rows, group))
    except CounterpointError as error:
        raise refused(error, group, x) from None


def check_operands(op: str, x: Tensor, w: Tensor) -> None:
    """Refuse operands that do not fit one another.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    check_dense(op, x=x, w=w)
    if x.dtype not in DTYPES:
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype)
    check_place(op, x=x)
    if x.dim() != 2:
        raise InputError(op, "x", want="[rows, K] of 2 dims", got=f"{x.dim()}-D")
    if w.dim() != 3:
        raise InputError(op, "w", want="[E_local, K, N] of 3 dims", got=f"{w.dim()}-D")
    if w.shape[1] != x.shape[1]:
        fix = "pass w.transpose(1, 2) of weights that are stored as [E_local, N, K]"
        want = f"[E_local, K={x.shape[1]}, N]"
        raise InputError(op, "w", want=want, got=tuple(w.shape), fix=fix)
    if w.dtype != x.dtype:
        raise InputError(op, "w", want=f"{x.dtype} as x", got=w.dtype)
    if w.device != x.device:
        raise InputError(op, "w", want=f"on {x.device} as x", got=w.device)
    if not any(w.stride(dim) == 1 or w.shape[dim] <= 1 for dim in (1, 2)):
        fix = "pass w.contiguous()"
        want = "with a unit stride in K or N"
        raise InputError(op, "w", want=want, got=f"strides {w.stride()}", fix=fix)


def table_of(op: str, counts: Table, x: Tensor, w: Tensor, ranks: int) -> Tensor:
    """The table as a tensor. Its values are not looked at.

    Raises:
        InputError: no whole numbers, another shape than [ranks, E], or on another device.
    """
    experts = ranks * w.shape[0]
    want = f"int32 or int64 [{ranks}, {experts}], rows of each rank for each expert"
    if not isinstance(counts, Tensor):
        table: Any = plain(counts)
        if misfit(table, tuple[tuple[int, ...], ...], COUNTS, "counts") is not None:
            raise InputError(op, "counts", want=want, got=repr(counts))
        if len(table) != ranks or any(len(row) != experts for row in table):
            got = f"{len(table)} rows of {sorted({len(row) for row in table})}"
            raise InputError(op, "counts", want=want, got=got)
        counts = torch.tensor(table, dtype=torch.int64, device="cpu")
    check_dense(op, counts=counts)
    if counts.dtype not in (torch.int32, torch.int64) or counts.shape != (ranks, experts):
        fix = f"w has {w.shape[0]} experts on each of {ranks} ranks"
        got = f"{counts.dtype} {list(counts.shape)}"
        raise InputError(op, "counts", want=want, got=got, fix=fix)
    if counts.device not in (torch.device("cpu"), x.device):
        raise InputError(op, "counts", want=f"on cpu or on {x.device} as x", got=counts.device)
    return counts


def room_of(
    op: str, counts: Tensor, max_rows: int | None, group: dist.ProcessGroup
) -> tuple[int, bool]:
    """Rows of the result on this rank, and whether the table is host-known.

    Raises:
        InputError: `max_rows` is missing, not a count, or, where the table is host-known, less
            than what a rank gets.
    """
    host = host_known(counts)
    if max_rows is None and not host:
        fix = "rows that a rank may get at most; its memory is that large"
        raise InputError(op, "max_rows", want="given with counts on a GPU", got=None, fix=fix)
    if max_rows is not None:
        max_rows = whole(op, "max_rows", max_rows)
        if not host:
            return max_rows, host
    if not torch.compiler.is_compiling() and is_fake(counts):
        what = f"{op}: fake tensors have no values, and those of counts say how many rows there are"
        raise UnsupportedError(what)
    totals = rows_by_rank(counts, op == DISPATCH).tolist()
    if max_rows is not None and max(totals) > max_rows:
        who = totals.index(max(totals))
        want = f">= {max(totals)}, what rank {who} gets"
        raise InputError(op, "max_rows", want=want, got=max_rows)
    return totals[group.rank()], host
