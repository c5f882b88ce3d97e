"""Matmuls and the reduction of their sum over the ranks: one operator."""

from typing import Any, cast

import torch
from torch import fx

from counterpoint.adapters.graph.axes import CONVERT, value, whole
from counterpoint.adapters.graph.find import Reduction
from counterpoint.adapters.graph.operands import (
    by_rank,
    joins,
    others,
    plan_of,
    rank_of,
    where_of,
)
from counterpoint.adapters.graph.rewriter import Rewriter
from counterpoint.tensor_parallel import (
    backward,
    matmul_all_reduce,
    matmul_reduce_scatter,
    sum_of_biases,
)

aten: Any = torch.ops.aten
ops: Any = torch.ops.counterpoint


def reduce(to: Rewriter, one: Reduction) -> None:
    """The sum over the ranks of a sum of matmuls, or of one whose operands stand together."""
    matmuls = [term.node for term in one.terms]
    term = one.terms[0]
    rows, columns = (whole(axes) for axes in term.own)
    with to.before([one.node, one.wait, *matmuls]):
        xs = [cast(fx.Node, node.args[-2]) for node in matmuls]
        ws = [cast(fx.Node, node.args[-1]) for node in matmuls]
        sums = [value(w).shape[0] for w in ws]
        across_columns = one.kind != "all-reduce" and one.across[0] in columns
        added_to = value(xs[0]).shape[0] if across_columns else value(ws[0]).shape[1]
        if one.kind == "all-reduce" or joins(sums, added_to):
            xs, ws = [to.together(xs, 1)], [to.together(ws, 0)]
        bias = _bias(to, one)
        if one.kind == "all-reduce":
            op, (x,), (w,) = "matmul_all_reduce", xs, ws
            where = plan_of(to, one.node), one.group, one.ranks
            y = to.emit(ops.matmul_all_reduce.default, x, w, bias, *where)
            one.note(matmul_all_reduce.OPERATOR, x, w, bias)
            now = [*rows, *columns]
        else:
            op, across = "matmul_reduce_scatter", one.across[0]
            added = None
            if across_columns:  # of the transposed product, where a bias is of rows
                if bias is not None:
                    parts = to.arranged(bias, columns, [[across], others(columns, across)])
                    added = to.emit(aten.select.int, parts, 0, rank_of(to, one))
                    bias = None
                xs, ws = [to.turned(w) for w in ws], [to.turned(x) for x in xs]
                rows, columns = columns, rows
            xs = [by_rank(to, one, rows, x) for x in xs]
            y = _scattered(to, one, xs, ws, bias)
            if added is not None:
                y = to.emit(aten.add.Tensor, y, to.emit(aten.unsqueeze.default, added, 1))
            now = others([*rows, *columns], across)
        if one.average:
            y = to.emit(aten.div.Tensor, y, one.ranks)
        to.replace(one.wait, _with_shares(to, one, to.arranged(y, now, term.dims)))
    to.check()
    one.operator, one.matmuls = op, matmuls


def _bias(to: Rewriter, one: Reduction) -> fx.Node | None:
    """What is added once to the sum over the ranks; each rank's own is summed over them first."""
    once = list(one.biases)
    if one.own_biases:
        first, *others = one.own_biases
        dtype = value(first).dtype
        own = to.emit(CONVERT, first, torch.float32) if dtype != torch.float32 else first
        for more in others:
            own = to.emit(aten.add.Tensor, own, more)
        own = to.emit(sum_of_biases.OP, own, one.group)
        once.append(to.emit(CONVERT, own, dtype) if dtype != torch.float32 else own)
    if not once:
        return None
    bias = once[0]
    for more in once[1:]:
        bias = to.emit(aten.add.Tensor, bias, more)
    return bias


def _scattered(
    to: Rewriter, one: Reduction, xs: list[fx.Node], ws: list[fx.Node], bias: fx.Node | None
) -> fx.Node:
    """This rank's rows of the sum of all products, plus a bias."""
    where = plan_of(to, one.node), *where_of(one)[1:], rank_of(to, one)
    if len(xs) == 1:
        one.note(matmul_reduce_scatter.OPERATOR, *xs, *ws, bias)
        return to.emit(ops.matmul_reduce_scatter.default, *xs, *ws, bias, *where)
    one.note(backward.operator_of_sum(len(xs)), *xs, *ws)
    y = to.emit(ops.matmul_reduce_scatter_sum.default, xs, ws, *where)
    return y if bias is None else to.emit(aten.add.Tensor, y, bias)


def _with_shares(to: Rewriter, one: Reduction, y: fx.Node) -> fx.Node:
    """What was reduced and this rank's part of what all ranks have."""
    for term, across in one.shares:
        given, now = cast(fx.Node, term.node.args[0]), [axis for axes in term.own for axis in axes]
        if across is None:
            part = to.arranged(given, now, term.dims)
        else:
            parts = to.arranged(given, now, [[across], *term.dims])
            part = to.emit(aten.select.int, parts, 0, rank_of(to, one))
        y = to.emit(aten.add.Tensor, y, part)
    return y
