"""Rows go to their experts, and each expert multiplies: the first half of a layer of experts."""

from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import call, matmul_all_to_all
from counterpoint.ops.check import autocast, check_group
from counterpoint.ops.expert_gradients import weight_gradient
from counterpoint.ops.experts import operator_of, run, seen
from counterpoint.ops.experts import sample as sample  # what is tuned and compared
from counterpoint.ops.experts_check import Table, check_operands, room_of, table_of
from counterpoint.ops.plans import backward_plan, plan_key
from counterpoint.plan.steps import Plan

OP = "all_to_all_matmul"

call.LIBRARY.define(
    f"{OP}(Tensor x, Tensor w, Tensor counts, SymInt rows, bool host, bool keep, bool shown, "
    "bool clear, str plan, str group_name, int group_size) -> (Tensor, Tensor)"
)


@overload
def all_to_all_matmul(
    x: Tensor, w: Tensor, *, counts: Table, group: dist.ProcessGroup | None = None,
    max_rows: int | None = None, plan: str | Path | Plan = "auto",
    return_rows: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def all_to_all_matmul(
    x: Tensor, w: Tensor, *, counts: Table, group: dist.ProcessGroup | None = None,
    max_rows: int | None = None, plan: str | Path | Plan = "auto", return_rows: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    *,
    counts: Table,
    group: dist.ProcessGroup | None = None,
    max_rows: int | None = None,
    plan: str | Path | Plan = "auto",
    return_rows: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to their experts and multiply: y[rows of e] = concat over s of x_s[rows for e] w_e.

    In place of `all_to_all_single`, the rows' permutation and a grouped matmul. Expert e of all E
    is on rank e // E_local. Accumulates in fp32. Runs on the current stream. Differentiable: its
    backward is `matmul_all_to_all`, and what is saved is the rows that came here and w.

    Args:
        x: bf16, fp16 or fp32 [T, K], on CPU or CUDA, sorted by expert, all E of them in order.
        w: dtype of x, [E_local, K, N], a unit stride in K or N; pass `weight.transpose(1, 2)` of
            weights that are stored as [E_local, N, K].
        counts: int32 or int64 [ranks, E], rows that each rank sends to each expert, equal on all
            ranks; see `exchange_counts`. On the CPU, or nested lists: host-known. On the GPU of x:
            device-known, the host does not wait for it.
        group: whose ranks take part; the default group if None.
        max_rows: rows that a rank may get at most; needed, and the rows of y, where counts is
            device-known. Give all ranks the same.
        plan: "auto": chosen by the model, and one kernel where counts are device-known and it takes
            the problem; "serial": the libraries; "fused": one kernel, of 16-bit numbers, K and N
            multiples of 8, and a number of ranks that is a power of 2; "grouped", or with sizes of
            groups of experts "grouped 8/8/16 ring": copy engines, where counts are host-known and
            all equal; a Plan; or a JSON file of one. The backward takes the same family. Serial
            copies device-known counts to the host, which waits for them; it does not run while a
            graph is captured. In one kernel, with device-known counts, x has equally many rows on
            all ranks.
        return_rows: also return the rows that came here, as they were multiplied.

    Returns:
        dtype of x, [R, N], new tensors: sorted by local expert, then by source rank. R is the sum
        of counts over this rank's experts, or max_rows where counts is device-known; rows beyond
        the sum are then not written and hold anything, and rows of x beyond that of counts[rank]
        are ignored. With return_rows the rows too, [R, K] of the same layout.

    Raises:
        InputError: an argument is wrong, or ranks differ (compared at the first call with these
            sizes of w, and at each call under COUNTERPOINT_CHECK=1); nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: `plan` is fused, and the kernel does not fit this GPU.
        PeerTimeoutError: a rank did not come to an earlier call; the group is unusable.

    Example:
        >>> y = counterpoint.all_to_all_matmul(x, w, counts=counts, group=ep)  # doctest: +SKIP
    """
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        group = check_group(OP, group)
    if return_rows is not True and return_rows is not False:
        raise InputError(OP, "return_rows", want="True or False", got=repr(return_rows))
    known, key = seen(OP, x, w, counts, max_rows, plan, group), None
    if known is not None and known.good:
        rows = (*known.facts, int(return_rows))
        found, key, _ = call.repeated(OP, (x, w, counts), group, plan, rows, 0, known.room)  # type: ignore[arg-type]
        if found is not None:
            return (found[0], found[1]) if return_rows else found[0]
    x, w = autocast(x, w)  # type: ignore[assignment]
    check_operands(OP, x, w)
    table, spec = table_of(OP, counts, x, w, group.size()), plan_key(OP, plan)
    room, host = room_of(OP, table, max_rows, group)
    if key is not None and known is not None:
        tensors, given = (x, w, table), call.Given(room)
        operator = operator_of(OP, return_rows)
        y, *rest = call.first(operator, tensors, spec, known.facts, group, key, given)
        return (y, rest[0]) if return_rows else y
    keep = return_rows or (torch.is_grad_enabled() and w.requires_grad)
    op: Any = torch.ops.counterpoint.all_to_all_matmul
    where = (spec, group.group_name, group.size())
    y, kept = op(x, w, table, room, host, keep, return_rows, False, *where)
    return (y, kept) if return_rows else y


def received(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator as the dispatcher has it: what a backward calls."""
    return torch.ops.counterpoint.all_to_all_matmul(*arguments)


def _run(
    x: Tensor, w: Tensor, counts: Tensor, rows: int, host: bool, keep: bool, shown: bool,
    clear: bool, plan: str, group_name: str, group_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    operator = operator_of(OP, keep, clear)
    y, *kept = run(operator, (x, w, counts), plan, group_name, rows, host)
    return y, kept[0] if keep else x.new_empty(0, x.shape[1])


def _fake(
    x: Tensor, w: Tensor, counts: Tensor, rows: int, host: bool, keep: bool, shown: bool,
    clear: bool, plan: str, group_name: str, group_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(rows, w.shape[2]), x.new_empty(rows if keep else 0, x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, _, ctx.host, keep, ctx.shown, _, *ctx.where = inputs
    ctx.save_for_backward(w, counts, output[1] if keep else None)
    ctx.rows = x.shape[0]
    if not keep:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # nobody asks for the gradient of rows that are only kept


def _backward(ctx: Any, dy: Tensor | None, drows: Tensor | None) -> tuple[Tensor | None, ...]:
    """dx: the gradients of the rows go back to their owners; dw: of the rows that came here."""
    w, counts, rows = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    plan, name, size = ctx.where
    none = (None,) * 9
    if dy is None and drows is None:
        return None, None, *none
    if dy is None:
        assert drows is not None
        dy = drows.new_zeros(drows.shape[0], w.shape[2])
    dy = dy.contiguous()  # autograd hands over expanded tensors
    if drows is None and ctx.shown and ctx.host:
        # whether there is one may differ between ranks, what runs may not
        drows = dy.new_zeros(dy.shape[0], w.shape[1])
    dx = dw = None
    if need_x:
        clear = not ctx.host
        dx = matmul_all_to_all.returned(
            dy, w.transpose(1, 2), counts, drows, ctx.rows, ctx.host, clear,
            backward_plan(OP, plan), name, size,
        )  # fmt: skip
    if need_w:
        dw = weight_gradient(rows, dy, counts, w, name, size)
    return dx, dw, *none


call.declare(OP, _run, _fake)
torch.library.register_autograd(
    f"counterpoint::{OP}", _backward, setup_context=_save, lib=call.LIBRARY
)
