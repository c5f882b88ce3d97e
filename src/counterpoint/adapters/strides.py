"""Results lie as the graph was traced with, where something reads how they lie.

An operator's result may have other strides than what it replaces. Most that reads it does not mind,
and its own result then has other strides, too. A copy is put only before what would fail, before
what reads memory as it lies, and before results of the graph.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from counterpoint.adapters.axes import same, value
from counterpoint.adapters.rewriter import Rewriter

aten: Any = torch.ops.aten
NAMESPACES = ("aten", "prims", "counterpoint")  # operators of others may read memory as it lies
AS_IT_LIES = (aten.as_strided.default, aten.view.dtype, aten.view_as_real.default)


def restore(to: Rewriter) -> None:
    """Copy what a rewrite has put in other strides, where that matters."""
    traced = {new: value(old) for old, new in to.done.items() if isinstance(old.meta["val"], Tensor)}
    moved = {node: was for node, was in traced.items() if not _lie_alike(value(node), was)}
    for node in list(to.graph.nodes) if moved else ():
        given = [n for n in node.all_input_nodes if n in moved]
        if not given:
            continue
        now = _results(node)
        if now is None:
            _copy(to, node, {n: moved[n] for n in given})
        elif isinstance(now, Tensor) and not _lie_alike(now, value(node)):
            moved[node], node.meta["val"] = value(node), now


def _results(node: fx.Node) -> Any:
    """What a node makes of its inputs as they lie by now; None: it needs them as they were."""
    namespace = getattr(node.target, "namespace", "")
    if node.op == "output" or node.target in AS_IT_LIES:
        return None
    if namespace not in NAMESPACES or isinstance(node.meta.get("val"), list | tuple):
        return None if namespace not in NAMESPACES else node.meta["val"]
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next(value(n) for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor))
    try:
        with cast(Any, mode).fake_mode:
            return cast(Any, node.target)(*args, **kwargs)
    except (RuntimeError, ValueError):  # no view of what lies so
        return None
