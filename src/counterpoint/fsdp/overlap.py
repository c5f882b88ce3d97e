"""`cp.overlap(model)`: gathers and reduce-scatters of an FSDP2 model, behind its computation."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
        self._seen: set[int] = set()  # ids of states that FSDP2 had set up
        self._captured = False  # the last forward of a root was in a capture
        self._members: list[Member] = []
        self._found: dict[int, FoundGroup] = {}  # by id of a member's group
        self._shards: dict[int, Shards] = {}  # by id of a member's group
        self._all: list[Shards] = []
        self._held: deque[tuple[Any, object]] = deque()
        self._trial: Trial | None = None
        self._ours, self._reduced = True, False
        self._key: list[Hashable] = []
        self._state = "on"
        torch_parts.watch_roots(self._states, self._begin)

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """What is done with each group, why not more, and what the trial has measured."""
        if not self.found:
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
        """Give everything back to torch, between two steps, on all ranks. It may be called again.

        Raises:
            PeerTimeoutError: a rank does not call it.
        """
        self._release()
        for member in self._members:
            member.hooks.take()
        torch_parts.unwatch_roots(self._states)
        for state in self._states:
            state.__dict__.pop("_counterpoint_overlapped", None)
        self._members.clear()
        self._shards.clear()
        self._found.clear()
        self._trial = None
        self._state = "off: torch's own way"

    def _release(self) -> None:
        """Let go of the memory that ranks share, once none of them uses it any more."""
        self._drain()
        for member in self._members:
            device = self._shards[id(member.g)].device
            torch_parts.drop_gathered(member.g, device.current_stream())
        if self._all and self._all[0].on_gpu:
            torch.cuda.synchronize()
        for shards in self._all:
            shards.workspace.gather(None)
            shards.release()
        self._all.clear()

    # -- once, when FSDP2 has set itself up

    def _set_up(self) -> None:
        """Find and take what FSDP2 has set up by now: all groups, or those of one of several roots.

        Raises:
            InputError: models or settings differ by rank.
            UnsupportedError: there is no memory for gathered parameters.
        """
        states = [s for s in self._states if torch_parts.is_set_up(s) and id(s) not in self._seen]
        groups: list[Group] = []
        for state in states:
            groups += [g for g in torch_parts.groups_of(state) if not any(g is h for h in groups)]
        found = [self._describe(g) for g in groups]
        self._compare(groups, found)
        self._seen |= {id(state) for state in states}
        self.found += found
        sets: dict[Workspace, list[Member]] = {}
        for g, each in zip(groups, found, strict=True):
            if not each.why:
                facts = [torch_parts.fact_of(p) for p in g.fsdp_params]
                member = Member(g, facts, scatters=not each.why_scatter)
                self._found[id(g)] = each
                workspace = workspace_of(torch_parts.shard_group(g), torch.device(g.device))
                sets.setdefault(workspace, []).append(member)
        shared: list[Member] = []
        for workspace, members in sets.items():
            shared += self._share(workspace, members)
        if shared:
            self._take_slots(shared)
        for member in shared:
            self._install(member)
        self._members += shared
        self._state = "on" if self._members else "left to torch: no group qualifies"
        if self._trial_steps and self._trial is None and shared:
            self._trial = self._new_trial()

    def _new_trial(self) -> Trial | None:
        """A trial whose verdict all ranks hear; None: no shard group has all ranks."""
        ranks = [{*dist.get_process_group_ranks(s.workspace.group)} for s in self._all]
        for shards, mine in zip(self._all, ranks, strict=True):
            if all(mine >= others for others in ranks):
                return Trial(self._trial_steps, shards.workspace.gather, on_gpu=shards.on_gpu)
        self._trial_steps = 0
        return None

    def _compare(self, groups: Sequence[Group], every: Sequence[FoundGroup]) -> None:
        """Refuse models and settings that differ by rank.

        Raises:
            InputError: they do; on all ranks that share a group.
        """
        gather, scatter = self._wants
        settings = {"slots": self._slots, "gather": gather, "scatter": scatter,
                    "trial_steps": self._trial_steps}  # fmt: skip
        told: dict[Workspace, list[tuple[str, str]]] = {}
        for g, found in zip(groups, every, strict=True):
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

    def _describe(self, g: Group) -> FoundGroup:
        facts = [torch_parts.fact_of(p) for p in g.fsdp_params]
        found = FoundGroup(torch_parts.name_of(g), len(facts), sum(f.orig for f in facts))
        gather, scatter = self._wants
        found.why = torch_parts.why_not_gathered(g) if gather else "gather=False"
        found.why_scatter = torch_parts.why_not_scattered(g) if scatter else "scatter=False"
        if not found.why_scatter and torch_parts.sums_in_own_dtype(g):
            found.notes.append("torch would sum them in their own dtype, so bits differ")
        return found

    def _share(self, workspace: Workspace, members: Sequence[Member]) -> Sequence[Member]:
        """Have the memory of one shard group; the members that have it. Else torch's way on all."""
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
            return ()
        try:
            if not why:
                shards = Shards(workspace, members, torch_parts.device_module(workspace.device))
                self._all.append(shards)
                self._shards.update((id(m.g), shards) for m in members)
                return members
        except (OSError, torch.OutOfMemoryError, UnsupportedError) as error:
            why = f"no memory that all ranks share: {error}"
        for member in members:
            of[id(member.g)].why = why
        return ()

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
        torch_parts.drop_gathered(member.g, shards.device.current_stream())
        member.hooks = Hooks(member.g, methods, member.buffers)

    # -- each step

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward of a root begins: what was published is of no use any more."""
        if any(torch_parts.is_set_up(s) and id(s) not in self._seen for s in self._states):
            self._set_up()
        if not self._all:
            return
        capturing = self._all[0].on_gpu and torch.cuda.is_current_stream_capturing()
        if capturing or self._captured:  # events of a capture, or of before one, are waited for
            self._held.clear()  # by nobody: FSDP2 has ordered the streams
            for member in self._members:
                if member.slot:
                    member.slot.left = None
        self._captured = capturing
        self._drain()
        for shards in self._all:
            shards.stale = True
            if not capturing:
                shards.check()
        if capturing:
            self._trial = None  # the way that it goes now is kept
        elif self._trial and torch.is_grad_enabled():
            self._try(_key_of(args, kwargs))

    def _try(self, key: Hashable) -> None:
        """One more step of the trial, where an optimizer step lies behind."""
        assert self._trial is not None
        if self._reduced or not self._key:
            ours = self._trial.begin(tuple(self._key))
            self._key, self._reduced = [], False
            if ours is None:
                self.verdict, self._trial = self._trial.verdict, None
                assert self.verdict is not None
                ours = self.verdict.ours
                if not ours:
                    self._state = "left to torch: overlapping was not faster beyond doubt"
            self.switch(ours=ours)
            if not ours and self.verdict:
                self._release()
        self._key.append(key)

    def switch(self, *, ours: bool) -> None:
        """Go our way or torch's from the next gather on, in the same memory."""
        if ours != self._ours:
            for member in self._members:  # what gathers there by now comes before
                streams = torch_parts.streams(member.g)
                if streams is not None:
                    self._shards[id(member.g)].device.current_stream().wait_stream(streams[0])
        self._ours = ours

    def _drain(self) -> None:
        """Let go of gradients that have been pushed."""
        while self._held:
            event, _ = self._held.popleft()
            self._all[0].device.current_stream().wait_event(event)

    def _unshard(self, member: Member, shards: Shards, async_op: bool = False) -> None:
        g = member.g
        if torch_parts.skips_gather(g):
            return
        if not self._ours or torch_parts.gathers_by_torch(g):
            torch_parts.by_torch(g, "unshard", async_op)
            return
        streams = torch_parts.streams(g)
        assert streams is not None, "a group is overlapped once FSDP2 has set itself up"
        # where there is no room, this is a gather ahead: what needs it waits for it, see _wait
        if self._take(member, streams[0], now=False):
            self._gather(member, shards, streams[0])

    def _gather(self, member: Member, shards: Shards, stream: Any) -> None:
        g, device = member.g, shards.device
        others: list[Member] = []
        if torch_parts.is_outside(g):  # by hand: whatever was done to its shards before
            stream.wait_stream(device.current_stream())
            shards.publish([member], stream)
        elif shards.stale and self._captured:
            shards.publish(shards.members, stream)
            shards.stale = False
        elif shards.stale:  # what is needed first, first: the others beside its computation
            shards.publish([member], stream)
            shards.stale, others = False, [m for m in shards.members if m is not member]
        elif member.published != torch_parts.versions(g):
            stream.wait_stream(device.current_stream())
            shards.publish([member], stream)
        shards.gather(member, stream)
        torch_parts.gathering(g, stream.record_event())
        if others:
            shards.publish(others, stream, more=True)

    def _take(self, member: Member, stream: Any, *, now: bool) -> bool:
        """Have a place to gather to on a stream, the slot or memory of its own.

        Args:
            now: it is needed; else a gather on its way keeps its place.

        Returns:
            Whether there is one.

        Raises:
            UnsupportedError: it is needed, and there is none.
        """
        slot = member.slot
        if slot is None:
            return True
        holder, here = slot.holder, self._shards[id(member.g)].device.current_stream()
        if holder is not None and holder is not member and not torch_parts.is_free(holder.g):
            idle = torch_parts.is_idle(holder.g) and not holder.by_hand
            if idle or (now and torch_parts.is_pending(holder.g)):
                torch_parts.drop_gathered(holder.g, here)  # it is gathered again when it is needed
            elif not member.uses and not torch_parts.has_gradients(member.g):
                stream.wait_stream(here)  # the new memory may have been used there
                self._move(member)
                return True
            elif now:
                names = torch_parts.name_of(member.g), torch_parts.name_of(holder.g)
                what = f"{names[0]} is needed while {names[1]} is in use"
                raise UnsupportedError(f"{OP}: {what}; call it with more slots")
            else:
                return False
        if slot.left is not None:
            stream.wait_event(slot.left)
        slot.holder = member
        return True

    def _move(self, member: Member) -> None:
        """Give a group memory of its own; no graph holds its gathered parameters."""
        assert member.slot is not None
        member.buffers = Slot(member.gathered_bytes, member.slot.memory.device).buffers(member)
        member.slot = None
        member.pulls.clear()
        member.hooks.move(member.buffers)
        found = self._found[id(member.g)]
        found.kept = True
        found.notes.append("more groups are gathered at a time than there are slots")

    def _wait(self, member: Member, shards: Shards) -> None:
        g, here = member.g, shards.device.current_stream()
        streams = torch_parts.streams(g)
        assert streams is not None
        if torch_parts.is_sharded(g):
            member.by_hand = torch_parts.is_outside(g)
        if torch_parts.is_forward(g) and not torch_parts.in_backward():
            member.uses += 1
        if torch_parts.is_pending(g) and not torch_parts.is_ours(g):
            self._take(member, here, now=True)
            torch_parts.by_torch(g, "wait_for_unshard")
            return
        if not torch_parts.is_pending(g) and torch_parts.is_sharded(g) and self._ours:
            if torch_parts.skips_gather(g):  # not wanted in this backward
                return
            self._take(member, streams[0], now=True)
            self._gather(member, shards, streams[0])
        if torch_parts.is_pending(g):
            if (event := torch_parts.gather_event(g)) is not None:  # CPU ranks have none
                here.wait_event(event)
            torch_parts.use_gathered(g)

    def _to_sharded(self, member: Member) -> None:
        g = member.g
        was = not torch_parts.is_sharded(g)
        torch_parts.to_sharded(g)
        if was and member.slot is not None:
            device = self._shards[id(g)].device
            member.slot.left = device.current_stream().record_event()

    def _post_backward(self, member: Member, shards: Shards, *given: Any) -> None:
        g = member.g
        self._reduced = self._reduced or g.reduce_grads
        member.uses = max(0, member.uses - 1)
        unfrozen = any(
            trains and place.sent < 0
            for trains, place in zip(torch_parts.trains(g), member.places, strict=True)
        )
        ours = self._ours and member.scatters and not unfrozen
        if not ours or torch_parts.reduces_by_torch(g):
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
