"""How a call of embedding_bag_all_to_all runs: in one kernel, by three, or by torch and gloo."""

from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import agreement
from counterpoint.ops.embedding_call import SERIAL, Given, How, taken
from counterpoint.ops.embedding_check import OP, problem_with
from counterpoint.ops.embedding_choice import way_of
from counterpoint.ops.embedding_gradients import pooled_on_cpu
from counterpoint.ops.embedding_serial import Serial, exchanged
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import WAYS, Facts, Way
from counterpoint.runtime.fused import fused_memory, in_turn
from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.launch_embedding import Place, Sender, place_of
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import Workspace, workspace_of


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
        sender = taken(self.senders, given, self.layout)
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


class _OnCpuRanks:
    """What the kernel computes, by torch and gloo.

    gloo ends the process of a rank whose peer sends another size, and values are wrong on one rank
    only: so each call is compared first.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __call__(self, given: Given, how: How, out: PooledOutputs | None) -> Tensor:
        layout = how.layout
        _compare(given, how, self.workspace)
        own = pooled_on_cpu(
            *given, layout.num_bags, last=how.last, mean=how.mean, dtype=layout.dtype
        )
        y = out.view(out.take()) if out is not None else None
        return exchanged(own, layout, how.rank, self.workspace.group, y)


def _compare(given: Given, how: How, workspace: Workspace) -> None:
    """Refuse a call that differs between ranks, or whose values are wrong on one of them.

    Raises:
        InputError: on all ranks, naming the one.
    """
    problem = problem_with(given.tables, given.indices, given.offsets, last=how.last)
    called = f"{how.layout}, plan {how.plan!r}"
    everyone = agreement.meet(OP, ({"op": OP, "how": called, "problem": problem}, None), workspace)
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
    way = way_of(given, how, workspace, into=out is not None)
    key = (OP, facts, SERIAL if way == SERIAL else out is not None)
    ready: Any = workspace.code.get(key)
    if ready is None:
        # what is made while a graph is captured is empty until its first replay
        workspace.refuse_growth("none: this is the first call of such bags, indices and weights")
        # memory that calls in any mode may write to
        with torch.inference_mode(False):
            if device.type == "cpu":
                ready = _OnCpuRanks(workspace)
            elif way == SERIAL:
                ready = Serial(facts, workspace)
            else:
                ready = _InOneKernel(facts, workspace, own_outputs=out is not None)
                ready.prepare(given, how, out)
        workspace.remember(key, ready)
    checks = device.type == "cuda" and agreement.checking()
    if checks and not torch.cuda.is_current_stream_capturing():
        _compare(given, how, workspace)
    return ready(given, how, out)
