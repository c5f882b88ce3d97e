"""What both operators of experts share: the table of counts, its checks, the ranks' agreement.

E experts in all, E_local = E / ranks of them on each rank: expert e is on rank e // E_local.
`counts[s, e]` is how many rows rank s sends to expert e; every rank has the whole table. Rows are
laid out in two ways:

    by owner    on rank s, sorted by expert, all E of them in order: counts[s, 0], counts[s, 1], ...
    by expert   on rank d, sorted by local expert, then by source: counts[0, e], counts[1, e], ...

A table on the CPU is host-known: it sizes what is returned. One on a GPU is device-known: what is
returned has `max_rows` rows, the rows beyond the table's sum are not written, and rows of x beyond
it are not read. Tables change with every step of a layer, so nothing is kept by their values.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops import agreement
from counterpoint.ops.check import DTYPES
from counterpoint.plan import direct
from counterpoint.runtime.workspace import Workspace, workspace_of

Counts = Tensor | Sequence[Sequence[int]]
PLANS = ("auto", "serial", "fused")


@dataclass(frozen=True)
class Exchange:
    """One call of an operator of experts, as the dispatcher has it.

    Args:
        op: its name.
        x: [rows, K], by owner where `out`, else by expert.
        w: [E_local, K, N].
        counts: int32 or int64 [ranks, E].
        rows: of the result.
        out: rows go to their experts; else they come back.
        host: `counts` is host-known.
        plan: "auto", "serial", "fused", or a spec such as "grouped 8/8/16".
        keep: also return the rows that come, where `out`; no fact that ranks must have alike.
    """

    op: str
    x: Tensor
    w: Tensor
    counts: Tensor
    rows: int
    out: bool
    host: bool
    plan: str
    keep: bool = False


class Ready(Protocol):
    """A call whose facts have been checked."""

    workspace: Workspace

    def __call__(self, given: Exchange, add: Tensor | None, clear: bool) -> tuple[Tensor, Tensor]:
        """Run on the current stream: (the result, the rows that were multiplied).

        Args:
            given: the call, any rows and table.
            add: of the products' shape, added to them before they go back.
            clear: the rows beyond the table's sum are zero.
        """
        ...


R = TypeVar("R", bound=Ready)


def host_known(counts: Tensor) -> bool:
    """Whether the host may read the table at each call."""
    return not counts.is_cuda


def is_grouped(plan: str) -> bool:
    """Whether `plan` is a spec of the family "grouped"."""
    return plan.split()[:1] == ["grouped"]


def backward_plan(plan: str) -> str:
    """The plan of an operator's backward, the other operator: sizes of groups are chosen anew."""
    return "grouped" if is_grouped(plan) else plan


def check_operands(op: str, x: Tensor, w: Tensor, plan: str) -> str:
    """Refuse operands that do not fit one another; the plan, by the name that it has here.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, Tensor):
            raise InputError(op, name, want="a Tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided:
            raise InputError(op, name, want="a dense tensor", got=tensor.layout)
    if x.dtype not in DTYPES:
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype)
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(op, "x", want="on cpu or cuda", got=x.device)
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
    return check_plan(op, plan)


def check_plan(op: str, plan: str) -> str:
    """The plan, by the name that it has here; sizes of groups are looked at when experts are known.

    Raises:
        InputError: there is no such plan.
    """
    if plan == direct.FUSED:  # as choosers and plans call it
        return "fused"
    if not isinstance(plan, str) or not (plan in PLANS or is_grouped(plan)):
        raise InputError(op, "plan", want="auto, serial, fused or grouped", got=repr(plan))
    return plan


def check_counts(
    op: str, counts: Counts, x: Tensor, w: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, bool]:
    """The table as a tensor, and whether it is host-known. Its values are not looked at.

    Raises:
        InputError: no whole numbers, another shape than [ranks, E], or on another device.
    """
    ranks, experts = group.size(), group.size() * w.shape[0]
    want = f"int32 or int64 [{ranks}, {experts}], rows of each rank for each expert"
    if not isinstance(counts, Tensor):
        try:
            table = [[index(n) for n in row] for row in counts]
        except TypeError:  # no sequences, or not of whole numbers
            raise InputError(op, "counts", want=want, got=repr(counts)) from None
        if len(table) != ranks or any(len(row) != experts for row in table):
            got = f"{len(table)} rows of {sorted({len(row) for row in table})}"
            raise InputError(op, "counts", want=want, got=got)
        counts = torch.tensor(table, dtype=torch.int64, device="cpu")
    if counts.dtype not in (torch.int32, torch.int64) or counts.shape != (ranks, experts):
        fix = f"w has {w.shape[0]} experts on each of {ranks} ranks"
        got = f"{counts.dtype} {list(counts.shape)}"
        raise InputError(op, "counts", want=want, got=got, fix=fix)
    if counts.device not in (torch.device("cpu"), x.device):
        raise InputError(op, "counts", want=f"on cpu or on {x.device} as x", got=counts.device)
    return counts.contiguous(), host_known(counts)


def num_rows(
    op: str, counts: Tensor, host: bool, max_rows: int | None, out: bool, rank: int
) -> int:
    """Rows of the result on this rank.

    Raises:
        InputError: `max_rows` is missing, not a count, or, where the table is host-known, less
            than what a rank gets.
    """
    if max_rows is None and not host:
        fix = "rows that a rank may get at most; its memory is that large"
        raise InputError(op, "max_rows", want="given with counts on a GPU", got=None, fix=fix)
    if max_rows is not None:
        try:
            max_rows = index(max_rows)
        except TypeError:
            raise InputError(op, "max_rows", want="a count", got=repr(max_rows)) from None
        if max_rows < 0:
            raise InputError(op, "max_rows", want=">= 0", got=max_rows)
        if not host:
            return max_rows
    totals = rows_by_rank(counts, out).tolist()
    if max_rows is not None and max(totals) > max_rows:
        who = totals.index(max(totals))
        want = f">= {max(totals)}, what rank {who} gets"
        raise InputError(op, "max_rows", want=want, got=max_rows)
    return totals[rank]


def rows_by_rank(counts: Tensor, out: bool) -> Tensor:
    """What each rank gets: its experts' rows where `out`, else its own rows back."""
    if not out:
        return counts.sum(1)
    return counts.view(counts.shape[0], counts.shape[0], -1).sum((0, 2))


