"""The parameter groups of a shard group, and the memory that they are gathered to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.torch_parts import Fact, Group, Pending
from counterpoint.gpu.driver import Batch
from counterpoint.group.symmetric_memory import SymmetricMemory

ALIGN = 256  # bytes
PUSHES = 16  # of a group whose parameters are pushed one by one, at most


class Place(NamedTuple):
    """Where one parameter of a group lies.

    Args:
        at, size: bytes of this rank's shard among all that a rank has.
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
        self.slot: Slot | None = None
        self.buffers: list[Tensor] = []  # in the slot, one a parameter
        self.pulls: dict[int, Batch] = {}  # by owner
        self.hooks: Any = None
        self.wide = False  # backwards before have kept gradients in fp32
        self.by_hand = False  # gathered by a user, who reads its parameters
        self.in_graph = False  # a graph may read what it is gathered to
        self.published: list[tuple[int, int, int]] = []  # versions of its shards then
        self.lies: Pending | None = None  # its last gather in this forward and backward
        self.read: list[tuple[int, int]] | None = None  # versions of what it brought, once in use

    def lay_out(self, index: int, at: int) -> int:
        """Fill in where its parameters lie, from byte `at` on; where that ends."""
        self.index = index
        for fact in self.facts:
            size = fact.numel * fact.dtype.itemsize
            trains = self.scatters and fact.trains
            self.places.append(Place(at, size, self.sent if trains else -1))
            at += aligned(size)
            if trains:
                self.sent += aligned(size) // fact.dtype.itemsize
        return at

    def gather_in(self, slot: "Slot") -> None:
        """Have a place to be gathered to."""
        self.slot, self.buffers, self.lies = slot, slot.buffers(self), None
        self.pulls.clear()

    def parts(self, total: Tensor, of: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The gradients of these parameters in a flat sum of all."""
        starts = ((i, self.places[i].sent) for i in of)
        return [(i, total[start : start + self.facts[i].numel]) for i, start in starts]

    def sizes(self) -> tuple[int, int, int]:
        """Elements of this rank's shard, those with gradients of ours, and parameters."""
        trained = sum(f.numel for f in self.facts if f.trains and self.scatters)
        return sum(f.numel for f in self.facts), trained, len(self.facts)

    def large(self) -> list[int]:
        """Places of the parameters that are worth a push of their own."""
        whole = sum(f.numel for f in self.facts)
        return [i for i, f in enumerate(self.facts) if f.numel * PUSHES >= whole]

    def shards(self) -> list[Tensor]:
        """This rank's shards, flat and padded, as the optimizer has them now.

        Raises:
            InputError: they have other sizes than when the model first ran.
        """
        found = torch_parts.masters(self.g)
        for fact, shard in zip(self.facts, found, strict=True):
            if shard.numel() != fact.numel:
                want = f"{fact.numel} elements, as when the model first ran"
                raise InputError("overlap", fact.name, want=want, got=shard.numel())
        return found

    @property
    def gathered_bytes(self) -> int:
        """Of the whole group on one rank."""
        ranks = torch_parts.shard_group(self.g).size()
        return sum(aligned(f.numel * ranks * f.dtype.itemsize) for f in self.facts)


class Slot:
    """Memory that groups are gathered to in turn, or one group alone.

    Args:
        memory: flat bytes.
        shared: that memory on all ranks, where peers read it.
        area: its name in words, then.

    Attributes:
        alone: whether it is the memory of one group.
        holder: the last group that was gathered to it.
        left: the event of the stream on which its use ended.
    """

    def __init__(
        self, memory: Tensor, shared: SymmetricMemory | None = None, area: str = ""
    ) -> None:
        self.memory, self.shared, self.area = memory, shared, area
        self.alone = False
        self.holder: Member | None = None
        self.left: Any = None

    def buffers(self, member: Member) -> list[Tensor]:
        """One a parameter, flat, each at the start of a storage of its own, as torch wants it."""
        ranks, at, found = torch_parts.shard_group(member.g).size(), 0, list[Tensor]()
        for fact in member.facts:
            size = fact.numel * ranks * fact.dtype.itemsize
            part = self.memory[at : at + size].view(fact.dtype)
            found.append(torch.from_dlpack(part) if part.numel() else part.clone())
            at += aligned(size)
        return found


def part_of(whole: Tensor, fact: Fact, r: int) -> Tensor:
    """What rank r owns of a gathered parameter or of its gradient, which is flat: a view.

    Flat, or [rows, elements] where it lies in several pieces; of uneven rows the last have fewer.
    """
    if fact.rows == 1:
        return whole[r * fact.numel : (r + 1) * fact.numel]
    width = fact.numel // fact.rows
    return whole.view(fact.rows, -1)[:, r * width : (r + 1) * width]


def aligned(num_bytes: int) -> int:
    """To where the next parameter or gradient may begin."""
    return -(-num_bytes // ALIGN) * ALIGN
