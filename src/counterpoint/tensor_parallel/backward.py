"""Gradients of the two operators, as operators: communication beside the matmuls of the gradient.

Both need what their forward communicated once more: only shards are saved, and gathered again. The
two are each other's input gradient; with the weight's gradient they are one plan. Of a gather for
several weights, each has its dy_i and its dw_i, and dx is of the sum.

    all_gather_matmul_backward      dx_r = rows of rank r of the sum over s of dy_s w_s^T
                                    dw = gather(x)^T dy
    matmul_reduce_scatter_backward  dx = gather(dy) w^T, dw = x^T gather(dy)
    all_gather_matmul_wgrad         dw of the first alone, where x needs no gradient
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from counterpoint.group.ranks import group_of
from counterpoint.operators import implementation
from counterpoint.ops import call
from counterpoint.ops.agreement import Input
from counterpoint.ops.call import Operator, Output, Tensors, present
from counterpoint.ops.plans import backward_plan, in_force
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.problem import DType, Problem

WGRAD = "all_gather_matmul_wgrad"


def flat_rows(x: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
    """`rows` of dim 0 as rows of the flattened tensor."""
    inner = prod(x.shape[1:-1])
    return tuple(n * inner for n in rows)


def dtype_of(x: Tensor) -> DType:
    """The name of its dtype in a Problem."""
    return cast(DType, str(x.dtype).removeprefix("torch."))


def numbered(name: str, count: int) -> list[str]:
    """The buffers of so many tensors of one kind, as plans call them."""
    return [f"{name}{i}" for i in range(count)] if count > 1 else [name]


def splits_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """`Problem.splits` of weights of such sizes."""
    return tuple(sizes) if len(sizes) > 1 else ()


def _scatter_problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    _, x, wt = present(tensors)
    m, (n, k) = prod(x.shape[:-1]), wt.shape
    op = "matmul_reduce_scatter_backward"
    return Problem(op, m, n, k, ranks, dtype_of(x), flat_rows(x, rows))


def _outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
    """Gradients have the shapes of what they are gradients of."""
    _, x, wt = present(tensors)
    return Output("dx", tuple(x.shape)), Output("dw", tuple(wt.shape[::-1]), _transposed(wt.t()))


SCATTER = Operator(
    "matmul_reduce_scatter_backward",
    (Input("dy", "rows", own=True), Input("x", "rows"), Input("wt", "matrix")),
    _scatter_problem,
    _outputs,
)


@cache
def gather_of(count: int) -> Operator:
    """Of an all_gather_matmul of that many weights; its tensors: each dy, x, each wt."""
    op = "all_gather_matmul_backward"

    def problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
        dys, x = tensors[:count], cast(Tensor, tensors[count])
        return _gathered(op, x, cast(Sequence[Tensor], dys), rows, ranks)

    def outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
        x, *wts = present(tensors[count:])
        dws = zip(numbered("dw", count), wts, strict=True)
        return (
            Output("dx", tuple(x.shape)),
            *(Output(name, tuple(wt.shape[::-1]), _transposed(wt.t())) for name, wt in dws),
        )

    dys, wts = numbered("dy", count), numbered("wt", count)
    inputs = (
        *(Input(name, "rows") for name in dys), Input("x", "rows", own=True),
        *(Input(name, "matrix") for name in wts),
    )  # fmt: skip
    return Operator(op, inputs, problem, outputs)


@cache
def wgrad_of(count: int, transposed: bool) -> Operator:
    """Of that many weights, whose gradients are all stored transposed or none; x, then each dy.

    The transposition is an argument: no two calls with equal tensors differ in it on one rank.
    """

    def problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
        x, *dys = present(tensors)
        return _gathered(WGRAD, x, dys, rows, ranks)

    def outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
        x, *dys = present(tensors)
        dws = zip(numbered("dw", count), dys, strict=True)
        return tuple(Output(dw, (x.shape[-1], dy.shape[-1]), transposed) for dw, dy in dws)

    dys = (Input(name, "rows") for name in numbered("dy", count))
    return Operator(WGRAD, (Input("x", "rows", own=True), *dys), problem, outputs)


def kept_of(x: Tensor, rows: Sequence[int], ranks: int, rank: int, n: int) -> tuple[int, ...]:
    """The shape of what this rank has of a sum that is scattered."""
    return (rows[rank] if rows else x.shape[0] // ranks, *x.shape[1:-1], n)


@cache
def operator_of_sum(count: int) -> Operator:
    """A matmul_reduce_scatter of the sum of that many products; its tensors: each x, each w."""
    op = "matmul_reduce_scatter"

    def problem(tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
        x, *_ = tensors = present(tensors)
        m, n = prod(x.shape[:-1]), tensors[-1].shape[1]
        sizes = [w.shape[0] for w in tensors[count:]]
        return Problem(
            op, m, n, sum(sizes), ranks, dtype_of(x), flat_rows(x, rows), splits=splits_of(sizes)
        )

    def outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
        x, *_, w = present(tensors)
        return (Output("y", kept_of(x, rows, ranks, rank, w.shape[1])),)

    xs = (Input(name, "rows") for name in numbered("x", count))
    ws = (Input(name, "matrix") for name in numbered("w", count))
    return Operator(op, (*xs, *ws), problem, outputs)


# of one weight, which are the first of their ops
gather_of(1)
wgrad_of(1, True)


def _gathered(
    op: str, x: Tensor, dys: Sequence[Tensor], rows: Sequence[int], ranks: int
) -> Problem:
    """Of gradients dy of all rows, and a part of x."""
    first, columns = dys[0], [dy.shape[-1] for dy in dys]
    return Problem(
        op, prod(first.shape[:-1]), sum(columns), x.shape[-1], ranks, dtype_of(x),
        flat_rows(first, rows), splits=splits_of(columns),
    )  # fmt: skip


def _transposed(w: Tensor) -> bool:
    """Whether w [K, N] is stored as [N, K]: its gradient is made the same way."""
    return w.stride(0) == 1 and w.shape[0] > 1


def _run_gather(
    dys: list[Tensor], x: Tensor, weights: list[Tensor],
    plan: str, rows: list[int], group_name: str, *_: int,
) -> list[Tensor]:  # fmt: skip
    tensors = (*dys, x, *(w.t() for w in weights))
    return call.run(gather_of(len(dys)), tensors, plan, rows, group_name)


def _run_scatter(
    dy: Tensor, x: Tensor, w: Tensor, plan: str, rows: list[int], group_name: str, *_: int
) -> tuple[Tensor, Tensor]:
    dx, dw = call.run(SCATTER, (dy, x, w.t()), plan, rows, group_name)
    return dx, dw


def _run_wgrad(
    x: Tensor, dys: list[Tensor], transposed: bool,
    plan: str, rows: list[int], group_name: str, *_: int,
) -> list[Tensor]:  # fmt: skip
    return call.run(wgrad_of(len(dys), transposed), (x, *dys), plan, rows, group_name)


def _fake_gather(_: object, x: Tensor, weights: list[Tensor], *__: Any) -> list[Tensor]:
    return [x.new_empty(x.shape), *(_empty(x, w.shape, _transposed(w)) for w in weights)]


def _fake_scatter(_: object, x: Tensor, w: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _empty(x, w.shape, _transposed(w))


def _fake_wgrad(x: Tensor, dys: list[Tensor], transposed: bool, *_: Any) -> list[Tensor]:
    return [_empty(x, (x.shape[-1], dy.shape[-1]), transposed) for dy in dys]


def _empty(x: Tensor, shape: Sequence[int], transposed: bool) -> Tensor:
    return x.new_empty(shape[::-1]).t() if transposed else x.new_empty(shape)


def _flops_of_gather(dys: Any, x: Any, *_: object, **__: object) -> int:
    return 4 * sum(map(prod, dys)) * x[-1]


def _flops_of_scatter(dy: Any, x: Any, *_: object, **__: object) -> int:
    return 4 * prod(x) * dy[-1]


def _flops_of_wgrad(x: Any, dys: Any, *_: object, **__: object) -> int:
    return 2 * sum(map(prod, dys)) * x[-1]


register(
    "all_gather_matmul_backward", _run_gather, _fake_gather, refuse_double_matmul,
    flops=_flops_of_gather,
)  # fmt: skip
register(
    "matmul_reduce_scatter_backward", _run_scatter, _fake_scatter, refuse_double_matmul,
    flops=_flops_of_scatter,
)  # fmt: skip
register(WGRAD, _run_wgrad, _fake_wgrad, refuse_double_matmul,
         flops=_flops_of_wgrad)  # fmt: skip


def _known(op: str) -> Operator:
    """An operator by its name."""
    assert implementation(op)  # whose module declares it
    return Operator.known[op]


def _called(
    op: str, of: tuple[Callable[..., Operator], *tuple[Any, ...]], tensors: Any,
    given: tuple[Any, ...], plan: str, rows: list[int],
    where: tuple[str, int] | tuple[str, int, int],
) -> Sequence[Tensor]:  # fmt: skip
    """An operator of a gradient: at once where nothing else sees the call, else by torch.

    Args:
        op: as torch has it.
        of: what makes the operator, which it makes once, and of what.
        tensors: of the operator.
        given: the tensors as torch has them.
    """
    if not torch.compiler.is_compiling():
        group = group_of(where[0])
        # else a group of this name was made anew: torch's way refuses that
        if (group.size(), group.rank())[: len(where) - 1] == where[1:]:
            settings = (*where, *of[1:])
            found, key, _ = call.repeated(
                f"gradient by {op}", tensors, group, plan, rows, settings=settings
            )  # fmt: skip
            if found is not None:
                return found
            if key is not None:
                operator, *arguments = of
                return call.ran(operator(*arguments), tensors, in_force(plan), rows, group, key)
    results = getattr(torch.ops.counterpoint, op)(*given, plan, rows, *where)
    return (results,) if isinstance(results, Tensor) else results


def gradients_of_gather(
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    needs: tuple[bool, bool],
    plan: str,
    rows: list[int],
    where: tuple[str, int, int],
) -> tuple[Tensor | None, list[Tensor] | None]:
    """dx and each dw of y_i = gather(x) w_i, those that are needed: at once where both are.

    Args:
        where: name and size of the group, and this rank.
    """
    need_dx, need_dw = needs
    dys, ws = [dy.contiguous() for dy in dys], list(weights)  # autograd hands over expanded ones
    wts, count = [w.t() for w in ws], len(ws)
    if need_dx and need_dw:
        op = "all_gather_matmul_backward"
        tensors, plan = (*dys, x, *wts), backward_plan(op, plan, rows)
        dx, *dws = _called(op, (gather_of, count), tensors, (dys, x, ws), plan, rows, where)
        return dx, dws
    if need_dx:
        plan, sums = backward_plan("matmul_reduce_scatter", plan, rows), (*dys, *wts)
        op, of = "matmul_reduce_scatter_sum", (operator_of_sum, count)
        (dx,) = _called(op, of, sums, (dys, wts), plan, rows, where)
        return dx, None
    if need_dw:
        plan, stored = backward_plan(WGRAD, plan, rows), _transposed(ws[0])
        of, given = (wgrad_of, count, stored), (x, dys, stored)
        return None, [*_called(WGRAD, of, (x, *dys), given, plan, rows, where)]
    return None, None


def gradients_of_scatter(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    needs: tuple[bool, bool],
    plan: str,
    rows: list[int],
    where: tuple[str, int, int],
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dw of a matmul_reduce_scatter, as `gradients_of_gather`."""
    need_dx, need_dw = needs
    dy, wt = dy.contiguous(), w.t()
    if need_dx and need_dw:
        op = SCATTER.op
        plan = backward_plan(op, plan, rows)
        dx, dw = _called(op, (_known, op), (dy, x, wt), (dy, x, w), plan, rows, where)
        return dx, dw
    if need_dx:
        op, tensors = "all_gather_matmul", (dy, wt, None, None, None)
        plan, size = backward_plan(op, plan, rows), where[:2]
        (dx,) = _called(op, (_known, op), tensors, tensors[:3], plan, rows, size)
        return dx, None
    if need_dw:  # dy is what is gathered, and dw comes out transposed
        plan, stored = backward_plan(WGRAD, plan, rows), not _transposed(w)
        of, given = (wgrad_of, 1, stored), (dy, [x], stored)
        (dwt,) = _called(WGRAD, of, (dy, x), given, plan, rows, where)
        return None, dwt.t()
    return None, None
