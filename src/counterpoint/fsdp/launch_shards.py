"""Shards that are gathered in place, and gradients that are scattered in place.

Each rank publishes its shards, in the dtype of the computation, in memory that its peers read. Copy
engines pull each parameter from its owner to where the matmul reads it, once that owner has
published: no copy in, no copy out. Gradients are pushed from where autograd wrote them into the
inbox of their owner, who sums them in fp32 in rank order. There are two inboxes in turn, so that a
push waits for the sum of the push before the last one only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.kernel_sum import sum_kernel
from counterpoint.fsdp.plan_shards import gather_plan, peers_in_order, scatter_plan
from counterpoint.fsdp.torch_parts import Fact, Group
from counterpoint.fsdp.words import ENTERED, PUBLISHED, PUSHED, SUMMED, Signal, words_of
from counterpoint.runtime.driver import Batch, Copy
from counterpoint.runtime.workspace import Workspace

ALIGN = 256  # bytes
BLOCK = 4096  # elements of a program of the sum
BITS = 32  # of a word of a mask
MOST_PUSHES = 64  # batches that a group keeps ready


class Place(NamedTuple):
    """Where one parameter of a group lies.

    Args:
        at, size: bytes of this rank's shard in what it publishes.
        sent: element at which its gradient lies in an inbox; -1: it has none.
    """

    at: int
    size: int
    sent: int


class Member:
    """One group of FSDP2 that is gathered in place.

    Args:
        g: torch's own.
        facts: of its parameters.
        scatters: whether its gradients are scattered in place, too.
    """

    def __init__(self, g: Group, facts: Sequence[Fact], *, scatters: bool) -> None:
        self.g, self.facts, self.scatters = g, facts, scatters
        self.index = -1
        self.places: list[Place] = []
        self.sent = 0  # elements of a rank's part of its gradients
        self.grad_dtype = next((f.dtype for f in facts if f.trains), torch.float32)
        self.buffers: list[Tensor] = []
        self.slot: Slot | None = None
        self.pulls: dict[int, Batch] = {}
        self.pushes: dict[tuple[int, int, int], Pushes] = {}  # by inbox, rank, and gradients
        self.sums: dict[int, Any] = {}  # launches, by inbox
        self.hooks: Any = None
        self.uses = 0  # graphs of autograd that hold its gathered parameters, as far as known
        self.by_hand = False  # gathered by a user, who reads its parameters
        self.published: list[tuple[int, int, int]] = []  # versions of its shards then

    def parts(self, total: Tensor, of: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The gradients of these parameters in a flat sum of all."""
        starts = ((i, self.places[i].sent) for i in of)
        return [(i, total[start : start + self.facts[i].numel]) for i, start in starts]

    def sizes(self) -> tuple[int, int, int]:
        """Elements of this rank's shard, those with gradients of ours, and parameters."""
        trained = sum(f.numel for f in self.facts if f.trains and self.scatters)
        return sum(f.numel for f in self.facts), trained, len(self.facts)

    @property
    def gathered_bytes(self) -> int:
        """Of the whole group on one rank."""
        ranks = torch_parts.shard_group(self.g).size()
        return sum(_aligned(f.numel * ranks * f.dtype.itemsize) for f in self.facts)


class Pushes(NamedTuple):
    """A batch of copies whose sources begin somewhere else each time.

    Args:
        batch: its sources are offsets.
        of: of each copy the number of what it is a part of.
    """

    batch: Batch
    of: list[int]

    def submit(self, starts: Sequence[int], stream: int) -> None:
        """Enqueue it.

        Args:
            starts: addresses of those.
        """
        offsets = self.batch.sources
        sources = [starts[i] + at for i, at in zip(self.of, offsets, strict=True)]
        self.batch._replace(sources=sources).submit(stream)


