"""A host thread that says which rank and step do not move, while the main thread is blocked.

It reads words in pinned host memory that kernels write when a wait gives up, and makes no CUDA
call, so it may run while a graph is captured. The error is raised at the next call of the group.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import PeerTimeoutError

PERIOD_S = 0.05


class Watchdog:
    """Watches a word: 1 + tag of the step that gave up, and above it the bits of its late waits.

    Its thread ends with it.
    """

    def __init__(
        self, words: NDArray[np.int64], describe: Callable[[int, int], PeerTimeoutError]
    ) -> None:
        self._words = words
        self._describe = describe
        self._fault: PeerTimeoutError | None = None
        name = "counterpoint-watchdog"
        threading.Thread(target=_watch, args=(weakref.ref(self),), name=name, daemon=True).start()

    def look(self) -> PeerTimeoutError | None:
        """The fault, once a wait has given up; says it on stderr the first time it is seen."""
        if self._fault is None and self._words[0]:
            word = int(self._words[0])
            fault = self._describe((word & 0xFFFFFFFF) - 1, word >> 32 & 0xFFFFFFFF)
            self._fault = fault
            print(f"counterpoint: {fault}", file=sys.stderr, flush=True)
        return self._fault


def _watch(watched: "weakref.ref[Watchdog]") -> None:
    while (watchdog := watched()) is not None:
        if watchdog.look() is not None:
            return
        del watchdog
        time.sleep(PERIOD_S)
