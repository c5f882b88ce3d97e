"""How a call of embedding_bag_all_to_all runs: in one kernel, by a lookup, or by torch and gloo."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import agreement
from counterpoint.ops.embedding_check import OP, problem_with
from counterpoint.ops.embedding_gradients import flat_dims, pooled_on_cpu
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import Facts, Layout, Way, way_for
from counterpoint.runtime.fused import fused_memory, in_turn
from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.launch_embedding import Lookup, Place, Sender, place_of
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import Workspace, workspace_of


class Given(NamedTuple):
    """The tensors of a call."""

    tables: list[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None


class How(NamedTuple):
    """All else of a call, but its group."""

    mean: bool
    last: bool
    sparse: bool
    layout: Layout
    rank: int

    def flat(self) -> tuple[Any, ...]:
        """As the dispatcher takes it."""
        dims, batch = flat_dims(self.layout), list(self.layout.batch)
        return self.mean, self.last, self.sparse, dims, batch, self.layout.dtype, self.rank


class _InOneKernel:
    """The fused kernel on a GPU: one for each way, compiled when it is first taken."""

    def __init__(self, facts: Facts, workspace: Workspace, *, own_outputs: bool) -> None:
        self.workspace, self.facts, self.layout = workspace, facts, facts.layout
        self.lanes = lanes_of(workspace)
        ranks = tuple(range(workspace.group.size()))
        self.tag = self.lanes.register(OP, "fused", (("rows of own bags", ranks),))
        self.memory = fused_memory(workspace)
        # of the layout, not of what may be one rank's alone: dtypes of indices and weights
        key = (OP, "place", facts.layout, own_outputs)
        place: Place | None = workspace.code.get(key)
        if place is None:
            place = place_of(self.memory, facts.layout, own_outputs=own_outputs)
            workspace.remember(key, place)
        self.place = place
        self.senders: dict[Way, Sender] = {}

    def sender(self, given: Given) -> Sender:
        """The one for so many indices; while a graph is captured, one that is compiled."""
        way = way_for(given.indices.numel(), len(given.tables) * self.layout.num_bags)
        found = self.senders.get(way)
        if found is None:
            if self.senders and torch.cuda.is_current_stream_capturing():
                return next(iter(self.senders.values()))
            found = Sender(self.facts, self.memory, self.place, self.tag, way)
            self.senders[way] = found
        return found

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        device = self.workspace.device
        sender = self.sender(given)
        if torch.cuda.is_current_stream_capturing():
            self.workspace.keep(sender, sender.chunks(given.tables))
        else:
            self.lanes.follow()
            in_turn(device)
        if out is not None:
            turn = out.take()
            sender(*given, (out.bases, out.turn_bytes, turn))
            return out.view(turn)
        shape = self.layout.batch[how.rank], self.layout.columns
        y = torch.empty(shape, dtype=self.layout.dtype, device=device)
        sender(*given)
        sender.copy_out(y)
        return y


class _Alone:
    """A rank by itself on a GPU: the lookup."""

    def __init__(self, facts: Facts, workspace: Workspace) -> None:
        self.workspace, self.layout, self.facts = workspace, facts.layout, facts
        self.lookups: dict[Way, Lookup] = {}

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        way = way_for(given.indices.numel(), len(given.tables) * self.layout.num_bags)
        lookup = self.lookups.get(way)
        if lookup is None:
            lookup = self.lookups[way] = Lookup(self.facts, 0, self.workspace.device, way)
        if torch.cuda.is_current_stream_capturing():
            self.workspace.keep(lookup, lookup.chunks(given.tables))
        shape = self.layout.num_bags, self.layout.columns
        like = given.indices
        y = out.view(out.take()) if out else like.new_empty(shape, dtype=self.layout.dtype)
        lookup(*given, y)
        return y


class _OnCpuRanks:
    """What the kernel computes, by torch and gloo.

    gloo ends the process of a rank whose peer sends another size, and values are wrong on one rank
    only: so each call is compared first.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        layout, rank, group = how.layout, how.rank, self.workspace.group
        _compare(given, how, self.workspace)
        own = pooled_on_cpu(
            *given, layout.num_bags, last=how.last, mean=how.mean, dtype=layout.dtype
        )
        columns = [sum(dims) for dims in layout.dims]
        got = own.new_empty(layout.batch[rank] * layout.columns)
        sizes = [layout.batch[rank] * c for c in columns]
        dist.all_to_all_single(
            got, own.flatten(), sizes, [b * columns[rank] for b in layout.batch], group=group
        )
        parts = [p.view(-1, c) for p, c in zip(got.split(sizes), columns, strict=True) if c]
        y = torch.cat(parts, 1)
        return y if out is None else out.view(out.take()).copy_(y)


def _compare(given: Given, how: How, workspace: Workspace) -> None:
    """Refuse a call that differs between ranks, or whose values are wrong on one of them.

    Raises:
        InputError: on all ranks, naming the one.
    """
    problem = problem_with(given.tables, given.indices, given.offsets, last=how.last)
    everyone = agreement.meet(OP, {"op": OP, "how": str(how.layout), "problem": problem}, workspace)
    for rank, said in enumerate(everyone):
        if said.get("how") != everyone[0].get("how"):
            want = f"equal on all ranks, {everyone[0].get('how', 'another call')} as on rank 0"
            raise InputError(OP, "arguments", want=want, got=f"{said.get('how')} on rank {rank}")
        if said["problem"]:
            what, want, got = said["problem"].split("|")
            raise InputError(OP, what, want=want, got=f"{got} on rank {rank}")


def run(given: Given, how: How, group_name: str, out: PooledOutputs | None = None) -> Tensor:
    """Prepare and run; what is prepared is remembered."""
    device = given.indices.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(given, how, group_name, out)
    workspace = workspace_of(group_of(group_name), device)
    workspace.check()
    weights = None if given.weights is None else given.weights.dtype
    facts = Facts(how.layout, how.mean, weights, given.indices.dtype, given.offsets.dtype)
    key = (OP, facts, out is not None)
    ready: Any = workspace.code.get(key)
    if ready is None:
        # memory that calls in any mode may write to
        with torch.inference_mode(False):
            if device.type == "cpu":
                ready = _OnCpuRanks(workspace)
            elif len(how.layout.batch) == 1:
                ready = _Alone(facts, workspace)
            else:
                ready = _InOneKernel(facts, workspace, own_outputs=out is not None)
        workspace.remember(key, ready)
    if device.type == "cuda" and agreement.checking():
        _compare(given, how, workspace)
    return ready(given, how, out)
