"""What is made simpler in a graph, before its collectives are matched and behind the operators."""

from typing import Any, cast

import torch
from torch import fx

from counterpoint.adapters.graph.axes import (
    TURNS,
    VIEWS,
    NotFollowedError,
    dims_of,
    same,
    step,
    value,
    whole,
)
from counterpoint.adapters.graph.rewriter import Rewriter

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional


def flatten(graph: fx.Graph) -> None:
    """The product of a batch of one matrix, as an einsum makes them, as that of matrices."""
    batches = [node for node in graph.nodes if node.target is aten.bmm.default]
    to = Rewriter(graph, {})
    for node in batches:
        if not same(value(node).shape[0], 1):
            continue
        with to.before([node]):
            a, b = (to.emit(aten.squeeze.dim, each, 0) for each in node.args)
            product = to.emit(aten.mm.default, a, b)
            to.done[node] = to.emit(aten.unsqueeze.default, product, 0)
        node.replace_all_uses_with(to.done[node])
    to.erase()


def merge(graph: fx.Graph) -> None:
    """The sum of two all-reduces as the all-reduce of a sum: fewer, of other rounding."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        reduced = [_reduced(term) for term in node.args]
        if None in reduced or reduced[0].args[1:] != reduced[1].args[1:]:  # pyright: ignore
            continue
        a, b = cast(list[fx.Node], reduced)
        if a is b or not all(map(same, value(a).shape, value(b).shape)):
            continue
        with graph.inserting_before(node):
            to = Rewriter(graph, {}, node)
            total = to.emit(aten.add.Tensor, a.args[0], b.args[0])
            sent = to.emit(c10d.all_reduce.default, total, *a.args[1:])
            to.done[node] = to.emit(c10d.wait_tensor.default, sent)
            node.replace_all_uses_with(to.done[node])
        to.erase()


def _reduced(term: object) -> fx.Node | None:
    """The all-reduce whose result, read once, this is."""
    if not isinstance(term, fx.Node) or term.target is not c10d.wait_tensor.default:
        return None
    node = cast(fx.Node, term.args[0])
    once = len(term.users) == len(node.users) == 1 and node.args[1:2] == ("sum",)
    return node if node.target is c10d.all_reduce.default and once else None


def straighten(graph: fx.Graph) -> None:
    """What is put in another order for one operator and back for the next is not moved at all."""
    for node in list(graph.nodes):
        for given in node.all_input_nodes if _is_ours(node) else ():
            source = _source(given)
            if source is None:
                continue
            try:
                with graph.inserting_before(node):
                    to, size = Rewriter(graph, {}, node), value(given).shape
                    shaped = to.emit(aten.view.default, source, [to.size(n) for n in size])
            except (NotFollowedError, RuntimeError, ValueError):  # sizes that are not known
                continue
            node.replace_input_with(given, shaped)
            while given is not source and not given.users:
                before = cast(fx.Node, given.args[0])
                graph.erase_node(given)
                given = before


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "counterpoint"


def _source(node: fx.Node) -> fx.Node | None:
    """The operator's result that a node, behind permutations, has in the same order; None: none."""
    path = [node]
    while path[-1].target in (*VIEWS, *TURNS):
        path.append(cast(fx.Node, path[-1].args[0]))
    source = path.pop()
    if not any(each.target in TURNS for each in path) or not _is_ours(source):
        return None
    own = dims = dims_of(source)
    try:
        for each in reversed(path):
            dims = step(each, dims) or []
    except NotFollowedError:
        return None
    now, before = (whole([axis for axes in each for axis in axes]) for each in (dims, own))
    return source if now == before else None
