"""Shards that are gathered in place.

Each rank publishes its shards, in the dtype of the computation, in memory that its peers read. Copy
engines pull each parameter from its owner to where the matmul reads it, once that owner has
published: no copy in, no copy out. `Kept` publishes all shards once a step, in memory of their own.
`InTurn` publishes a group's at each gather, where they are gathered to: it needs no memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.member import ALIGN, Member, Slot, part_of
from counterpoint.fsdp.plan_shards import gather_plan, peers_in_order
from counterpoint.fsdp.words import FILLED, FREE, SHARDS, SLOT, CpuWords, CudaWords, Signal
from counterpoint.gpu.driver import Batch, Copy
from counterpoint.group.workspace import Workspace


class Gathers:
    """The gathers of one shard group.

    Attributes:
        kept: whether shards are published in memory of their own.

    Args:
        workspace: of the group.
        members: equal on all ranks, laid out.
        words: of its ranks.
    """

    kept = True

    def __init__(
        self, workspace: Workspace, members: Sequence[Member], words: CpuWords | CudaWords
    ) -> None:
        self.workspace, self.members, self.words = workspace, members, words
        self.current = torch_parts.Current(workspace.device)
        self.on_gpu = workspace.device.type == "cuda"
        self.rank, self.ranks = workspace.rank, workspace.board.ranks
        self.owners = peers_in_order(gather_plan(self.ranks, kept=self.kept), self.rank)

    def begin(self) -> None:
        """A forward of a root begins: shards may have changed since the last."""
        raise NotImplementedError

    def room(self, num_bytes: int) -> Slot:
        """Memory to gather to. A collective call.

        Raises:
            OSError, torch.OutOfMemoryError, UnsupportedError: there is none.
        """
        raise NotImplementedError

    def gather(self, member: Member, stream: Any, *, alone: bool, at_once: bool) -> Any:
        """Gather a group; the event of its end.

        Args:
            alone: by hand, whatever was done to its shards before.
            at_once: nothing goes on behind that event.
        """
        raise NotImplementedError

    def changed(self, member: Member) -> bool:
        """Whether its shards were written since they were published, or a forward began."""
        return member.published != torch_parts.versions(member.g)

    def forget(self) -> None:
        """Shards were written, in whatever way: each is published before it is gathered again."""
        for member in self.members:
            member.published = []

    def write(self, members: Sequence[Member], targets: list[Tensor], stream: Any) -> None:
        """Write shards to where peers read them."""
        found = (shard for member in members for shard in member.shards())
        sources = [shard.view(part.shape) for shard, part in zip(found, targets, strict=True)]
        for member in members:
            member.published = torch_parts.versions(member.g)
        with torch.no_grad(), self.current.on(stream):
            torch_parts.copy_all(targets, sources)

    def pull(self, member: Member, r: int, ranks: Sequence[int], stream: Any) -> None:
        """Have the shards of these ranks, as one batch of copies that is named by r."""
        if self.on_gpu:
            if r not in member.pulls:
                copies = (self._copies(member, owner) for owner in ranks)
                member.pulls[r] = Batch([copy for of in copies for copy in of if copy.width])
            member.pulls[r].submit(stream.cuda_stream)
            return
        for owner in ranks:
            theirs = self.shared(member)
            start = theirs.buffer_ptrs[owner]
            for fact, buffer, copy in zip(
                member.facts, member.buffers, self._copies(member, owner), strict=True
            ):
                item, first = fact.dtype.itemsize, copy.source - start
                last = first + (copy.height - 1) * copy.source_pitch + copy.width
                part = theirs.peer(owner)[first:last].view(fact.dtype).as_strided(
                    (copy.height, copy.width // item), (copy.source_pitch // item, 1)
                )  # fmt: skip
                # .data: with a version of its own, so that a gather is no change to autograd
                own = part_of(buffer.data, fact, owner)
                own.copy_(part.view(own.shape))

    def _copies(self, member: Member, r: int) -> list[Copy]:
        """From where rank r has published its shards of a group to their places here."""
        found: list[Copy] = []
        for fact, place, b, (at, pitch) in zip(
            member.facts, member.places, member.buffers, self.sources(member, r), strict=True
        ):
            width = place.size // fact.rows
            to = b.data_ptr() + r * width
            found.append(Copy(to, self.ranks * width, at, pitch, width, fact.rows))
        return found

    def shared(self, member: Member) -> Any:
        """The memory in which all ranks publish a group's shards."""
        raise NotImplementedError

    def sources(self, member: Member, r: int) -> list[tuple[int, int]]:
        """Addresses of a group's shards of rank r, and bytes from a piece to the next."""
        raise NotImplementedError

    def num_bytes(self) -> int:
        """Of memory in which shards are published, and that nothing is gathered to."""
        return 0

    def release(self) -> None:
        """Let go of that memory; nothing is gathered any more."""


