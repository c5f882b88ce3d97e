"""The search on landscapes that are known: what it finds, and when it keeps plain overlap."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from counterpoint.errors import InputError
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.search import Found, Space, search, simpler

Landscape = Callable[[Controls], float]
SPACE = Space(
    transports=("copy_engine",), blocks_per_sm=(6, 4, 2), chunks=(2, 4), delays_s=(5e-6, 10e-6),
    max_ctas=(16,), carve_out=True,
)  # fmt: skip


def separable(controls: Controls) -> float:
    """Milliseconds; best at a delay of 5 us and 4 blocks, 10.0 x 0.75 x 0.9."""
    if not controls.overlap:
        return 11.0
    factors = {
        "delay_s": {0.0: 1.0, 5e-6: 0.75, 10e-6: 0.8},
        "blocks_per_sm": {None: 1.0, 6: 0.95, 4: 0.9, 2: 1.2},
        "chunks": {1: 1.0, 2: 1.03, 4: 1.06},
        "transport": {"sm": 1.0, "copy_engine": 1.1},
        "max_ctas": {0: 1.0, 16: 1.4},
        "priority": {False: 1.0, True: 1.04},
        "carve_out": {False: 1.0, True: 1.01},
    }
    seconds = 10e-3
    for name, values in factors.items():
        seconds *= values[getattr(controls, name)]
    return seconds


class Measured:
    """Times of a landscape, scattered; remembers what was asked."""

    def __init__(self, landscape: Landscape, noise: float = 0.0, seed: int = 0) -> None:
        self.landscape, self.noise, self.draw = landscape, noise, random.Random(seed)
        self.asked: list[list[Controls]] = []

    def __call__(self, some: Sequence[Controls], num: int) -> Mapping[Controls, Sequence[float]]:
        self.asked.append(list(some))
        return {c: [self.landscape(c) * (1 + self.draw.gauss(0, self.noise)) for _ in range(num)]
                for c in some}  # fmt: skip


def found(measure: Measured, space: Space = SPACE) -> Found:
    return search(space, measure, time_left=lambda: True)


@pytest.mark.parametrize("seed", range(10))
def test_the_best_of_a_separable_landscape(seed: int):
    result = found(Measured(separable, 0.002, seed))
    assert result.best == Controls(delay_s=5e-6, blocks_per_sm=4)
    assert not result.timed_out
    arm = result.arm(result.best)
    assert arm.gain == pytest.approx(1 / 0.675 - 1, rel=0.02)
    assert "takes 32." in result.why


def test_controls_that_need_each_other():
    """Blocks left free help only a collective that is urgent; by itself a delay is far better."""

    def together(controls: Controls) -> float:
        if controls.blocks_per_sm and controls.priority and not controls.delay_s:
            return 7e-3
        return 8.5e-3 if controls.delay_s else 10e-3 * (1.02 if controls.blocks_per_sm else 1.0)

    best = found(Measured(together, 0.002)).best
    assert best.priority and best.blocks_per_sm and best.num_set == 2


@pytest.mark.parametrize("first", [0.85, 1.15])
def test_clocks_that_settle_late_do_not_decide(first: float):
    """What is measured before they have settled is compared by what is measured again."""

    class Settling(Measured):
        def __call__(self, some, num):
            rounds = super().__call__(some, num)
            factor = first if len(self.asked) == 1 else 1.0
            return {c: [factor * s for s in seconds] for c, seconds in rounds.items()}

    assert found(Settling(separable, 0.003)).best == Controls(delay_s=5e-6, blocks_per_sm=4)


def test_a_simpler_setting_must_be_sure_of_its_gain():
    """A leader that gains 5 % is not given up for one that is as fast but scatters."""

    class Scattered(Measured):
        def __call__(self, some, num):
            return {
                c: [s * (1 + 0.12 * (i % 3 - 1) * (c.num_set == 1))
                    for i, s in enumerate(seconds)]
                for c, seconds in super().__call__(some, num).items()
            }  # fmt: skip

    def nearly(controls: Controls) -> float:
        if controls.delay_s and controls.priority:
            return 9.4e-3
        return 9.5e-3 if controls.delay_s or controls.priority else 10e-3

    space = Space(chunks=(), delays_s=(5e-6,))
    assert found(Scattered(nearly), space).best == Controls(delay_s=5e-6, priority=True)


def test_nine_of_ten_searches_decide_alike():
    """As on 2 GPUs: settings with copy engines differ by less than 1 %, rounds by 1 %."""

    def like_copies(controls: Controls) -> float:
        if controls.transport != "copy_engine":
            return 11.6e-3 if not controls.delay_s else 8.5e-3
        chunks = {1: 1.0, 2: 0.995, 4: 0.993}[controls.chunks]
        return 8.06e-3 * chunks * (0.997 if controls.delay_s else 1.0)

    space = Space(transports=("copy_engine",), chunks=(2, 4))
    for first in range(0, 50, 10):
        picks = Counter(
            found(Measured(like_copies, 0.01, seed), space).best.spec
            for seed in range(first, first + 10)
        )
        assert picks["overlap copy_engine"] >= 9, picks


def test_of_equals_the_one_with_fewer_controls():
    def flat(controls: Controls) -> float:
        return 5e-3 if controls.delay_s else 10e-3

    assert found(Measured(flat, 0.003)).best.num_set == 1


def test_plain_overlap_stays_unless_the_gain_is_twice_its_noise():
    def slightly(controls: Controls) -> float:
        return 9.8e-3 if controls.delay_s else 10e-3

    quiet = found(Measured(lambda c: 9.5e-3 if c.delay_s else 10e-3, 0.002))
    assert quiet.best.delay_s
    noisy = found(Measured(slightly, 0.05, 3))
    assert noisy.best == OFF
    nothing = found(Measured(lambda c: 10e-3 + 1e-3 * (c != OFF)))
    assert (nothing.best, nothing.why) == (OFF, "no setting is faster than plain overlap")


def test_a_sequence_can_win():
    result = found(Measured(lambda c: 10e-3 if c.overlap else 8e-3))
    assert result.best == SEQUENTIAL


def test_no_setting_is_searched_twice_and_losers_are_not_combined():
    measure = Measured(separable)
    result = found(measure)
    *searched, _ = measure.asked
    times = Counter(c for some in searched for c in some[1:] if c != OFF)
    repeated = {c for c, count in times.items() if count > 1}
    # the best so far is timed beside what is tried from it
    assert len(repeated) <= len(searched)
    assert not [c for some in searched[1:] for c in some if c.max_ctas]
    assert {arm.controls for arm in result.arms} == {c for some in measure.asked for c in some}


def test_time_that_is_up_ends_the_search():
    measure = Measured(separable)
    result = search(SPACE, measure, time_left=lambda: False)
    assert result.timed_out
    assert len(measure.asked) == 2  # each control by itself, and the best again
    assert result.best == Controls(delay_s=5e-6)


def test_settings_that_cannot_be_had_are_left_out():
    class Refusing(Measured):
        def __call__(self, some, num):
            return {c: t for c, t in super().__call__(some, num).items() if not c.delay_s}

    result = found(Refusing(separable))
    assert result.best == Controls(blocks_per_sm=4)

    class Broken(Measured):
        def __call__(self, some, num):
            return {c: t for c, t in super().__call__(some, num).items() if c != OFF}

    with pytest.raises(InputError, match="a time of plain overlap, got none"):
        found(Broken(separable))


def test_simpler_settings_have_some_of_the_controls():
    of = Controls(transport="copy_engine", chunks=4, along="n", delay_s=5e-6)
    found = set(simpler(of))
    assert len(found) == 6 and of not in found and OFF not in found
    assert Controls(chunks=4, along="n") in found
    assert Controls(transport="copy_engine", delay_s=5e-6) in found
    assert simpler(SEQUENTIAL) == simpler(OFF) == ()
