"""What reaches other islands, measured: blocks that all ranks exchange at once, as in a plan."""

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.wire import wire_of
from counterpoint.group.workspace import Workspace

MIB = 1 << 20
LEAST_S = 0.05  # more than a core gives one rank before another has its turn
# of chunks of a plan, by device
SIZES = {"cpu": (MIB // 4, MIB // 2, MIB), "cuda": (8 * MIB, 32 * MIB, 64 * MIB)}
STREAM = 8  # exchanges in a row, at least: by itself one takes longer than as one of many

Row = dict[str, Any]


def exchanges(workspace: Workspace, rounds: int) -> list[Row]:
    """Seconds of one exchange, and of the library's all-gather, by bytes through a NIC.

    An exchange is of all distances in turn. Of one island there are no rows. Collective.
    """
    far, found = workspace.islands.number - 1, list[Row]()
    of = far * ceil(STREAM / max(far, 1))
    for size in SIZES[workspace.device.type] * (far > 0):
        for question, call in (
            ("exchange", exchange(workspace, size)),
            ("far gather", gather(workspace, size)),
        ):
            seconds = slowest_s(call, workspace, rounds, of)
            found.append({"question": question, "num_bytes": size, "seconds": seconds})
    return found


def exchange(workspace: Workspace, num_bytes: int) -> Callable[[], object]:
    """One exchange with the rail of each other island, over and over: a call is one of them."""
    wire, islands, ranks = wire_of(workspace), workspace.islands, workspace.group.size()
    sent, kept = (torch.ones(num_bytes, dtype=torch.uint8, device=workspace.device) for _ in "ab")
    awaited = Awaited("characterize", "take part in an exchange", "exchange")
    turn = [0]

    def call() -> None:
        away = (1 + turn[0] % (islands.number - 1)) * islands.size
        turn[0] += 1
        rank = workspace.rank
        to, source = (rank + away) % ranks, (rank - away) % ranks
        wire.exchange([(sent, to)], [(kept, source)], awaited)

    return call


def gather(workspace: Workspace, num_bytes: int) -> Callable[[], object]:
    """The library's all-gather of all ranks: a ring, which takes the NICs of an island in parts.

    What comes to a rank, all others' blocks, is `num_bytes` for each NIC.
    """
    others = workspace.group.size() - 1
    block = ceil(num_bytes * workspace.islands.size / others)
    own = torch.ones(block, dtype=torch.uint8, device=workspace.device)
    full = own.new_empty(block * (others + 1))
    awaited = Awaited("characterize", "take part in a gather", "far gather")
    library = library_of(workspace, awaited)
    return lambda: library.all_gather(full, own)


def slowest_s(call: Callable[[], object], workspace: Workspace, rounds: int, of: int = 1) -> float:
    """Median seconds of a call over `rounds`, the slowest rank's; all ranks make it at once.

    A round is as many calls as take LEAST_S, in multiples of `of`.
    """
    device, group = workspace.device, workspace.group

    def together(calls: int) -> float:
        dist.barrier(group)
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX, group)
        return float(took) / calls

    together(of)
    calls = of * ceil(LEAST_S / together(of) / of)
    return median(together(calls) for _ in range(rounds))
