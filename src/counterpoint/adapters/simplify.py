"""What is made simpler in a graph before its collectives are matched."""

from typing import Any, cast

import torch
from torch import fx

from counterpoint.adapters.axes import same, value
from counterpoint.adapters.rewriter import Rewriter

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
