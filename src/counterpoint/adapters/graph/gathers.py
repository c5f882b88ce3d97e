"""An all-gather and the matmuls that read it: operators for products, gradients and sums.

One for what stands in the forward and one for the backward, as nothing may wait for a gradient.
"""

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from counterpoint.adapters.graph import activations
from counterpoint.adapters.graph.axes import (
    CONVERT,
    VIEWS,
    Axis,
    NotFollowedError,
    Size,
    same,
    value,
    whole,
)
from counterpoint.adapters.graph.find import Gather, Reduction, Total, Use
from counterpoint.adapters.graph.operands import (
    alike,
    by_rank,
    columns_of,
    joins,
    others,
    own_part,
    plan_of,
    rank_of,
    ranks_first,
    right_operand,
    row_bias,
    summed,
    where_of,
)
from counterpoint.adapters.graph.rewriter import POLICY, Rewriter
from counterpoint.tensor_parallel import all_gather_matmul, backward

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
ops: Any = torch.ops.counterpoint
# torch, too, computes these again in the backward
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def gather(
    to: Rewriter, one: Gather, scatters: Sequence[Reduction], *, activate: bool = True
) -> None:
    """Products, gradients and sums of what was gathered, each by one operator in each direction.

    Args:
        activate: look for activations that an operator can apply.
    """
    made: list[str] = []
    taken: list[Reduction] = []
    if _is_read_later(to, one):
        with to.before([one.node]):
            one.kept = to.kept(one.given)
    for later in (False, True):  # what stands in the forward must not wait for a gradient
        uses = [use for use in one.uses if (use.node in to.backward) == later]
        outer = [use for use in uses if one.is_outer(use)]
        inner = [use for use in uses if not one.is_outer(use)]
        mine = (s for s in scatters if s.backward == later and not s.operator)
        if outer and inner:
            if not _both_gradients(to, one, outer, inner):
                raise NotFollowedError("its matmuls are of no one operator")
            made.append("matmul_reduce_scatter_backward")
        elif outer:
            applied = activations.applied(to, one, outer) if activate else ""
            made.append(applied or _products(to, one, outer))
        elif scatter := next((s for s in mine if _belong(one, inner, s)), None):
            _gather_gradients(to, one, inner, scatter)
            taken.append(scatter)
            made.append("all_gather_matmul_backward")
        elif inner:
            _weight_gradients(to, one, inner)
            made.append("all_gather_matmul_wgrad")
    for total in one.totals:
        _total(to, one, total)
    to.check()
    for scatter in taken:
        scatter.operator = "all_gather_matmul_backward"
        scatter.matmuls = [term.node for term in scatter.terms]
        scatter.problems = [p for p in one.problems if p.op == scatter.operator]
    one.operator, one.matmuls = " and ".join(made), [use.node for use in one.uses]


def _is_read_later(to: Rewriter, one: Gather) -> bool:
    """Whether the backward gathers again what torch gathers once, in the forward, and saves."""
    if one.backward or one.node.meta.get(POLICY) in AGAIN:
        return False
    return any(each.node in to.backward for each in (*one.uses, *one.totals))


def _products(to: Rewriter, one: Gather, uses: list[Use]) -> str:
    """y = gather(x) w for one or several w."""
    if not alike(uses):
        raise NotFollowedError("its matmuls read it differently")
    nodes, first = [use.node for use in uses], uses[0]
    with to.before(nodes):
        x = own_part(to, one, first.rows, first.inner)
        weights = [right_operand(to, use) for use in uses]
        where = (plan_of(to, first.node), *where_of(one)[1:])
        if len(uses) == 1:
            bias = None if first.turned else row_bias(first)
            made = [to.emit(ops.all_gather_matmul.default, x, weights[0], bias, *where)]
            one.note(all_gather_matmul.OPERATOR, x, weights[0], bias)
            added = [bias is not None]
        else:
            several = to.emit(ops.all_gather_matmul_list.default, x, weights, *where)
            one.note(all_gather_matmul.operator_of_several(len(uses)), x, *weights)
            made = [to.emit(operator.getitem, several, i) for i in range(len(uses))]
            added = [False] * len(uses)
        now = ranks_first(first.rows, one.across)
        for use, w, y, has_bias in zip(uses, weights, made, added, strict=True):
            columns = columns_of(w)
            y = to.arranged(y, [*now, columns], [first.rows, [columns]])
            if use.turned:
                y = to.turned(y)
            if use.bias is not None and not has_bias:
                y = to.emit(aten.add.Tensor, y, use.bias)
            to.replace(use.node, y)
    return "all_gather_matmul" + (f" of {len(uses)} weights" if len(uses) > 1 else "")


