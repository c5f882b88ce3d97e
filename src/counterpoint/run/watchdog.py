"""A host thread that says which rank and step do not move, while the main thread is blocked.

It looks at the notice board, and at words in pinned host memory that kernels write when a wait
gives up. It makes no CUDA call, so it may run while a graph is captured. The error is raised at the
next call of the group.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import CounterpointError, PeerTimeoutError
from counterpoint.group.notice_board import NoticeBoard

PERIOD_S = 0.05
DEATHS_EVERY = 6  # looks: whether a rank has died is asked of the host's kernel


Late = Callable[[], CounterpointError | None]


class Watchdog:
    """Watches a word: 1 + tag of the step that gave up, and above it the bits of its late waits.

    Its thread ends with it, or when the group is left.

    Args:
        words, describe: the word, and the error that it stands for.
        board: of the group.
        stop: ends the waits of kernels; those that waited then say for whom.

    Attributes:
        ended: the group is left.
    """

    def __init__(
        self, words: NDArray[np.int64], describe: Callable[[int, int], PeerTimeoutError],
        board: NoticeBoard, stop: Callable[[], object],
    ) -> None:  # fmt: skip
        self._words = words
        self._describe = describe
        self._board = board
        self._stop: Callable[[], object] | None = stop
        self._looks = self._deaths = 0
        self._fault: CounterpointError | None = None
        self._waits: list[tuple[Late, Callable[[], object]]] = []
        self.ended = False
        board.alarms.append((words, self.look))  # before it has something to tell
        name = "counterpoint-watchdog"
        threading.Thread(target=_watch, args=(weakref.ref(self),), name=name, daemon=True).start()

    def watch(self, late: Late, end: Callable[[], object]) -> None:
        """Look after waits of a library, too.

        Args:
            late: what is wrong with them, once something is.
            end: ends them, when the group is unusable.
        """
        self._waits.append((late, end))

    def end(self) -> None:
        """Watch no more: the group is left, and what others do is no fault."""
        self.ended = True

    def look(self) -> CounterpointError | None:
        """The fault, once there is one; says it on stderr the first time it is seen."""
        if self._fault is None:
            # who has left a verdict knew more than a wait that has given up
            fault, word = self._board.fault or self._board.wrong(), int(self._words[0])
            if fault is None and word:
                fault = self._describe((word & 0xFFFFFFFF) - 1, word >> 32 & 0xFFFFFFFF)
            for late, _ in self._waits:
                fault = fault or late()
            if fault is not None:
                self._fault = fault
                print(f"counterpoint: {fault}", file=sys.stderr, flush=True)
        return self._fault

    def tell(self) -> None:
        """Leave the fault for the next call and for the other ranks, and end what waits in vain."""
        self._board.settle()
        self._end_kernels()
        for _, end in self._waits if not self.ended else ():
            end()

    def look_for_deaths(self) -> None:
        """End the waits of kernels once a rank has died and what it has posted has come.

        Where no kernel waits this changes nothing; the next call of the group hears of it.
        """
        self._looks += 1
        if self._looks % DEATHS_EVERY == 0:
            self._deaths = self._deaths + 1 if self._board.died() else 0
            if self._deaths > 1:
                self._end_kernels()

    def _end_kernels(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None and not self.ended:
            stop()


def _watch(watched: "weakref.ref[Watchdog]") -> None:
    while (watchdog := watched()) is not None and not watchdog.ended:
        if watchdog.look() is not None:
            watchdog.tell()
            return
        watchdog.look_for_deaths()
        del watchdog
        time.sleep(PERIOD_S)
