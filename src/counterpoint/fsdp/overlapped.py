"""A model of FSDP2 whose groups are gathered and scattered in place: set up once; each step."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.fsdp import room, torch_parts
from counterpoint.fsdp.found import FoundGroup
from counterpoint.fsdp.launch_shards import Shards
from counterpoint.fsdp.member import Member
from counterpoint.fsdp.plan_shards import predicted
from counterpoint.fsdp.torch_parts import Group, Hooks
from counterpoint.fsdp.trial import Trial, Verdict
from counterpoint.ops.auto import knowledge_of
from counterpoint.runtime.workspace import Workspace, workspace_of

OP = "overlap"
Memory = Literal["auto", "kept", "ring"]


class Overlapped:
    """What `overlap` has done with a model.

    Attributes:
        found: its parameter groups; empty before its first forward.
        verdict: what the trial on real steps has measured; None: not yet, or there is none.
    """

    def __init__(
        self, model: nn.Module, *, slots: int, gather: bool, scatter: bool, trial_steps: int,
        memory: Memory,
    ) -> None:  # fmt: skip
        self.found: list[FoundGroup] = []
        self.verdict: Verdict | None = None
        self._model, self._slots = model, slots
        self._wants, self._trial_steps = (gather, scatter), trial_steps
        self._memory: Memory = memory
        self._watch = room.Watch()
        self._states = torch_parts.states_of(model)
        self._seen: set[int] = set()  # ids of states that FSDP2 had set up
        self._on_gpu = torch.cuda.is_available()
        self._captured = False  # the last forward of a root was in a capture
        self._members: list[Member] = []
        self._found: dict[int, FoundGroup] = {}  # by id of a member's group
        self._shards: dict[int, Shards] = {}  # by id of a member's group
        self._all: list[Shards] = []
        self._held: tuple[Any, object] | None = None  # gradients that are pushed, until an event
        self._trial: Trial | None = None
        self._ours, self._reduced = True, False
        self._key: list[Hashable] = []
        self._state = "nothing yet: the model has not run"
        self._replayed = False  # a captured step was: no host sees what its replays gather
        torch_parts.watch_roots(self._states, self._begin)
        torch_parts.watch_steps(self)

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """What is done with each group, why not more, and what the trial has measured."""
        if not self.found:
            return self._state
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
            "published": sum(s.num_bytes()[0] for s in self._all),
            "inboxes": sum(s.num_bytes()[1] for s in self._all),
            "gathered": sum(gathered.values()),
        }

    def off(self) -> None:
        """Give everything back to torch, between two steps, on all ranks. It may be called again.

        Raises:
            PeerTimeoutError: a rank does not call it.
            UnsupportedError: a forward has no backward yet, on all ranks that share a group.
        """
        saved = any(torch_parts.is_saved(member.g) for member in self._members)
        for shards in {id(s): s for s in self._shards.values()}.values():
            saved = any(shards.workspace.gather(saved))
        if saved:
            what = "off() while a graph holds gathered parameters"
            raise UnsupportedError(f"{OP}: {what}; call it behind the backward")
        self._release()
        for member in self._members:
            member.hooks.take(member.buffers)
        torch_parts.unwatch_roots(self._states)
        torch_parts.unwatch_steps(self)
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
            here = self._shards[id(member.g)].current.stream()
            torch_parts.drop_gathered(member.g, here)
        if self._all and self._all[0].on_gpu:
            torch.cuda.synchronize()
        for shards in self._all:
            shards.workspace.gather(None)
            shards.release()
        self._all.clear()

    # -- once, when FSDP2 has set itself up

    def _ready(self, states: Sequence[Any], capturing: bool) -> bool:
        """Whether the groups of these can be taken now; equal on all ranks."""
        groups = [g for state in states for g in torch_parts.groups_of(state)]
        why = "a captured step keeps the way that it had before" if capturing else ""
        if any(torch_parts.is_saved(g) for g in groups):
            why = "a graph of an earlier forward holds gathered parameters"
        if any(torch_parts.holds_gradients(g) for g in groups):
            why = "gradients of an earlier backward are not reduced yet"
        if not (capturing or self._watched(groups)):
            why = f"after {room.STEPS} steps as they are, which show what memory is left"
        for workspace in () if capturing else _circles(groups):
            why = next(filter(None, workspace.gather(why)), "")
        if not self._members:
            self._state = f"not yet: {why}"
        return not why

    def _watched(self, groups: Sequence[Group]) -> bool:
        """Whether it can be told by now how much memory there is."""
        if self._seen or self._memory != "auto" or not groups:
            return True
        of = torch.device(groups[0].device)
        return room.left(of) is None or self._watch.over(groups)

    def _set_up(self, states: Sequence[Any]) -> None:
        """Find and take what FSDP2 has set up by now: all groups, or those of one of several roots.

        Raises:
            InputError: models or settings differ by rank.
        """
        groups: list[Group] = []
        for state in states:
            groups += [g for g in torch_parts.groups_of(state) if not any(g is h for h in groups)]
        found = [self._describe(g) for g in groups]
        self._compare(groups, found)
        self._seen |= {id(state) for state in states}
        self.found += found
        if self._on_gpu:
            torch.cuda.empty_cache()  # shared memory is no cached memory
        sets: dict[tuple[Workspace, int], list[Member]] = {}  # by the streams of their root, too
        for g, each in zip(groups, found, strict=True):
            if not each.why:
                facts = [torch_parts.fact_of(p) for p in g.fsdp_params]
                member = Member(g, facts, scatters=not each.why_scatter)
                self._found[id(g)] = each
                workspace = workspace_of(torch_parts.shard_group(g), torch.device(g.device))
                sets.setdefault((workspace, id(g.comm_ctx)), []).append(member)
        shared: list[Member] = []
        for (workspace, _), members in sets.items():
            shared += self._share(workspace, members)
        self._take_slots(shared)
        shared = self._agreed(groups, shared)
        for member in shared:
            self._install(member)
        self._members += shared
        self._state = "on" if self._members else "left to torch: no group qualifies"
        if self._trial_steps and self._trial is None and self.verdict is None and shared:
            self._trial = self._new_trial()

    def _agreed(self, groups: Sequence[Group], members: Sequence[Member]) -> list[Member]:
        """The members that all replicas of their shards have, too; on all others torch stays."""
        with_replicas = {torch_parts.replica_group(g): torch.device(g.device) for g in groups}
        for ranks, device in with_replicas.items():
            if ranks is None or ranks.size() == 1:
                continue
            mine = [m for m in members if torch_parts.replica_group(m.g) is ranks]
            names = [torch_parts.name_of(m.g) for m in mine]
            others = workspace_of(ranks, device).gather(names)
            for m in mine:
                if not all(torch_parts.name_of(m.g) in theirs for theirs in others):
                    self._found[id(m.g)].why = "a replica of its shards leaves it to torch"
                    del self._shards[id(m.g)]
        left = [m for m in members if not self._found[id(m.g)].why]
        for shards in self._all:
            shards.keep([m for m in shards.members if m in left or m in self._members])
        self._all = [shards for shards in self._all if shards.members]
        return left

    def _new_trial(self) -> Trial | None:
        """A trial whose verdict all ranks hear; None: no shard group has all ranks."""
        ranks = [{*dist.get_process_group_ranks(s.workspace.group)} for s in self._all]
        for shards, mine in zip(self._all, ranks, strict=True):
            if all(mine >= others for others in ranks):
                gather = partial(_gathered, _circles([shards.members[0].g]))
                return Trial(self._trial_steps, gather, on_gpu=shards.on_gpu)
        self._trial_steps = 0
        return None

    def _compare(self, groups: Sequence[Group], every: Sequence[FoundGroup]) -> None:
        """Refuse models and settings that differ by rank.

        Raises:
            InputError: they do; on all ranks that share a group.
        """
        gather, scatter = self._wants
        settings = {"slots": self._slots, "gather": gather, "scatter": scatter,
                    "trial_steps": self._trial_steps, "memory": self._memory}  # fmt: skip
        told: dict[Workspace, list[tuple[str, str]]] = {}
        for g, found in zip(groups, every, strict=True):
            for workspace in _workspaces([g]):
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
                shards = Shards(workspace, members, kept=self._keeps(workspace, members))
                self._all.append(shards)
                self._shards.update((id(m.g), shards) for m in members)
                return members
        except (OSError, torch.OutOfMemoryError, UnsupportedError) as error:
            why = f"no memory that all ranks share: {error}"
        for member in members:
            of[id(member.g)].why = why
        return ()

    def _keeps(self, workspace: Workspace, members: Sequence[Member]) -> bool:
        """Whether shards are published in memory of their own; equal on all ranks."""
        if self._memory != "auto":
            return self._memory == "kept"
        most = max(m.gathered_bytes for m in members)  # of an inbox, too
        alone = sum(m.gathered_bytes for m in members if torch_parts.keeps_gathered(m.g))
        published = sum(f.numel * f.dtype.itemsize for m in members for f in m.facts)
        need = published + alone + (self._slots + 1) * most
        left = room.left(workspace.device)
        fits = left is None or (self._watch.trained and left >= need)
        return all(workspace.gather(fits))

    def _take_slots(self, members: list[Member]) -> None:
        """Memory for gathered parameters: in turn where they are resharded, else their own.

        Members that have none, on any of their ranks, are torch's, and leave the list.
        """
        pools: dict[int, list[Member]] = {}
        for m in members:  # kept groups of one root share slots, whoever shares their shards
            shards = self._shards[id(m.g)]
            pools.setdefault(id(m.g.comm_ctx) if shards.kept else id(shards), []).append(m)
        for pool in pools.values():
            why = ""
            try:
                self._take_slots_of(pool)
            except (OSError, torch.OutOfMemoryError, UnsupportedError) as error:
                why = f"no memory for gathered parameters: {error}"
            for workspace in dict.fromkeys(self._shards[id(m.g)].workspace for m in pool):
                why = next(filter(None, workspace.gather(why)), "")
            for m in pool if why else ():
                self._found[id(m.g)].why = why
                members.remove(m)
                del self._shards[id(m.g)]

    def _take_slots_of(self, members: Sequence[Member]) -> None:
        """Memory for some members that can use the same."""
        gathers = self._shards[id(members[0].g)].gathers
        turns = [m for m in members if not torch_parts.keeps_gathered(m.g)]
        most = max((m.gathered_bytes for m in turns), default=0)
        slots = [gathers.room(most) for _ in range(min(self._slots, len(turns)))]
        for i, member in enumerate(turns):
            member.gather_in(slots[i % len(slots)])
        for member in members:
            if member.slot is None:
                self._settle(member, member.gathered_bytes)

    def _install(self, member: Member) -> None:
        shards = self._shards[id(member.g)]
        methods = {
            "unshard": partial(self._unshard, member, shards),
            "wait_for_unshard": partial(self._wait, member, shards),
            "_to_sharded": partial(self._to_sharded, member),
            "post_backward": partial(self._post_backward, member, shards),
        }
        torch_parts.drop_gathered(member.g, shards.current.stream())
        member.hooks = Hooks(member.g, methods, member.buffers)

    # -- each step

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward of a root begins: what was published is of no use any more."""
        capturing = self._is_capturing()
        new = [s for s in self._states if torch_parts.is_set_up(s) and id(s) not in self._seen]
        left = self.verdict is not None and not self.verdict.ours
        if new and not left and self._ready(new, capturing):
            with torch.inference_mode(False):  # what is made is for training, too
                self._set_up(new)
        self._note_capture(begins=True)
        if not self._all:
            return
        self._drain()
        for member in self._members:
            member.lies = None
        for shards in self._all:
            shards.gathers.begin()
            if not capturing:
                shards.check()
        if capturing:
            self._trial = None  # the way that it goes now is kept
        elif self._trial and torch.is_grad_enabled():
            self._try(_key_of(args, kwargs))

    def _is_capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _note_capture(self, *, begins: bool = False) -> None:
        """Let nobody wait for events of a capture, or of before one: FSDP2 has ordered the streams.

        Args:
            begins: a forward does, maybe that of another capture.
        """
        was, self._captured = self._captured, self._is_capturing()
        self._replayed |= self._captured
        if was != self._captured or (begins and was):
            self._held = None
            for member in self._members:
                member.lies = None
                if member.slot:
                    member.slot.left = None

    def behind_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Its shards have changed: optimizers write DTensors in ways that no version tells."""
        if torch_parts.steps(optimizer, self._states):
            self._watch.stepped = True
            for shards in self._all:
                shards.gathers.forget()

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
                    self._shards[id(member.g)].current.stream().wait_stream(streams[0])
        self._ours = ours

    def _drain(self) -> None:
        """Let go of gradients that have been pushed."""
        self._note_capture()
        if self._held:
            self._all[0].current.stream().wait_event(self._held[0])
            self._held = None

    def _unshard(self, member: Member, shards: Shards, async_op: bool = False) -> None:
        g = member.g
        if torch_parts.skips_gather(g):
            return
        if not self._ours or torch_parts.gathers_by_torch(g):
            member.lies = None
            torch_parts.by_torch(g, "unshard", async_op)
            return
        streams = torch_parts.streams(g)
        assert streams is not None, "a group is overlapped once FSDP2 has set itself up"
        if member.lies and self._still_lies(member, shards):
            torch_parts.gathering(g, member.lies)
        # where there is no room, this is a gather ahead: what needs it waits for it, see _wait
        elif self._take(member, streams[0], now=False):
            self._gather(member, shards, streams[0])

    def _gather(self, member: Member, shards: Shards, stream: Any) -> None:
        pending = torch_parts.Pending(shards.gather(member, stream, at_once=self._captured))
        # "ring" gathers as torch does, each time: what is kept was published once a forward
        member.lies = pending if shards.kept and not self._replayed else None
        member.read = None
        torch_parts.gathering(member.g, pending)

    def _still_lies(self, member: Member, shards: Shards) -> bool:
        """Whether its place holds what a gather would bring: of this forward, and unchanged."""
        g, slot = member.g, member.slot
        assert slot is not None
        self._note_capture()
        if not member.lies or not (slot.alone or slot.holder is member):
            return False
        unread = member.read is None or member.read != torch_parts.gathered_versions(g)
        return not (unread or torch_parts.is_outside(g) or shards.gathers.changed(member))

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
        assert slot is not None
        self._note_capture()
        holder = None if slot.alone else slot.holder
        if holder is not None and holder is not member and not torch_parts.is_free(holder.g):
            here = self._shards[id(member.g)].current.stream()
            idle = torch_parts.is_idle(holder.g) and not holder.by_hand
            if idle or (now and torch_parts.is_pending(holder.g)):
                torch_parts.drop_gathered(holder.g, here)  # it is gathered again when it is needed
            elif self._may_move(member, now=now):
                stream.wait_stream(here)  # the new memory may have been used there
                with torch.inference_mode(False):
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

    def _may_move(self, member: Member, *, now: bool) -> bool:
        """Whether a group can have memory of its own; for that of all ranks all must be able."""
        free, shards = not torch_parts.is_saved(member.g), self._shards[id(member.g)]
        if shards.kept:
            return free
        return now and all(shards.workspace.gather(free))

    def _move(self, member: Member) -> None:
        """Give a group memory of its own; no graph has saved its gathered parameters."""
        self._settle(member, member.gathered_bytes)
        member.hooks.move(member.buffers)
        found = self._found[id(member.g)]
        found.notes.append("more groups are gathered at a time than there are slots")

    def _settle(self, member: Member, num_bytes: int) -> None:
        """Memory of its own for a group."""
        gathers = self._shards[id(member.g)].gathers
        slot = gathers.room(num_bytes)
        slot.alone = self._found[id(member.g)].kept = True
        member.gather_in(slot)

    def _wait(self, member: Member, shards: Shards) -> None:
        g, here = member.g, shards.current.stream()
        streams = torch_parts.streams(g)
        assert streams is not None
        if torch_parts.is_sharded(g):
            member.by_hand = torch_parts.is_outside(g)
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
            member.read = torch_parts.gathered_versions(g)
            if member.by_hand:  # whoever reads them may write them
                member.lies = None

    def _to_sharded(self, member: Member) -> None:
        g = member.g
        was, slot = not torch_parts.is_sharded(g), member.slot
        torch_parts.to_sharded(g)
        if not was or slot is None:
            return
        slot.left = self._shards[id(g)].current.stream().record_event()
        if slot.shared and member.read not in (None, torch_parts.gathered_versions(g)):
            member.read = None
            what = f"gathered parameters of {torch_parts.name_of(g)} were written, which peers read"
            raise UnsupportedError(f'{OP}: {what}; call it with memory="kept"')

    def _widen(self, member: Member, shards: Shards) -> None:
        """Have room for gradients in fp32, before they are taken: else torch reduces those."""
        if shards.scatters is None or shards.scatters.is_wide or shards.why_not_wide:
            return
        why = shards.scatters.widen()
        for workspace in _circles([member.g]):  # replicas sum what all of them have made alike
            why = next(filter(None, workspace.gather(why)), "")
        shards.why_not_wide = why
        for m in shards.members if why else ():
            self._found[id(m.g)].notes.append(f"torch reduces some: {why}")

    def _post_backward(self, member: Member, shards: Shards, *given: Any) -> None:
        g = member.g
        self._reduced = self._reduced or g.reduce_grads
        wide, member.wide = member.wide, False
        if not g.reduce_grads and torch_parts.widens(g, member.grad_dtype):
            member.wide = True
            self._widen(member, shards)
        unfrozen = any(
            trains and place.sent < 0
            for trains, place in zip(torch_parts.trains(g), member.places, strict=True)
        )
        ours = self._ours and member.scatters and not unfrozen
        if not ours or torch_parts.reduces_by_torch(g) or (wide and shards.why_not_wide):
            torch_parts.by_torch(g, "post_backward", *given)
            return
        grads = [
            (i, (t.float() if wide else t).contiguous()) for i, t in torch_parts.begin_reduce(g)
        ]
        if not grads:
            return
        streams, current = torch_parts.streams(g), shards.current
        assert streams is not None
        here, stream = current.stream(), streams[1]
        self._drain()
        stream.wait_stream(here)
        replicated = torch_parts.is_replicated(g)
        with current.on(stream):
            total = shards.scatter(member, grads, stream)
            reduced = member.parts(total, [i for i, _ in grads])
            if replicated:
                streams[2].wait_stream(stream)
                stream = streams[2]
            with current.on(stream) if replicated else nullcontext():
                if replicated:
                    torch_parts.sum_over_replicas(g, total)
                ended = torch_parts.give_gradients(g, reduced, stream.record_event)
        torch_parts.note_reduced(g, stream, ended)
        self._held = ended, (grads, total)


def _circles(groups: Sequence[Group]) -> list[Workspace]:
    """Those that tell each other so that all ranks of a model hear: of shards, then of replicas."""
    pairs = [(torch_parts.replica_group(g), torch.device(g.device)) for g in groups]
    replicas = [workspace_of(r, device) for r, device in pairs if r and r.size() > 1]
    return [*dict.fromkeys([*_workspaces(groups), *replicas])]


def _gathered(circles: Sequence[Workspace], value: Any) -> list[Any]:
    """What all ranks say, by way of some circles of them."""
    found = [value]
    for workspace in circles:
        found = [each for theirs in workspace.gather(found) for each in theirs]
    return found


def _workspaces(groups: Sequence[Group]) -> list[Workspace]:
    """Of the ranks that share each, where there are several."""
    ranks = [(g, torch_parts.shard_group(g)) for g in groups]
    return [workspace_of(r, torch.device(g.device)) for g, r in ranks if r and r.size() > 1]


def _told(g: Group, found: FoundGroup) -> str:
    """What ranks compare of a group."""
    facts = (torch_parts.fact_of(p) for p in g.fsdp_params)
    each = ", ".join(f"{f.name} {f.orig} {f.dtype} {'trained' * f.trains}" for f in facts)
    return "; ".join([f"{found.name}: {each}", *filter(None, (found.why, found.why_scatter))])


def _key_of(args: Any, kwargs: Any) -> Hashable:
    """Shapes of what a forward is given."""
    leaves = tree_leaves((args, kwargs))
    return tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor))
