"""Which setting of the controls is fastest: which to try, and when a gain is one. Pure.

Each control by itself first, then the best values of two controls together, which often need each
other; then each changed from the best so far, until nothing gains or the time is up; then the best
few against plain overlap once more, with many rounds. What is measured is the same on all ranks,
and so is every decision.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, count
from typing import Any

from counterpoint.errors import InputError
from counterpoint.resources.controls import OFF, SEQUENTIAL, Along, Controls, Transport

Rounds = Sequence[float]  # seconds of a setting, one for each round of a rotation
FIRST_ROUNDS = 3
FINAL_ROUNDS, FINAL_S = range(15, 62), 0.5  # of each finalist: as many as this lasts
FINALISTS = 2
TIE = 0.02  # settings this close to the best are as good: the one with fewer controls is taken
LOSES = 1.25  # times plain overlap: a value that takes this alone is not combined with others
NOISES = 2.0  # a gain counts from this many times its noise on


@dataclass(frozen=True)
class Space:
    """The values of each control that can be had for a pipeline here.

    Args:
        transports: beside "sm".
        blocks_per_sm: that the compute kernels can be brought to.
        chunks: of each matmul.
        along: dims that are cut.
        delays_s: of compute behind a collective.
        max_ctas: of the library's collectives.
        priority: whether it can be had.
        carve_out: likewise.
    """

    transports: tuple[Transport, ...] = ()
    blocks_per_sm: tuple[int, ...] = ()
    chunks: tuple[int, ...] = (2, 4, 8)
    along: tuple[Along, ...] = ("m",)
    delays_s: tuple[float, ...] = (5e-6, 10e-6)
    max_ctas: tuple[int, ...] = ()
    priority: bool = True
    carve_out: bool = False

    def neighbours(self, of: Controls) -> tuple[Controls, ...]:
        """All settings that differ from `of` in one control, in a fixed order."""
        of = OFF if of == SEQUENTIAL else of
        values: list[tuple[str, list[Any]]] = [
            ("transport", ["sm", *self.transports]),
            ("priority", [False, True] if self.priority else []),
            ("delay_s", [0.0, *self.delays_s]),
            ("chunks", [1, *self.chunks]),
            ("along", [*self.along] if of.chunks > 1 else []),
            ("blocks_per_sm", [None, *self.blocks_per_sm]),
            ("carve_out", [False, True] if self.carve_out else []),
            ("max_ctas", [0, *self.max_ctas]),
        ]
        found: list[Controls] = []
        for name, some in values:
            for value in some:
                if value == getattr(of, name):
                    continue
                change: dict[str, Any] = {name: value}
                if name == "blocks_per_sm" and value:
                    change["carve_out"] = False
                if name == "carve_out" and value:
                    change["blocks_per_sm"] = None
                if name == "chunks" and value == 1:
                    change["along"] = "m"
                if name == "transport" and value == "copy_engine":
                    change |= {"priority": False, "max_ctas": 0}
                if name in ("priority", "max_ctas") and of.transport == "copy_engine":
                    continue
                found.append(replace(of, **change))
        return tuple(found)


@dataclass(frozen=True)
class Arm:
    """A setting that was measured.

    Args:
        controls: the setting.
        seconds: median over rounds.
        gain: plain overlap's time over this one's, of the same rounds, median, less 1.
        noise: of the gain: half the distance of its 20 % and 80 % quantiles.
        num_rounds: that it is of.
        settled_s: `seconds`, at the clocks of the search's first rotation; what settings of
            different rotations are compared by.
    """

    controls: Controls
    seconds: float
    gain: float
    noise: float
    num_rounds: int
    settled_s: float = 0.0


@dataclass(frozen=True)
class Found:
    """What a search has ended with.

    Args:
        best: the setting to take: plain overlap unless another one gains more than twice the noise.
        arms: every setting that was measured, each with its last measurement.
        why: of `best`, one sentence.
        refused: settings that could not be had, and why.
        timed_out: whether the time was up before nothing gained any more.
    """

    best: Controls
    arms: tuple[Arm, ...]
    why: str
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    timed_out: bool = False

    def arm(self, controls: Controls) -> Arm:
        """What was measured of a setting."""
        return next(arm for arm in self.arms if arm.controls == controls)


Measure = Callable[[Sequence[Controls], int], Mapping[Controls, Rounds]]


def search(
    space: Space,
    measure: Measure,
    *,
    time_left: Callable[[], bool],
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Find the fastest setting in `space`.

    Args:
        space: of settings.
        measure: times settings side by side, all in each round; a setting that cannot be had is
            missing in the result. Equal on all ranks.
        time_left: whether to go on; equal on all ranks.
        progress: is told what comes next.

    Raises:
        InputError: plain overlap itself cannot be measured.
    """
    timed = _Timed(measure, progress)
    timed.take([SEQUENTIAL, *space.neighbours(OFF)], FIRST_ROUNDS, "each control by itself")
    space = _without_losers(space, timed.arms)
    timed_out = False
    for step in count():
        if not time_left():
            timed_out = True
            break
        best = timed.leaders()[0]
        some = space.neighbours(best.controls) if step else _two_together(space, timed.arms)
        new = [c for c in some if c not in timed.tried]
        if new:
            what = f"from {best.controls.spec}" if step else "two controls together"
            timed.take([best.controls, *new], FIRST_ROUNDS, what)
        if step and (not new or timed.leaders()[0].settled_s >= best.settled_s * (1 - TIE / 2)):
            break
    leaders = timed.leaders()
    one = [arm.controls for arm in leaders if arm.controls.num_set == 1]
    finalists = [*(arm.controls for arm in leaders[:FINALISTS]), *one[:1]]
    finalists = list(dict.fromkeys([*finalists, *simpler(finalists[0])]))
    timed.take(finalists, final_rounds(leaders[0].seconds), "the best")
    best, why = _decide([timed.arms[c] for c in finalists if c in timed.arms])
    return Found(best, tuple(timed.leaders()), why, timed_out=timed_out)


