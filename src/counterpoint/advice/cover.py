"""Time that spans cover, for many questions at once."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Cover:
    """A union of spans of time.

    Args:
        spans: (start, end) of each, in any order; they may overlap.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        given = np.array(sorted(spans), dtype=np.float64).reshape(-1, 2)
        reach = np.maximum.accumulate(given[:, 1]) if len(given) else np.empty(0)
        first = np.r_[True, given[1:, 0] > reach[:-1]] if len(given) else np.empty(0, dtype=bool)
        self.starts: Times = given[first, 0]
        self.ends: Times = reach[np.r_[first[1:], True]] if len(given) else reach
        self._before: Times = np.r_[0.0, np.cumsum(self.ends - self.starts)]

    def within(self, start: Times | float, end: Times | float) -> Times:
        """How much of each span [start, end) is covered."""
        return self._until(end) - self._until(start)

    def gaps(self, start: float, end: float) -> list[tuple[float, float]]:
        """What of [start, end) is not covered."""
        inside = (self.ends > start) & (self.starts < end)
        bounds = np.r_[start, np.c_[self.starts[inside], self.ends[inside]].ravel(), end]
        return [(a, b) for a, b in bounds.reshape(-1, 2).tolist() if b > a]

    def spans(self) -> list[tuple[float, float]]:
        """The union itself: disjoint, in ascending order."""
        return np.c_[self.starts, self.ends].tolist()

    def _until(self, at: Times | float) -> Times:
        """What is covered before each time."""
        i = np.searchsorted(self.starts, at, side="right")
        last = (
            np.where(i > 0, np.minimum(at, self.ends[i - 1]) - self.starts[i - 1], 0.0)
            if len(self.starts)
            else np.zeros(np.shape(at))
        )
        return self._before[np.maximum(i - 1, 0)] + np.maximum(last, 0.0)
