"""`cp.overlap(model)`: gathers and reduce-scatters of an FSDP2 model, behind its computation."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.launch_shards import Member, Shards, Slot
from counterpoint.fsdp.plan_shards import Predicted, predicted
from counterpoint.fsdp.torch_parts import Group, Hooks
from counterpoint.fsdp.trial import Trial, Verdict
from counterpoint.ops.auto import knowledge_of
from counterpoint.runtime.workspace import Workspace, workspace_of

OP = "overlap"
HELD = 2  # scatters whose gradients are held; later ones wait


@dataclass
class FoundGroup:
    """One parameter group of a model, and what is done with it.

    Attributes:
        name: of its module.
        parameters: how many, and `numel` elements.
        why: why FSDP2 gathers it itself, or "".
        why_scatter: why FSDP2 reduces its gradients itself, or "".
        kept: whether its parameters have memory of their own, rather than a slot.
        predicted: seconds in place and by torch; None: nothing is known of the machine.
        notes: what else is to be said.
    """

    name: str
    parameters: int
    numel: int
    why: str = ""
    why_scatter: str = ""
    kept: bool = False
    predicted: Predicted | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{self.name}: {self.parameters} parameters, {self.numel / 1e6:.2f} M"
        if self.why:
            return f"{what}: left to torch, {self.why}"
        where = "gathered in place, kept" if self.kept else "gathered in place"
        if not self.why_scatter:
            scattered = "gradients pushed in place, summed in fp32"
        elif self.why_scatter == "frozen":
            scattered = "frozen: no gradients"
        else:
            scattered = f"gradients left to torch, {self.why_scatter}"
        predicted = [f"predicted alone: {self.predicted}"] if self.predicted else []
        return "; ".join([f"{what}: {where}", scattered, *predicted, *self.notes])


class Overlapped:
    """What `overlap` has done with a model.

    Attributes:
        found: its parameter groups; empty before its first forward.
        verdict: what the trial on real steps has measured; None: not yet, or there is none.
    """

    def __init__(
        self, model: nn.Module, *, slots: int, gather: bool, scatter: bool, trial_steps: int
    ) -> None:
        self.found: list[FoundGroup] = []
        self.verdict: Verdict | None = None
        self._model, self._slots = model, slots
        self._wants, self._trial_steps = (gather, scatter), trial_steps
        self._states = torch_parts.states_of(model)
        self._hooks: list[Hooks] = []
        self._members: list[Member] = []
        self._found: dict[int, FoundGroup] = {}  # by id of a member's group
        self._shards: dict[int, Shards] = {}  # by id of a member's group
        self._all: list[Shards] = []
        self._held: deque[tuple[Any, object]] = deque()
        self._trial: Trial | None = None
        self._ours, self._ready, self._reduced = True, False, False
        self._key: list[Hashable] = []
        self._state = "on"
        torch_parts.watch_roots(self._states, self._begin)

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """What is done with each group, why not more, and what the trial has measured."""
        if not self._ready:
            return "nothing yet: the model has not run"
        lines = [str(group) for group in self.found]
        if self.verdict:
            v = self.verdict
            times = f"{v.as_is_ms:.2f} ms a step as is, {v.ours_ms:.2f} overlapped"
            speedup = f"{v.as_is_ms / v.ours_ms:.2f}x, 95 % interval {v.low:.2f} to {v.high:.2f}"
            lines.append(f"tried on {2 * v.pairs} steps: {times}: {speedup}")
        elif self._trial:
            lines.append("being tried on real steps, beside torch's own way")
        if sizes := ", ".join(f"{n} {b / 2**20:.0f} MiB" for n, b in self.num_bytes().items() if b):
            lines.append(f"memory of this rank: {sizes}")
        lines.append(self._state)
        return "\n".join(lines)

    def num_bytes(self) -> dict[str, int]:
        """Memory on this rank: what is published, inboxes, and gathered parameters."""
        gathered = {b.data_ptr(): b.numel() * b.itemsize for m in self._members for b in m.buffers}
        return {
            "published": sum(s.shadow.num_bytes for s in self._all),
            "inboxes": sum(s.inbox.num_bytes for s in self._all if s.inbox),
            "gathered": sum(gathered.values()),
        }

    def off(self) -> None:
        """Give everything back to torch, between two steps. `overlap` may be called again."""
        self._drain()
        for hooks in self._hooks:
            torch_parts.drop_gathered(hooks.g)
            hooks.take()
        self._hooks.clear()
        torch_parts.unwatch_roots(self._states)
        for state in self._states:
            state.__dict__.pop("_counterpoint_overlapped", None)
        self._members.clear()
        self._shards.clear()
        self._all.clear()
        self._state = "off: torch's own way"

    # -- once, when FSDP2 has set itself up

    def _set_up(self) -> None:
        self._ready = True
        groups: list[Group] = []
        for state in self._states:
            groups += [g for g in torch_parts.groups_of(state) if not any(g is h for h in groups)]
        for g in groups:
            self._find(g)
        self._compare(groups)
        sets: dict[Workspace, list[Member]] = {}
        for member in self._members:
            g = member.g
            workspace = workspace_of(torch_parts.shard_group(g), torch.device(g.device))
            sets.setdefault(workspace, []).append(member)
        for workspace, members in sets.items():
            self._share(workspace, members)
        shared = [m for m in self._members if id(m.g) in self._shards]
        self._members = shared
        if not shared:
            self._state = "left to torch: no group qualifies"
            return
        self._take_slots(shared)
        for member in shared:
            self._install(member)
        if self._trial_steps:
            first = self._all[0].workspace
            on_gpu = first.device.type == "cuda"
            self._trial = Trial(self._trial_steps, first.gather, on_gpu=on_gpu)

    def _compare(self, groups: Sequence[Group]) -> None:
        """Refuse models and settings that differ by rank.

        Raises:
            InputError: they do; on all ranks that share a group.
        """
        gather, scatter = self._wants
        settings = {"slots": self._slots, "gather": gather, "scatter": scatter,
                    "trial_steps": self._trial_steps}  # fmt: skip
        told: dict[Workspace, list[tuple[str, str]]] = {}
        for g, found in zip(groups, self.found, strict=True):
            group = torch_parts.shard_group(g)
            if group is not None and group.size() > 1:
                workspace = workspace_of(group, torch.device(g.device))
                facts = told.setdefault(workspace, [(k, str(v)) for k, v in settings.items()])
                facts.append(("model", _told(g, found)))
        for workspace, facts in told.items():
            everyone = [[*map(tuple, theirs)] for theirs in workspace.gather(facts)]
            for r, theirs in enumerate(everyone):
                for (name, here), (_, there) in zip(everyone[0], theirs, strict=False):
                    if here != there:
                        want = f"equal on all ranks, {here} as on rank 0"
                        raise InputError(OP, name, want=want, got=f"{there} on rank {r}")
                if len(theirs) != len(everyone[0]):
                    want = f"equal on all ranks, {len(everyone[0])} facts as on rank 0"
                    raise InputError(OP, "model", want=want, got=f"{len(theirs)} on rank {r}")

    def _find(self, g: Group) -> None:
        facts = [torch_parts.fact_of(p) for p in g.fsdp_params]
        found = FoundGroup(torch_parts.name_of(g), len(facts), sum(f.orig for f in facts))
        gather, scatter = self._wants
        found.why = torch_parts.why_not_gathered(g) if gather else "gather=False"
        found.why_scatter = torch_parts.why_not_scattered(g) if scatter else "scatter=False"
        if not found.why_scatter and g._reduce_dtype is None and facts[0].dtype != torch.float32:
            found.notes.append("torch would sum them in their own dtype, so bits differ")
        self.found.append(found)
        if not found.why:
            member = Member(g, facts, scatters=not found.why_scatter)
            self._members.append(member)
            self._found[id(g)] = found

    def _share(self, workspace: Workspace, members: Sequence[Member]) -> None:
        """Have the memory of one shard group; where a rank cannot, torch's way on all."""
        of = self._found
        why = "its ranks are on several hosts" if workspace.islands.number > 1 else ""
        machine = None if why else knowledge_of(workspace).machine
        for member in members if machine else ():
            assert machine is not None
            found = of[id(member.g)]
            found.predicted = predicted(workspace.board.ranks, *member.sizes(), machine)
            if found.predicted.slower:
                found.why = f"predicted to be slower: {found.predicted}"
        members = [m for m in members if not of[id(m.g)].why]
        if not members:
            return
        try:
            if not why:
                shards = Shards(workspace, members, torch_parts.device_module(workspace.device))
                self._all.append(shards)
                self._shards.update((id(m.g), shards) for m in members)
                return
        except (OSError, torch.OutOfMemoryError, UnsupportedError) as error:
            why = f"no memory that all ranks share: {error}"
        for member in members:
            of[id(member.g)].why = why

    def _take_slots(self, members: Sequence[Member]) -> None:
        """Memory for gathered parameters: in turn where they are resharded, else their own."""
        of = self._found
        turns = [m for m in members if not torch_parts.keeps_gathered(m.g)]
        most = max((m.gathered_bytes for m in turns), default=0)
        problem, slots = "", list[Slot]()
        try:
            device = members[0].g.device
            slots = [Slot(most, device) for _ in range(min(self._slots, len(turns)))]
            for i, member in enumerate(turns):
                member.slot = slots[i % len(slots)]
                member.buffers = member.slot.buffers(member)
            for member in members:
                if member.slot is None:
                    of[id(member.g)].kept = True
                    member.buffers = Slot(member.gathered_bytes, device).buffers(member)
        except torch.OutOfMemoryError as error:
            problem = f"no memory for gathered parameters: {error}"
        for shards in self._all:
            problem = next((p for p in shards.workspace.gather(problem) if p), "")
        if problem:
            raise UnsupportedError(f"{OP}: {problem}; call it with slots=1, or without")

    def _install(self, member: Member) -> None:
        shards = self._shards[id(member.g)]
        methods = {
            "unshard": partial(self._unshard, member, shards),
            "wait_for_unshard": partial(self._wait, member, shards),
            "_to_sharded": partial(self._to_sharded, member),
            "post_backward": partial(self._post_backward, member, shards),
        }
        torch_parts.drop_gathered(member.g)
        member.hooks = Hooks(member.g, methods, member.buffers)
        self._hooks.append(member.hooks)

    # -- each step

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward of a root begins: what was published is of no use any more."""
        if not self._ready:
            self._set_up()
        if not self._members:
            return
        capturing = self._all[0].on_gpu and torch.cuda.is_current_stream_capturing()
        self._drain(wait=not capturing)
        for shards in self._all:
            shards.stale = True
            if not capturing:
                shards.check()
        if capturing:
            self._freeze()
        elif self._trial and torch.is_grad_enabled():
            self._try(_key_of(args, kwargs))

    def _freeze(self) -> None:
        """A step is captured: it keeps the way that it goes now, and waits for nothing before."""
        self._trial = None
        for member in self._members:
            if member.slot:
                member.slot.left = None

    def _try(self, key: Hashable) -> None:
        """One more step of the trial, where an optimizer step lies behind."""
        assert self._trial is not None
        if self._reduced or not self._key:
            ours = self._trial.begin(tuple(self._key))
            self._key, self._reduced = [], False
            if ours is None:
                self.verdict, self._trial = self._trial.verdict, None
                assert self.verdict is not None
                if not self.verdict.ours:
                    self.off()
                    self._state = "left to torch: overlapping was not faster beyond doubt"
                    return
                ours = True
            self.switch(ours=ours)
        self._key.append(key)

    def switch(self, *, ours: bool) -> None:
        """Go our way or torch's from the next step on; all memory is kept."""
        if ours == self._ours:
            return
        self._drain()
        self._ours = ours
        for hooks in self._hooks:
            torch_parts.drop_gathered(hooks.g)
            hooks.swap(ours)

    def _drain(self, *, wait: bool = True) -> None:
        """Let go of gradients that have been pushed."""
        while self._held:
            event, _ = self._held.popleft()
            if wait:
                self._all[0].device.current_stream().wait_event(event)

    def _unshard(self, member: Member, shards: Shards, async_op: bool = False) -> None:
        g = member.g
        if not self._ours:
            torch_parts.by_torch(g, "unshard", async_op)
            return
        if torch_parts.skips_gather(g):
            return
        streams = torch_parts.streams(g)
        assert streams is not None, "a group is overlapped once FSDP2 has set itself up"
        stream, device = streams[0], shards.device
        others: list[Member] = []
        if torch_parts.is_outside(g):  # by hand: whatever was done to its shards before
            stream.wait_stream(device.current_stream())
            shards.publish([member], stream)
        elif shards.stale:  # what is needed first, first: the others beside its computation
            shards.publish([member], stream)
            shards.stale, others = False, [m for m in shards.members if m is not member]
        elif member.published != torch_parts.versions(g):
            stream.wait_stream(device.current_stream())
            shards.publish([member], stream)
        self._take(member, stream)
        shards.gather(member, stream)
        torch_parts.gathering(g, stream.record_event())
        if others:
            shards.publish(others, stream, more=True)

    def _take(self, member: Member, stream: Any) -> None:
        """Have a place to gather to: the slot, or memory of its own where that is in use."""
        slot = member.slot
        if slot is None:
            return
        holder = slot.holder
        if holder is not None and holder is not member and not torch_parts.is_free(holder.g):
            member.slot = None
            member.buffers = Slot(member.gathered_bytes, slot.memory.device).buffers(member)
            member.pulls.clear()
            member.hooks.move(member.buffers)
            found = self._found[id(member.g)]
            found.kept = True
            found.notes.append("more groups are gathered at a time than there are slots")
            return
        if slot.left is not None:
            stream.wait_event(slot.left)
        slot.holder = member

    def _wait(self, member: Member, shards: Shards) -> None:
        g = member.g
        if not self._ours:
            torch_parts.by_torch(g, "wait_for_unshard")
        elif torch_parts.is_pending(g):
            if (event := torch_parts.gather_event(g)) is not None:  # CPU ranks have none
                shards.device.current_stream().wait_event(event)
            torch_parts.use_gathered(g)

    def _to_sharded(self, member: Member) -> None:
        g = member.g
        was = not torch_parts.is_sharded(g)
        torch_parts.to_sharded(g)
        if was and self._ours and member.slot is not None:
            device = self._shards[id(g)].device
            member.slot.left = device.current_stream().record_event()

    def _post_backward(self, member: Member, shards: Shards, *given: Any) -> None:
        g = member.g
        self._reduced = self._reduced or g.reduce_grads
        if not self._ours or not member.scatters or torch_parts.reduces_by_torch(g):
            torch_parts.by_torch(g, "post_backward", *given)
            return
        grads = [
            (i, t if t.is_contiguous() else t.contiguous()) for i, t in torch_parts.begin_reduce(g)
        ]
        if not grads:
            return
        streams, device = torch_parts.streams(g), shards.device
        assert streams is not None
        here, stream = device.current_stream(), streams[1]
        while len(self._held) >= HELD:
            event, _ = self._held.popleft()
            here.wait_event(event)
        stream.wait_stream(here)
        with device.stream(stream):
            total = shards.scatter(member, grads, torch_parts.divisor(g), stream)
        if torch_parts.is_replicated(g):
            streams[2].wait_stream(stream)
            stream = streams[2]
        with device.stream(stream):
            if torch_parts.is_replicated(g):
                torch_parts.sum_over_replicas(g, total)
            reduced = member.parts(total, [i for i, _ in grads])
            ended = torch_parts.give_gradients(g, reduced, stream.record_event)
        torch_parts.note_reduced(g, stream, ended)
        self._held.append((ended, (grads, total)))