class Slot:
    """Memory that groups are gathered to in turn.

    Attributes:
        holder: the last group that was.
        left: the event of the stream on which its use ended.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.holder: Member | None = None
        self.left: Any = None

    def buffers(self, member: Member) -> list[Tensor]:
        """One a parameter, flat, each at the start of a storage of its own, as torch wants it."""
        ranks, at, found = torch_parts.shard_group(member.g).size(), 0, list[Tensor]()
        for fact in member.facts:
            size = fact.numel * ranks * fact.dtype.itemsize
            part = self.memory[at : at + size].view(fact.dtype)
            found.append(torch.from_dlpack(part) if part.numel() else part.clone())
            at += _aligned(size)
        return found


class Shards:
    """What the ranks of one shard group share. Collective to make.

    Args:
        workspace: of the group.
        members: equal on all ranks, their places filled in here.
        device: torch.cpu or torch.cuda.
    """

    def __init__(self, workspace: Workspace, members: Sequence[Member], device: Any) -> None:
        self.workspace, self.members, self.device = workspace, members, device
        self.rank, self.ranks = workspace.rank, workspace.board.ranks
        self.owners = peers_in_order(gather_plan(self.ranks), self.rank)
        self.receivers = peers_in_order(scatter_plan(self.ranks), self.rank)
        at = 0
        for i, member in enumerate(members):
            member.index = i
            at = _lay_out(member, at)
        self.shadow = workspace.allocate(max(at, ALIGN))
        scattered = [m for m in members if m.scatters]
        part = max((m.sent * m.grad_dtype.itemsize for m in scattered), default=0)
        self.part_bytes = _aligned(part)
        self.mask_words = 2  # the first names the group
        while (self.mask_words - 1) * BITS < max((len(m.facts) for m in scattered), default=1):
            self.mask_words *= 2
        self.inbox = workspace.allocate(2 * self.ranks * self.part_bytes) if part else None
        # which gradients each rank brings, of both inboxes; an aligned row a rank
        self.masks = workspace.allocate(2 * self.ranks * self.mask_words * 4) if part else None
        self.words = words_of(workspace)
        self.on_gpu = workspace.device.type == "cuda"
        fault = torch.zeros(2 + self.mask_words, dtype=torch.int32)
        self.fault = fault.pin_memory() if self.on_gpu else fault
        self.brought: dict[int, Tensor] = {}  # masks in device memory
        self.stale = True
        self.heard: set[int] = set()  # ranks whose last publishing this one has waited for
        self.turn = 0

    # -- parameters

    def publish(self, members: Sequence[Member], stream: Any, *, more: bool = False) -> None:
        """Write shards to where peers read them.

        Args:
            members: whose.
            more: of the same step as those published before: no peer reads old ones any more.
        """
        meet = "" if more else ENTERED
        self.words(Signal("publish", advance=True, post=meet, wait=meet), stream)
        targets, sources = list[Tensor](), list[Tensor]()
        own = self.shadow.local()
        for member in members:
            member.published = torch_parts.versions(member.g)
            masters = torch_parts.masters(member.g)
            for fact, place, master in zip(member.facts, member.places, masters, strict=True):
                if master.numel() != fact.numel:
                    want = f"{fact.numel} elements, as when the model first ran"
                    raise InputError("overlap", fact.name, want=want, got=master.numel())
                targets.append(own[place.at : place.at + place.size].view(fact.dtype))
                sources.append(master)
        with torch.no_grad(), self.device.stream(stream):
            torch_parts.copy_all(targets, sources)
        self.words(Signal("publish", post=PUBLISHED), stream)
        self.heard = {self.rank}

    def gather(self, member: Member, stream: Any) -> None:
        """Pull each parameter to its place, from each owner once it has published."""
        for r in self.owners:
            if r not in self.heard:
                self.words(Signal("publish", wait=PUBLISHED, ranks=(r,)), stream)
                self.heard.add(r)
            if self.on_gpu:
                if r not in member.pulls:
                    # this rank's own shards are no batch of their own
                    own = self._pulls(member, self.rank) if r == self.owners[-1] else []
                    member.pulls[r] = Batch.of([*self._pulls(member, r), *own])
                member.pulls[r].submit(stream.cuda_stream)
        if self.on_gpu:
            return
        for r in range(self.ranks):
            theirs = self.shadow.peer(r)
            for fact, place, buffer in zip(
                member.facts, member.places, member.buffers, strict=True
            ):
                source = theirs[place.at : place.at + place.size].view(fact.dtype)
                # .data: with a version of its own, so that a gather is no change to autograd
                buffer.data[r * fact.numel : (r + 1) * fact.numel].copy_(source)

    def _pulls(self, member: Member, r: int) -> list[Copy]:
        start = self.shadow.buffer_ptrs[r]
        return [
            Copy(b.data_ptr() + r * p.size, p.size, start + p.at, p.size, p.size, 1)
            for p, b in zip(member.places, member.buffers, strict=True) if p.size
        ]  # fmt: skip

    # -- gradients

    def scatter(
        self, member: Member, grads: Sequence[tuple[int, Tensor]], divisor: float, stream: Any
    ) -> Tensor:
        """Push gradients to their owners, and sum what is this rank's.

        Args:
            grads: contiguous, with their parameters' places.
            divisor: of the sum.

        Returns:
            Flat, in the dtype of the shards; `parts` says where each parameter's is.

        Raises:
            InputError: ranks bring gradients of different parameters; on a GPU `check` says so.
        """
        turn, words = self.turn, self.words
        self.turn = 1 - turn
        epoch = f"inbox {turn}"
        words(Signal(epoch, wait=f"{SUMMED} {turn}"), stream)
        mask = member.index + 1 | sum(1 << BITS + i for i, _ in grads)
        if self.on_gpu:
            self._push_by_copies(member, grads, mask, turn, stream)
        else:
            for r in range(self.ranks):
                self._push(member, grads, mask, turn, r)
        pushed = f"{PUSHED} {turn}"
        words(Signal(epoch, advance=True, post=pushed, wait=pushed), stream)
        total = self._summed(member, divisor, turn, stream)
        words(Signal(epoch, post=f"{SUMMED} {turn}"), stream)
        return total

    def _push_by_copies(
        self, member: Member, grads: Sequence[tuple[int, Tensor]], mask: int, turn: int,
        stream: Any,
    ) -> None:  # fmt: skip
        """To each rank the rows that it owns, and which parameters' they are."""
        starts = [self._mask(mask).data_ptr(), *(t.data_ptr() for _, t in grads)]
        for r in self.receivers:
            batch = member.pushes.get((turn, r, mask))
            if batch is None:
                if len(member.pushes) > MOST_PUSHES:  # gradients that come and go at random
                    member.pushes.clear()
                ranks = (r, self.rank) if r == self.receivers[-1] else (r,)
                copies = [c for to in ranks for c in self._pushes(member, grads, turn, to)]
                batch = member.pushes[turn, r, mask] = Pushes(
                    Batch.of([copy for _, copy in copies]), [i for i, _ in copies]
                )
            batch.submit(starts, stream.cuda_stream)

    def _pushes(
        self, member: Member, grads: Sequence[tuple[int, Tensor]], turn: int, r: int
    ) -> list[tuple[int, Copy]]:
        """The copies to one rank, whose sources are offsets in what has that number."""
        assert self.inbox is not None and self.masks is not None
        item, mine = member.grad_dtype.itemsize, turn * self.ranks + self.rank
        row = 4 * self.mask_words
        found = [(0, Copy(self.masks.buffer_ptrs[r] + mine * row, row, 0, row, row, 1))]
        base = self.inbox.buffer_ptrs[r] + mine * self.part_bytes
        for number, (i, _) in enumerate(grads, 1):
            first, last = _rows(member.facts[i], r)
            if size := (last - first) * item:
                to = base + member.places[i].sent * item
                found.append((number, Copy(to, size, first * item, size, size, 1)))
        return found

    def _push(
        self, member: Member, grads: Sequence[tuple[int, Tensor]], mask: int, turn: int, r: int
    ) -> None:
        """The rows that rank r owns, and which parameters' they are."""
        assert self.inbox is not None and self.masks is not None
        mine, row = turn * self.ranks + self.rank, 4 * self.mask_words
        self.masks.peer(r)[mine * row : (mine + 1) * row] = self._mask(mask).view(torch.uint8)
        part = self.inbox.peer(r)[mine * self.part_bytes : (mine + 1) * self.part_bytes]
        inbox = part.view(member.grad_dtype)
        for i, grad in grads:
            first, last = _rows(member.facts[i], r)
            sent = member.places[i].sent
            inbox[sent : sent + last - first] = grad.view(-1)[first:last]

    def _mask(self, mask: int) -> Tensor:
        """A mask as words in device memory."""
        found = self.brought.get(mask)
        if found is None:
            words = [mask >> BITS * i & 0xFFFFFFFF for i in range(self.mask_words)]
            signed = [w - (1 << BITS) * (w >> BITS - 1) for w in words]
            found = torch.tensor(signed, dtype=torch.int32, device=self.workspace.device)
            self.brought[mask] = found
        return found

    def _summed(self, member: Member, divisor: float, turn: int, stream: Any) -> Tensor:
        """This rank's part of the sum of all ranks' gradients, in the dtype of its shards."""
        assert self.inbox is not None and self.masks is not None
        ranks, size = self.ranks, self.ranks * self.part_bytes
        parts = self.inbox.local()[turn * size : (turn + 1) * size].view(member.grad_dtype)
        stride = self.part_bytes // member.grad_dtype.itemsize
        row = 4 * self.mask_words
        masks = self.masks.local()[turn * ranks * row : (turn + 1) * ranks * row].view(torch.int32)
        dtype = torch_parts.grad_dtype(member.g)
        if self.on_gpu:
            out = torch.empty(member.sent, dtype=dtype, device=self.workspace.device)
            if turn not in member.sums:
                kernel: Any = sum_kernel
                after = (
                    member.sent,
                    stride,
                    1 / divisor,
                    masks,
                    self.rank,
                    self.fault,
                    member.index,
                )
                member.sums[turn] = parts, after, kernel.warmup(
                    parts, out, *after, RANKS=ranks, WORDS=self.mask_words, BLOCK=BLOCK,
                    grid=(1,), num_warps=8,
                )[(-(-member.sent // BLOCK), 1, 1)]  # fmt: skip
            parts, after, launch = member.sums[turn]
            sizes = ranks, self.mask_words, BLOCK
            after = (*after[:2], 1 / divisor, *after[3:])
            launch(parts, out, *after, *sizes, stream=stream.cuda_stream)
            return out
        words = masks.view(ranks, -1)
        for r in range(ranks):
            differs = words[r] ^ words[self.rank]
            if differs.any():
                self.fault[0], self.fault[1] = member.index + 1, r
                self.fault[2:] = differs
                self.check()
        total = torch.zeros(member.sent, dtype=torch.float32)
        for r in range(ranks):
            total += parts[r * stride : r * stride + member.sent]
        return total.div_(divisor).to(dtype)

    def release(self) -> None:
        """Let go of all memory that ranks share; nothing is gathered or scattered any more."""
        del self.shadow, self.inbox, self.masks

    def check(self) -> None:
        """Say what is wrong with an earlier call, if something is.

        Raises:
            InputError: ranks brought gradients of different parameters.
            PeerTimeoutError: a rank did not answer.
        """
        found, r, other, *differs = self.fault.tolist()
        if found:
            member = self.members[found - 1]
            bits = [w >> i & 1 for w in differs for i in range(BITS)]
            names = [f.name for f, bit in zip(member.facts, bits, strict=False) if bit]
            if other:  # a whole group has none on one of the two
                names = [f"all of {torch_parts.name_of(member.g)} or of another group"]
            want = f"equal on all ranks: rank {self.rank} or rank {r} alone has one"
            fix = "let all ranks use the same parameters"
            if hasattr(self.members[0].g, "reduce_scatter_unused_params"):
                fix += ", or call set_reduce_scatter_unused_params(True)"
            raise InputError("overlap", f"gradient of {', '.join(names)}", want=want,
                             got="it on the other alone", fix=fix)  # fmt: skip
        self.workspace.check()


def _rows(fact: Fact, r: int) -> tuple[int, int]:
    """[first, last) elements of a gradient that rank r owns; of uneven rows the last have fewer."""
    return min(r * fact.numel, fact.orig), min((r + 1) * fact.numel, fact.orig)


def _lay_out(member: Member, at: int) -> int:
    """Fill in where parameters lie, in what is published from byte `at` on; where that ends."""
    sent = 0
    for fact in member.facts:
        size = fact.numel * fact.dtype.itemsize
        trains = member.scatters and fact.trains
        member.places.append(Place(at, size, sent if trains else -1))
        at += _aligned(size)
        if trains:
            sent += _aligned(size) // fact.dtype.itemsize
    member.sent = sent
    return at


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
