"""One piece of work on a lane, and arithmetic on the time that such pieces cover. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from counterpoint.errors import InputError

COMMUNICATION_KINDS = ("copy", "exchange", "collective", "barrier", "wait")
COMPUTE_KINDS = (
    "matmul", "reduce", "move", "spread", "fold", "fused", "opaque", "attention",
    "attention_backward",
)  # fmt: skip
KINDS = (*COMPUTE_KINDS, *COMMUNICATION_KINDS, "other")

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work: [start_s, end_s) on one lane of one rank.

    Args:
        rank: Rank it ran on.
        lane: Lane of the plan, or "stream N" for work that belongs to no step.
        start_s: Begin, in seconds on a clock that all spans of a timeline share.
        end_s: End, on the same clock.
        kind: One of `KINDS`: a step's kind, "wait" for a spin on a peer, or "other".
        label: What a reader sees: the step's name; of a wait "wait for " and the step's name.

    Raises:
        InputError: The span ends before it starts, or `kind` is not in `KINDS`.
    """

    rank: int
    lane: str
    start_s: float
    end_s: float
    kind: str
    label: str

    def __post_init__(self) -> None:
        # `not >=` also refuses NaN
        if not self.end_s >= self.start_s:
            want = f"at or after start_s={self.start_s:g} ({self.label!r})"
            raise InputError("Span", "end_s", want=want, got=f"{self.end_s:g}")
        if self.kind not in KINDS:
            raise InputError("Span", "kind", want=f"one of {', '.join(KINDS)}", got=repr(self.kind))

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


def union(spans: Iterable[Span]) -> list[Interval]:
    """Merge to disjoint intervals in ascending order; spans of no length vanish."""
    merged: list[Interval] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.end_s == span.start_s:
            continue
        if merged and span.start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end_s))
        else:
            merged.append((span.start_s, span.end_s))
    return merged


def difference(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """Cut `holes` out of `intervals`; both are disjoint and ascending."""
    left: list[Interval] = []
    for start_s, end_s in intervals:
        at_s = start_s
        for hole_start_s, hole_end_s in holes:
            if hole_end_s <= at_s:
                continue
            if hole_start_s >= end_s:
                break
            if hole_start_s > at_s:
                left.append((at_s, hole_start_s))
            at_s = hole_end_s
        if at_s < end_s:
            left.append((at_s, end_s))
    return left


def length_s(intervals: Iterable[Interval]) -> float:
    """The length of disjoint intervals together."""
    return sum(end_s - start_s for start_s, end_s in intervals)
