"""Symmetric memory: one buffer per rank of a group, of equal size, that each rank can address.

Plain loads and stores reach a peer's buffer; nothing here says when its bytes are there.
That is the business of signals and barriers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError


@dataclass(frozen=True, eq=False)
class SymmetricMemory:
    """The buffers of all ranks of a group, as seen from one of them.

    The memory lives as long as this object or a tensor taken from it. A tensor of a peer
    that has freed its own side stays readable on CPU, and must not be touched on CUDA.

    Args:
        rank: of this process in the group.
        buffers: each rank's buffer, uint8 [num_bytes], in rank order, mapped in this process.
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
        return self.buffers[rank]


def allocate(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device | str
) -> SymmetricMemory:
    """Allocate a zero-filled buffer on each rank of `group`, and open those of the peers.

    A collective, synchronous call: when it returns, all buffers are zero and open on all
    ranks. If one rank cannot, all ranks raise.

    Args:
        num_bytes: size of one rank's buffer, equal on all ranks.
        group: all its ranks call this.
        device: "cpu", or this rank's CUDA device.

    Raises:
        InputError: `num_bytes` is < 1 or differs between ranks, or this rank is not in `group`.
        UnsupportedError: ranks cannot share memory here, or not on this kind of device.
        OSError: a CPU rank is out of memory.
        torch.OutOfMemoryError: a CUDA rank is out of memory.
    """
    device = torch.device(device)
    if dist.get_rank(group) < 0:
        raise InputError("allocate", "group", want="a group of this rank", got="another")

    # imported here: the CUDA side needs private parts of torch that a CPU build may lack
    if device.type == "cpu":
        from counterpoint.runtime.symmetric_cpu import allocate_cpu

        return allocate_cpu(num_bytes, group)
    if device.type == "cuda":
        from counterpoint.runtime.symmetric_cuda import allocate_cuda

        return allocate_cuda(num_bytes, group, device)
    raise UnsupportedError(f"allocate: symmetric memory is on cpu and cuda, not on {device.type}")


def check_sizes(num_bytes: list[int]) -> None:
    """Refuse the sizes that the ranks ask for, from a list that is equal on all of them.

    Raises:
        InputError: one of `num_bytes` is < 1, or they are not all equal.
    """
    if min(num_bytes) < 1 or len(set(num_bytes)) > 1:
        raise InputError("allocate", "num_bytes", want=">= 1 and equal on all ranks", got=num_bytes)
