"""NCCL's own copy-engine collectives: no block of a kernel, if buffers are registered with it.

Where NVLS is on they synchronise by multicast, which is refused here: NCCL_NVLS_ENABLE=0 must be
set before the process group is made.
"""

import math
import os
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import UnsupportedError

NCCL_SINCE = (2, 28)


def missing(device: torch.device) -> str:
    """Why `device` has no such collectives, and what would provide them; '' if it has."""
    if device.type != "cuda" or torch.version.hip:
        return f"needs NCCL and an NVIDIA GPU, not {device}"
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        fix = "set NCCL_NVLS_ENABLE=0 before the process group is made"
        return f"needs NVLS off, it synchronises by multicast; {fix}"
    has_policy = hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO")
    if not has_policy or not hasattr(dist.ProcessGroupNCCL.Options().config, "cta_policy"):
        return f"torch {torch.__version__} cannot ask NCCL for it; install torch >= 2.11"
    if torch.cuda.nccl.version() < NCCL_SINCE:
        has, needs = (".".join(map(str, v)) for v in (torch.cuda.nccl.version(), NCCL_SINCE))
        return f"NCCL {has} has none; install {needs} or newer"
    return ""


class ZeroCta:
    """A second NCCL group of the same ranks, and memory that is registered with it.

    All ranks of the group make one, and allocate from it in the same order.

    Args:
        group: an NCCL group.
        device: this rank's GPU.

    Raises:
        UnsupportedError: they are missing here; the message says why.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if why := missing(device):
            raise UnsupportedError(f"zero_cta: {why}")
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # pyright: ignore  (not in its stub)
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup), "a rank of a group makes a group with its ranks"
        self.group = made
        self.device = device
        dist.all_reduce(torch.ones(1, device=device), group=made)  # sets its communicator up
        self._backend: Any = made._get_backend(device)  # pyright: ignore[reportPrivateUsage]
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        self._registered = False
        self._tensors: list[Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Registered memory: a tensor of zeros, of equal shape on all ranks."""
        with torch.cuda.use_mem_pool(self._pool):
            tensor = torch.zeros(math.prod(shape), dtype=dtype, device=self.device).view(shape)
        if not self._registered:  # later segments of the pool are registered as they come
            self._backend.register_mem_pool(self._pool, symm=True)
            self._registered = True
        self._tensors.append(tensor)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was allocated here."""
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == own.untyped_storage().data_ptr() for own in self._tensors)
