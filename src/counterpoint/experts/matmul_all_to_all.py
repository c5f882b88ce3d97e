"""Each expert multiplies, and rows go back to their owners: the second half of a layer."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts import routed_operators
from counterpoint.experts.check import Checked, Table, checked
from counterpoint.experts.facts import Seen, operator_of, seen
from counterpoint.experts.facts import sample as sample  # what is tuned and compared
from counterpoint.experts.fused.launch import COMBINE as OP
from counterpoint.experts.operators import OPS
from counterpoint.experts.routes.exchange_routes import Routes
from counterpoint.ops import call
from counterpoint.ops.agreement import left
from counterpoint.ops.check import asked_of, check_dense, check_group
from counterpoint.plan.steps import Plan

on_host: Callable[[Tensor], bool] = attrgetter("is_cpu")


def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    *,
    counts: Table | Routes,
    group: dist.ProcessGroup | None = None,
    max_rows: int | None = None,
    plan: str | Path | Plan = "auto",
    sum_of: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Multiply by experts and send rows back: the inverse of `all_to_all_matmul`.

    In place of a grouped matmul, the rows' permutation and `all_to_all_single`, and with `sum_of`
    of the weighted sum that follows. Accumulates in fp32, and rounds to the dtype of x for the way.
    Runs on the current stream. Differentiable, by `all_to_all_matmul`.

    Args:
        x: bf16, fp16 or fp32 [R, K], on CPU or CUDA, sorted by local expert, then by source rank.
        w: dtype of x, [E_local, K, N], a unit stride in K or N.
        counts: as for `all_to_all_matmul`, the same; with `Routes` sums of tokens are returned.
        group: as for `all_to_all_matmul`.
        max_rows: rows that a rank may get back at most, those of y; needed as there.
        plan: as there.
        sum_of: (rows, weights), both [tokens, top_k]: int32 or int64 into the rows of y, and
            floating point. Returned is then, instead of y,
            out[t] = weights[t, 0] y[rows[t, 0]] + weights[t, 1] y[rows[t, 1]] + ...,
            summed in fp32 in that order and rounded once, as its gradients are.

    Returns:
        dtype of x, [T, N], a new tensor: this rank's rows back, sorted by expert, all E of them. T
        is the sum of counts[rank], or max_rows where counts is device-known; rows beyond the sum
        are not written, and rows of x beyond those of this rank's experts are ignored.
        With sum_of [tokens, N].

    Raises:
        InputError, PlanError, UnsupportedError, PeerTimeoutError: as for `all_to_all_matmul`.

    Example:
        >>> y = counterpoint.matmul_all_to_all(h, w, counts=counts, group=ep)  # doctest: +SKIP
    """
    try:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            group = check_group(OP, group)
        if isinstance(counts, Routes):
            return routed_operators.combine(x, w, counts, (max_rows, plan), group, sum_of)
        known, found, key = seen(OP, x, w, counts, max_rows, plan, group), None, None
        index, weights = sum_of if isinstance(sum_of, tuple) and len(sum_of) == 2 else (None, None)
        at_once = known is not None and known.good
        if at_once and sum_of is not None:  # rows to sum that the host can read are looked at
            at_once = isinstance(index, Tensor) and not on_host(index)
        if known is not None and at_once:
            tensors = (x, w, counts, None, index, weights)
            found, key, _ = call.repeated(OP, tensors, group, plan, known.facts, 0, known.room)  # type: ignore[arg-type]
        if found is None:
            return _anew(checked(OP, x, w, counts, max_rows, plan, group), sum_of, known, key)
        return found[0]
    except BaseException as error:
        left(OP, error, group, x)
        raise


def _anew(
    given: Checked, sum_of: tuple[Tensor, Tensor] | None, known: Seen | None,
    key: tuple[object, ...] | None,
) -> Tensor:  # fmt: skip
    """The first call like this one, or one that goes through the dispatcher."""
    x, w, counts, plan, group, room, host = given
    index, weights = (None, None) if sum_of is None else _check_sum(sum_of, x)
    if key is not None and known is not None:
        operator, tensors = operator_of(OP), (x, w, counts, None, index, weights)
        return call.ran(operator, tensors, plan, known.facts, group, key, call.Given(room))[0]
    where = (plan, group.group_name, group.size(), "some" if asked_of(x=x, w=w) else "")
    if index is None or weights is None:
        return OPS.matmul_all_to_all(x, w, counts, None, room, host, False, *where)
    keep = torch.is_grad_enabled() and weights.requires_grad
    return OPS.matmul_all_to_all_sum(x, w, counts, index, weights, room, host, keep, *where)[0]


def _check_sum(sum_of: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_of` as two tensors of one shape beside x.

    Raises:
        InputError: it is something else.
    """
    want = "(rows, weights), int32 or int64 and floating point, both [tokens, top_k]"
    if not isinstance(sum_of, tuple | list) or len(sum_of) != 2:
        raise InputError(OP, "sum_of", want=want, got=type(sum_of).__name__)
    index, weights = sum_of
    if not isinstance(index, Tensor) or not isinstance(weights, Tensor):
        raise InputError(OP, "sum_of", want=want, got="no Tensors")
    check_dense(OP, sum_of=index)
    check_dense(OP, sum_of=weights)
    kinds = index.dtype in (torch.int32, torch.int64) and weights.is_floating_point()
    if not kinds or index.dim() != 2 or index.shape != weights.shape:
        got = f"{index.dtype} {list(index.shape)} and {weights.dtype} {list(weights.shape)}"
        raise InputError(OP, "sum_of", want=want, got=got)
    if index.device != x.device or weights.device != x.device:
        got = f"{index.device} and {weights.device}"
        raise InputError(OP, "sum_of", want=f"on {x.device} as x", got=got)
    return index, weights