class Kept(Gathers):
    """All shards are published once a step, in memory of their own.

    What is gathered first is published first; the others follow one by one on a stream of their
    own, since casts find few free SMs beside matmuls: what waits for all of them waits long. That
    stream waits for no word: ranks may gather in different orders.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        most = max(p.at + p.size for m in self.members for p in m.places)
        self.shadow = self.workspace.allocate(max(most, ALIGN))
        device = self.workspace.device
        self.publisher: Any = torch.cuda.Stream(device, -1) if self.on_gpu else torch.cpu.Stream()
        self.stale = True
        self.order = list(self.members)  # in which they were gathered in the step before
        self.seen: list[Member] = []  # in this step
        self.unheard: dict[int, Any] = {}  # groups published since their last gather; when

    def begin(self) -> None:
        self.stale = True

    def room(self, num_bytes: int) -> Slot:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.workspace.device)
        return Slot(memory)

    def gather(self, member: Member, stream: Any, *, alone: bool, at_once: bool) -> Any:
        if alone or (not self.stale and self.changed(member)):
            stream.wait_stream(self.current.stream())
            self._meet(stream, at_once=at_once)
            self._publish([member], stream)
        elif self.stale:
            self._publish_all(member, stream, at_once=at_once)
            self.stale = False
        if member not in self.seen:
            self.seen.append(member)
        new, published = member.index in self.unheard, self.unheard.pop(member.index, None)
        if published is not None and not at_once:
            stream.wait_event(published)
        for r in self.owners:
            if new:
                words = Signal(shards_area(member.index), wait=FILLED, ranks=(r,))
                self.words(words, stream)
            # this rank's own shards are no batch of their own
            self.pull(member, r, (r, self.rank) if r == self.owners[-1] else (r,), stream)
        return stream.record_event()

    def _meet(self, stream: Any, *, at_once: bool) -> None:
        """Have all peers end the gathers before: they read no more what was published before."""
        if not at_once:  # what a capture is told of is before it by itself
            stream.wait_stream(self.publisher)
        self.words(Signal(SHARDS, advance=True, post=FREE, wait=FREE), stream)

    def _publish_all(self, first: Member, stream: Any, *, at_once: bool) -> None:
        """Publish each group: `first` on the stream of gathers, the others beside it.

        Args:
            first: is gathered first.
            stream: of gathers.
            at_once: all on that stream.
        """
        known = dict.fromkeys([*self.seen, *self.order])
        others = [m for m in known if m is not first and m in self.members]
        self.order, self.seen = [first, *others], []
        self._meet(stream, at_once=at_once)
        if at_once:
            self._publish(self.order, stream)
            return
        self._publish([first], stream)
        self.publisher.wait_stream(stream)
        for member in others:
            self._publish([member], self.publisher)
            self.unheard[member.index] = self.publisher.record_event()

    def _publish(self, members: Sequence[Member], stream: Any) -> None:
        """Write shards to where peers read them, and let peers know."""
        own = self.shadow.local()
        targets = [
            own[place.at : place.at + place.size].view(fact.dtype)
            for member in members
            for fact, place in zip(member.facts, member.places, strict=True)
        ]
        self.write(members, targets, stream)
        for member in members:
            self.words(Signal(shards_area(member.index), advance=True, post=FILLED), stream)
            self.unheard[member.index] = None

    def shared(self, member: Member) -> Any:
        return self.shadow

    def sources(self, member: Member, r: int) -> list[tuple[int, int]]:
        base, of = self.shadow.buffer_ptrs[r], zip(member.facts, member.places, strict=True)
        return [(base + place.at, place.size // fact.rows) for fact, place in of]

    def num_bytes(self) -> int:
        return self.shadow.num_bytes

    def release(self) -> None:
        del self.shadow


class InTurn(Gathers):
    """A group's shards are published at each gather, in the memory that it is gathered to.

    A rank writes its own shards where its own matmuls read them, and its peers read them there. The
    next group is published there once all peers have read. As torch's own, a gather is collective.
    """

    kept = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.slots = 0

    def begin(self) -> None:
        for member in self.members:  # FSDP2 has gathers wait for what was done before a forward
            member.published = torch_parts.versions(member.g)

    def room(self, num_bytes: int) -> Slot:
        if self.on_gpu:
            torch.cuda.empty_cache()  # shared memory is no cached memory
        shared = self.workspace.allocate(max(num_bytes, ALIGN))
        self.slots += 1
        return Slot(shared.local(), shared, slot_area(self.slots - 1))

    def gather(self, member: Member, stream: Any, *, alone: bool, at_once: bool) -> Any:
        slot = member.slot
        assert slot is not None
        if alone or self.changed(member):
            stream.wait_stream(self.current.stream())
        self.words(Signal(slot.area, wait=FREE), stream)
        targets = [
            part_of(buffer.data, fact, self.rank)
            for fact, buffer in zip(member.facts, member.buffers, strict=True)
        ]
        self.write([member], targets, stream)
        self.words(Signal(slot.area, advance=True, post=FILLED), stream)
        for r in self.owners:
            self.words(Signal(slot.area, wait=FILLED, ranks=(r,)), stream)
            self.pull(member, r, (r,), stream)
        self.words(Signal(slot.area, post=FREE), stream)
        return stream.record_event()

    def shared(self, member: Member) -> Any:
        assert member.slot is not None
        return member.slot.shared

    def sources(self, member: Member, r: int) -> list[tuple[int, int]]:
        slot = member.slot
        assert slot is not None and slot.shared is not None
        own, theirs = (slot.shared.buffer_ptrs[rank] for rank in (self.rank, r))
        found: list[tuple[int, int]] = []
        for fact, p, b in zip(member.facts, member.places, member.buffers, strict=True):
            width = p.size // fact.rows
            at = theirs + b.data_ptr() - own + r * width if width else theirs
            found.append((at, self.ranks * width))
        return found


def shards_area(number: int) -> str:
    """The name of a group's shards in words."""
    return f"{SHARDS} {number}"


def slot_area(number: int) -> str:
    """The name of a slot in words."""
    return f"{SLOT} {number}"
