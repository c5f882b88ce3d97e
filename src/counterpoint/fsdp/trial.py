"""Whether overlapping is faster here, tried on real steps: by turns, and timed by device events.

A step reaches from one optimizer step to the next. Steps of both ways alternate, in pairs whose
order alternates, too; those of a pair count where they ran the same forwards on all ranks. It ends
when the 95 % interval of the median of torch's time over ours excludes 1, or after MOST_STEPS.
"""

import time
from collections.abc import Callable, Hashable
from math import comb
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

WARM_STEPS = 4  # two of each way: torch and we allocate, and blocks are compiled
MOST_STEPS = 64
LOOKS_EVERY = 8  # steps, once there are as many as asked for


class Verdict(NamedTuple):
    """What was measured: times of a step in ms, medians, and the interval of as is / ours."""

    as_is_ms: float
    ours_ms: float
    low: float
    high: float
    pairs: int

    @property
    def ours(self) -> bool:
        """Whether ours stays: only where it is faster beyond doubt."""
        return self.low > 1

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1 or self.high < 1


def verdict_of(pairs: list[tuple[float, float]]) -> Verdict:
    """Of (as is, ours) times of pairs of steps, of the slowest rank each."""
    ratios = sorted(a / b for a, b in pairs)
    low, high = interval(len(ratios))
    first, last = (ratios[low], ratios[high]) if pairs and high >= low else (0.0, float("inf"))
    as_is, ours = (median(times) for times in zip(*pairs or [(0.0, 0.0)], strict=True))
    return Verdict(as_is, ours, first, last, len(pairs))


def interval(n: int) -> tuple[int, int]:
    """Places, in n sorted numbers, of a 95 % interval of their median; (0, -1): too few."""
    below, k = 0.0, 0
    while k < n and below + comb(n, k) / 2**n <= 0.025:
        below += comb(n, k) / 2**n
        k += 1
    return (k - 1, n - k) if k else (0, -1)


class Trial:
    """Alternates, times and decides.

    Args:
        steps: optimizer steps to try at least.
        on_gpu: whether device events tell the time.
        gather: what all ranks say, in rank order.
    """

    def __init__(self, steps: int, gather: Callable[[Any], list[Any]], *, on_gpu: bool) -> None:
        self._gather, self._on_gpu = gather, on_gpu
        self._least = min(max(steps, 2), MOST_STEPS)
        self._step = -1
        self._marks: list[Any] = []  # the time at which each step began
        self._keys: list[Hashable] = []
        self.verdict: Verdict | None = None

    def ours(self, step: int) -> bool:
        """Whose way a step goes: ours first and last of four."""
        return step % 4 in (0, 3)

    def begin(self, key: Hashable) -> bool | None:
        """A step begins: whether it goes our way; None: the trial is over.

        Args:
            key: what the step before ran.
        """
        if self._step >= 0:
            self._keys.append(key)
        self._marks.append(self._now())
        self._step += 1
        tried = self._step - WARM_STEPS
        if tried >= self._least and (tried - self._least) % LOOKS_EVERY == 0:
            self.verdict = self._look()
            if self.verdict.decided or tried >= MOST_STEPS:
                return None
        return self.ours(self._step)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, step: int) -> float:
        first, last = self._marks[step], self._marks[step + 1]
        return first.elapsed_time(last) if self._on_gpu else (last - first) * 1e3

    def _look(self) -> Verdict:
        if self._on_gpu:
            torch.cuda.synchronize()
        mine: list[list[float] | None] = []
        for first in range(WARM_STEPS, self._step - 1, 2):
            same = self._keys[first] == self._keys[first + 1]
            mine.append([self._ms(first), self._ms(first + 1)] if same else None)
        pairs: list[tuple[float, float]] = []
        for i, each in enumerate(zip(*self._gather(mine), strict=True)):
            if None in each:
                continue
            slowest = [max(times[j] for times in each) for j in (0, 1)]
            ours = 0 if self.ours(WARM_STEPS + 2 * i) else 1
            pairs.append((slowest[1 - ours], slowest[ours]))
        return verdict_of(pairs)


def key_of(args: Any, kwargs: Any) -> Hashable:
    """Shapes of what a forward is given."""
    leaves = tree_leaves((args, kwargs))
    return tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor))