def prepare(
    given: Exchange, group: dist.ProcessGroup, key: Hashable, make: Callable[[Workspace], R],
    refused: CounterpointError | None = None, alike: dict[str, str] | None = None,
) -> R:  # fmt: skip
    """Check the values, agree with the other ranks at the first call, and make what runs.

    The ranks are asked at the first call with these facts, which sizes and tables are none of, and
    at each call of CPU ranks (gloo ends the process of a rank whose peer sends another size) or
    under COUNTERPOINT_CHECK=1. A device-known table is read by the host then, and at no other time.

    Args:
        key: what else than the facts of `given` decides how it runs.
        make: what runs it; collective.
        refused: what this rank has found wrong already.
        alike: what else all ranks must have alike, by name; compared where it is new.

    Raises:
        InputError: the table is wrong or differs between ranks, or rows do not fit it.
        PeerTimeoutError: a rank did not come; the group is unusable.
    """
    x, w = given.x, given.w
    workspace = workspace_of(group, x.device)
    workspace.check()
    facts = (x.shape[1], x.dtype, w.shape, w.stride(), given.counts.dtype, given.host)
    whole = (given.op, given.plan, facts, key)
    agreed = (whole, *alike.values()) if alike else whole
    ready: R | None = workspace.code.get(whole)
    first = ready is None or agreed not in workspace.code or agreement.checking() or not x.is_cuda
    talks = first and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    table = given.counts.cpu() if given.host or talks else None
    if refused is None and table is not None:
        refused = refusal(given, table, workspace.rank)
    if first:
        words = _words(given, table) | {"what runs": str(key)} | (alike or {})
        agreement.agree(given.op, words, workspace, refused)
    elif refused is not None:
        raise refused
    if ready is None:
        with torch.inference_mode(False):
            ready = make(workspace)
        workspace.remember(whole, ready)
    if talks and agreed not in workspace.code:
        workspace.remember(agreed, True)
    return ready


def refusal(given: Exchange, table: Tensor, rank: int) -> InputError | None:
    """What is wrong with the values of the table, or with rows that do not fit it."""
    low = int(table.min()) if table.numel() else 0
    if low < 0:
        return InputError(given.op, "counts", want=">= 0", got=low)
    has, gets = (int(rows_by_rank(table, out)[rank]) for out in (not given.out, given.out))
    rows, where = given.x.shape[0], f"on rank {rank}"
    what = f"counts[{rank}]" if given.out else f"what counts has for experts of rank {rank}"
    if given.host and rows != has:
        want = f"[{has}, K] {where}, the sum of {what}"
        return InputError(given.op, "x", want=want, got=tuple(given.x.shape))
    if rows < has:
        want = f"[{has}, K] or more {where}, the sum of {what}"
        return InputError(given.op, "x", want=want, got=tuple(given.x.shape))
    if gets > given.rows:
        want = f">= {gets} {where}, as counts says"
        return InputError(given.op, "max_rows", want=want, got=given.rows)
    return None


def _words(given: Exchange, table: Tensor | None) -> dict[str, str]:
    here = {
        "op": given.op, "w.shape": str(tuple(given.w.shape)),
        "w.stride()": str(given.w.stride()), "x.dtype": str(given.x.dtype),
        "plan": given.plan, "counts' place": "the host" if given.host else "the device",
    }  # fmt: skip
    for source, row in enumerate([] if table is None else table.tolist()):
        here[f"counts[{source}]"] = str(row)
    return here
