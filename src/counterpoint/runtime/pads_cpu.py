"""Waits of CPU ranks for words on their signal pads: bounded, and short where a peer is dead."""

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from counterpoint.errors import PeerTimeoutError
from counterpoint.plan.bind import Arrival
from counterpoint.runtime.ranks import describe_process
from counterpoint.runtime.workspace import NUM_SLOTS, Workspace

YIELDS = 20  # then sleep: ranks may outnumber cores
SLEEP_S = 50e-6
LOOK_EVERY_S = 0.05  # how often a late peer's process is looked at


class Awaited(NamedTuple):
    """What a wait is for, as its error says it: "op: rank 1 did not DEED within 2 s"."""

    op: str
    deed: str
    step: str


def never() -> bool:
    """A wait that nothing else ends."""
    return False


def pads_of(workspace: Workspace) -> list[NDArray[np.int32]]:
    """The words of each rank's pad."""
    pads = workspace.pads
    return [pads.peer(r).view(torch.int32).numpy() for r in range(pads.world_size)]


def meet(workspace: Workspace, awaited: Awaited, stopped: Callable[[], bool] = never) -> None:
    """Come together before what cannot say who is missing: a library's collective.

    Raises:
        PeerTimeoutError: a rank did not come.
    """
    workspace.meetings += 1
    count, pads = workspace.meetings, pads_of(workspace)
    mine = NUM_SLOTS - 1 - workspace.rank
    for pad in pads:
        pad[mine] = count
    try:
        slots = [Arrival(NUM_SLOTS - 1 - r, r) for r in range(len(pads))]
        await_words(workspace, slots, count, awaited, stopped)
    except PeerTimeoutError:
        for pad in pads:  # who comes later must not wait inside the collective
            pad[mine] = count - 1
        raise


def await_words(
    workspace: Workspace, arrivals: Sequence[Arrival], count: int, awaited: Awaited,
    stopped: Callable[[], bool] = never,
) -> None:  # fmt: skip
    """Wait until the words of the own pad have come to `count`.

    Args:
        stopped: whether to give up without an error.

    Raises:
        PeerTimeoutError: a peer is dead, or too late.
    """
    pad = pads_of(workspace)[workspace.rank]
    start_s = look_s = time.monotonic()
    polls = 0
    for arrival in arrivals:
        while wrapped(int(pad[arrival.slot]) - count) < 0:
            if stopped():
                return
            polls += 1
            if polls < YIELDS:
                os.sched_yield()
                continue
            time.sleep(SLEEP_S)
            now_s = time.monotonic()
            if now_s - look_s > LOOK_EVERY_S:
                look_s = now_s
                _look(workspace, arrival, now_s - start_s, awaited)


def _look(workspace: Workspace, arrival: Arrival, waited_s: float, awaited: Awaited) -> None:
    """Raise once a late peer is dead, or too late."""
    state = describe_process(workspace.pads.peer_pids[arrival.rank])
    if waited_s < workspace.timeout_s and not state.endswith("dead"):
        return
    # the awaited rank may be alive, and have given up on one that is not
    gone = [(r, theirs) for r, theirs in workspace.gone() if r != arrival.rank]
    who = "".join(f", rank {r}: {theirs}" for r, theirs in gone)
    fault = workspace.fault = PeerTimeoutError(
        f"{awaited.op}: rank {arrival.rank} did not {awaited.deed} within {waited_s:.2f} s "
        f"({state}{who}); the group is unusable, restart its ranks "
        "(COUNTERPOINT_TIMEOUT_S is the bound)",
        rank=gone[0][0] if gone and state.endswith("alive") else arrival.rank,
        step=awaited.step,
    )
    raise fault


def wrapped(word: int) -> int:
    """As a signed 32-bit word: epochs wrap."""
    return int(np.int64(word + 2**31) % 2**32 - 2**31)
