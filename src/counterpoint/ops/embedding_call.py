"""A call of embedding_bag_all_to_all, as what runs it takes it."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from counterpoint.runtime.embedding_layout import Layout, Way, way_for
from counterpoint.runtime.launch_embedding import Pooling

AUTO, FUSED, SERIAL = PLANS = "auto", "fused", "serial"
PLAIN = {Tensor, Parameter, type(None)}


class Given(NamedTuple):
    """The tensors of a call."""

    tables: list[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None

    def plain(self) -> bool:
        """Whether all are what they seem: no subclass, which has to see its operators."""
        tables, *others = self
        return PLAIN.issuperset(map(type, tables)) and PLAIN.issuperset(map(type, others))


class How(NamedTuple):
    """All else of a call, but its group."""

    mean: bool
    last: bool
    sparse: bool
    layout: Layout
    rank: int
    plan: str = AUTO

    def flat(self) -> tuple[Any, ...]:
        """As the dispatcher takes it."""
        layout = self.layout
        return (self.mean, self.last, self.sparse, layout.flat_dims, [*layout.batch], layout.dtype,
                self.rank, self.plan)  # fmt: skip


P = TypeVar("P", bound=Pooling)


def taken(ways: dict[Way, P], given: Given, layout: Layout) -> P:
    """The way for so many indices; while a graph is captured, one that is compiled."""
    found = ways[way_for(given.indices.numel(), len(given.tables) * layout.num_bags)]
    if not torch.cuda.is_current_stream_capturing():
        return found
    vec_in = found.chunks(given.tables).vec_in
    return next((w for w in (found, *ways.values()) if vec_in in w.launches), found)
