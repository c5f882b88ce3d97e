"""Time that spans cover, for many questions at once. Without numpy: a light install has none."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Cover:
    """A union of spans of time.

    Args:
        spans: (start, end) of each, in any order; they may overlap.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []  # of what is covered, disjoint, in ascending order
        self.ends: list[float] = []
        self._before: list[float] = []  # what is covered before each
        for start, end in sorted(spans):
            if not self.ends or start > self.ends[-1]:
                self._before.append(self._until(start))
                self.starts.append(start)
                self.ends.append(end)
            else:
                self.ends[-1] = max(self.ends[-1], end)

    def within(self, start: float, end: float) -> float:
        """How much of the span [start, end) is covered."""
        return self._until(end) - self._until(start)

    def gaps(self, start: float, end: float) -> list[tuple[float, float]]:
        """What of [start, end) is not covered."""
        inside = slice(bisect_right(self.ends, start), bisect_left(self.starts, end))
        begins, stops = [start, *self.ends[inside]], [*self.starts[inside], end]
        return [(a, b) for a, b in zip(begins, stops, strict=True) if b > a]

    def spans(self) -> list[tuple[float, float]]:
        """The union itself: disjoint, in ascending order."""
        return [*zip(self.starts, self.ends, strict=True)]

    def _until(self, at: float) -> float:
        """What is covered before a time."""
        i = bisect_right(self.starts, at) - 1
        return self._before[i] + min(at, self.ends[i]) - self.starts[i] if i >= 0 else 0.0