def _told(g: Group, found: FoundGroup) -> str:
    """What ranks compare of a group."""
    facts = (torch_parts.fact_of(p) for p in g.fsdp_params)
    each = ", ".join(f"{f.name} {f.orig} {f.dtype} {'trained' * f.trains}" for f in facts)
    return "; ".join([f"{found.name}: {each}", *filter(None, (found.why, found.why_scatter))])


def _key_of(args: Any, kwargs: Any) -> Hashable:
    """Shapes of what a forward is given."""
    leaves = tree_leaves((args, kwargs))
    return tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor))


def overlap(
    model: nn.Module, *, slots: int = 2, gather: bool = True, scatter: bool = True,
    trial_steps: int = 16,
) -> Overlapped:  # fmt: skip
    """Hide the communication of an FSDP2 model behind its computation. One line, on all ranks.

    Parameters are gathered by copy engines, from where each rank publishes its shards to where
    matmuls read them; gradients are pushed from where autograd wrote them to their owner, who sums
    them in fp32. What FSDP2 does around its collectives, copies in and copies out, is gone. A group
    of parameters that cannot be had so stays torch's, and `explain` says why. Both ways are then
    tried by turns on the first optimizer steps; ours stays only where it is faster beyond doubt.

    Args:
        model: `fully_shard` has been called on it, or on modules of it.
        slots: gathered groups that have memory at a time, of those that are resharded.
        gather: gather in place.
        scatter: scatter gradients in place, of groups that are gathered so.
        trial_steps: optimizer steps to try at least, 64 at most; 0: none, overlap at once.

    Returns:
        What is done, and how to end it: see `Overlapped`.

    Raises:
        InputError: no module is one of FSDP2, or an argument is wrong.
        UnsupportedError: this torch's FSDP2 is none that we know.

    Example:
        >>> overlapped = counterpoint.overlap(model)  # doctest: +SKIP
        >>> print(overlapped.explain())  # doctest: +SKIP
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        fix = (
            "shard it by torch.distributed.fsdp.fully_shard; overlapping DDP brought 1.00x to 1.05x"
        )
        raise InputError(
            OP, "model", want="a model of FSDP2", got="DistributedDataParallel", fix=fix
        )
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(OP, "model", want="a torch.nn.Module", got=type(model).__name__)
    if type(slots) is not int or slots < 1:
        raise InputError(OP, "slots", want="a number from 1 on", got=slots)
    if type(trial_steps) is not int or trial_steps < 0:
        raise InputError(OP, "trial_steps", want="a number from 0 on", got=trial_steps)
    torch_parts.need(torch_parts.refusal())
    states = torch_parts.states_of(model)
    if not states:
        fix = "call torch.distributed.fsdp.fully_shard on it before"
        raise InputError(OP, "model", want="sharded by FSDP2", got=type(model).__name__, fix=fix)
    if any("_counterpoint_overlapped" in state.__dict__ for state in states):
        fix = "call off() on what overlap returned before"
        raise InputError(
            OP, "model", want="one that is not overlapped yet", got="one that is", fix=fix
        )
    made = Overlapped(model, slots=slots, gather=gather, scatter=scatter, trial_steps=trial_steps)
    for state in states:
        state._counterpoint_overlapped = True
    return made