class _Timed:
    """The settings that have been timed."""

    def __init__(self, measure: Measure, progress: Callable[[str], None]) -> None:
        self.measure, self.progress = measure, progress
        self.arms: dict[Controls, Arm] = {}
        self.tried: set[Controls] = set()  # those that could not be had, too

    def take(self, some: Sequence[Controls], num_rounds: int, what: str) -> None:
        """Time settings, the first of which has been timed before unless none has."""
        wanted = [OFF, *(c for c in some if c != OFF)]
        self.progress(f"{what}: {len(wanted)} settings")
        rounds = self.measure(wanted, num_rounds)
        if OFF not in rounds:
            raise InputError("search", "measure", want="a time of plain overlap", got="none")
        self.tried.update(wanted)
        # clocks drift from rotation to rotation: the first setting says by how much. Plain overlap
        # would not do, whose launches race: it often has two times, apart by a tenth
        known, again = self.arms.get(some[0]), rounds.get(some[0])
        drift = statistics.median(again) / known.settled_s if known and again else 1.0
        for controls, seconds in rounds.items():
            self.arms[controls] = _arm(controls, seconds, rounds[OFF], drift)

    def leaders(self) -> list[Arm]:
        """The fastest first."""
        return sorted(self.arms.values(), key=lambda arm: (arm.settled_s, arm.controls.spec))


def final_rounds(seconds: float) -> int:
    """Rounds of the last rotation, where the best setting takes `seconds`."""
    return min(max(round(FINAL_S / seconds), FINAL_ROUNDS[0]), FINAL_ROUNDS[-1])


def _without_losers(space: Space, arms: Mapping[Controls, Arm]) -> Space:
    """Without the values that are far slower by themselves: they would cost most of the time."""

    def keeps(name: str, value: object) -> bool:
        change: dict[str, Any] = {name: value}
        arm = arms.get(replace(OFF, **change))
        return arm is None or arm.seconds <= arms[OFF].seconds * LOSES

    return replace(
        space,
        blocks_per_sm=tuple(k for k in space.blocks_per_sm if keeps("blocks_per_sm", k)),
        max_ctas=tuple(c for c in space.max_ctas if keeps("max_ctas", c)),
        chunks=tuple(p for p in space.chunks if keeps("chunks", p)),
    )


def _two_together(space: Space, arms: Mapping[Controls, Arm]) -> list[Controls]:
    """The best values of two controls by themselves, for all two of them that can be had."""
    best: dict[str, Controls] = {}
    for controls in sorted(
        (c for c in space.neighbours(OFF) if c in arms), key=lambda c: arms[c].seconds
    ):
        name = next(f.name for f in fields(Controls) if getattr(controls, f.name) != f.default)
        best.setdefault(name, controls)
    both = [
        second for a, b in combinations(best, 2) for second in space.neighbours(best[a])
        if second.num_set == 2 and getattr(second, b) == getattr(best[b], b)
    ]  # fmt: skip
    return list(dict.fromkeys(both))


def simpler(than: Controls) -> tuple[Controls, ...]:
    """The settings that have some of the controls of another one: each has to earn its place."""
    names = [f.name for f in fields(Controls) if getattr(than, f.name) != f.default]
    names = [name for name in names if name not in ("overlap", "along")]
    found: list[Controls] = []
    some = (kept for size in range(1, len(names)) for kept in combinations(names, size))
    for kept in some:
        values = {name: getattr(than, name) for name in kept}
        if "chunks" in values:
            values["along"] = than.along
        found.append(Controls(**values))
    return tuple(found) if than.overlap else ()


def _arm(controls: Controls, seconds: Rounds, off: Rounds, drift: float) -> Arm:
    gains = [theirs / mine - 1 for theirs, mine in zip(off, seconds, strict=True)]
    fifths = statistics.quantiles(gains, n=5) if len(gains) > 1 else [0.0] * 4
    noise = 0.0 if controls == OFF else (fifths[3] - fifths[0]) / 2
    median_s = statistics.median(seconds)
    return Arm(
        controls, median_s, statistics.median(gains), noise, len(gains), settled_s=median_s / drift
    )


def _decide(finalists: Sequence[Arm]) -> tuple[Controls, str]:
    """The one to take, and why."""
    leader = min(finalists, key=lambda arm: arm.seconds)
    near = [arm for arm in finalists if leader.seconds * (1 + TIE) >= arm.seconds]
    sure = [arm for arm in near if arm.gain > NOISES * arm.noise] or [leader]
    best = min(sure, key=lambda arm: (arm.controls.num_set, arm.controls.spec))
    if best.controls == OFF:
        return OFF, "no setting is faster than plain overlap"
    share = best.gain / (1 + best.gain)
    gains = f"takes {share:.1%} less time than plain overlap"
    if best.gain <= NOISES * best.noise:
        bound = f"less than {NOISES:g} times the noise of {best.noise:.1%}"
        return OFF, f"{best.controls.spec} {gains}, {bound}: not taken"
    others = len(near) > 1 and leader.controls != best.controls
    tie = f"; {leader.controls.spec} is as fast with more controls" if others else ""
    return best.controls, f"{gains}, noise {best.noise:.1%}{tie}"
