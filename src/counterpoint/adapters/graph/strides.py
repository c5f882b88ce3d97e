"""Results lie as the graph was traced with, where something reads how they lie.

An operator's result may have other strides than what it replaces. Most that reads it does not mind,
and its own result then has other strides, too. A copy is put only before what would fail, before
what reads memory as it lies, and before results of the graph.
"""

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from counterpoint.adapters.graph.axes import same
from counterpoint.adapters.graph.rewriter import Rewriter

aten: Any = torch.ops.aten
Values = dict[fx.Node, Any]  # a tensor without values, or several
AS_IT_LIES = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
    aten._reshape_alias.default, aten.view.dtype, aten.sym_stride.int,
    aten.sym_storage_offset.default,
)  # fmt: skip
ANY = (
    aten.copy_.default, aten._unsafe_view.default, aten.sum.default, aten.var_mean.correction,
    aten.linalg_vector_norm.default, aten.logsumexp.default,
)  # fmt: skip


def restore(to: Rewriter) -> None:
    """Copy what a rewrite has put in other strides, where that matters."""
    if not any(_lies_otherwise(_val(new), _val(old)) for old, new in to.done.items()):
        return
    traced: Values = {node: _val(node) for node in to.graph.nodes}
    traced |= {new: _val(old) for old, new in to.done.items() if new in traced}
    moved: Values = {}
    # a copy lies as it should, even where sizes are not known to be equal: none is copied again
    copied = set[fx.Node]()
    while (reader := _mind(to.graph, traced, moved, copied)) is not None:
        for given in [n for n in reader.all_input_nodes if n in moved]:
            copied.add(_copy(to.graph, reader, given, traced))
    for node, now in moved.items():
        node.meta["val"] = now


def _mind(graph: fx.Graph, traced: Values, moved: Values, copied: set[fx.Node]) -> fx.Node | None:
    """The first node that needs its inputs as they were; what lies otherwise before it is `moved`.

    Args:
        traced: what each node was traced as; of a new node what it is.
        copied: what lies as it was.
    """
    moved.clear()
    for node in graph.nodes:
        if node in copied:
            continue
        now = _val(node)
        if any(given in moved for given in node.all_input_nodes):
            now = _now(node, moved)
            if now is None:
                return node
        if _lies_otherwise(now, traced.get(node)):
            moved[node] = now
    return None


def _now(node: fx.Node, moved: Values) -> Any:
    """What a node makes of its inputs as they lie by now; None: it needs them as they were."""
    if not _takes_any(node.target):
        return None
    args: Any
    kwargs: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: moved.get(n, _val(n)))
    if node.target is operator.getitem:
        return args[0][args[1]]
    given: Any = next(moved[n] for n in node.all_input_nodes if isinstance(moved.get(n), Tensor))
    try:
        with given.fake_mode:
            return cast(Any, node.target)(*args, **kwargs)
    except (RuntimeError, ValueError):  # no view of what lies so
        return None


def _takes_any(target: Any) -> bool:
    """Whether an operator is known to take tensors of any strides."""
    if target in AS_IT_LIES:
        return False
    known = torch.Tag.pointwise, torch.Tag.core
    return (
        target is operator.getitem
        or getattr(target, "namespace", "") in ("counterpoint", "prims")
        or getattr(target, "is_view", False)
        or target in ANY
        or any(tag in known for tag in getattr(target, "tags", ()))
    )


def _copy(graph: fx.Graph, reader: fx.Node, given: fx.Node, traced: Values) -> fx.Node:
    """Put a copy before one reader; or, where a part of it is read, behind what it is a part of."""
    part = given
    while _order(traced[part]) is None and part.all_input_nodes[0] in traced:
        part = part.all_input_nodes[0]
    was = traced[part]
    order = _order(was) or range(was.dim())
    with graph.inserting_before(reader if part is given else part.next):
        to = Rewriter(graph, {}, reader if part is given else part)
        turned = to.emit(aten.permute.default, part, [*order])
        copy = to.emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
        back = to.emit(aten.permute.default, copy, [order.index(i) for i in range(len(order))])
    if part is given:
        reader.replace_input_with(given, back)
    else:
        part.replace_all_uses_with(back, delete_user_cb=lambda user: user is not turned)
    traced[back] = was
    return back


def _order(tensor: Tensor) -> Sequence[int] | None:
    """The dims from the outermost to the innermost in memory; None: it has gaps."""
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted(range(len(sizes)), key=lambda i: (-strides[i], i))  # type: ignore[operator]
    left: Any = 1
    for i in reversed(order):
        if not same(sizes[i], 1) and not same(strides[i], left):
            return None
        left = left * sizes[i]
    return order


def _lies_otherwise(now: Any, was: Any) -> bool:
    """Whether a tensor, or one of several, has other strides."""
    if isinstance(now, list | tuple):
        pairs = zip(cast(Sequence[Any], now), cast(Sequence[Any], was), strict=True)
        return any(_lies_otherwise(*pair) for pair in pairs)
    if not isinstance(now, Tensor) or not isinstance(was, Tensor):
        return False
    if any(same(size, 0) for size in now.shape):
        return False
    strides = zip(now.shape, now.stride(), was.stride(), strict=True)
    return any(not same(size, 1) and not same(a, b) for size, a, b in strides)


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")
