"""What lies between nodes, and collectives of groups of ranks that lie on it.

The GPUs of a `Machine` are one NVLink island; each has a NIC. Above them lie levels, such as pods,
past which links are shared by more than they carry.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.ranges import MAX_RANKS, check
from counterpoint.scale import constants
from counterpoint.scale.collectives import (
    Link,
    all_to_all_s,
    message_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """NICs and the network above them.

    Args:
        nic_bytes_per_s: of one GPU and one direction, as the datasheet has it: 400 Gb/s is 50e9.
        nic_latency_s: of one message between nodes.
        levels: (GPUs, oversubscription) of each level: past so many GPUs, a link carries that
            factor less for each GPU; ascending. Pods of 3072 with 1:7 above: ((3072, 7),).
        source: where the numbers come from.

    Raises:
        InputError: a number is out of its range, as it is where its unit has slipped, or levels do
            not ascend.
    """

    nic_bytes_per_s: float = 50e9
    nic_latency_s: float = constants.NIC_LATENCY_S.value
    levels: tuple[tuple[int, float], ...] = ()
    source: str = "datasheet rate of NDR InfiniBand or 400 Gb/s Ethernet"

    def __post_init__(self) -> None:
        check("Fabric", self)
        sizes = [size for size, _ in self.levels]
        if any(low >= high for low, high in pairwise(sizes)):
            raise InputError("Fabric", "levels", want="of ascending GPUs", got=self.levels)


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far apart in the numbers of all ranks."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Network:
    """A machine's islands on a fabric: what a collective of a group costs.

    Raises:
        InputError: a level of the fabric is smaller than an island.
    """

    machine: Machine
    fabric: Fabric

    def __post_init__(self) -> None:
        island = self.machine.num_devices
        for size, _ in self.fabric.levels:
            if size < island:
                want = f"of at least the {island} GPUs of an island ({self.machine.name})"
                raise InputError("Fabric", "levels", want=want, got=size)

    def near(self, group: Group) -> int:
        """How many ranks of a group one island has."""
        return max(1, min(group.size, self.machine.num_devices // group.stride))

    @property
    def island(self) -> Link:
        """A GPU's links within its island, as the library's collectives use them."""
        costs = self.machine.costs
        return Link(costs.collective_bytes_per_s, self.machine.link.latency_s)

    @property
    def nic(self) -> Link:
        """A GPU's NIC."""
        rate = constants.NIC_SHARE.value * self.fabric.nic_bytes_per_s
        return Link(rate, self.fabric.nic_latency_s)

    def all_reduce_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of the fastest of a ring, a tree, and a hierarchy of rings."""
        near = self.near(group)
        far = -(-group.size // near)
        if far == 1:
            return ring_all_reduce_s(self.island, total_bytes, group.size)
        through = self._through(near)
        inside_s = 2 * ring_all_gather_s(self.island, total_bytes, near)
        return min(
            ring_all_reduce_s(through, total_bytes, group.size),
            tree_all_reduce_s(through, total_bytes, group.size),
            inside_s + ring_all_reduce_s(self.nic, total_bytes / near, far),
        )

    def all_gather_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of an all-gather, or of a reduce-scatter: a ring, or a hierarchy of two."""
        near = self.near(group)
        far = -(-group.size // near)
        if far == 1:
            return ring_all_gather_s(self.island, total_bytes, group.size)
        inside_s = ring_all_gather_s(self.island, total_bytes, near)
        return min(
            ring_all_gather_s(self._through(near), total_bytes, group.size),
            inside_s + ring_all_gather_s(self.nic, total_bytes / near, far),
        )

    def all_to_all_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of a direct all-to-all: the slowest of the levels that its blocks go through.

        Of S bytes of a rank, (n - near) / n leave its island by its NIC, and what leaves a level
        besides waits for a share of its links.
        """
        near = self.near(group)
        times = [all_to_all_s(self.island, total_bytes * near / group.size, near)]
        if near < group.size:
            rate, shared = self.nic.bytes_per_s, 1.0
            within = near
            for size, factor in ((0, 1.0), *self.fabric.levels):
                within = max(within, min(group.size, size // group.stride))
                shared *= factor
                leaves = total_bytes * (group.size - within) / group.size
                times.append(leaves / rate * shared + 2 * self.nic.latency_s)
        return max(times)

    def send_s(self, num_bytes: float, stride: int) -> float:
        """Seconds from one rank to another that is so far from it."""
        return message_s(self.nic if stride >= self.machine.num_devices else self.island, num_bytes)

    def as_machine(self, group: Group) -> Machine:
        """The machine that plans of a group see: as many GPUs, at the rate of an all-to-all.

        Clocks have settled: a step is long. Rates within an island are the machine's own.
        """
        costs = self.machine.costs
        rate = float("inf")
        if self.near(group) < group.size:
            probe = 2.0**30
            fixed_s = 2 * self.nic.latency_s
            seconds = self.all_to_all_s(probe, group) - fixed_s
            rate = max(probe * (group.size - 1) / group.size / seconds, 1e9)
        settled = replace(
            costs,
            gemm_flop_per_s=costs.gemm_flop_per_s / costs.gemm_settled,
            gemm_settled=1.0,
            copy_bytes_per_s=min(costs.copy_bytes_per_s, rate),
            collective_bytes_per_s=min(costs.collective_bytes_per_s, rate),
            direct_bytes_per_s=min(costs.direct_bytes_per_s, rate),
        )
        num_devices = max(min(group.size, MAX_RANKS), self.machine.num_devices)
        return replace(self.machine, num_devices=num_devices, measured=settled)

    def _through(self, near: int) -> Link:
        """A link of one ring over all: within islands, and by the NICs of all its ranks of one."""
        rate = min(self.island.bytes_per_s, self.nic.bytes_per_s * near)
        latency_s = (self.island.latency_s * (near - 1) + self.nic.latency_s) / near
        return Link(rate, latency_s)
