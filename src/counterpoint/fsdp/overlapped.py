"""A model of FSDP2 whose groups are gathered and scattered in place: set up once, and tried."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from counterpoint.choose.known import released
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.fsdp import room, torch_parts
from counterpoint.fsdp.circles import circles_of, gathered, workspaces_of
from counterpoint.fsdp.found import FoundGroup
from counterpoint.fsdp.in_place import OP, InPlace
from counterpoint.fsdp.launch_shards import Shards
from counterpoint.fsdp.member import Member
from counterpoint.fsdp.plan_shards import predicted
from counterpoint.fsdp.predicted_step import PredictedStep, predicted_step
from counterpoint.fsdp.sizes import sizes_of
from counterpoint.fsdp.torch_parts import Group
from counterpoint.fsdp.trial import Trial, Verdict, key_of
from counterpoint.group.workspace import Workspace, workspace_of
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.ops.auto import knowledge_of

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
        self._groups = InPlace()
        self._trial: Trial | None = None
        self._key: list[Hashable] = []
        self._state = "nothing yet: the model has not run"
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

    def predict(
        self, computation_ms: float, *, host_ms: float = 0.0, machine: MachineLike | None = None
    ) -> PredictedStep:
        """What a step takes as it is and overlapped, before any has run. No collective call.

        Args:
            computation_ms: of a step of this model on one GPU without FSDP2, and of its optimizer
                on one rank's shards.
            host_ms: of that, until the host has launched it. It matters where there are few tokens.
            machine: as `counterpoint.machine_of` takes it; None: of this process's GPU.

        Raises:
            InputError: an argument is wrong.
            UnsupportedError: nothing is known of this machine, or no group has several ranks.
        """
        for name, value in (("computation_ms", computation_ms), ("host_ms", host_ms)):
            if not 0 <= value < float("inf"):
                raise InputError(OP, name, want="milliseconds, from 0 on", got=value)
        groups = [g for state in self._states for g in torch_parts.groups_of(state)]
        shared = [(g, r.size()) for g in groups if (r := torch_parts.shard_group(g))]
        ranks = max((n for _, n in shared), default=1)
        here = self._on_gpu and machine is None
        found = released(torch.cuda.get_device_name(), ranks) if here else None
        found = found if machine is None else machine_of(OP, machine)
        if found is None or ranks == 1:
            why = "no group has several ranks" if found else "nothing is known of this machine"
            raise UnsupportedError(f"{OP}: {why}; predict a step of another")
        lie = self._slots if self._memory != "ring" else 0
        sizes = sizes_of([g for g, _ in shared], gather=self._wants[0], lie=lie)
        return predicted_step(sizes, ranks, found.costs, computation_ms / 1e3, host_ms / 1e3)

    def num_bytes(self) -> dict[str, int]:
        """Memory on this rank: what is published, inboxes, and gathered parameters."""
        gathered = {
            b.data_ptr(): b.numel() * b.itemsize for m in self._groups.members for b in m.buffers
        }
        return {
            "published": sum(s.num_bytes()[0] for s in self._groups.all),
            "inboxes": sum(s.num_bytes()[1] for s in self._groups.all),
            "gathered": sum(gathered.values()),
        }

    def mark_dirty(self) -> None:
        """Say that shards were written in a way that memory="kept" does not notice: see `overlap`.

        Call it on all ranks, behind such a write and before the backward. It waits for nothing.
        """
        for shards in self._groups.all:
            shards.gathers.forget()

    def off(self) -> None:
        """Give everything back to torch, between two steps, on all ranks. It may be called again.

        Raises:
            PeerTimeoutError: a rank does not call it.
            UnsupportedError: a forward has no backward yet, on all ranks that share a group.
        """
        saved = any(torch_parts.is_saved(member.g) for member in self._groups.members)
        for shards in {id(s): s for s in self._groups.shards.values()}.values():
            saved = any(shards.workspace.gather(saved))
        if saved:
            what = "off() while a graph holds gathered parameters"
            raise UnsupportedError(f"{OP}: {what}; call it behind the backward")
        self._groups.release()
        for member in self._groups.members:
            member.hooks.take(member.buffers)
        torch_parts.unwatch_roots(self._states)
        torch_parts.unwatch_steps(self)
        for state in self._states:
            state.__dict__.pop("_counterpoint_overlapped", None)
        self._groups = InPlace()
        self._trial = None
        self._state = "off: torch's own way"

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
        for workspace in () if capturing else circles_of(groups):
            why = next(filter(None, workspace.gather(why)), "")
        if not self._groups.members:
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
                self._groups.of[id(g)] = each
                workspace = workspace_of(torch_parts.shard_group(g), torch.device(g.device))
                sets.setdefault((workspace, id(g.comm_ctx)), []).append(member)
        shared: list[Member] = []
        for (workspace, _), members in sets.items():
            shared += self._share(workspace, members)
        self._take_slots(shared)
        shared = self._agreed(groups, shared)
        for member in shared:
            self._groups.install(member)
        self._groups.members += shared
        self._state = "on" if self._groups.members else "left to torch: no group qualifies"
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
                    self._groups.of[id(m.g)].why = "a replica of its shards leaves it to torch"
                    del self._groups.shards[id(m.g)]
        left = [m for m in members if not self._groups.of[id(m.g)].why]
        for shards in self._groups.all:
            shards.keep([m for m in shards.members if m in left or m in self._groups.members])
        self._groups.all = [shards for shards in self._groups.all if shards.members]
        return left

    def _new_trial(self) -> Trial | None:
        """A trial whose verdict all ranks hear; None: no shard group has all ranks."""
        ranks = [{*dist.get_process_group_ranks(s.workspace.group)} for s in self._groups.all]
        for shards, mine in zip(self._groups.all, ranks, strict=True):
            if all(mine >= others for others in ranks):
                gather = partial(gathered, circles_of([shards.members[0].g]))
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
            for workspace in workspaces_of([g]):
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
        of = self._groups.of
        why = "its ranks are on several hosts" if workspace.islands.number > 1 else ""
        machine = None if why else knowledge_of(workspace).machine
        for member in members if machine else ():
            assert machine is not None
            found, kept = of[id(member.g)], self._memory != "ring"
            sizes = workspace.board.ranks, *member.sizes()
            found.predicted = predicted(*sizes, machine, kept=kept)
            if found.predicted.slower:
                found.why = f"predicted to be slower: {found.predicted}"
        members = [m for m in members if not of[id(m.g)].why]
        if not members:
            return ()
        try:
            if not why:
                shards = Shards(workspace, members, kept=self._keeps(workspace, members))
                self._groups.all.append(shards)
                self._groups.shards.update((id(m.g), shards) for m in members)
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
            shards = self._groups.shards[id(m.g)]
            pools.setdefault(id(m.g.comm_ctx) if shards.kept else id(shards), []).append(m)
        for pool in pools.values():
            why = ""
            try:
                self._take_slots_of(pool)
            except (OSError, torch.OutOfMemoryError, UnsupportedError) as error:
                why = f"no memory for gathered parameters: {error}"
            for workspace in dict.fromkeys(self._groups.shards[id(m.g)].workspace for m in pool):
                why = next(filter(None, workspace.gather(why)), "")
            for m in pool if why else ():
                self._groups.of[id(m.g)].why = why
                members.remove(m)
                del self._groups.shards[id(m.g)]

    def _take_slots_of(self, members: Sequence[Member]) -> None:
        """Memory for some members that can use the same."""
        gathers = self._groups.shards[id(members[0].g)].gathers
        turns = [m for m in members if not torch_parts.keeps_gathered(m.g)]
        most = max((m.gathered_bytes for m in turns), default=0)
        slots = [gathers.room(most) for _ in range(min(self._slots, len(turns)))]
        for i, member in enumerate(turns):
            member.gather_in(slots[i % len(slots)])
        for member in members:
            if member.slot is None:
                self._groups.settle(member, member.gathered_bytes)

    # -- each step

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward of a root begins: what was published is of no use any more."""
        capturing = self._groups.is_capturing()
        new = [s for s in self._states if torch_parts.is_set_up(s) and id(s) not in self._seen]
        left = self.verdict is not None and not self.verdict.ours
        if new and not left and self._ready(new, capturing):
            with torch.inference_mode(False):  # what is made is for training, too
                self._set_up(new)
        self._groups.note_capture(begins=True)
        if not self._groups.all:
            return
        self._groups.begin(capturing=capturing)
        if capturing:
            self._trial = None  # the way that it goes now is kept
        elif self._trial and torch.is_grad_enabled():
            self._try(key_of(args, kwargs))

    def behind_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Its shards have changed: optimizers write DTensors in ways that no version tells."""
        if torch_parts.steps(optimizer, self._states):
            self._watch.stepped = True
            self.mark_dirty()

    def switch(self, *, ours: bool) -> None:
        """Go our way or torch's from the next gather on, in the same memory."""
        self._groups.switch(ours=ours)

    def _try(self, key: Hashable) -> None:
        """One more step of the trial, where an optimizer step lies behind."""
        assert self._trial is not None
        if self._groups.reduced or not self._key:
            ours = self._trial.begin(tuple(self._key))
            self._key, self._groups.reduced = [], False
            if ours is None:
                self.verdict, self._trial = self._trial.verdict, None
                assert self.verdict is not None
                ours = self.verdict.ours
                if not ours:
                    self._state = "left to torch: overlapping was not faster beyond doubt"
            self.switch(ours=ours)
            if not ours and self.verdict:
                self._groups.release()
        self._key.append(key)


def _told(g: Group, found: FoundGroup) -> str:
    """What ranks compare of a group."""
    facts = (torch_parts.fact_of(p) for p in g.fsdp_params)
    each = ", ".join(f"{f.name} {f.orig} {f.dtype} {'trained' * f.trains}" for f in facts)
    return "; ".join([f"{found.name}: {each}", *filter(None, (found.why, found.why_scatter))])
