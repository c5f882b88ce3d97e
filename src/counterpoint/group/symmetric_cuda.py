"""Symmetric memory between GPUs that reach each other over NVLink: torch's own allocator.

The only importer of `torch.distributed._symmetric_memory`, a private module. Its calls here
are those of torch 2.11.
"""

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as private

from counterpoint.errors import UnsupportedError
from counterpoint.group.islands import group_of_island
from counterpoint.group.symmetric_memory import (
    NOT_HERE,
    SymmetricMemory,
    check_sizes,
    on_all_ranks,
)

# torch numbers the meetings of symmetric memory in each process, over all of its groups, and finds
# what a peer has written by that number. A rank that has met once more, in a group of its own,
# would wait for ever. The numbers are read where torch writes them, in a store of their own
PROBE = "counterpoint/probe"  # groups of this rank alone
MEETING = "CUDASymmetricMemory/{}/0"
MOST_MEETINGS = 1 << 16
MOST_EXTRA = 64  # meetings that a rank may be behind another one
_probes = count()
c10d: Any = private


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
        mine = _meetings(symmetric_memory, device)
        reports = gather((num_bytes, problem, os.getpid(), mine))
        check_sizes([size for size, *_ in reports])
        for rank, (_, problem, *_) in enumerate(reports):
            if problem:
                # the allocator reports both as a RuntimeError of the CUDA driver
                lack = "out of memory" in problem
                kind = torch.OutOfMemoryError if lack else UnsupportedError
                what = f"{num_bytes} bytes of symmetric memory: {problem}"
                raise on_all_ranks(kind(f"allocate: rank {rank} cannot make {what}"))

        _catch_up([met for *_, met in reports], mine, gather, symmetric_memory, device)
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
    pids = tuple(pid for _, _, pid, _ in reports)
    return SymmetricMemory(dist.get_rank(group), tuple(buffers), pids, handle)


def _meetings(symmetric_memory: ModuleType, device: torch.device) -> int:
    """The number of one more meeting of this rank, with itself; -1: torch does not show it."""
    store, name = c10d.HashStore(), f"{PROBE}/{next(_probes)}"
    group = dist.ProcessGroup(store, 0, 1)  # torch finds it by its name, as long as it is here
    alone = symmetric_memory.empty(1, dtype=torch.uint8, device=device)
    try:
        c10d._register_process_group(name, group)
        symmetric_memory.rendezvous(alone, name)
    except (AttributeError, RuntimeError):
        return -1
    finally:
        with suppress(AttributeError, RuntimeError):
            c10d._unregister_process_group(name)
    return next((i for i in range(MOST_MEETINGS) if store.check([MEETING.format(i)])), -1)


def _catch_up(
    met: list[int], mine: int, gather: Callable[[Any], list[Any]], symmetric_memory: ModuleType,
    device: torch.device,
) -> None:  # fmt: skip
    """Have met as often as the rank that has met most.

    Args:
        met: how often each rank has; equal on all of them.
        mine: how often this one has.

    Raises:
        UnsupportedError: ranks cannot; on all of them.
    """
    first = met
    for _ in range(MOST_EXTRA):
        if min(met) < 0 or min(met) == max(met):
            return
        if mine < max(met):
            mine = _meetings(symmetric_memory, device)
        met = gather(mine)
    raise UnsupportedError(
        f"allocate: torch's symmetric memory has met {first} times on the ranks, in rank order; "
        "it finds no peer then: let all ranks set up as much of it, other groups included"
    )


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
