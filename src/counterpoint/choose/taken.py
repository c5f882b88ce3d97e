"""The plan that calls of one problem run by in this process, and where it came from."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, NamedTuple

from counterpoint.choose.choice import shortened
from counterpoint.plan.steps import Plan

Source = Literal["estimated", "tuned", "kept file", "asked for", "not weighed"]


class Pick(NamedTuple):
    """A spec, and where it came from.

    Args:
        source: "estimated" by the model; "tuned" in this process, or before and read from a "kept
            file"; "asked for" by the call; "not weighed": nothing else could be.
        why: it was not weighed.
        predicted_s, measured_s: time of one call; None: not known.
        next_spec: the fastest of the others; "": none has a time.
        next_s: its time, predicted or measured as that of the one taken.
    """

    spec: str
    source: Source
    why: str = ""
    predicted_s: float | None = None
    measured_s: float | None = None
    next_spec: str = ""
    next_s: float | None = None


@dataclass(slots=True)
class Taken:
    """A plan that was taken for calls, which count themselves here.

    Args:
        calls: that began in this process, but replays of graphs that a user has captured.
    """

    plan: Plan
    pick: Pick
    calls: int = 0
    predicted_s: float | None = None
    measured_s: float | None = None

    def __post_init__(self) -> None:
        self.know(self.pick)

    @property
    def spec(self) -> str:
        """Of the plan."""
        return self.plan.spec

    def know(self, pick: Pick) -> None:
        """Have come from there by now, with times that are known there."""
        self.pick = pick
        if pick.predicted_s is not None:
            self.predicted_s = pick.predicted_s
        if pick.measured_s is not None:
            self.measured_s = pick.measured_s

    def __str__(self) -> str:
        pick = self.pick
        text = f"{shortened(self.plan.problem)}: {self.spec}"
        for seconds, how in ((pick.measured_s, "measured"), (pick.predicted_s, "predicted")):
            text += f", {seconds * 1e6:.0f} us {how}" if seconds is not None else ""
        text += f", {pick.source}" + (f": {pick.why}" if pick.why else "")
        if pick.next_s is not None and isfinite(pick.next_s):
            text += f"; next {pick.next_spec}, {pick.next_s * 1e6:.0f} us"
        return text
