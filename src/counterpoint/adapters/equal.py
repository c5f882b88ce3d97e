"""What is known to be equal on all ranks of a group while a graph is compiled.

The result of an all-reduce or an all-gather, and inputs of DTensors, replicated on the
dim of the mesh whose ranks the group has. Nothing else: parameters and buffers may differ by rank.
"""

from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext

from counterpoint.adapters.axes import CONVERT, TURNS, VIEWS

c10d: Any = torch.ops._c10d_functional
EQUAL = (c10d.all_reduce.default, c10d.all_gather_into_tensor.default)


def equal_on_ranks(node: fx.Node, group: str) -> bool:
    """Whether a node is known to have one value on all ranks of a group."""
    while node.target in (*VIEWS, *TURNS, CONVERT):
        node = cast(fx.Node, node.args[0])
    if node.op == "placeholder":
        return group in _replicated(node.graph).get(node, ())
    if node.target is not c10d.wait_tensor.default:
        return False
    sent = cast(fx.Node, node.args[0])
    return sent.target in EQUAL and sent.args[-1] == group


def _replicated(graph: fx.Graph) -> dict[fx.Node, set[str]]:
    """The groups on whose ranks an input is replicated, as far as torch says it."""
    metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    given: Any = getattr(metadata, "subclass_inp_meta", None) or ()
    inputs = [n for n in graph.nodes if n.op == "placeholder" and "tangents" not in n.name]
    if sum(getattr(each, "arg_count", 1) for each in given) != len(inputs):
        return {}
    found: dict[fx.Node, set[str]] = {}
    for each in given:
        taken = [inputs.pop(0) for _ in range(getattr(each, "arg_count", 1))]
        spec = (getattr(each, "meta", None) or (None,))[0]
        placements, mesh = getattr(spec, "placements", ()), getattr(spec, "mesh", None)
        dims = [i for i, placement in enumerate(placements) if placement.is_replicate()]
        if mesh is not None and len(taken) == 1:
            found[taken[0]] = {mesh.get_group(i).group_name for i in dims}
    return found
