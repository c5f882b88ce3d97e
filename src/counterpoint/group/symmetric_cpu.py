"""Symmetric memory between the processes of one host, for CPU ranks.

Each rank makes a memfd, its peers map it through /proc/<pid>/fd. It never has a name in a
file system: nothing is left behind however a rank ends, and Docker's 64 MB limit on
/dev/shm does not apply. All ranks must be of one user and one pid namespace.
"""

import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import UnsupportedError
from counterpoint.group.islands import host, name_of_mine
from counterpoint.group.symmetric_memory import (
    NOT_HERE,
    SymmetricMemory,
    check_sizes,
    on_all_ranks,
)


class _Offer(NamedTuple):
    """What a rank tells its peers of its buffer; errno and problem if it has none."""

    num_bytes: int
    pid: int
    place: str = ""
    fd: int = -1
    errno: int = 0
    problem: str = ""


def allocate_cpu(
    num_bytes: int, group: dist.ProcessGroup, gather: Callable[[Any], list[Any]], mates: range
) -> SymmetricMemory:
    """Allocate on CPU; see `symmetric.allocate`.

    Raises:
        InputError: `num_bytes` is < 1 or differs between ranks.
        UnsupportedError: the ranks are on several hosts, containers or users.
        OSError: a rank is out of memory.
    """
    offer = _make_offer(num_bytes, len(mates))
    try:
        # no rank leaves early before the exchange, or its peers would wait for it there
        offers = [_Offer(*each) for each in gather(offer)]
        _check(offers, mates)

        buffers = [NOT_HERE] * len(offers)
        problem = ""
        try:
            for r in mates:
                buffers[r] = _map(offers[r])
        except RuntimeError as error:
            problem = str(error)
        # also the barrier after which no peer needs this rank's fd any more
        problems = gather(problem)
    finally:
        if offer.fd >= 0:
            os.close(offer.fd)

    for rank, problem in enumerate(problems):
        if problem:
            raise UnsupportedError(
                f"allocate: rank {rank} cannot open the memory of its peers: {problem}; "
                "run all ranks as one user who may look into /proc/<pid>/fd"
            )
    return SymmetricMemory(
        rank=dist.get_rank(group),
        buffers=tuple(buffers),
        peer_pids=tuple(peer.pid for peer in offers),
    )


def _make_offer(num_bytes: int, world_size: int) -> _Offer:
    offer = _Offer(num_bytes, os.getpid())
    fd = -1
    try:
        offer = offer._replace(place=f"{name_of_mine()} on {host()}")
        # a memfd has no limit but the host's memory, past which the kernel kills a process
        available_bytes = _available_bytes()
        if num_bytes * world_size > available_bytes:
            raise OSError(
                errno.ENOMEM, f"{world_size} ranks want it, {available_bytes} bytes are available"
            )
        fd = os.memfd_create("counterpoint", os.MFD_CLOEXEC)
        # reserves zeroed pages: at first touch, a lack of them would be a SIGBUS
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        return offer._replace(errno=error.errno or 0, problem=str(error))
    return offer._replace(fd=fd)


def _check(offers: list[_Offer], mates: range) -> None:
    """Raise the same error on all ranks that share memory: they see the same offers."""
    check_sizes([offer.num_bytes for offer in offers])
    places = [offers[r].place for r in mates]
    if len(set(places)) > 1:
        raise UnsupportedError(
            "allocate: CPU ranks share memory within one host and one pid namespace, "
            f"got {places} in rank order; run all ranks of the group in one of them"
        )
    for rank, offer in enumerate(offers):
        if offer.problem:
            what = f"{offer.num_bytes} bytes of shared memory: {offer.problem}"
            raise on_all_ranks(OSError(offer.errno, f"allocate: rank {rank} cannot make {what}"))


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return 1024 * int(fields["MemAvailable"].split()[0])  # given in KiB


def _map(offer: _Offer) -> Tensor:
    # unlike mmap.mmap, keeps no fd open: n ranks would hold n of them per allocation
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    return torch.from_file(path, shared=True, size=offer.num_bytes, dtype=torch.uint8)
