"""Islands: neighbouring ranks of a group that reach each other's memory, agreed by all ranks.

By default those of one host. COUNTERPOINT_ISLAND names the island of a rank in its place, as where
NVLink spans hosts; so does NCCL_HOSTID, which NCCL takes for a host.
"""

import os
import socket
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[range, Any]] = WeakKeyDictionary()


class Islands(NamedTuple):
    """The islands of a group as one rank sees them.

    Args:
        number: how many; each has equally many ranks, one after another.
        size: ranks of one.
        rank: this one.
        why: why ranks that share an island are taken to be on islands of their own, or "".
    """

    number: int
    size: int
    rank: int
    why: str = ""

    @property
    def mine(self) -> range:
        """The ranks of this one's island."""
        first = self.rank // self.size * self.size
        return range(first, first + self.size)

    def named(self, rank: int) -> str:
        """A rank for a message."""
        return f"rank {rank}" + (f" (island {rank // self.size})" if self.number > 1 else "")


def name_of_mine() -> str:
    """The island of this rank, in the same words on all ranks of it."""
    for variable in ("COUNTERPOINT_ISLAND", "NCCL_HOSTID"):
        if text := os.environ.get(variable):
            return text
    return host()


def islands_of(names: Sequence[str], rank: int) -> Islands:
    """The islands of ranks whose islands have those names.

    Islands of unequal size, or of ranks that are not neighbours, are no grid: each rank is taken
    to be one then.
    """
    blocks = [(name, len([*ranks])) for name, ranks in groupby(names)]
    sizes = {size for _, size in blocks}
    if len(blocks) > len({name for name, _ in blocks}):
        why = "ranks of one island are not neighbours"
    elif len(sizes) > 1:
        why = f"islands have {' and '.join(map(str, sorted(sizes)))} ranks"
    else:
        return Islands(len(blocks), blocks[0][1], rank)
    return Islands(len(names), 1, rank, why)


@cache
def host() -> str:
    """Equal on two ranks if and only if a process id means the same process to both."""
    # each host numbers its namespaces anew, and two containers may share a host name
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} of boot {boot}"


def group_of_island(group: dist.ProcessGroup, mates: range) -> dist.ProcessGroup:
    """The group of the ranks that share an island, made once; all of them call this.

    Args:
        group: of all islands.
        mates: its ranks that are on this one's.
    """
    if len(mates) == group.size():
        return group
    groups = _groups.setdefault(group, {})
    if mates not in groups:
        ranks = [dist.get_global_rank(group, r) for r in mates]
        groups[mates] = dist.new_group(ranks, use_local_synchronization=True)
    return groups[mates]
