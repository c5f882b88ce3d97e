"""Symmetric memory between GPUs that reach each other over NVLink: torch's own allocator.

The only importer of `torch.distributed._symmetric_memory`, a private module. Its calls here
are those of torch 2.11.
"""

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import UnsupportedError
from counterpoint.runtime.islands import group_of_island
from counterpoint.runtime.symmetric_memory import NOT_HERE, SymmetricMemory, check_sizes


def allocate_cuda(
    num_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    gather: Callable[[Any], list[Any]],
    mates: range,
) -> SymmetricMemory:
    """Allocate on CUDA; see `symmetric.allocate`. Synchronises the host with `device`.

    Raises:
        InputError: `num_bytes` is < 1 or differs between ranks.
        UnsupportedError: this torch has no symmetric memory, or the GPUs are not peers.
        torch.OutOfMemoryError: a rank is out of memory.
    """
    symmetric_memory = torch_symmetric_memory()
    with torch.cuda.device(device):
        buffer = None
        problem = ""
        try:
            buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
            # the zeros must be there before a peer writes
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            problem = str(error)
        # rendezvous waits for all ranks, so none may stay away from it alone
        reports = gather((num_bytes, problem, os.getpid()))
        check_sizes([size for size, *_ in reports])
        for rank, (_, problem, _) in enumerate(reports):
            if problem:
                # the allocator reports both as a RuntimeError of the CUDA driver
                lack = "out of memory" in problem
                raise (torch.OutOfMemoryError if lack else UnsupportedError)(
                    f"allocate: rank {rank} cannot make {num_bytes} bytes of symmetric memory: "
                    f"{problem}"
                )

        handle: Any = None
        buffers: list[Any] = [NOT_HERE] * len(reports)
        problem = ""
        try:
            handle = symmetric_memory.rendezvous(buffer, group_of_island(group, mates).group_name)
            for i, rank in enumerate(mates):
                buffers[rank] = handle.get_buffer(i, (num_bytes,), torch.uint8)
            # a tensor of the handle does not keep memory alive, as the one that made it does
            buffers[dist.get_rank(group)] = buffer
        except RuntimeError as error:
            problem = str(error)
        # also the barrier that tells each rank that its peers' buffers are open
        problems = gather(problem)
        for rank, problem in enumerate(problems):
            if problem:
                raise UnsupportedError(
                    f"allocate: rank {rank} cannot open the memory of its peers: {problem}; "
                    "`nvidia-smi topo -p2p n` shows which GPUs reach each other"
                )
    pids = tuple(pid for *_, pid in reports)
    return SymmetricMemory(dist.get_rank(group), tuple(buffers), pids, handle)


def torch_symmetric_memory() -> ModuleType:
    name = "torch.distributed._symmetric_memory"
    if not torch.cuda.is_available():
        raise UnsupportedError("allocate: symmetric memory on cuda needs a GPU, torch sees none")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"allocate: torch {torch.__version__} has no {name} ({error}); install torch >= 2.11"
        ) from error
    missing = [call for call in ("empty", "rendezvous") if not hasattr(module, call)]
    if missing:
        raise UnsupportedError(
            f"allocate: {name} of torch {torch.__version__} lacks {missing}; install torch >= 2.11"
        )
    return module
