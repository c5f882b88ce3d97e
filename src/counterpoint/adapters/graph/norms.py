"""A norm behind an all-reduce that no matmul stands before, in inference: one operator for both.

By RMS or a LayerNorm, of the sum or of the sum and a residual, as `torch.nn.functional` has them,
and by RMS as in models of transformers. Those round before they multiply by the weight, where
neither torch.compile nor the operator does.
"""

import operator
from functools import cache
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from counterpoint.adapters.graph.axes import CONVERT, NotFollowedError, same, value
from counterpoint.adapters.graph.find import Collective
from counterpoint.adapters.graph.forms import NUMBER, Form, Match, matches
from counterpoint.adapters.graph.operands import PLAN
from counterpoint.adapters.graph.rewriter import Rewriter
from counterpoint.norms import all_reduce_norm
from counterpoint.norms.norms import Kind, Norm

aten: Any = torch.ops.aten
ops: Any = torch.ops.counterpoint


class _Normed(NamedTuple):
    """What stands behind an all-reduce.

    Args:
        views: of the sum, one after another, before anything else.
        total: what is normalised.
        residual: that was added to the sum; None: nothing.
        norm: its kind, and eps.
        match: where it stands.
    """

    views: list[fx.Node]
    total: fx.Node
    residual: fx.Node | None
    norm: Norm
    match: Match


def normalise(to: Rewriter, one: Collective, reason: str) -> None:
    """The sum of what no matmul makes, and its norm; where there is none, `reason` stays."""
    behind = _normed(one.wait) if one.node.args[1] == "sum" else None
    if behind is None:
        raise NotFollowedError(reason)
    views, total, residual, norm, (result, (_, weight, *bias), *_) = behind
    with to.before([one.node, one.wait, *views, total, result]):
        given = one.given
        for view in views:
            given = to.emit(view.target, given, *view.args[1:])
        tensors = given, residual, weight, *(bias or [None]), None
        made = to.emit(ops.all_reduce_norm.default, *tensors, *norm, PLAN, one.group)
        one.note(all_reduce_norm.operator_of(norm), *tensors)
        y, h = (to.emit(operator.getitem, made, i) for i in (0, 1))
        to.replace(result, y)
        to.replace(total, h)
    to.check()
    one.operator, one.reason = f"all_reduce_{norm.kind}_norm", ""


def _normed(wait: fx.Node) -> _Normed | None:
    """The norm of a sum that can be had with it; None: there is none.

    Args:
        wait: of the all-reduce.
    """
    views: list[fx.Node] = []
    while (view := _only(wait)) and view.target is aten.view.default:
        views.append(view)
        wait = view
    total, residual = wait, None
    if (node := _only(wait)) and node.target is aten.add.Tensor:
        others = [n for n in node.args if isinstance(n, fx.Node) and n is not wait]
        if len(others) == 1 and not node.kwargs and _alike(others[0], wait):
            total, residual = node, others[0]
    if value(total).dim() < 2:
        return None
    kinds, forms = zip(*_forms(value(total).dim()), strict=True)
    for i, match in matches(forms, [total], value(total).dtype):
        eps = match.number
        if _fits(total, match) and eps is not None and 0 <= eps < inf:
            return _Normed(views, total, residual, Norm(kinds[i], float(eps)), match)
    return None


@cache
def _forms(dim: int) -> list[tuple[Kind, Form]]:
    """Of rows of a tensor of so many dims."""

    h, row = (2,) * dim, (2,)

    def by_rms(h: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(h, row, w, NUMBER)

    def of_transformers(h: Tensor, w: Tensor) -> Tensor:
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + NUMBER))

    def by_layer(h: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.layer_norm(h, row, w, b, NUMBER)

    return [
        ("rms", Form(by_rms, h, row)),
        ("rms", Form(of_transformers, h, row)),
        ("layer", Form(by_layer, h, row, row)),
        ("layer", Form(by_layer, h, row)),
    ]


def _fits(total: fx.Node, match: Match) -> bool:
    """Whether it is a norm of these rows, in fp32, that nothing reads before its end."""
    h, *rows = match.given
    n, dtype, inside = value(total).shape[-1], value(total).dtype, {*match.inside, match.result}
    widened = {node for node in match.inside if node.target is CONVERT and node.args[0] is total}
    return (
        h is total
        and all(value(row).dim() == 1 and value(row).dtype == dtype for row in rows)
        and all(same(value(row).shape[0], n) for row in rows)
        and all(value(node).dtype == torch.float32 for node in match.reduced)
        and all(inside.issuperset(node.users) for node in match.inside - widened)
    )


def _only(node: fx.Node) -> fx.Node | None:
    """What reads a node, where nothing else does."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = value(one), value(other)
    return a.dtype == b.dtype and a.dim() == b.dim() and all(map(same, a.shape, b.shape))
