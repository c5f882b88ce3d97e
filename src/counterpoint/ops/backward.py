"""Gradients of the two operators, as operators: communication beside the matmuls of the gradient.

Both need what their forward communicated once more: only shards are saved, and gathered again. The
two are each other's input gradient; with the weight's gradient they are one plan.

    all_gather_matmul_backward      dx_r = rows of rank r of the sum over s of dy_s w_s^T
                                    dw = gather(x)^T dy
    matmul_reduce_scatter_backward  dx = gather(dy) w^T, dw = x^T gather(dy)
    all_gather_matmul_wgrad         dw of the first alone, where x needs no gradient
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor

from counterpoint.errors import UnsupportedError
from counterpoint.ops import call
from counterpoint.ops.agreement import Input
from counterpoint.ops.call import Operator, Output
from counterpoint.ops.plans import backward_plan
from counterpoint.problem import DType, Problem

Tensors = Sequence[Tensor | None]

_SCHEMA = "str plan, int[] rows, str group_name, int group_size, int rank"
call.LIBRARY.define(
    f"all_gather_matmul_backward(Tensor dy, Tensor x, Tensor w, {_SCHEMA}) -> (Tensor, Tensor)"
)
call.LIBRARY.define(
    f"matmul_reduce_scatter_backward(Tensor dy, Tensor x, Tensor w, {_SCHEMA}) -> (Tensor, Tensor)"
)
call.LIBRARY.define(
    f"all_gather_matmul_wgrad(Tensor x, Tensor dy, bool transposed, {_SCHEMA}) -> Tensor"
)


def flat_rows(x: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
    """`rows` of dim 0 as rows of the flattened tensor."""
    inner = prod(x.shape[1:-1])
    return tuple(n * inner for n in rows)


def dtype_of(x: Tensor) -> DType:
    """The name of its dtype in a Problem."""
    return cast(DType, str(x.dtype).removeprefix("torch."))


def _needed(tensors: Tensors) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


def _problem(op: str, whole: Tensor, wt: Tensor, rows: Sequence[int], ranks: int) -> Problem:
    """`whole` has the rows of all ranks, wt is [n, k]."""
    m, (n, k) = prod(whole.shape[:-1]), wt.shape
    return Problem(op, m, n, k, ranks, dtype_of(whole), flat_rows(whole, rows))


def _gather_problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    dy, _, wt = _needed(tensors)
    return _problem("all_gather_matmul_backward", dy, wt, rows, ranks)


def _scatter_problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    _, x, wt = _needed(tensors)
    return _problem("matmul_reduce_scatter_backward", x, wt, rows, ranks)


def _outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
    """Gradients have the shapes of what they are gradients of."""
    _, x, wt = _needed(tensors)
    return Output("dx", tuple(x.shape)), Output("dw", tuple(wt.shape[::-1]), _transposed(wt.t()))


def _wgrad_problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, dy = _needed(tensors)
    m, n, k = prod(dy.shape[:-1]), dy.shape[-1], x.shape[-1]
    return Problem(
        "all_gather_matmul_wgrad",
        m,
        n,
        k,
        ranks,
        dtype_of(x),
        flat_rows(dy, rows),
    )


def _wgrad_outputs(
    transposed: bool, tensors: Tensors, rows: Sequence[int], ranks: int, rank: int
) -> tuple[Output, ...]:
    x, dy = _needed(tensors)
    return (Output("dw", (x.shape[-1], dy.shape[-1]), transposed),)


def _transposed(w: Tensor) -> bool:
    """Whether w [K, N] is stored as [N, K]: its gradient is made the same way."""
    return w.stride(0) == 1 and w.shape[0] > 1


GATHER = Operator(
    "all_gather_matmul_backward",
    (Input("dy", "rows"), Input("x", "rows", own=True), Input("wt", "matrix")),
    _gather_problem,
    _outputs,
)
SCATTER = Operator(
    "matmul_reduce_scatter_backward",
    (Input("dy", "rows", own=True), Input("x", "rows"), Input("wt", "matrix")),
    _scatter_problem,
    _outputs,
)
# the transposition of dw is an argument: no two calls with equal tensors differ in it on one rank
WGRADS = {
    transposed: Operator(
        "all_gather_matmul_wgrad",
        (Input("x", "rows", own=True), Input("dy", "rows")),
        _wgrad_problem,
        partial(_wgrad_outputs, transposed),
    )
    for transposed in (False, True)
}


def _run_gather(
    dy: Tensor, x: Tensor, w: Tensor,
    plan: str, rows: list[int], group_name: str, group_size: int, rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dw = call.run(GATHER, (dy, x, w.t()), plan, rows, group_name)
    return dx, dw


def _run_scatter(
    dy: Tensor, x: Tensor, w: Tensor,
    plan: str, rows: list[int], group_name: str, group_size: int, rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dw = call.run(SCATTER, (dy, x, w.t()), plan, rows, group_name)
    return dx, dw


def _run_wgrad(
    x: Tensor, dy: Tensor, transposed: bool,
    plan: str, rows: list[int], group_name: str, group_size: int, rank: int,
) -> Tensor:  # fmt: skip
    (dw,) = call.run(WGRADS[transposed], (x, dy), plan, rows, group_name)
    return dw


def _fake(
    dy: Tensor, x: Tensor, w: Tensor,
    plan: str, rows: list[int], group_name: str, group_size: int, rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), _like(w, x)


def _fake_wgrad(
    x: Tensor, dy: Tensor, transposed: bool,
    plan: str, rows: list[int], group_name: str, group_size: int, rank: int,
) -> Tensor:  # fmt: skip
    k, n = x.shape[-1], dy.shape[-1]
    return x.new_empty(n, k).t() if transposed else x.new_empty(k, n)


def _like(w: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(w.shape[::-1]).t() if _transposed(w) else x.new_empty(w.shape)


def refuse_double(ctx: object, *grads: object) -> tuple[None, ...]:
    """The gradient of a gradient.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "counterpoint: double backward (a gradient of a gradient) is not supported; "
        "call backward without create_graph=True, or take torch's own operators there"
    )


