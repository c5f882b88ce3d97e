"""What a group does in each step: it is gathered and scattered in place, or torch's way."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from counterpoint.errors import UnsupportedError
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.circles import circles_of
from counterpoint.fsdp.found import FoundGroup
from counterpoint.fsdp.launch_shards import Shards
from counterpoint.fsdp.member import Member
from counterpoint.fsdp.torch_parts import Hooks

OP = "overlap"


class InPlace:
    """The groups of a model that are gathered in place, and what stands in for torch's methods.

    Attributes:
        members: the groups.
        shards: by id of torch's group, what its ranks share; `all` has each once.
        of: by id of torch's group, what `explain` says.
        ours: whether steps go our way; else torch's, in the same memory.
        reduced: a backward has reduced gradients since that was cleared.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.shards: dict[int, Shards] = {}
        self.all: list[Shards] = []
        self.of: dict[int, FoundGroup] = {}
        self.ours, self.reduced = True, False
        self._on_gpu = torch.cuda.is_available()
        self._captured = False  # the last forward of a root was in a capture
        self._replayed = False  # a captured step was: no host sees what its replays gather
        self._held: tuple[Any, object] | None = None  # gradients that are pushed, until an event

    def install(self, member: Member) -> None:
        shards = self.shards[id(member.g)]
        methods = {
            "unshard": partial(self._unshard, member, shards),
            "wait_for_unshard": partial(self._wait, member, shards),
            "_to_sharded": partial(self._to_sharded, member),
            "post_backward": partial(self._post_backward, member, shards),
        }
        torch_parts.drop_gathered(member.g, shards.current.stream())
        member.hooks = Hooks(member.g, methods, member.buffers)

    def begin(self, *, capturing: bool) -> None:
        """A forward of a root begins: what was published is of no use any more.

        Raises:
            InputError, PeerTimeoutError: something was wrong in an earlier step.
        """
        self.drain()
        for member in self.members:
            member.lies = None
        for shards in self.all:
            shards.begin(partial(self.push_ahead, shards))
            if not capturing:
                shards.check()

    def release(self) -> None:
        """Let go of the memory that ranks share, once none of them uses it any more."""
        self.drain()
        for member in self.members:
            here = self.shards[id(member.g)].current.stream()
            torch_parts.drop_gathered(member.g, here)
        if self.all and self.all[0].on_gpu:
            torch.cuda.synchronize()
        for shards in self.all:
            shards.workspace.gather(None)
            shards.release()
        self.all.clear()

    def is_capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def note_capture(self, *, begins: bool = False) -> None:
        """Let nobody wait for events of a capture, or of before one: FSDP2 has ordered the streams.

        Args:
            begins: a forward does, maybe that of another capture.
        """
        was, self._captured = self._captured, self.is_capturing()
        self._replayed |= self._captured
        if was != self._captured or (begins and was):
            self._held = None
            for member in self.members:
                member.lies = None
                if member.slot:
                    member.slot.left = None

    def switch(self, *, ours: bool) -> None:
        """Go our way or torch's from the next gather on, in the same memory."""
        if ours != self.ours:
            for member in self.members:  # what gathers there by now comes before
                streams = torch_parts.streams(member.g)
                if streams is not None:
                    self.shards[id(member.g)].current.stream().wait_stream(streams[0])
        self.ours = ours

    def drain(self) -> None:
        """Let go of gradients that have been pushed."""
        self.note_capture()
        if self._held:
            self.all[0].current.stream().wait_event(self._held[0])
            self._held = None

    def _unshard(self, member: Member, shards: Shards, async_op: bool = False) -> None:
        g = member.g
        if torch_parts.skips_gather(g):
            return
        if not self.ours or torch_parts.gathers_by_torch(g):
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
        # what replays find has no stream of its own: none would wait for it
        ended = shards.gather(member, stream, at_once=self._replayed)
        pending = torch_parts.Pending(ended)
        # "ring" gathers as torch does, each time: what is kept was published once a forward
        member.lies = pending if shards.kept and not self._replayed else None
        member.read = None
        torch_parts.gathering(member.g, pending)

    def _still_lies(self, member: Member, shards: Shards) -> bool:
        """Whether its place holds what a gather would bring: of this forward, and unchanged."""
        g, slot = member.g, member.slot
        assert slot is not None
        self.note_capture()
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
        self.note_capture()
        holder = None if slot.alone else slot.holder
        if holder is not None and holder is not member and not torch_parts.is_free(holder.g):
            here = self.shards[id(member.g)].current.stream()
            # where a graph reads it, what stays gathered stays as it was in the forward
            kept = holder.in_graph and torch_parts.keeps_gathered(holder.g)
            idle = torch_parts.is_idle(holder.g) and not (holder.by_hand or kept)
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
        free, shards = not torch_parts.is_saved(member.g), self.shards[id(member.g)]
        if shards.kept:
            return free
        return now and all(shards.workspace.gather(free))

    def _move(self, member: Member) -> None:
        """Give a group memory of its own; no graph has saved its gathered parameters."""
        self.settle(member, member.gathered_bytes)
        member.hooks.move(member.buffers)
        found = self.of[id(member.g)]
        found.notes.append("more groups are gathered at a time than there are slots")

    def settle(self, member: Member, num_bytes: int) -> None:
        """Memory of its own for a group."""
        gathers = self.shards[id(member.g)].gathers
        slot = gathers.room(num_bytes)
        slot.alone = self.of[id(member.g)].kept = True
        member.gather_in(slot)

    def _wait(self, member: Member, shards: Shards) -> None:
        g, here = member.g, shards.current.stream()
        streams = torch_parts.streams(g)
        assert streams is not None
        if torch_parts.frees_what_it_saves(g):
            raise UnsupportedError(
                f"{OP}: create_graph=True saves parameters of {torch_parts.name_of(g)}; call "
                "set_reshard_after_forward(False) and set_reshard_after_backward(False)"
            )
        if torch_parts.is_sharded(g):
            member.by_hand, member.in_graph = torch_parts.is_outside(g), False
        member.in_graph |= torch.is_grad_enabled()
        if torch_parts.is_pending(g) and not torch_parts.is_ours(g):
            self._take(member, here, now=True)
            torch_parts.by_torch(g, "wait_for_unshard")
            return
        if not torch_parts.is_pending(g) and torch_parts.is_sharded(g) and self.ours:
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
        slot.left = self.shards[id(g)].current.stream().record_event()
        if slot.shared and member.read not in (None, torch_parts.gathered_versions(g)):
            member.read = None
            what = f"gathered parameters of {torch_parts.name_of(g)} were written, which peers read"
            raise UnsupportedError(f'{OP}: {what}; call it with memory="kept"')

    def _widen(self, member: Member, shards: Shards) -> None:
        """Have room for gradients in fp32, before they are taken: else torch reduces those."""
        if shards.scatters is None or shards.scatters.is_wide or shards.why_not_wide:
            return
        why = shards.scatters.widen()
        for workspace in circles_of([member.g]):  # replicas sum what all of them have made alike
            why = next(filter(None, workspace.gather(why)), "")
        shards.why_not_wide = why
        for m in shards.members if why else ():
            self.of[id(m.g)].notes.append(f"torch reduces some: {why}")

    def _scatters(self, member: Member) -> bool:
        """Whether a backward that runs has its gradients scattered in place."""
        g = member.g
        unfrozen = any(
            trains and place.sent < 0
            for trains, place in zip(torch_parts.trains(g), member.places, strict=True)
        )
        ours = self.ours and member.scatters and not unfrozen
        return ours and not torch_parts.reduces_by_torch(g)

    def push_ahead(self, shards: Shards, member: Member, i: int) -> None:
        """A gradient of the group that scatters last is whole."""
        g, scatters = member.g, shards.scatters
        if scatters is None or not (scatters.pushes_ahead or self._scatters(member)):
            return
        grad, streams = torch_parts.new_gradient(g, i), torch_parts.streams(g)
        if grad is not None and streams and grad.dtype == member.grad_dtype and not member.wide:
            streams[1].wait_stream(shards.current.stream())
            scatters.push_ahead(i, grad, streams[1])

    def _post_backward(self, member: Member, shards: Shards, *given: Any) -> None:
        g = member.g
        self.reduced = self.reduced or g.reduce_grads
        wide, member.wide = member.wide, False
        if not g.reduce_grads and torch_parts.widens(g, member.grad_dtype):
            member.wide = True
            self._widen(member, shards)
        if not self._scatters(member) or (wide and shards.why_not_wide):
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
        self.drain()
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
