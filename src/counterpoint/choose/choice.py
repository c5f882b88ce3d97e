"""A choice among plans, and why: every candidate with its time, and what spoke against it."""

from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

from counterpoint.choose.slices import slices_of
from counterpoint.costs import Tiles
from counterpoint.machine import Machine
from counterpoint.model.estimate import estimate
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.timeline import Timeline

MAX_PROBLEM = 120  # characters of it in one line


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that was weighed.

    Args:
        spec: its family and variant.
        seconds: predicted or measured time of one call.
        basis: "simulated", "closed form" or "measured".
        verdict: why it was not chosen; "chosen" of the one that was.
    """

    spec: str
    seconds: float
    basis: str
    verdict: str


def shortened(problem: Problem) -> str:
    """A problem in a part of one line."""
    text = str(problem)
    return text if len(text) <= MAX_PROBLEM else f"{text[: MAX_PROBLEM - 3]}..."


def computed_of(problem: Problem) -> str:
    """What a problem computes, in a word."""
    return "lookup" if problem.tables else "norm" if problem.norm else "matmuls"


@dataclass(frozen=True)
class Choice:
    """The plan chosen for a problem, every candidate, and the timeline of the one chosen.

    Args:
        problem: what is computed.
        machine: where.
        spec: of the plan chosen.
        table: all candidates, the fastest first.
        eager: whether host time counted.
        basis: how it was chosen: "rule", "model" or "measurement".
        compute_s: of the matmuls alone, in one piece; of tables the lookup, of a norm that.
        comm_s: of the communication alone, by its fastest transport.
        tiles: the matmul library's tiles that were known.
    """

    problem: Problem
    machine: Machine
    spec: str
    table: tuple[Candidate, ...]
    eager: bool
    basis: str
    compute_s: float
    comm_s: float
    tiles: Tiles = field(repr=False)

    @cached_property
    def plan(self) -> Plan:
        """The plan chosen."""
        return build(self.problem, self.spec, self.machine)

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted timeline of the plan chosen, all ranks."""
        return estimate(self.plan, self.machine, eager=self.eager, tiles=self.tiles)

    @property
    def seconds(self) -> float:
        """Time of the plan chosen."""
        return next(c.seconds for c in self.table if c.spec == self.spec)

    @property
    def serial_s(self) -> float:
        """Time of the serial plan."""
        return next(c.seconds for c in self.table if c.spec == "serial")

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest of the others, of those whose time is known in the same way."""
        basis = next(c.basis for c in self.table if c.spec == self.spec)
        others = (c for c in self.table if c.spec != self.spec and c.basis == basis)
        return min(others, key=lambda c: c.seconds, default=None)

    @property
    def computed(self) -> str:
        """What `compute_s` is the time of."""
        return computed_of(self.problem)

    @property
    def longer_s(self) -> float:
        """The longer of what is computed and communication, each alone."""
        return max(self.compute_s, self.comm_s)

    @property
    def hidden(self) -> float:
        """Share saved of what serial takes beyond the longer part; 1 where nothing is to hide."""
        room_s = self.serial_s - self.longer_s
        # a comparison that holds for NaN: where the parts are not known, neither is this
        return 1.0 if room_s <= 0 else (self.serial_s - self.seconds) / room_s

    def speedup(self, seconds: float) -> float:
        """Serial's time over `seconds`."""
        return self.serial_s / seconds if seconds else 1.0  # an empty matmul on one rank

    def __str__(self) -> str:
        """One line: what is computed, the plan, its time, the speedup over serial, where."""
        known = self.basis == "measurement"
        return (
            f"{shortened(self.problem)}: {self.spec}, {self.seconds * 1e6:.0f} us "
            f"{'measured' if known else 'predicted'}, "
            f"{self.speedup(self.seconds):.2f}x over serial, {self.machine.name}"
        )

    def explain(self) -> str:
        """The choice in words and a table: times, what is hidden, why not the others."""
        p, us = self.problem, 1e6
        how = {"rule": "by rule", "model": "predicted", "measurement": "measured"}[self.basis]
        known = "measured" if self.machine.measured else "datasheet"
        mode = "eager" if self.eager else "in a CUDA graph"
        lines = [f"{p}", f"on {self.machine.name} ({known} rates: {self.machine.source}), {mode}"]
        hidden = ""
        if isfinite(self.longer_s):
            # not timed beside the plans
            basis = "predicted: " if self.basis == "measurement" else ""
            lines.append(
                f"{basis}{self.computed} alone {self.compute_s * us:.0f} us, communication alone "
                f"{self.comm_s * us:.0f} us"
            )
            hidden = f", {self.hidden:.0%} hidden"
        lines.append(
            f"chosen {how}: {self.spec}, {self.seconds * us:.0f} us, "
            f"{self.speedup(self.seconds):.2f}x serial{hidden}"
        )
        if p.tables and p.ranks > 1:
            lines.append(f"its backward: {slices_of(p, self.machine)}")
        lines.append("")
        width = max(len(c.spec) for c in self.table)
        lines.append(f"{'plan':{width}}        us   speedup  basis        verdict")
        for c in self.table:
            known = isfinite(c.seconds)
            time = f"{c.seconds * us:8.1f}" if known else f"{'-':>8}"
            ratio = f"{self.speedup(c.seconds):8.2f}" if known else f"{'-':>8}"
            lines.append(f"{c.spec:{width}}  {time}  {ratio}  {c.basis:11}  {c.verdict}")
        return "\n".join(lines)
