"""What the ranks of one shard group share: gathers in place, scatters in place, and words."""

from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.launch_gathers import Gathers, InTurn, Kept, shards_area, slot_area
from counterpoint.fsdp.launch_scatters import Grads, Scatters
from counterpoint.fsdp.member import Member
from counterpoint.fsdp.words import INBOX, SHARDS, words_of
from counterpoint.group.workspace import Workspace


class Shards:
    """The memory of a shard group. Collective to make.

    Args:
        workspace: of the group.
        members: equal on all ranks; laid out here.
        kept: whether shards are published once a step, in memory of their own.
    """

    def __init__(self, workspace: Workspace, members: Sequence[Member], *, kept: bool) -> None:
        self.workspace, self.members, self.kept = workspace, list(members), kept
        self.current = torch_parts.Current(workspace.device)
        self.on_gpu = workspace.device.type == "cuda"
        at = 0
        for i, member in enumerate(members):
            at = member.lay_out(i, at)
        if kept:
            areas = [SHARDS, *(shards_area(i) for i in range(len(members)))]
        else:  # each member may come to have memory of its own, beside a slot that it leaves
            areas = [slot_area(i) for i in range(2 * len(members))]
        words = words_of(workspace, (*areas, INBOX))
        self.gathers: Gathers = (Kept if kept else InTurn)(workspace, self.members, words)
        scattered = [m for m in members if m.sent]
        self.scatters = Scatters(workspace, scattered, words) if scattered else None
        self.why_not_wide = ""  # why gradients in fp32 are left to torch
        self._watched: Member | None = None  # the group whose gradients are pushed ahead
        self._unwatch: Callable[[], None] | None = None
        self._ahead: Callable[[Member, int], None] | None = None

    def keep(self, members: Sequence[Member]) -> None:
        """Have these alone from now on; equal on all ranks."""
        self.members[:] = members

    def begin(self, ahead: Callable[[Member, int], None]) -> None:
        """A forward of a root begins.

        Args:
            ahead: what to call for each gradient of the group that scatters last, with its place.
        """
        self._ahead = ahead
        self.gathers.begin()
        if self.scatters is None:
            return
        self.scatters.begin()
        last = self.scatters.last
        if last is not None and torch_parts.has_backward_hooks(last.g):
            last = None  # they may write gradients in ways that no version tells
        if last is not self._watched:
            self.unwatch()
            if last is not None:
                self._watched = last
                self._unwatch = torch_parts.watch_gradients(last.g, last.large(), self)

    def whole(self, i: int) -> None:
        """A gradient of the group that scatters last is."""
        if self._watched and self._ahead:
            self._ahead(self._watched, i)

    def unwatch(self) -> None:
        """Push gradients ahead no more."""
        if self._unwatch is not None:
            self._unwatch()
        self._watched = self._unwatch = None

    def gather(self, member: Member, stream: Any, *, at_once: bool) -> Any:
        """Gather a group; the event of its end.

        Args:
            member: the group.
            stream: of gathers.
            at_once: nothing goes on behind that event.
        """
        alone = torch_parts.is_outside(member.g)
        return self.gathers.gather(member, stream, alone=alone, at_once=at_once)

    def scatter(self, member: Member, grads: Grads, stream: Any) -> Any:
        """The sum of a group's gradients, this rank's part; see `Scatters.scatter`."""
        assert self.scatters is not None
        return self.scatters.scatter(member, grads, torch_parts.divisor(member.g), stream)

    def num_bytes(self) -> tuple[int, int]:
        """Of what is published and of the inbox, on this rank."""
        inbox = self.scatters.inbox.num_bytes if self.scatters else 0
        return self.gathers.num_bytes(), inbox

    def release(self) -> None:
        """Let go of memory that ranks share; nothing is gathered or scattered any more."""
        self.unwatch()
        self.gathers.release()
        self.scatters = None

    def check(self) -> None:
        """Say what is wrong with an earlier call, if something is.

        Raises:
            InputError: ranks brought gradients of different parameters.
            PeerTimeoutError: a rank did not answer.
        """
        if self.scatters:
            self.scatters.check()
        self.workspace.check()