def _both_gradients(to: Rewriter, one: Gather, outer: list[Use], inner: list[Use]) -> bool:
    """dx_i = gather(dy) w_i^T and dw_i = x_i^T gather(dy); several x_i stand side by side."""
    rows, columns = whole(outer[0].rows), whole(outer[0].inner)
    for use in (*outer, *inner):
        over, left = (use.rows, use.inner) if use in outer else (use.inner, use.rows)
        if whole(over) != rows or whole(left) != columns or use.bias is not None:
            return False
    if any(use.turned for use in outer):
        return False
    dx_sizes = [value(use.other).shape[1] for use in outer]
    dw_sizes = [value(use.other).shape[0 if use.turned else 1] for use in inner]
    if not same(sum(dx_sizes), sum(dw_sizes)):
        return False
    with to.before([use.node for use in (*outer, *inner)]):
        x = to.together([right_operand(to, use) for use in inner], 1)
        wt = to.together([use.other for use in outer], 1)
        k, first = columns_of(x), ranks_first(rows, one.across)
        operands = [
            own_part(to, one, rows, columns), to.arranged(x, [*rows, k], [first, [k]]),
            to.turned(wt),
        ]  # fmt: skip
        op = ops.matmul_reduce_scatter_backward.default
        y = to.emit(op, *operands, *where_of(one), rank_of(to, one))
        one.note(backward.SCATTER, *operands[:2], wt)
        dx, dw = (to.emit(operator.getitem, y, i) for i in (0, 1))
        for use, part in zip(outer, _split(to, dx, dx_sizes, -1), strict=True):
            k = Axis(value(part).shape[-1])
            to.replace(use.node, to.arranged(part, [*first, k], [rows, [k]]))
        for use, part in zip(inner, _split(to, dw, dw_sizes, 0), strict=True):
            to.replace(use.node, part if use.turned else to.turned(part))
    return True


def _split(to: Rewriter, node: fx.Node, sizes: Sequence[Size], dim: int) -> list[fx.Node]:
    """What stands side by side, as `together` has put it."""
    if len(sizes) == 1:
        return [node]
    parts = to.emit(aten.split_with_sizes.default, node, [*sizes], dim)
    return [to.emit(operator.getitem, parts, i) for i in range(len(sizes))]


def _belong(one: Gather, uses: Sequence[Use], scatter: Reduction) -> bool:
    """Whether what is scattered is the gradient of what was gathered, and these of the weights."""
    if not uses or scatter.group != one.group or not alike(uses):
        return False
    if scatter.average or scatter.shares or scatter.biases or scatter.own_biases:
        return False
    if len(scatter.terms) != len(uses) or any(use.bias is not None for use in uses):
        return False
    rows, columns = whole(uses[0].inner), whole(uses[0].rows)
    term, across = scatter.terms[0], scatter.across[0]
    term_rows, term_columns = (whole(axes) for axes in term.own)
    if across not in term_rows or term_rows.index(across) != rows.index(one.across):
        return False
    pairs = [*zip(rows, term_rows, strict=False), *zip(columns, term_columns, strict=False)]
    if len(rows) != len(term_rows) or len(columns) != len(term_columns):
        return False
    if not all(same(a.size, b.size) for a, b in pairs):
        return False
    return all(_gradient(use, scatter) is not None for use in uses)


def _gradient(use: Use, scatter: Reduction) -> fx.Node | None:
    """The matmul of a sum that takes the same gradient as this one of a weight."""
    for term in scatter.terms:
        dy = cast(fx.Node, term.node.args[-2])
        if use.turned:  # dw^T = dy^T gather(x): its operand is a transposed dy
            if use.other.target is aten.permute.default and _same_data(
                cast(fx.Node, use.other.args[0]), dy
            ):
                return term.node
        elif _same_data(use.other, dy):
            return term.node
    return None


