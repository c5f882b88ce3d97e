"""The line of one neighbour on the notice board, where ranks share no memory: between hosts.

Each rank shows its line in the store of the group a few times a second, and copies that of the next
rank. If any two ranks differ, some neighbours do; who finds it leaves a verdict for all. That is
one line written and one read for each rank, however many there are.
"""

import struct
import threading
import time
import weakref
import zlib
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from counterpoint.errors import CounterpointError
from counterpoint.group.messages import decode, encode
from counterpoint.group.store import ANSWER_S, answer_of, store_of

PERIOD_S = 0.25
SILENT_S = 30.0  # after which a rank counts as dead; with a shorter bound of waits after that
SHOWN = struct.Struct("<q")  # before a line: how often it has been shown


class FarLines:
    """What a rank exchanges with the next one. Collective to make.

    Args:
        group: whose ranks.
        name: of keys; equal on all ranks, and another one for each board.
        timeout_s: bound of waits; that or `SILENT_S` of silence, and a rank counts as dead. Time in
            which this rank itself could not look is none.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.silent_s = min(timeout_s, SILENT_S)
        self._own, self._next = (f"{name}/line/{r % ranks}" for r in (rank, rank + 1))
        self._verdict = f"{name}/verdict"
        self._store: Any = store_of(group)
        self._shown, self._heard = 0, 0
        self._last_s = -PERIOD_S
        self._unheard = 0  # exchanges since the next rank was heard
        self._found: CounterpointError | None = None  # a verdict
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
            if now_s - self._last_s < PERIOD_S or self._found is not None:
                return self._found
            self._last_s = now_s
            self._unheard += 1
            if self._store is None:
                return None
            try:
                found, next_one = answer_of(self._asked, self._line(mine), within_s=ANSWER_S)
                if found is not None:
                    self._found = decode(found)
                    return self._found
                if next_one is not None:
                    (heard,), line = SHOWN.unpack_from(next_one), next_one[SHOWN.size :]
                    if heard != self._heard:
                        self._heard, self._unheard = heard, 0
                        # at once: numpy lets go of the interpreter's lock, and half a line is wrong
                        theirs.data[:] = zlib.decompressobj().decompress(line, len(theirs))
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

    def beat(self, mine: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> None:
        """Exchange from a thread while this object lives: a rank that computes is not dead."""
        given = (weakref.ref(self), mine, theirs)
        threading.Thread(target=_beat, args=given, name="counterpoint-lines", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether this rank has left, or the store has gone."""
        return self._store is None

    def _line(self, mine: NDArray[np.uint8]) -> bytes:
        self._shown += 1
        return SHOWN.pack(self._shown) + zlib.compress(mine.tobytes(), 1)  # most of it is empty

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
                    answer_of(self._told, encode(error), within_s=ANSWER_S)
            except RuntimeError:
                self._store = None

    def _told(self, verdict: bytes) -> None:
        if not self._store.check([self._verdict]):
            self._store.set(self._verdict, verdict)

    def state(self) -> str:
        """Whether the next rank is heard, in words."""
        silent_s = self._unheard * PERIOD_S
        return f"silent for {silent_s:.1f} s: {'dead' if silent_s > self.silent_s else 'alive'}"


def _beat(
    watched: "weakref.ref[FarLines]", mine: NDArray[np.uint8], theirs: NDArray[np.uint8]
) -> None:
    while (lines := watched()) is not None and not lines.ended:
        lines.exchange(mine, theirs)
        pause_s = lines.silent_s / 8  # who waits looks more often
        del lines
        time.sleep(max(PERIOD_S, pause_s))