for _op, _impl, _meta in (
    ("all_gather_matmul_backward", _run_gather, _fake),
    ("matmul_reduce_scatter_backward", _run_scatter, _fake),
    ("all_gather_matmul_wgrad", _run_wgrad, _fake_wgrad),
):
    call.declare(_op, _impl, _meta)
    torch.library.register_autograd(f"counterpoint::{_op}", refuse_double, lib=call.LIBRARY)


def gradients(
    op: str,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    needs: tuple[bool, bool],
    plan: str,
    rows: list[int],
    where: tuple[str, int, int],
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dw) of `op`, those that are needed: both at once where both are.

    Args:
        where: name and size of the group, and this rank.
    """
    ops = torch.ops.counterpoint
    name, size, _ = where
    gathers = op == "all_gather_matmul"
    need_dx, need_dw = needs
    dy = dy.contiguous()  # autograd hands over expanded tensors
    if need_dx and need_dw:
        both = "all_gather_matmul_backward" if gathers else "matmul_reduce_scatter_backward"
        return getattr(ops, both)(dy, x, w, backward_plan(both, plan), rows, *where)
    if need_dx and gathers:
        plan = backward_plan("matmul_reduce_scatter", plan)
        return ops.matmul_reduce_scatter(dy, w.t(), None, plan, rows, *where), None
    if need_dx:
        plan = backward_plan("all_gather_matmul", plan)
        return ops.all_gather_matmul(dy, w.t(), None, plan, rows, name, size), None
    if need_dw:
        plan = backward_plan("all_gather_matmul_wgrad", plan)
        stored = _transposed(w)
        if gathers:
            return None, ops.all_gather_matmul_wgrad(x, dy, stored, plan, rows, *where)
        # the other way round: dy is what is gathered, and dw comes out transposed
        return None, ops.all_gather_matmul_wgrad(dy, x, not stored, plan, rows, *where).t()
    return None, None
