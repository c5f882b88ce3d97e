"""A rank that comes late to kernels of ours, on CPU ranks: events put them in order, not time."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import triton.language as tl

from counterpoint.kernels import clock, peer

TIMEOUT_S = 1.5  # of waits
# looks at the clock of a wait in vain: as it begins, in time, when the time is up, and once more
GIVES_UP = 4


def looks_of(rank: int, body: Callable[[], None]) -> int:
    """Launch on rank 0, and once that has ended on rank 1; how often waits look at the clock.

    It is a second later at each look; a wait for what is there, or for nothing, looks once.
    """
    seconds = itertools.count(step=10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "LOOK_EVERY", tl.constexpr(2))  # turns, which are slow here
        patch.setattr(clock, "time", SimpleNamespace(monotonic_ns=seconds.__next__))
        if rank:
            dist.barrier()
        body()
        if not rank:
            dist.barrier()
    dist.barrier()
    return next(seconds) // 10**9
