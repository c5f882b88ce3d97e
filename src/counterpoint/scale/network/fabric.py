"""What lies between nodes, and collectives of groups of ranks that lie on it.

The GPUs of a `Machine` are one NVLink island; each has a NIC. Above them lie levels, such as pods,
past which links are shared by more than they carry; or the islands form a torus.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from counterpoint.errors import InputError
from counterpoint.machine import LinkSpec, Machine
from counterpoint.ranges import MAX_RANKS, check
from counterpoint.scale import constants
from counterpoint.scale.network import torus
from counterpoint.scale.network.collectives import (
    Link,
    all_to_all_s,
    message_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)
from counterpoint.scale.network.links import Dimension, Topology, fat_tree
from counterpoint.scale.network.links import torus as torus_of
from counterpoint.scale.schedules import direct_s
from counterpoint.schedules.islands import MOST_PIECES

Congestion = Literal["closed", "events"]
MAX_DIMENSIONS = 4
LEAST_BYTES_PER_S = 1e6  # that a machine may have: see ranges.py
# that plans are between; of as many, a step of ours is weighed in half a second
MAX_ISLANDS, MAX_PLANNED = MOST_PIECES, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """NICs and the network above them.

    Args:
        nic_bytes_per_s: of one GPU and one direction, as the datasheet has it: 400 Gb/s is 50e9.
        nic_latency_s: of one message between nodes.
        levels: (GPUs, oversubscription) of each level: past so many GPUs, a link carries that
            factor less for each GPU; ascending. Pods of 3072 with 1:7 above: ((3072, 7),).
        torus: sizes of a torus of islands, innermost first, at most 4; (): there are switches. The
            NICs of an island are shared out over its 2 x dimensions links.
        rails: whether a NIC reaches only those of the same place in other islands: what goes to
            another place crosses its own island first.
        congestion: how long an all-to-all between islands takes: "closed": as its busiest link;
            "events": each message waits for each link of its route, as in `links`.
        source: where the numbers come from.

    Raises:
        InputError: a number is out of its range, as it is where its unit has slipped, levels do
            not ascend, or a torus has levels or rails.
    """

    nic_bytes_per_s: float = 50e9
    nic_latency_s: float = constants.NIC_LATENCY_S.value
    levels: tuple[tuple[int, float], ...] = ()
    torus: tuple[int, ...] = ()
    rails: bool = False
    congestion: Congestion = "closed"
    source: str = "datasheet rate of NDR InfiniBand or 400 Gb/s Ethernet"

    def __post_init__(self) -> None:
        check("Fabric", self)
        sizes = [size for size, _ in self.levels]
        if any(low >= high for low, high in pairwise(sizes)):
            raise InputError("Fabric", "levels", want="of ascending GPUs", got=self.levels)
        if len(self.torus) > MAX_DIMENSIONS:
            want = f"of at most {MAX_DIMENSIONS} dimensions"
            raise InputError("Fabric", "torus", want=want, got=self.torus)
        if self.torus and (self.levels or self.rails):
            other = "levels" if self.levels else "rails"
            raise InputError("Fabric", "torus", want=f"given without {other}", got=self.torus)


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far apart in the numbers of all ranks."""

    size: int
    stride: int


