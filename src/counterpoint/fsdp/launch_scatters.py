"""Gradients that are scattered in place.

They are pushed from where autograd wrote them into the inbox of their owner, who sums them in fp32
in rank order. A push waits until the sum of the push before has been made.

Nothing hides the group that scatters last in a backward. Its large gradients are pushed one by one,
each as soon as it is there; whether a rank does so is its own business, since words are the same.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.kernel_sum import sum_kernel
from counterpoint.fsdp.member import Member, aligned, part_of
from counterpoint.fsdp.plan_shards import peers_in_order, scatter_plan
from counterpoint.fsdp.words import FILLED, FREE, INBOX, CpuWords, CudaWords, Signal
from counterpoint.gpu.driver import Batch, Copy
from counterpoint.group.workspace import Workspace

BLOCK = 4096  # elements of a program of the sum
BITS = 32  # of a word of a mask
MOST_PUSHES = 64  # batches that a group keeps ready

Grads = Sequence[tuple[int, Tensor]]  # contiguous, with their parameters' places


class Pushes(NamedTuple):
    """A batch of copies whose sources begin somewhere else each time.

    Args:
        batch: as it was submitted last.
        of: of each copy the number of what it is a part of.
        offsets: in it, bytes.
    """

    batch: Batch
    of: list[int]
    offsets: list[int]

    def submit(self, starts: Sequence[int], stream: int) -> None:
        """Enqueue it.

        Args:
            starts: addresses of those.
            stream: raw.
        """
        sources = [starts[i] + at for i, at in zip(self.of, self.offsets, strict=True)]
        self.batch.submit(stream, sources)


class Scatters:
    """The scatters of one shard group.

    Args:
        workspace: of the group.
        members: those that scatter, equal on all ranks, laid out.
        words: of its ranks.
    """

    def __init__(
        self, workspace: Workspace, members: Sequence[Member], words: CpuWords | CudaWords
    ) -> None:
        self.workspace, self.words = workspace, words
        self.groups = {m.index: m for m in members}
        self._most = max(m.sent for m in members)  # elements of a rank's part
        self.on_gpu = workspace.device.type == "cuda"
        self.rank, self.ranks = workspace.rank, workspace.board.ranks
        self.receivers = peers_in_order(scatter_plan(self.ranks), self.rank)
        self.mask_words = 2  # the first names the group
        while (self.mask_words - 1) * BITS < max(len(m.facts) for m in members):
            self.mask_words *= 2
        self._make(max(m.sent * m.grad_dtype.itemsize for m in members))
        # which gradients each rank brings: a row a rank
        self.masks = workspace.allocate(self.ranks * self.mask_words * 4)
        fault = torch.zeros(2 + self.mask_words, dtype=torch.int32)
        self.fault = fault.pin_memory() if self.on_gpu else fault
        self._brought: dict[int, Tensor] = {}  # masks in device memory
        self._order: list[int] = []  # groups as they scatter, since the last forward began
        self.last: Member | None = None  # of those before, the last whose pushes ahead are of use
        self._early = set[int]()  # groups that others follow once gradients of theirs are there

    def _make(self, part_bytes: int) -> None:
        """Memory for a part from each rank. A collective call."""
        part_bytes = aligned(part_bytes)
        self.inbox = self.workspace.allocate(max(self.ranks * part_bytes, 1))
        self.part_bytes = part_bytes
        # both by group, and by the dtype of gradients
        self._pushes: dict[Hashable, Pushes] = {}  # by receiver, and which gradients there are
        self._sums: dict[Hashable, Any] = {}  # launches
        # by parameter: gradients of one group that are in inboxes, and their versions then
        self._ahead: dict[int, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """A forward begins: which group has scattered last is known by now."""
        if self._order:
            several = (of for of in self._order if len(self.groups[of].facts) > 1)
            late = [self.groups[of] for of in several if of not in self._early]
            self.last = late[-1] if late else None
        self._order.clear()
        self._ahead.clear()

    @property
    def is_wide(self) -> bool:
        """Whether there is room for gradients in fp32."""
        return self._most * 4 <= self.part_bytes

    def widen(self) -> str:
        """Have it. A collective call; why there is none, or ""."""
        try:
            self.workspace.refuse_growth("the first gradients that are kept in fp32")
            if self.on_gpu:
                torch.cuda.empty_cache()  # shared memory is no cached memory
            self._make(self._most * 4)
        except (OSError, torch.OutOfMemoryError, UnsupportedError) as error:
            return f"no memory for gradients in fp32: {error}"
        return ""

    @property
    def pushes_ahead(self) -> bool:
        """Whether it has begun to, in this backward."""
        return bool(self._ahead)

    def push_ahead(self, i: int, grad: Tensor, stream: Any) -> None:
        """Push one gradient of `last`.

        Args:
            i: its parameter's place.
            grad: contiguous, as autograd has made it.
            stream: of scatters; it goes on behind what made the gradient.
        """
        assert self.last is not None
        if not self._ahead:
            self.words(Signal(INBOX, wait=FREE), stream)
        self._push(self.last, [(i, grad)], 0, stream)
        self._ahead[i] = grad, grad._version

    def scatter(self, member: Member, grads: Grads, divisor: float, stream: Any) -> Tensor:
        """Push gradients to their owners, and sum what is this rank's.

        Args:
            member: whose.
            grads: of its parameters that have one, all of one dtype, which all ranks have.
            divisor: of the sum.
            stream: the current one.

        Returns:
            Flat, in the dtype of the shards; `Member.parts` says where each parameter's is.

        Raises:
            InputError: ranks bring gradients of different parameters; on a GPU `check` says so.
        """
        words, dtype = self.words, grads[0][1].dtype
        words(Signal(INBOX, wait=FREE), stream)
        mask = member.index + 1 | sum(1 << BITS + i for i, _ in grads)
        there = self._ahead if member is self.last else {}
        if self.last and bool(self._ahead) != (member is self.last):
            self._early.add(self.last.index)
        left = [(i, grad) for i, grad in grads if not _same(grad, there.get(i))]
        self._push(member, left, mask, stream)
        self._ahead.clear()
        self._order.append(member.index)
        words(Signal(INBOX, advance=True, post=FILLED, wait=FILLED), stream)
        sum_of = self._sum_by_kernel if self.on_gpu else self._sum
        total = sum_of(member, dtype, divisor, stream)
        words(Signal(INBOX, post=FREE), stream)
        return total

    def _push(self, member: Member, grads: Grads, mask: int, stream: Any) -> None:
        """To each rank the rows that it owns.

        Args:
            member: whose.
            grads: some of its gradients.
            mask: which parameters' gradients this rank brings in all, pushed beside them; 0: that
                is not known yet.
            stream: of scatters.
        """
        if not self.on_gpu:
            for r in range(self.ranks):
                self._push_by_host(member, grads, mask, r)
            return
        starts = [t.data_ptr() for _, t in grads]
        starts += [self._mask(mask).data_ptr()] if mask else []
        item = grads[0][1].itemsize if grads else 0
        of = member.index, mask, sum(1 << i for i, _ in grads), item
        for r in self.receivers:
            pushes = self._pushes.get((r, *of))
            if pushes is None:
                if len(self._pushes) > MOST_PUSHES * len(self.groups):  # they come and go at random
                    self._pushes.clear()
                ranks = (r, self.rank) if r == self.receivers[-1] else (r,)
                copies = [c for to in ranks for c in self._copies(member, grads, mask, to)]
                batch, numbers = Batch([copy for _, copy in copies]), [i for i, _ in copies]
                pushes = Pushes(batch, numbers, [copy.source for _, copy in copies])
                self._pushes[(r, *of)] = pushes
            pushes.submit(starts, stream.cuda_stream)

    def _copies(self, member: Member, grads: Grads, mask: int, r: int) -> list[tuple[int, Copy]]:
        """The copies to one rank, whose sources are offsets in what has that number."""
        found = list[tuple[int, Copy]]()
        base = self.inbox.buffer_ptrs[r] + self.rank * self.part_bytes
        for number, (i, grad) in enumerate(grads):
            fact, item = member.facts[i], grad.itemsize
            first, pitch = (n // fact.rows * item for n in (r * fact.numel, fact.orig))
            if width := part_of(grad.view(-1), fact, r).numel() // fact.rows * item:
                to = base + member.places[i].sent * item
                found.append((number, Copy(to, width, first, pitch, width, fact.rows)))
        if mask:
            row = 4 * self.mask_words
            to = self.masks.buffer_ptrs[r] + self.rank * row
            found.append((len(grads), Copy(to, row, 0, row, row, 1)))
        return found

    def _push_by_host(self, member: Member, grads: Grads, mask: int, r: int) -> None:
        """The same to one of CPU ranks."""
        sources = [t for _, t in grads] + ([self._mask(mask)] if mask else [])
        for number, copy in self._copies(member, grads, mask, r):
            memory = self.inbox if number < len(grads) else self.masks
            at, size = copy.target - memory.buffer_ptrs[r], copy.width * copy.height
            source = sources[number].view(-1).view(torch.uint8)[copy.source :]
            rows = source.as_strided((copy.height, copy.width), (copy.source_pitch, 1))
            memory.peer(r)[at : at + size] = rows.flatten()

    def _mask(self, mask: int) -> Tensor:
        """A mask as words in device memory."""
        found = self._brought.get(mask)
        if found is None:
            self.workspace.refuse_growth("gradients of other parameters than before")
            words = [mask >> BITS * i & 0xFFFFFFFF for i in range(self.mask_words)]
            signed = [w - (1 << BITS) * (w >> BITS - 1) for w in words]
            found = torch.tensor(signed, dtype=torch.int32, device=self.workspace.device)
            self._brought[mask] = found
        return found

    def _came(self, dtype: torch.dtype) -> tuple[Tensor, int, Tensor]:
        """What ranks have pushed: their parts, elements from one to the next, and masks."""
        parts, masks = self.inbox.local().view(dtype), self.masks.local().view(torch.int32)
        return parts, self.part_bytes // dtype.itemsize, masks

    def _sum_by_kernel(
        self, member: Member, dtype: torch.dtype, divisor: float, stream: Any
    ) -> Tensor:
        """This rank's part of the sum of all ranks' gradients, in the dtype of its shards."""
        own, key = torch_parts.grad_dtype(member.g), (member.index, dtype)
        out = torch.empty(member.sent, dtype=own, device=self.workspace.device)
        sizes = self.ranks, self.mask_words, BLOCK
        if key not in self._sums:
            self.workspace.refuse_growth("the first gradients of a group")
            parts, stride, masks = self._came(dtype)
            before = parts, member.sent, stride
            after = masks, self.rank, self.fault, member.index
            kernel: Any = sum_kernel
            compiled = kernel.warmup(
                parts, out, member.sent, stride, 1 / divisor, *after, *sizes, grid=(1,), num_warps=8
            )
            grid = (-(-member.sent // BLOCK), 1, 1)
            self._sums[key] = before, after, compiled[grid]
        (parts, sent, stride), after, launch = self._sums[key]
        launch(
            parts, out, sent, stride, 1 / divisor, *after, *sizes, stream=stream.cuda_stream
        )  # fmt: skip
        return out

    def _sum(self, member: Member, dtype: torch.dtype, divisor: float, stream: Any) -> Tensor:
        """The same on CPU ranks."""
        parts, stride, masks = self._came(dtype)
        words = masks.view(self.ranks, -1)
        for r in range(self.ranks):
            differs = words[r] ^ words[self.rank]
            if differs.any():
                self.fault[0], self.fault[1] = member.index + 1, r
                self.fault[2:] = differs
                self.check()
        total = torch.zeros(member.sent, dtype=torch.float32)
        for r in range(self.ranks):
            total += parts[r * stride : r * stride + member.sent]
        return total.div_(divisor).to(torch_parts.grad_dtype(member.g))

    def check(self) -> None:
        """Say what is wrong with an earlier call, if something is.

        Raises:
            InputError: ranks brought gradients of different parameters.
        """
        found, r, other, *differs = self.fault.tolist()
        if not found:
            return
        member = self.groups[found - 1]
        bits = [w >> i & 1 for w in differs for i in range(BITS)]
        names = [f.name for f, bit in zip(member.facts, bits, strict=False) if bit]
        if other:  # a whole group has none on one of the two
            names = [f"all of {torch_parts.name_of(member.g)} or of another group"]
        want = f"equal on all ranks: rank {self.rank} or rank {r} alone has one"
        fix = "let all ranks use the same parameters"
        if hasattr(member.g, "reduce_scatter_unused_params"):
            fix += ", or call set_reduce_scatter_unused_params(True)"
        raise InputError("overlap", f"gradient of {', '.join(names)}", want=want,
                         got="it on the other alone", fix=fix)  # fmt: skip


def _same(grad: Tensor, sent: tuple[Tensor, int] | None) -> bool:
    """Whether a gradient is what was sent: that very tensor, not written since."""
    return sent is not None and sent[0] is grad and sent[1] == grad._version