def _same_data(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are views of one node, of one shape."""
    if len(value(a).shape) != len(value(b).shape) or not all(
        map(same, value(a).shape, value(b).shape)
    ):
        return False
    return _viewed(a) is _viewed(b)


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = cast(fx.Node, node.args[0])
    return node


def _gather_gradients(to: Rewriter, one: Gather, uses: list[Use], scatter: Reduction) -> None:
    """dx = this rank's rows of the sum of dy_i w_i^T, and dw_i = gather(x)^T dy_i."""
    matmuls = [cast(fx.Node, _gradient(use, scatter)) for use in uses]
    if len(set(matmuls)) != len(matmuls):
        raise NotFollowedError("two of its matmuls take the same gradient")
    rows, columns = whole(uses[0].inner), whole(uses[0].rows)
    with to.before([scatter.node, scatter.wait, *matmuls, *(use.node for use in uses)]):
        dys = [cast(fx.Node, node.args[0]) for node in matmuls]
        weights = [cast(fx.Node, node.args[1]) for node in matmuls]  # [n, k]
        sizes = [value(w).shape[0] for w in weights]
        if joins(sizes, value(weights[0]).shape[1]):
            dys, weights = [to.together(dys, 1)], [to.together(weights, 0)]
        dys = [by_rank(to, one, rows, dy) for dy in dys]
        x, wts = own_part(to, one, rows, columns), [to.turned(w) for w in weights]
        op = ops.all_gather_matmul_backward.default
        y = to.emit(op, dys, x, wts, *where_of(one), rank_of(to, one))
        one.note(backward.gather_of(len(dys)), *dys, x, *weights)
        dx, *dws = (to.emit(operator.getitem, y, i) for i in range(1 + len(dys)))
        term, across = scatter.terms[0], scatter.across[0]
        own = others([axis for axes in term.own for axis in axes], across)
        to.replace(scatter.wait, to.arranged(dx, own, term.dims))
        for use, part in zip(uses, _parts(to, dws, sizes), strict=True):
            to.replace(use.node, part if use.turned else to.turned(part))


def _parts(to: Rewriter, dws: Sequence[fx.Node], sizes: Sequence[Size]) -> list[fx.Node]:
    """Each dw_i [k, n_i], or all as one, as dw_i^T, as weights are stored."""
    turned = [to.turned(dw) for dw in dws]
    return turned if len(turned) == len(sizes) else _split(to, turned[0], sizes, 0)


def _weight_gradients(to: Rewriter, one: Gather, uses: list[Use]) -> None:
    """dw_i = gather(x)^T dy_i, x gathered once for all."""
    if not alike(uses):
        raise NotFollowedError("its matmuls read it differently")
    rows, columns, turned = whole(uses[0].inner), whole(uses[0].rows), uses[0].turned
    with to.before([use.node for use in uses]):
        dys = [right_operand(to, use) for use in uses]
        sizes = [value(dy).shape[1] for dy in dys]
        x = own_part(to, one, rows, columns)
        if joins(sizes, value(x).shape[1]):
            dys = [to.together(dys, 1)]
        dys = [by_rank(to, one, rows, dy) for dy in dys]
        op = ops.all_gather_matmul_wgrad.default
        y = to.emit(op, x, dys, turned, *where_of(one), rank_of(to, one))
        one.note(backward.wgrad_of(len(dys), turned), x, *dys)
        dws = [to.emit(operator.getitem, y, i) for i in range(len(dys))]
        for use, part in zip(uses, _parts(to, dws, sizes), strict=True):
            y = part if use.turned else to.turned(part)
            to.replace(use.node, y if use.bias is None else to.emit(aten.add.Tensor, y, use.bias))


def _total(to: Rewriter, one: Gather, total: Total) -> None:
    """The sum of what was gathered: this rank's first, then that of the ranks, which is small."""
    dtype = one.dtype
    with to.before([total.node]):
        own = own_part(to, one, total.over, total.left)
        wide = to.emit(aten.sum.dim_IntList, own, [0], False, dtype=torch.float32)
        left = whole(total.left)
        now = [axis for axis in left if axis is not one.across]
        if one.across in whole(total.over):
            result = summed(to, one, wide)
        else:
            sent = to.emit(c10d.all_gather_into_tensor.default, wide, one.ranks, one.group)
            result, now = to.emit(c10d.wait_tensor.default, sent), [one.across, *now]
        if dtype != torch.float32:
            result = to.emit(CONVERT, result, dtype)
        result = to.arranged(result, now, [left])
        shape = [to.size(n) for n in value(total.node).shape]
        to.replace(total.node, to.emit(aten.reshape.default, result, shape))