def settled(machine: Machine) -> float:
    """Time of long matmuls against short ones, whose clocks power has not lowered yet."""
    ampere = not machine.measured and machine.device.capability == "8.0"
    return constants.AMPERE_SETTLED.value if ampere else machine.costs.gemm_settled


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

    def covers(self, num_gpus: int) -> None:
        """Refuse a torus of more or fewer islands than there are.

        Raises:
            InputError: names the nearest that fits.
        """
        islands, sizes = -(-num_gpus // self.machine.num_devices), self.fabric.torus
        if sizes and prod(sizes) != islands:
            shown, near = ("x".join(map(str, s)) for s in (sizes, torus.nearest(sizes, islands)))
            each = f"{self.machine.num_devices} GPUs ({self.machine.name})"
            want = f"such that it multiplies to the {islands} islands of {each}"
            fix = f"the nearest that fits: {near}"
            raise InputError("Fabric", "torus", want=want, got=shown, fix=fix)

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
        if self.fabric.torus:
            return inside_s + 2 * torus.all_gather_s(self._dimensions(group), total_bytes / near)
        return min(
            ring_all_reduce_s(through, total_bytes, group.size),
            tree_all_reduce_s(through, total_bytes, group.size),
            inside_s + ring_all_reduce_s(self.nic, total_bytes / near, far),
        )

    def all_gather_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of an all-gather, or of a reduce-scatter: one ring over all, as NCCL has it.

        NCCL has no hierarchy of these, so its latency grows with the ranks.
        """
        near = self.near(group)
        far = -(-group.size // near)
        if far == 1:
            return ring_all_gather_s(self.island, total_bytes, group.size)
        if self.fabric.torus:
            inside_s = ring_all_gather_s(self.island, total_bytes, near)
            return inside_s + torus.all_gather_s(self._dimensions(group), total_bytes / near)
        return ring_all_gather_s(self._through(near), total_bytes, group.size)

    def all_to_all_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of a direct all-to-all: the slowest of the levels that its blocks go through.

        Of S bytes of a rank, (n - near) / n leave its island by its NIC, and what leaves a level
        besides waits for a share of its links. With rails, or on a torus, a block goes to the right
        NIC within its island first.
        """
        near = self.near(group)
        if near == group.size:
            return all_to_all_s(self.island, total_bytes, near)
        crosses = self.fabric.rails or self.fabric.torus
        within = total_bytes if crosses else total_bytes * near / group.size
        return max(all_to_all_s(self.island, within, near), self._leaves_s(total_bytes, group))

    def send_s(self, num_bytes: float, stride: int) -> float:
        """Seconds from one rank to another that is so far from it."""
        if stride < self.machine.num_devices:
            return message_s(self.island, num_bytes)
        if self.fabric.torus:
            hops = torus.hops(self.fabric.torus, stride // self.machine.num_devices)
            return message_s(self._torus_link, num_bytes, hops, stored=False)
        return message_s(self.nic, num_bytes)

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
            rate = max(probe * (group.size - 1) / group.size / seconds, LEAST_BYTES_PER_S)
        long = replace(
            costs,
            gemm_flop_per_s=costs.gemm_flop_per_s / settled(self.machine),
            gemm_settled=1.0,
            copy_bytes_per_s=min(costs.copy_bytes_per_s, rate),
            collective_bytes_per_s=min(costs.collective_bytes_per_s, rate),
            direct_bytes_per_s=min(costs.direct_bytes_per_s, rate),
        )
        num_devices = max(min(group.size, MAX_RANKS), self.machine.num_devices)
        return replace(self.machine, num_devices=num_devices, measured=long)

    def as_islands(self, group: Group) -> Machine | None:
        """The machine of a group's islands that plans between them see, with its NIC.

        Its rate is that of an all-to-all: plans send each other island as much. None where there
        is one island, or these have no equal parts of the group. Of more than `MAX_ISLANDS` or
        `MAX_PLANNED` ranks there is none either: a plan would have too many steps.
        """
        near = self.near(group)
        islands, rest = divmod(group.size, near)
        if islands == 1 or rest or islands > MAX_ISLANDS or group.size > MAX_PLANNED:
            return None
        probe = 2.0**30
        seconds = self._leaves_s(probe, group) - 2 * self.nic.latency_s
        rate = max(probe * (group.size - near) / group.size / seconds, LEAST_BYTES_PER_S)
        nic = LinkSpec(name="NIC", bytes_per_s=rate, latency_s=self.nic.latency_s,
                       source=self.fabric.source)  # fmt: skip
        return replace(self.as_machine(Group(1, 1)), nic=nic)

    def _leaves_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of an all-to-all's blocks for other islands."""
        if self.fabric.congestion == "events":
            return _events_s(self, total_bytes, group)
        near = self.near(group)
        if self.fabric.torus:
            block = total_bytes * near / group.size
            return torus.all_to_all_s(self._dimensions(group), block)
        levels = ((near, 1.0), *self._pods(group))
        leaves = max((group.size - within) / group.size * slower for within, slower in levels)
        return total_bytes * leaves / self.nic.bytes_per_s + 2 * self.nic.latency_s

    def _through(self, near: int) -> Link:
        """A link of one ring over all: within islands, and by the NICs of all its ranks of one."""
        rate = min(self.island.bytes_per_s, self.nic.bytes_per_s * near)
        latency_s = (self.island.latency_s * (near - 1) + self.nic.latency_s) / near
        return Link(rate, latency_s)

    def _pods(self, group: Group) -> list[tuple[int, float]]:
        """Of each level, the ranks of a group in one of its pods, and the factor past it.

        Ranks never get fewer from one level to the next, and factors multiply.
        """
        within, slower = self.near(group), 1.0
        found: list[tuple[int, float]] = []
        for size, factor in self.fabric.levels:
            within = max(within, min(group.size, size // group.stride))
            slower *= factor
            found.append((within, slower))
        return found

    @property
    def _torus_link(self) -> Link:
        """One rank's share of a link from its island to the next one."""
        return self.nic._replace(bytes_per_s=self.nic.bytes_per_s / (2 * len(self.fabric.torus)))

    def _dimensions(self, group: Group) -> tuple[Dimension, ...]:
        """Where a group lies on the torus."""
        islands = -(-group.size // self.near(group))
        stride = max(group.stride // self.machine.num_devices, 1)
        return torus.dimensions(self.fabric.torus, islands, stride, self._torus_link)

    def between(self, group: Group) -> Topology:
        """Links between a group's islands, as one rank of each of them has them."""
        near = self.near(group)
        islands = -(-group.size // near)
        if self.fabric.torus:
            return torus_of(self._dimensions(group))
        levels: list[tuple[int, Link]] = []
        for size, slower in self._pods(group):
            pod = size // near
            pooled = self.nic._replace(bytes_per_s=self.nic.bytes_per_s * pod / slower)
            levels.append((pod, pooled))
        inside = None
        if self.fabric.rails and near > 1:
            # a block for its own place stays
            inside = self.island._replace(bytes_per_s=self.island.bytes_per_s * near / (near - 1))
        return fat_tree(islands, self.nic, levels, inside)


@lru_cache(maxsize=1024)
def _events_s(network: Network, total_bytes: float, group: Group) -> float:
    """Seconds of a direct all-to-all between islands, message by message.

    Ranks of one island do the same at the same time, so one of each stands for them: it sends each
    island what is for all ranks there.
    """
    between = network.between(group)
    share = network.near(group) * between.ranks / group.size
    return direct_s(between, "all_to_all", total_bytes * share)
