"""Embedding bags by three passes: a lookup of all own tables, the library's all-to-all, a concat.

Nothing here is written by a peer but the library's buffer, so calls need no memory of the group.
With `out=` they take its turns as the fused kernel does, and keep its promise: when a call has
ended, in stream order, every rank has begun it, and so has read what an earlier one had left.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.ops.embedding_call import Given, How, taken
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import WAYS, Facts, Layout, Way
from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.launch_embedding import Lookup
from counterpoint.runtime.workspace import Workspace


class Serial:
    """The serial way on a GPU, and a rank by itself, whose lookup writes the output.

    Each way of the lookup is compiled when a call first takes it: nobody waits in a kernel of ours.
    """

    def __init__(self, facts: Facts, workspace: Workspace) -> None:
        self.workspace, self.layout = workspace, facts.layout
        self.lookups: dict[Way, Lookup] = {}
        like: Lookup | None = None
        for _, way in WAYS:
            like = Lookup(facts, workspace.rank, workspace.device, way, like)
            self.lookups[way] = like
        self._word = torch.zeros(1, dtype=torch.int32, device=workspace.device)

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        lookup = taken(self.lookups, given, self.layout)
        if torch.cuda.is_current_stream_capturing():
            self.workspace.keep(self, lookup.chunks(given.tables))
        y = None
        if out is not None:
            y = out.view(out.take())
            # peers go by what this rank has read before the call, on whatever stream that was
            lanes_of(self.workspace).follow()
        alone = len(self.layout.batch) == 1
        sent = y if alone else None
        if sent is None:
            shape = self.layout.num_bags, lookup.columns
            sent = given.indices.new_empty(shape, dtype=self.layout.dtype)
        lookup(*given, sent)
        if alone:
            return sent
        if y is not None and not all_hear(self.layout):
            dist.all_reduce(self._word, group=self.workspace.group)
        return exchanged(sent, self.layout, how.rank, self.workspace.group, y)


def all_hear(layout: Layout) -> bool:
    """Whether every rank gets rows of every other: of none, the library sends nothing at all."""
    return all(layout.batch) and all(layout.dims)


def exchanged(
    sent: Tensor, layout: Layout, rank: int, group: dist.ProcessGroup, y: Tensor | None = None
) -> Tensor:
    """Own bags' rows of all tables, side by side.

    Args:
        sent: [bags of all ranks, columns of own tables], of this rank.
        y: where they go, [own bags, columns of all tables]; None: a new tensor.
    """
    columns, own = [sum(dims) for dims in layout.dims], layout.batch[rank]
    got = sent.new_empty(own * layout.columns)
    sizes = [own * c for c in columns]
    splits = [bags * columns[rank] for bags in layout.batch]
    if layout.num_bags:
        dist.all_to_all_single(got, sent.view(-1), sizes, splits, group=group)
    parts = [p.view(own, c) for p, c in zip(got.split(sizes), columns, strict=True) if c]
    out: Any = {} if y is None else {"out": y}
    return torch.cat(parts, 1, **out)
