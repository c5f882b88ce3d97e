"""Rows go to their experts, and each expert multiplies: the first half of a layer of experts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts import routed_operators
from counterpoint.experts.check import Checked, Table, checked
from counterpoint.experts.facts import Seen, operator_of, seen
from counterpoint.experts.facts import sample as sample  # what is tuned and compared
from counterpoint.experts.operators import OPS
from counterpoint.experts.routes.exchange_routes import Routes
from counterpoint.experts.steps_counted import DISPATCH as OP
from counterpoint.ops import call
from counterpoint.ops.agreement import left
from counterpoint.ops.check import asked_of, check_group
from counterpoint.plan.steps import Plan


@overload
def all_to_all_matmul(
    x: Tensor, w: Tensor, *, counts: Table | Routes, group: dist.ProcessGroup | None = None,
    max_rows: int | None = None, plan: str | Path | Plan = "auto",
    return_rows: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def all_to_all_matmul(
    x: Tensor, w: Tensor, *, counts: Table | Routes, group: dist.ProcessGroup | None = None,
    max_rows: int | None = None, plan: str | Path | Plan = "auto", return_rows: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def all_to_all_matmul(
    x: Tensor, w: Tensor, *, counts: Table | Routes, group: dist.ProcessGroup | None = None,
    max_rows: int | None = None, plan: str | Path | Plan = "auto", return_rows: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Send rows to their experts and multiply: y[rows of e] = concat over s of x_s[rows for e] w_e.

    In place of `all_to_all_single`, the rows' permutation and a grouped matmul. Expert e of all E
    is on rank e // E_local. Accumulates in fp32. Runs on the current stream. Differentiable: its
    backward is `matmul_all_to_all`, and what is saved is the rows that came here and w.

    Args:
        x: bf16, fp16 or fp32 [T, K], on CPU or CUDA, sorted by expert, all of them; or tokens.
        w: dtype of x, [E_local, K, N], a unit stride in K or N; pass `w.mT` of an [E_local, N, K].
        counts: int32 or int64 [ranks, E], rows that each rank sends to each expert, equal on all
            ranks; see `exchange_counts`. On the CPU, or nested lists: host-known. On the GPU of x:
            device-known, the host does not wait for it. Of tokens: see `exchange_routes`.
        group: whose ranks take part; None: the default one.
        max_rows: rows that a rank may get at most, those of y; needed where counts is on the GPU.
        plan: "auto": chosen by the model, and one kernel where counts are device-known and it takes
            the problem; "serial": the libraries, and the host waits for device-known counts, so
            no graph can be captured; "fused": one kernel, of 16-bit numbers, K and N multiples of
            8, a number of ranks that is a power of 2, and, with device-known counts, equally many
            rows of x on all ranks; "grouped", or with sizes of groups of experts "grouped 8/8/16
            ring": copy engines, where counts are host-known; with "chunks=4" each group in four
            chunks, where experts are few; "islands": tokens go once to each of several; "routed
            8/8/16": of tokens, as "grouped", and each goes once to a rank; a Plan; or a JSON file
            of one. Routes of max_rows take the first three. The backward takes the same family.
        return_rows: also return the rows that came here, as they were multiplied.

    Returns:
        dtype of x, [R, N], new tensors: sorted by local expert, then by source rank. R is the sum
        of counts over this rank's experts, or max_rows where counts is device-known; rows beyond
        the sum are then not written, and rows of x beyond that of counts[rank] are ignored. With
        return_rows the rows too, [R, K] of the same layout.

    Raises:
        InputError, PlanError, UnsupportedError, PeerTimeoutError: as for `all_gather_matmul`. Ranks
            compare counts at the first call, or at each by COUNTERPOINT_CHECK=1.

    Example:
        >>> y = counterpoint.all_to_all_matmul(x, w, counts=counts, group=ep)  # doctest: +SKIP
    """
    try:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            group = check_group(OP, group)
        if return_rows is not True and return_rows is not False:
            raise InputError(OP, "return_rows", want="True or False", got=repr(return_rows))
        if isinstance(counts, Routes):
            return routed_operators.dispatch(x, w, counts, (max_rows, plan), group, return_rows)
        known, found, key = seen(OP, x, w, counts, max_rows, plan, group), None, None
        if known is not None and known.good:
            facts = (*known.facts, int(return_rows))
            found, key, _ = call.repeated(OP, (x, w, counts), group, plan, facts, 0, known.room)  # type: ignore[arg-type]
        if found is None:
            found = _anew(checked(OP, x, w, counts, max_rows, plan, group), return_rows, known, key)
        return (found[0], found[1]) if return_rows else found[0]
    except BaseException as error:
        left(OP, error, group, x)
        raise


def _anew(
    given: Checked, return_rows: bool, known: Seen | None, key: tuple[object, ...] | None
) -> Sequence[Tensor]:
    """The first call like this one, or one that goes through the dispatcher."""
    x, w, counts, plan, group, room, host = given
    if key is not None and known is not None:
        operator, tensors = operator_of(OP, return_rows), (x, w, counts)
        return call.ran(operator, tensors, plan, known.facts, group, key, call.Given(room))
    keep = return_rows or (torch.is_grad_enabled() and w.requires_grad)
    return OPS.all_to_all_matmul(
        x, w, counts, room, host, keep, return_rows, False, plan, group.group_name, group.size(),
        asked_of(x=x),
    )  # fmt: skip
