"""What embedding bags and their all-to-all take: in one kernel, and as lookup and all-to-all.

In one kernel the shorter one of the lookup and the stores to peers hides behind the other; nothing
is put side by side, but the output is copied where it is not the caller's own memory. How long
single bags are is not known: a rank's mean stands for it.
"""

from dataclasses import dataclass

from counterpoint.machine import Machine
from counterpoint.problem import Problem
from counterpoint.schedules.islands import all_to_all_s

# fitted to what benchmarks have measured: H200, 2026-11, 39 cases, those of one kernel on 2 GPUs,
# the others on 2 and on 4
READ_RATE = 1.07  # of rows that are read, against the machine's rate of memory
WRITTEN_COST = 1.62  # of a byte that a lookup writes, in bytes read
START_S = 7e-6  # of a lookup, beside its bytes; first and last bags leave SMs idle
# of each row of the longest mean bag, one after another: no lookup is shorter
ROW_S = 0.31e-6
EXCHANGE_S = 16e-6  # of the library's all-to-all beside its bytes
FUSED_S = 16e-6  # of the fused kernel beside its longer side: a start with nothing to hide, flags


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one call until the last rank has its rows, and of its parts on the busiest rank."""

    serial_s: float
    fused_s: float
    lookup_s: float
    exchange_s: float  # the library's all-to-all, and the copy that puts columns side by side
    sent_s: float  # that all-to-all by itself, of ranks that begin together


def seconds(p: Problem, machine: Machine) -> Seconds:
    """Predict both plans; of one rank there is nothing to exchange, and both are the lookup."""
    costs, ranks = machine.costs, range(p.ranks)
    columns = [sum(each) for each in p.tables]
    lookups = lookups_s(p, machine)
    if p.ranks == 1:
        return Seconds(lookups[0], lookups[0], lookups[0], 0.0, 0.0)

    sent = [(p.m - p.rows[r]) * columns[r] * p.item_bytes for r in ranks]
    received = [p.rows[r] * (p.n - columns[r]) * p.item_bytes for r in ranks]
    # a rank sends when it has pooled: to one that is late too, which then finds its rows there
    last_s = max(s + through_s(p, machine, each) for s, each in zip(lookups, sent, strict=True))
    last_s = max(last_s, min(lookups) + through_s(p, machine, max(received)))
    sent_s = through_s(p, machine, max(*sent, *received))
    copy_s = costs.memory_s(2 * max(p.rows) * p.n * p.item_bytes)
    serial_s = last_s + EXCHANGE_S + copy_s

    # out of one GPU, or into one
    stores_s = max(*sent, *received) / costs.copy_bytes_per_s
    pooled_s = max(lookups) - START_S
    fused_s = FUSED_S + max(pooled_s, stores_s) + (0.0 if p.out else copy_s)
    exchange_s = serial_s - max(lookups)
    return Seconds(serial_s, fused_s, max(lookups), exchange_s, sent_s + EXCHANGE_S)


def through_s(p: Problem, machine: Machine, num_bytes: float) -> float:
    """The library's all-to-all of so many bytes of a rank, its start left out."""
    seconds = num_bytes / machine.costs.collective_bytes_per_s
    if p.islands > 1 and machine.nic is not None:
        seconds = max(seconds, all_to_all_s(p, machine.nic, num_bytes))
    return seconds


def lookups_s(p: Problem, machine: Machine, share: float = 1.0) -> list[float]:
    """Of each rank: the lookup of a share of the bags."""
    bytes_s = 1 / (READ_RATE * machine.costs.hbm_bytes_per_s)
    written = [WRITTEN_COST * p.m * sum(each) * p.item_bytes for each in p.tables]
    return [
        START_S + max((_read_bytes(p, r) + each) * bytes_s * share, ROW_S * mean_bag(p, r))
        for r, each in enumerate(written)
    ]


def mean_bag(p: Problem, rank: int) -> float:
    """Indices of a bag, in the mean of a rank's tables; 0 where they are not known."""
    return (p.indices[rank] if p.indices else 0) / max(p.m * len(p.tables[rank]), 1)


def _read_bytes(p: Problem, rank: int) -> float:
    """What a rank's tables are read for: rows, as wide as its tables in the mean, and indices.

    Int64 indices, and where each bag begins.
    """
    tables, count = len(p.tables[rank]), p.indices[rank] if p.indices else 0
    row = sum(p.tables[rank]) / tables * p.item_bytes if tables else 0.0
    return count * (row + 8) + p.m * tables * 8
