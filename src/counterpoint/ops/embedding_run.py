"""How a call of embedding_bag_all_to_all runs: in one kernel, by a lookup, or by torch and gloo."""

from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import agreement
from counterpoint.ops.embedding_check import OP, problem_with
from counterpoint.ops.embedding_gradients import flat_dims, pooled_on_cpu
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import WAYS, Facts, Layout, Way, way_for
from counterpoint.runtime.fused import fused_memory, in_turn
from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.launch_embedding import Lookup, Place, Pooling, Sender, place_of
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
    """The fused kernel on a GPU: one for each way, all compiled at the first call."""

    def __init__(self, facts: Facts, workspace: Workspace, *, own_outputs: bool) -> None:
        self.workspace, self.layout = workspace, facts.layout
        self.lanes = lanes_of(workspace)
        ranks = tuple(range(workspace.group.size()))
        tag = self.lanes.register(OP, "fused", (("rows of own bags", ranks),))
        memory = fused_memory(workspace)
        # of the layout, not of what may be one rank's alone: dtypes of indices and weights
        key = (OP, "place", facts.layout, own_outputs)
        place: Place | None = workspace.agreed.get(key)
        if place is None:
            place = place_of(memory, facts.layout, own_outputs=own_outputs)
            workspace.agreed[key] = place
        self.senders: dict[Way, Sender] = {}
        like: Sender | None = None
        for _, way in WAYS:
            like = self.senders[way] = Sender(facts, memory, place, tag, way, like)
        self._met = (OP, "compiled", facts.layout, facts.mean, own_outputs)

    def prepare(self, given: Given, how: How, out: PooledOutputs | None) -> None:
        """Compile all ways; at the first call of all ranks, wait until all of them have."""
        y = None if out else self._output(how)
        turn = (out.bases, out.turn_bytes, 0) if out else None
        for sender in self.senders.values():
            sender.prepare(*given, turn, y)
        if self._met not in self.workspace.agreed:
            agreement.meet(OP, ({"op": OP}, None), self.workspace)
            self.workspace.agreed[self._met] = True

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        sender = _taken(self.senders, given, self.layout)
        if torch.cuda.is_current_stream_capturing():
            self.workspace.keep(sender, sender.chunks(given.tables))
        else:
            self.lanes.follow()
            in_turn(self.workspace.device)
        if out is not None:
            turn = out.take()
            sender(*given, (out.bases, out.turn_bytes, turn))
            return out.view(turn)
        y = self._output(how)
        sender(*given)
        sender.copy_out(y)
        return y

    def _output(self, how: How) -> Tensor:
        shape = self.layout.batch[how.rank], self.layout.columns
        return torch.empty(shape, dtype=self.layout.dtype, device=self.workspace.device)


class _Alone:
    """A rank by itself on a GPU: the lookup, compiled for each way when a call first takes it."""

    def __init__(self, facts: Facts, workspace: Workspace) -> None:
        self.workspace, self.layout = workspace, facts.layout
        self.lookups: dict[Way, Lookup] = {}
        like: Lookup | None = None
        for _, way in WAYS:
            like = self.lookups[way] = Lookup(facts, 0, workspace.device, way, like)

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        lookup = _taken(self.lookups, given, self.layout)
        if torch.cuda.is_current_stream_capturing():
            self.workspace.keep(lookup, lookup.chunks(given.tables))
        shape = self.layout.num_bags, self.layout.columns
        like = given.indices
        y = out.view(out.take()) if out else like.new_empty(shape, dtype=self.layout.dtype)
        lookup(*given, y)
        return y


P = TypeVar("P", bound=Pooling)


def _taken(ways: dict[Way, P], given: Given, layout: Layout) -> P:
    """The way for so many indices; while a graph is captured, one that is compiled."""
    found = ways[way_for(given.indices.numel(), len(given.tables) * layout.num_bags)]
    if not torch.cuda.is_current_stream_capturing():
        return found
    vec_in = found.chunks(given.tables).vec_in
    return next((w for w in (found, *ways.values()) if vec_in in w.launches), found)


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
    everyone = agreement.meet(
        OP, ({"op": OP, "how": str(how.layout), "problem": problem}, None), workspace
    )
    for rank, (said, _) in enumerate(everyone):
        if said.get("how") != everyone[0][0].get("how"):
            want = f"equal on all ranks, {everyone[0][0].get('how', 'another call')} as on rank 0"
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
        # what is made while a graph is captured is empty until its first replay
        workspace.refuse_growth("none: this is the first call of such bags, indices and weights")
        # memory that calls in any mode may write to
        with torch.inference_mode(False):
            if device.type == "cpu":
                ready = _OnCpuRanks(workspace)
            elif len(how.layout.batch) == 1:
                ready = _Alone(facts, workspace)
            else:
                ready = _InOneKernel(facts, workspace, own_outputs=out is not None)
                ready.prepare(given, how, out)
        workspace.remember(key, ready)
    checks = device.type == "cuda" and agreement.checking()
    if checks and not torch.cuda.is_current_stream_capturing():
        _compare(given, how, workspace)
    return ready(given, how, out)
