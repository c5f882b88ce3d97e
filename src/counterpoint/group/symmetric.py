"""Symmetric memory of a group, on CPU ranks or on GPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.group.ranks import gather_object
from counterpoint.group.symmetric_memory import SymmetricMemory


def allocate(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device | str,
    gather: Callable[[Any], list[Any]] | None = None, mates: range | None = None,
) -> SymmetricMemory:  # fmt: skip
    """Allocate a zero-filled buffer on each rank of `group`, and open those of the peers.

    A collective, synchronous call: when it returns, all buffers are zero and open on all
    ranks. If one rank cannot, all ranks raise.

    Args:
        num_bytes: size of one rank's buffer, equal on all ranks.
        group: all its ranks call this.
        device: "cpu", or this rank's CUDA device.
        gather: how ranks tell each other what they have; None: by the library, as long as the
            group's own timeout.
        mates: the ranks whose buffers this one opens, itself included; None: all.

    Raises:
        InputError: `num_bytes` is < 1 or differs between ranks, or this rank is not in `group`.
        UnsupportedError: ranks cannot share memory here, or not on this kind of device.
        OSError: a CPU rank is out of memory.
        torch.OutOfMemoryError: a CUDA rank is out of memory.
    """
    device = torch.device(device)
    if dist.get_rank(group) < 0:
        raise InputError("allocate", "group", want="a group of this rank", got="another")

    gather = gather or partial(gather_object, group=group)
    mates = range(dist.get_world_size(group)) if mates is None else mates
    # imported here: the CUDA side needs private parts of torch that a CPU build may lack
    if device.type == "cpu":
        from counterpoint.group.symmetric_cpu import allocate_cpu

        return allocate_cpu(num_bytes, group, gather, mates)
    if device.type == "cuda":
        from counterpoint.group.symmetric_cuda import allocate_cuda

        return allocate_cuda(num_bytes, group, device, gather, mates)
    raise UnsupportedError(f"allocate: symmetric memory is on cpu and cuda, not on {device.type}")
