"""What symmetric memory is: one buffer per rank of a group, of equal size, each open to all ranks.

Plain loads and stores reach a peer's buffer; nothing here says when its bytes are there.
That is the business of signals and barriers.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from counterpoint.errors import InputError

E = TypeVar("E", bound=Exception)
NOT_HERE = torch.empty(0, dtype=torch.uint8)  # the buffer of a rank of another island


@dataclass(frozen=True, eq=False)
class SymmetricMemory:
    """The buffers of all ranks of a group, as seen from one of them.

    The memory lives as long as this object or a tensor taken from it. A tensor of a peer
    that has freed its own side stays readable on CPU, and must not be touched on CUDA.

    Args:
        rank: of this process in the group.
        buffers: each rank's buffer, uint8 [num_bytes], in rank order, mapped in this process;
            `NOT_HERE` of those whose memory this rank does not reach.
        peer_pids: each rank's process; `ranks.describe_process` tells a dead peer from a late one.
        handle: on CUDA torch's own object, which keeps the peers' mappings alive.
    """

    rank: int
    buffers: tuple[Tensor, ...]
    peer_pids: tuple[int, ...]
    handle: Any = None

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.buffers)

    @property
    def num_bytes(self) -> int:
        """Size of one rank's buffer."""
        return self.buffers[self.rank].numel()

    @property
    def buffer_ptrs(self) -> tuple[int, ...]:
        """Address of each rank's buffer, in this process, in rank order."""
        return tuple(buffer.data_ptr() for buffer in self.buffers)

    def local(self) -> Tensor:
        """This rank's own buffer, uint8 [num_bytes]."""
        return self.buffers[self.rank]

    def peer(self, rank: int) -> Tensor:
        """The buffer of `rank`, uint8 [num_bytes]; of this rank, the same as `local()`."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        assert self.buffers[rank] is not NOT_HERE, f"rank {rank} is on another island"
        return self.buffers[rank]


def check_sizes(num_bytes: list[int]) -> None:
    """Refuse the sizes that the ranks ask for, from a list that is equal on all of them.

    Raises:
        InputError: one of `num_bytes` is < 1, or they are not all equal.
    """
    if min(num_bytes) < 1 or len(set(num_bytes)) > 1:
        raise InputError("allocate", "num_bytes", want=">= 1 and equal on all ranks", got=num_bytes)


def on_all_ranks(error: E) -> E:
    """The error, which is none of ours but raised by all ranks at the same place of a call."""
    error.is_told = True  # type: ignore[attr-defined]
    return error
