"""Walks through spaces, and searches of many landscapes: what holds wherever they lead."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import product
from typing import Any

import pytest

from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.search import (
    FINAL_ROUNDS,
    FIRST_ROUNDS,
    NOISES,
    Found,
    Space,
    final_rounds,
    search,
)

SPACE = Space(
    transports=("copy_engine", "zero_cta"), blocks_per_sm=(6, 2), chunks=(2, 8), along=("m", "n"),
    delays_s=(5e-6,), max_ctas=(8, 16), carve_out=True,
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "overlap": (True,), "priority": (False, True), "blocks_per_sm": (None, 6, 2),
    "carve_out": (False, True), "delay_s": (0.0, 5e-6), "chunks": (1, 2, 8), "along": ("m", "n"),
    "transport": ("sm", "copy_engine", "zero_cta"), "max_ctas": (0, 8, 16), "num_sms": (0,),
    "green_sms": (0,),
}  # fmt: skip
# what comes along with a control, and to which value
COUPLED = {
    ("blocks_per_sm", "carve_out"): False, ("carve_out", "blocks_per_sm"): None,
    ("chunks", "along"): "m", ("transport", "priority"): False, ("transport", "max_ctas"): 0,
}  # fmt: skip


def changed(one: Controls, other: Controls) -> set[str]:
    return {f.name for f in fields(Controls) if getattr(one, f.name) != getattr(other, f.name)}


def test_a_walk_reaches_all_of_the_space_and_nothing_else():
    """Each step changes one control; another one only where the two exclude each other."""
    assert set(VALUES) == {f.name for f in fields(Controls)}
    reached, edge = {OFF}, [OFF]
    while edge:
        controls = edge.pop()
        for near in SPACE.neighbours(controls):
            names = changed(controls, near)
            assert any(
                all(COUPLED.get((name, m), near) == getattr(near, m) for m in names - {name})
                for name in names
            ), (controls, near)
            if near not in reached:
                reached.add(near)
                edge.append(near)
    # every combination that is no contradiction: copies imply priority and know no max_ctas,
    # blocks imply the carve-out, what is in one piece is not cut along anything
    legal = {
        Controls(**given)
        for values in product(*VALUES.values())
        if (given := dict(zip(VALUES, values, strict=True)))
        and not (given["transport"] == "copy_engine" and (given["priority"] or given["max_ctas"]))
        and not (given["blocks_per_sm"] and given["carve_out"])
        and not (given["chunks"] == 1 and given["along"] == "n")
    }
    assert reached == legal


def test_a_space_without_anything():
    nothing = Space(chunks=(), along=(), delays_s=(), priority=False)
    assert nothing.neighbours(OFF) == nothing.neighbours(SEQUENTIAL) == ()
    asked: list[tuple[list[Controls], int]] = []

    def measure(some: Sequence[Controls], num: int) -> Mapping[Controls, Sequence[float]]:
        asked.append((list(some), num))
        return {c: [1.0 if c.overlap else 2.0] * num for c in some}

    assert search(nothing, measure, time_left=lambda: True).best == OFF
    assert asked[0] == ([OFF, SEQUENTIAL], FIRST_ROUNDS)
    assert asked[-1] == ([OFF, SEQUENTIAL], final_rounds(1.0))


def test_short_loops_run_more_often_in_the_end():
    """Half a second of each finalist, and enough of a slow one to have quantiles."""
    assert [final_rounds(s) for s in (1e-3, 10e-3, 20e-3, 0.1)] == [61, 50, 25, 15]


class Landscape:
    """A random factor of each value, and of some pairs of them; scattered by `noise`."""

    def __init__(self, seed: int, noise: float) -> None:
        self.draw, self.noise = random.Random(seed), noise
        self.factor = cache(lambda *_: self.draw.choice((0.8, 0.95, 1.0, 1.0, 1.05, 1.3)))
        self.pair = cache(lambda *_: self.draw.choice((0.95, 1.0, 1.0, 1.0, 1.1)))
        self.asked: list[list[Controls]] = []

    def seconds(self, controls: Controls) -> float:
        names = sorted(changed(OFF, controls))
        found = 1e-2
        for i, name in enumerate(names):
            found *= self.factor(name, getattr(controls, name))
            for other in names[:i]:
                found *= self.pair(name, getattr(controls, name), other, getattr(controls, other))
        return found

    def __call__(self, some: Sequence[Controls], num: int) -> Mapping[Controls, Sequence[float]]:
        self.asked.append(list(some))
        return {c: [self.seconds(c) * (1 + self.draw.gauss(0, self.noise)) for _ in range(num)]
                for c in some}  # fmt: skip


def check(found: Found, measure: Landscape) -> None:
    """What holds of every search."""
    asked = [c for some in measure.asked for c in some]
    assert {arm.controls for arm in found.arms} == set(asked)
    assert all(some.count(c) == 1 for some in measure.asked for c in some)
    # beside plain overlap only the best so far is measured again before the end
    again = Counter(c for some in measure.asked[:-1] for c in some if c != OFF)
    for i, some in enumerate(measure.asked[1:-1], 1):
        seen = {c for before in measure.asked[:i] for c in before}
        assert len([c for c in some if c in seen and c != OFF]) <= 1
    assert sum(again.values()) - len(again) <= len(measure.asked)
    if found.best != OFF:
        arm = found.arm(found.best)
        assert arm.gain > NOISES * arm.noise and arm.num_rounds in FINAL_ROUNDS
        assert arm.gain > 0


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_searches_of_random_landscapes(noise: float):
    worse = 0
    for seed in range(25):
        measure = Landscape(seed, noise)
        found = search(SPACE, measure, time_left=lambda: True)
        check(found, measure)
        # as fast as any one control by itself, or as near as counts as equal
        single = min(map(measure.seconds, (OFF, SEQUENTIAL, *SPACE.neighbours(OFF))))
        worse += measure.seconds(found.best) > single * 1.03
    assert not worse or noise == 0.1


def test_time_is_asked_for_before_every_rotation_but_the_first_and_the_last():
    for allowed in range(3):
        measure = Landscape(3, 0.0)
        left = iter([True] * allowed + [False])
        found = search(SPACE, measure, time_left=lambda left=left: next(left))
        assert found.timed_out and len(measure.asked) == 2 + allowed
        check(found, measure)
