"""What is known to be equal on all ranks of a group while a graph is compiled.

The result of an all-reduce or an all-gather, and what a linear layer of DTensors divides by the
ranks: DTensor makes shares of a bias so, where it is replicated. Nothing else is: parameters,
buffers and random numbers may differ by rank.
"""

from typing import Any, cast

import torch
from torch import fx

from counterpoint.adapters.graph.axes import CONVERT, TURNS, VIEWS

c10d: Any = torch.ops._c10d_functional
EQUAL = (c10d.all_reduce.default, c10d.all_gather_into_tensor.default)


def equal_on_ranks(node: fx.Node, group: str) -> bool:
    """Whether a node is, in whatever views and casts, what a collective gave to all ranks."""
    node = _source(node)
    if node.target is not c10d.wait_tensor.default:
        return False
    sent = cast(fx.Node, node.args[0])
    return sent.target in EQUAL and sent.args[-1] == group


def is_replicated(share: fx.Node, matmul: fx.Node) -> bool:
    """Whether a share of a bias was made of an input by DTensor, for the matmul that adds it.

    Both then come from one call of the model, whose own arithmetic is in calls of their own.
    """
    calls = [node.meta.get("source_fn_stack", [node])[-1] for node in (share, matmul)]
    source = _source(cast(fx.Node, share.args[0]))
    is_local = getattr(source.meta.get("desc"), "attr", "") == "_local_tensor"
    return source.op == "placeholder" and is_local and calls[0] == calls[1]


def _source(node: fx.Node) -> fx.Node:
    while node.target in (*VIEWS, *TURNS, CONVERT):
        node = cast(fx.Node, node.args[0])
    return node
