"""Puts operators in the place of collectives and their matmuls, forward and backward at once.

    all-gather + matmuls                        all_gather_matmul, of a list where there are several
    all-gather + dgrad + wgrad                  matmul_reduce_scatter_backward
    wgrads of what was gathered, and the
    reduce-scatter of the sum of dgrads         all_gather_matmul_backward: x is gathered again, so
                                                that only this rank's part is kept for it
    wgrads alone                                all_gather_matmul_wgrad
    matmuls + reduce-scatter                    matmul_reduce_scatter, or of the sum of several
    matmuls + all-reduce                        matmul_all_reduce
    all-reduce + residual + norm by RMS,
    in inference, without a matmul              all_reduce_rms_norm

What is gathered or scattered along another dim than the first is moved there by views and copies,
which a compiler joins with what stands around them.
"""

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx

from counterpoint.adapters import axes, find, norms, rewriter, simplify
from counterpoint.adapters.axes import (
    CONVERT,
    VIEWS,
    Axes,
    Axis,
    NotFollowedError,
    Size,
    same,
    value,
    whole,
)
from counterpoint.adapters.find import (
    Collective,
    Gather,
    Reduction,
    Total,
    Use,
    collectives,
)
from counterpoint.adapters.rewriter import Rewriter, in_order
from counterpoint.ops import (
    all_gather_matmul,
    all_reduce_norm,
    backward,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from counterpoint.ops.norms import Norm
from counterpoint.ops.plans import BY_MODE

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
ops: Any = torch.ops.counterpoint
PLAN = "auto"  # serial among them: a match costs nothing
# by which caches of compiled graphs know this pass
FILES = (__file__, *(cast(str, each.__file__) for each in (axes, find, norms, rewriter, simplify)))


def rewrite(
    graph: fx.Graph, groups: dict[str, dist.ProcessGroup], *, merge_reductions: bool
) -> list[Collective]:
    """Rewrite a joint graph in place.

    Args:
        groups: whose collectives are looked at, by name.
        merge_reductions: replace sums of all-reduces by all-reduces of sums.

    Returns:
        All its collectives, those that it leaves among them.
    """
    if merge_reductions:
        simplify.merge(graph)
    simplify.flatten(graph)
    found = collectives(graph, {name: group.size() for name, group in groups.items()})
    rewriter = Rewriter(graph, groups)
    for one in found:
        one.backward = one.node in rewriter.backward
    scatters = [one for one in found if isinstance(one, Reduction) and one.kind == "reduce-scatter"]
    for one in found:
        if isinstance(one, Gather) and not one.reason:
            rewriter.attempt(one, lambda one=one: _gather(rewriter, one, scatters))
    for one in found:
        if isinstance(one, Reduction) and not one.reason and not one.operator:
            rewriter.attempt(one, lambda one=one: _reduce(rewriter, one))
    for one in found if not rewriter.backward else ():
        if one.kind == "all-reduce" and one.followed and not one.operator:
            rewriter.attempt(one, lambda one=one, before=one.reason: _norm(rewriter, one, before))
    rewriter.erase()
    rewriter.save_no_copies()
    in_order(graph)
    graph.lint()
    return found


def _gather(to: Rewriter, one: Gather, scatters: Sequence[Reduction]) -> None:
    """Products, gradients and sums of what was gathered, each by one operator in each direction."""
    made: list[str] = []
    taken: list[Reduction] = []
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
            made.append(_products(to, one, outer))
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


def _where(one: Collective) -> tuple[Any, ...]:
    return (PLAN, [], one.group, one.ranks)


def _plan(to: Rewriter, node: fx.Node) -> str:
    """Of an operator in the place of `node`: gradients are computed as always in any mode."""
    return PLAN if node in to.backward else BY_MODE


def _rank(to: Rewriter, one: Collective) -> int:
    return to.groups[one.group].rank()


def _own(to: Rewriter, one: Gather, rows: Axes, columns: Axes) -> fx.Node:
    """This rank's part as a matrix."""
    now = [axis for axes in one.shard for axis in axes]
    given = one.given
    if value(given).dtype != one.dtype:
        given = to.emit(CONVERT, given, one.dtype)
    return to.arranged(given, now, [_others(rows, one.across), _others(columns, one.across)])


def _others(axes: Axes, across: Axis) -> Axes:
    return [axis for axis in whole(axes) if axis is not across]


def _ranks_first(axes: Axes, across: Axis) -> Axes:
    return [across, *_others(axes, across)]


def _operand(to: Rewriter, use: Use) -> fx.Node:
    """The other operand of a product, as the right one."""
    return to.turned(use.other) if use.turned else use.other


def _columns(node: fx.Node) -> Axis:
    return Axis(value(node).shape[1])


def _alike(uses: Sequence[Use]) -> bool:
    first = uses[0]
    return all(
        use.turned == first.turned and whole(use.rows) == whole(first.rows)
        and whole(use.inner) == whole(first.inner)
        for use in uses
    )  # fmt: skip


def _products(to: Rewriter, one: Gather, uses: list[Use]) -> str:
    """y = gather(x) w for one or several w."""
    if not _alike(uses):
        raise NotFollowedError("its matmuls read it differently")
    nodes, first = [use.node for use in uses], uses[0]
    with to.before(nodes):
        x = _own(to, one, first.rows, first.inner)
        weights = [_operand(to, use) for use in uses]
        where = (_plan(to, first.node), *_where(one)[1:])
        if len(uses) == 1:
            bias = None if first.turned else first.bias
            if bias is not None and value(bias).dim() != 1:
                bias = None
            made = [to.emit(ops.all_gather_matmul.default, x, weights[0], bias, *where)]
            one.note(all_gather_matmul.OPERATOR, x, weights[0], bias)
            added = [bias is not None]
        else:
            several = to.emit(ops.all_gather_matmul_list.default, x, weights, *where)
            one.note(all_gather_matmul.operator_of_several(len(uses)), x, *weights)
            made = [to.emit(operator.getitem, several, i) for i in range(len(uses))]
            added = [False] * len(uses)
        now = _ranks_first(first.rows, one.across)
        for use, w, y, has_bias in zip(uses, weights, made, added, strict=True):
            columns = _columns(w)
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
        x = to.together([_operand(to, use) for use in inner], 1)
        wt = to.together([use.other for use in outer], 1)
        k, first = _columns(x), _ranks_first(rows, one.across)
        operands = [
            _own(to, one, rows, columns), to.arranged(x, [*rows, k], [first, [k]]), to.turned(wt),
        ]  # fmt: skip
        op = ops.matmul_reduce_scatter_backward.default
        y = to.emit(op, *operands, *_where(one), _rank(to, one))
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
    if not uses or scatter.group != one.group or scatter.biases or not _alike(uses):
        return False
    if scatter.average or scatter.shares:
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
        if _joins(sizes, value(weights[0]).shape[1]):
            dys, weights = [to.together(dys, 1)], [to.together(weights, 0)]
        dys = [_by_rank(to, one, rows, dy) for dy in dys]
        x, wts = _own(to, one, rows, columns), [to.turned(w) for w in weights]
        op = ops.all_gather_matmul_backward.default
        y = to.emit(op, dys, x, wts, *_where(one), _rank(to, one))
        one.note(backward.gather_of(len(dys)), *dys, x, *weights)
        dx, *dws = (to.emit(operator.getitem, y, i) for i in range(1 + len(dys)))
        term, across = scatter.terms[0], scatter.across[0]
        own = _others([axis for axes in term.own for axis in axes], across)
        to.replace(scatter.wait, to.arranged(dx, own, term.dims))
        for use, part in zip(uses, _parts(to, dws, sizes), strict=True):
            to.replace(use.node, part if use.turned else to.turned(part))


def _joins(sizes: Sequence[Size], k: Size) -> bool:
    """Whether operands of matmuls stand together in memory, so that one matmul sums all.

    Else each matmul adds to the sum before it, a row of `k` columns. What moves less is taken: rows
    of `sizes` columns are copied to stand together, or those sums are read and written.
    """
    if not all(isinstance(n, int) for n in (*sizes, k)):
        return True
    return bool(sum(sizes) <= (len(sizes) - 1) * k)


def _by_rank(to: Rewriter, one: Collective, rows: Axes, node: fx.Node) -> fx.Node:
    """A matrix with those of rank 0 before the others among its rows."""
    n = _columns(node)
    across = one.across if isinstance(one, Gather) else cast(Reduction, one).across[0]
    return to.arranged(node, [*rows, n], [_ranks_first(rows, across), [n]])


def _parts(to: Rewriter, dws: Sequence[fx.Node], sizes: Sequence[Size]) -> list[fx.Node]:
    """Each dw_i [k, n_i], or all as one, as dw_i^T, as weights are stored."""
    turned = [to.turned(dw) for dw in dws]
    return turned if len(turned) == len(sizes) else _split(to, turned[0], sizes, 0)


def _weight_gradients(to: Rewriter, one: Gather, uses: list[Use]) -> None:
    """dw_i = gather(x)^T dy_i, x gathered once for all."""
    if not _alike(uses):
        raise NotFollowedError("its matmuls read it differently")
    rows, columns, turned = whole(uses[0].inner), whole(uses[0].rows), uses[0].turned
    with to.before([use.node for use in uses]):
        dys = [_operand(to, use) for use in uses]
        sizes = [value(dy).shape[1] for dy in dys]
        x = _own(to, one, rows, columns)
        if _joins(sizes, value(x).shape[1]):
            dys = [to.together(dys, 1)]
        dys = [_by_rank(to, one, rows, dy) for dy in dys]
        op = ops.all_gather_matmul_wgrad.default
        y = to.emit(op, x, dys, turned, *_where(one), _rank(to, one))
        one.note(backward.wgrad_of(len(dys), turned), x, *dys)
        dws = [to.emit(operator.getitem, y, i) for i in range(len(dys))]
        for use, part in zip(uses, _parts(to, dws, sizes), strict=True):
            y = part if use.turned else to.turned(part)
            to.replace(use.node, y if use.bias is None else to.emit(aten.add.Tensor, y, use.bias))


def _total(to: Rewriter, one: Gather, total: Total) -> None:
    """The sum of what was gathered: this rank's first, then that of the ranks, which is small."""
    dtype = one.dtype
    with to.before([total.node]):
        own = _own(to, one, total.over, total.left)
        wide = to.emit(aten.sum.dim_IntList, own, [0], False, dtype=torch.float32)
        left = whole(total.left)
        now = [axis for axis in left if axis is not one.across]
        if one.across in whole(total.over):
            sent = to.emit(c10d.all_reduce.default, wide, "sum", one.group)
        else:
            sent = to.emit(c10d.all_gather_into_tensor.default, wide, one.ranks, one.group)
            now = [one.across, *now]
        result = to.emit(c10d.wait_tensor.default, sent)
        if dtype != torch.float32:
            result = to.emit(CONVERT, result, dtype)
        result = to.arranged(result, now, [left])
        shape = [to.size(n) for n in value(total.node).shape]
        to.replace(total.node, to.emit(aten.reshape.default, result, shape))


def _reduce(to: Rewriter, one: Reduction) -> None:
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
        if one.kind == "all-reduce" or _joins(sums, added_to):
            xs, ws = [to.together(xs, 1)], [to.together(ws, 0)]
        bias = one.biases[0] if one.biases else None
        for more in one.biases[1:]:
            bias = to.emit(aten.add.Tensor, bias, more)
        if one.kind == "all-reduce":
            op, (x,), (w,) = "matmul_all_reduce", xs, ws
            y = to.emit(ops.matmul_all_reduce.default, x, w, bias, _plan(to, one.node), one.group)
            one.note(matmul_all_reduce.OPERATOR, x, w, bias)
            now = [*rows, *columns]
        else:
            op, across = "matmul_reduce_scatter", one.across[0]
            added = None
            if across_columns:  # of the transposed product, where a bias is of rows
                if bias is not None:
                    parts = to.arranged(bias, columns, [[across], _others(columns, across)])
                    added = to.emit(aten.select.int, parts, 0, _rank(to, one))
                    bias = None
                xs, ws = [to.turned(w) for w in ws], [to.turned(x) for x in xs]
                rows, columns = columns, rows
            xs = [_by_rank(to, one, rows, x) for x in xs]
            y = _scattered(to, one, xs, ws, bias)
            if added is not None:
                y = to.emit(aten.add.Tensor, y, to.emit(aten.unsqueeze.default, added, 1))
            now = _others([*rows, *columns], across)
        if one.average:
            y = to.emit(aten.div.Tensor, y, one.ranks)
        to.replace(one.wait, _with_shares(to, one, to.arranged(y, now, term.dims)))
    to.check()
    one.operator, one.matmuls = op, matmuls


def _scattered(
    to: Rewriter, one: Reduction, xs: list[fx.Node], ws: list[fx.Node], bias: fx.Node | None
) -> fx.Node:
    """This rank's rows of the sum of all products, plus a bias."""
    where = _plan(to, one.node), *_where(one)[1:], _rank(to, one)
    if len(xs) == 1:
        one.note(matmul_reduce_scatter.OPERATOR, *xs, *ws, bias)
        return to.emit(ops.matmul_reduce_scatter.default, *xs, *ws, bias, *where)
    one.note(matmul_reduce_scatter.operator_of_sum(len(xs)), *xs, *ws)
    y = to.emit(ops.matmul_reduce_scatter_sum.default, xs, ws, *where)
    return y if bias is None else to.emit(aten.add.Tensor, y, bias)


def _norm(to: Rewriter, one: Collective, reason: str) -> None:
    """The sum of what no matmul makes, and its norm; where there is none, `reason` stays."""
    if one.node.args[1] != "sum":
        raise NotFollowedError(reason)
    try:
        behind = norms.normed(one.wait)
    except NotFollowedError:
        raise NotFollowedError(reason) from None
    norm = Norm("rms", behind.eps)
    tensors = one.given, behind.residual, behind.weight, None, None
    with to.before([one.node, one.wait, behind.total, behind.result]):
        made = to.emit(ops.all_reduce_norm.default, *tensors, *norm, PLAN, one.group)
        one.note(all_reduce_norm.operator_of(norm), *tensors)
        y, h = (to.emit(operator.getitem, made, i) for i in (0, 1))
        to.replace(behind.result, y)
        to.replace(behind.total, h)
    to.check()
    one.operator, one.reason = "all_reduce_rms_norm", ""


def _with_shares(to: Rewriter, one: Reduction, y: fx.Node) -> fx.Node:
    """What was reduced and this rank's part of what all ranks have."""
    for term, across in one.shares:
        given, now = cast(fx.Node, term.node.args[0]), [axis for axes in term.own for axis in axes]
        if across is None:
            part = to.arranged(given, now, term.dims)
        else:
            parts = to.arranged(given, now, [[across], *term.dims])
            part = to.emit(aten.select.int, parts, 0, _rank(to, one))
        y = to.emit(aten.add.Tensor, y, part)
    return y
