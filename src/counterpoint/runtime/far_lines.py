"""The line of one neighbour on the notice board, where ranks share no memory: between hosts.

Each rank shows its line in the store of the group a few times a second, and copies that of the next
rank. If any two ranks differ, some neighbours do; who finds it leaves a verdict for all. That is
one line written and one read for each rank, however many there are.
"""

import pickle
import threading
import time
import zlib
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from counterpoint.errors import CounterpointError
from counterpoint.runtime.store import ANSWER_S, answer_of, store_of

PERIOD_S = 0.25


class FarLines:
    """What a rank exchanges with the next one. Collective to make.

    Args:
        group: whose ranks.
        name: of keys; equal on all ranks, and another one for each board.
        timeout_s: silence after which a rank counts as dead. Time in which this rank itself could
            not look is none.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = timeout_s
        self._own, self._next = (f"{name}/line/{r % ranks}" for r in (rank, rank + 1))
        self._verdict = f"{name}/verdict"
        self._store: Any = store_of(group)
        self._shown, self._heard = 0, 0
        self._last_s = -PERIOD_S
        self._unheard = 0  # exchanges since the next rank was heard
        self._lock = threading.Lock()

    def exchange(
        self, mine: NDArray[np.uint8], theirs: NDArray[np.uint8]
    ) -> CounterpointError | None:
        """Show `mine` and copy the line of the next rank to `theirs`, if it is time to.

        Returns:
            The verdict of the first rank that gave up; None: nobody did.
        """
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._last_s < PERIOD_S:
                return None
            self._last_s = now_s
            self._unheard += 1
            if self._store is None:
                return None
            try:
                found, next_one = answer_of(self._asked, self._line(mine), within_s=ANSWER_S)
                if found is not None:
                    return pickle.loads(found)
                if next_one is not None:
                    heard, line = pickle.loads(next_one)
                    if heard != self._heard:
                        self._heard, self._unheard = heard, 0
                        # at once: numpy lets go of the interpreter's lock, and half a line is wrong
                        theirs.data[:] = zlib.decompress(line)
            except RuntimeError:  # it ended with its host
                self._store = None
        return None

    def leave(self, mine: NDArray[np.uint8]) -> None:
        """Show `mine` for the last time: a rank that ends after its last call has made it."""
        with self._lock:
            try:
                if self._store is not None:
                    answer_of(self._store.set, self._own, self._line(mine), within_s=ANSWER_S)
            except RuntimeError:
                pass
            self._store = None

    def _line(self, mine: NDArray[np.uint8]) -> bytes:
        self._shown += 1
        return pickle.dumps((self._shown, zlib.compress(mine.tobytes(), 1)))  # most of it is empty

    def _asked(self, line: bytes) -> tuple[bytes | None, bytes | None]:
        """Show a line; the verdict and the next rank's line, where there are."""
        store = self._store
        store.set(self._own, line)
        if store.check([self._verdict]):
            return store.get(self._verdict), None
        return None, store.get(self._next) if store.check([self._next]) else None

    def tell(self, error: CounterpointError) -> None:
        """Leave a verdict for all ranks, unless one has."""
        with self._lock:
            try:
                if self._store is not None:
                    answer_of(self._told, pickle.dumps(error), within_s=ANSWER_S)
            except RuntimeError:
                self._store = None

    def _told(self, verdict: bytes) -> None:
        if not self._store.check([self._verdict]):
            self._store.set(self._verdict, verdict)

    def state(self) -> str:
        """Whether the next rank is heard, in words."""
        silent_s = self._unheard * PERIOD_S
        return f"silent for {silent_s:.1f} s: {'dead' if silent_s > self.timeout_s else 'alive'}"
