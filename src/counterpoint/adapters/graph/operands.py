"""Operands of the operator that takes a collective's place: this rank's part, rows by rank."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from counterpoint.adapters.graph.axes import CONVERT, Axes, Axis, Size, same, value, whole
from counterpoint.adapters.graph.find import Collective, Gather, Reduction, Use
from counterpoint.adapters.graph.rewriter import Rewriter
from counterpoint.ops.plans import BY_MODE

c10d: Any = torch.ops._c10d_functional
PLAN = "auto"  # serial among them: a match costs nothing


def where_of(one: Collective) -> tuple[Any, ...]:
    return (PLAN, [], one.group, one.ranks)


def plan_of(to: Rewriter, node: fx.Node) -> str:
    """Of an operator in the place of `node`: gradients are computed as always in any mode."""
    return PLAN if node in to.backward else BY_MODE


def rank_of(to: Rewriter, one: Collective) -> int:
    return to.groups[one.group].rank()


def others(axes: Axes, across: Axis) -> Axes:
    return [axis for axis in whole(axes) if axis is not across]


def ranks_first(axes: Axes, across: Axis) -> Axes:
    return [across, *others(axes, across)]


def columns_of(node: fx.Node) -> Axis:
    return Axis(value(node).shape[1])


def joins(sizes: Sequence[Size], k: Size) -> bool:
    """Whether operands of matmuls stand together in memory, so that one matmul sums all.

    Else each matmul adds to the sum before it, a row of `k` columns. What moves less is taken: rows
    of `sizes` columns are copied to stand together, or those sums are read and written.
    """
    if not all(isinstance(n, int) for n in (*sizes, k)):
        return True
    return bool(sum(sizes) <= (len(sizes) - 1) * k)


def summed(to: Rewriter, one: Collective, node: fx.Node) -> fx.Node:
    """The sum over the ranks of something small."""
    sent = to.emit(c10d.all_reduce.default, node, "sum", one.group)
    return to.emit(c10d.wait_tensor.default, sent)


def by_rank(to: Rewriter, one: Collective, rows: Axes, node: fx.Node) -> fx.Node:
    """A matrix with those of rank 0 before the others among its rows."""
    n = columns_of(node)
    across = one.across if isinstance(one, Gather) else cast(Reduction, one).across[0]
    return to.arranged(node, [*rows, n], [ranks_first(rows, across), [n]])


def own_part(to: Rewriter, one: Gather, rows: Axes, columns: Axes) -> fx.Node:
    """This rank's part as a matrix."""
    now = [axis for axes in one.shard for axis in axes]
    given = one.kept or one.given
    for dtype in one.casts[1:]:
        given = to.emit(CONVERT, given, dtype)
    return to.arranged(given, now, [others(rows, one.across), others(columns, one.across)])


def right_operand(to: Rewriter, use: Use) -> fx.Node:
    """The other operand of a product, as the right one."""
    return to.turned(use.other) if use.turned else use.other


def alike(uses: Sequence[Use]) -> bool:
    """Whether matmuls read what was gathered as one matrix."""
    first = uses[0]
    return all(
        use.turned == first.turned and whole(use.rows) == whole(first.rows)
        and whole(use.inner) == whole(first.inner)
        for use in uses
    )  # fmt: skip


def row_bias(use: Use) -> fx.Node | None:
    """What is added to each row of a product, a number for each column; None: nothing like that."""
    shape = () if use.bias is None else value(use.bias).shape
    return use.bias if len(shape) == 1 and same(shape[0], value(use.node).shape[1]) else None
