"""How good choices are, against what was measured: right, regret, and what luck would have done.

A pick is right if it took no more than 2 % longer than the fastest candidate of its scenario;
regret is how much longer it took. Beside the choosers: always the same plan, and one at random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from counterpoint.errors import InputError
from counterpoint.problem import Problem

RIGHT = 1.02
SERIAL = "serial"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one scenario took.

    Args:
        name: of the scenario.
        problem: what is computed.
        times: seconds of each candidate by its spec, serial among them.

    Raises:
        InputError: serial is missing, or a time is not positive.
    """

    name: str
    problem: Problem
    times: Mapping[str, float]

    def __post_init__(self) -> None:
        if SERIAL not in self.times:
            raise InputError("Measured", "times", want=f"serial among them ({self.name})", got="no")
        for spec, seconds in self.times.items():
            if not seconds > 0:
                raise InputError("Measured", "times", want=f"above 0 ({spec})", got=seconds)

    @property
    def best_s(self) -> float:
        """Seconds of the fastest candidate."""
        return min(self.times.values())


@dataclass(frozen=True, slots=True)
class Score:
    """What the picks of one way to choose came to.

    Args:
        way: how was chosen.
        scenarios: how many of them had their pick measured, of `asked`.
        asked: how many there were.
        right: share of picks within 2 % of the fastest.
        mean_regret: how much longer than the fastest a pick took, mean.
        worst_regret: and most.
        worst: the scenario of that.
        speedup: serial over the picks, geometric mean.
        least_speedup: and least.
    """

    way: str
    scenarios: int
    asked: int
    right: float
    mean_regret: float
    worst_regret: float
    worst: str
    speedup: float
    least_speedup: float


def score(way: str, pick: Callable[[Measured], str], measured: Sequence[Measured]) -> Score:
    """Score one way to choose.

    Args:
        way: its name.
        pick: the spec that it takes; where that was not measured the scenario does not count.
        measured: the scenarios.

    Raises:
        InputError: no pick was measured.
    """
    taken = [(m, m.times[spec]) for m in measured if (spec := pick(m)) in m.times]
    if not taken:
        raise InputError("score", "measured", want=f"a scenario with a pick of {way}", got="none")
    return _score(way, taken, len(measured))


def constants(measured: Sequence[Measured]) -> list[Score]:
    """Always the same plan, for each that was measured; serial where it was not. Best first.

    A family that sizes its groups by the number of ranks, or one for each operator, counts by its
    whole spec.
    """
    specs = dict.fromkeys(spec for m in measured for spec in m.times)
    found = [
        _score(f"always {spec}", [(m, m.times.get(spec, m.times[SERIAL])) for m in measured],
               len(measured))
        for spec in specs
    ]  # fmt: skip
    return sorted(found, key=lambda s: (-s.right, s.mean_regret))


def at_random(measured: Sequence[Measured]) -> Score:
    """What is to be expected of a plan drawn from the candidates: means over all of them."""
    each = [(m, [t / m.best_s for t in m.times.values()]) for m in measured]
    worst, most = max(((m, max(ratios)) for m, ratios in each), key=lambda pair: pair[1])
    speedups = [geometric_mean(m.times[SERIAL] / t for t in m.times.values()) for m in measured]
    return Score(
        "at random", len(measured), len(measured),
        fmean(fmean(r <= RIGHT for r in ratios) for _, ratios in each),
        fmean(fmean(ratios) for _, ratios in each) - 1, most - 1, worst.name,
        geometric_mean(speedups), min(m.times[SERIAL] / max(m.times.values()) for m in measured),
    )  # fmt: skip


def _score(way: str, taken: Sequence[tuple[Measured, float]], asked: int) -> Score:
    regrets = [seconds / m.best_s - 1 for m, seconds in taken]
    speedups = [m.times[SERIAL] / seconds for m, seconds in taken]
    worst = max(range(len(taken)), key=regrets.__getitem__)
    return Score(
        way, len(taken), asked, fmean(r <= RIGHT - 1 for r in regrets), fmean(regrets),
        regrets[worst], taken[worst][0].name, geometric_mean(speedups), min(speedups),
    )  # fmt: skip
