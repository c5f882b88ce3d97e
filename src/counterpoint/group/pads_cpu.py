"""Waits of CPU ranks for words on their signal pads."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from counterpoint.group.notice_board import Awaited, Late
from counterpoint.group.workspace import Workspace
from counterpoint.plan.bind import Arrival


def never() -> bool:
    """A wait that nothing else ends."""
    return False


def pads_of(workspace: Workspace) -> dict[int, NDArray[np.int32]]:
    """The words of the pad of each rank of the island."""
    pads = workspace.pads
    return {r: pads.peer(r).view(torch.int32).numpy() for r in workspace.islands.mine}


def await_words(
    workspace: Workspace, arrivals: Sequence[Arrival], count: int, awaited: Awaited,
    stopped: Callable[[], bool] = never,
) -> None:  # fmt: skip
    """Wait until the words of the own pad have come to `count`.

    Args:
        stopped: whether to give up without an error.

    Raises:
        PeerTimeoutError: a peer is dead, or too late.
        InputError: a peer has called something else.
    """
    pad = pads_of(workspace)[workspace.rank]
    late = Late(workspace.board, awaited)
    for arrival in arrivals:
        while wrapped(int(pad[arrival.slot]) - count) < 0:
            if stopped():
                return
            late.wait(arrival.rank)
    late.end()


def wrapped(word: int) -> int:
    """As a signed 32-bit word: epochs wrap."""
    return int(np.int64(word + 2**31) % 2**32 - 2**31)
