"""Which way stays, by times of real steps."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp_models import DIM, Step, batch, made, mesh_of, same, trained
from on_ranks import on_ranks

import counterpoint as cp
from counterpoint.fsdp import trial
from counterpoint.fsdp.trial import MOST_STEPS, WARM_STEPS, Trial, interval, verdict_of


def test_an_interval_of_the_median_covers_it_95_times_in_100():
    """Against what a table of signs says, and by drawing."""
    assert [interval(n) for n in (5, 6, 8, 12, 20, 32)] == [
        (0, -1),
        (0, 5),
        (0, 7),
        (2, 9),
        (5, 14),
        (9, 22),
    ]
    drawn = random.Random(1)
    for n in (8, 20, 32):
        low, high = interval(n)
        hits = 0
        for _ in range(2000):
            sample = sorted(drawn.lognormvariate(0, 1) for _ in range(n))
            hits += sample[low] <= 1 <= sample[high]
        assert hits >= 0.94 * 2000


SAMPLES = [(1.2, 0.02, True), (0.9, 0.02, False), (1.0, 0.1, False), (1.02, 0.5, False)]


@pytest.mark.parametrize(("ratio", "noise", "ours"), SAMPLES)
def test_ours_stays_only_where_it_is_faster_beyond_doubt(ratio: float, noise: float, ours: bool):
    drawn = random.Random(2)
    pairs = [(ratio * drawn.gauss(1, noise), drawn.gauss(1, noise)) for _ in range(32)]
    verdict = verdict_of(pairs)
    assert verdict.ours == ours, verdict
    assert not verdict_of([]).ours and not verdict_of(pairs[:5]).decided


class Clock:
    """Times of steps that go by a schedule."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def decided(times: Any, keys: Any = lambda step: 0, steps: int = 16) -> tuple[Trial, int]:
    """A trial of steps that take `times(ours, step)` seconds; how many it took."""
    clock = Clock()
    with mock.patch.object(trial.time, "perf_counter", clock):
        tried = Trial(steps, lambda value: [value, value], on_gpu=False)
        for step in range(100):
            ours = tried.begin(keys(step - 1))
            if ours is None:
                return tried, step
            clock.now_s += times(ours, step)
    raise AssertionError("it never ends")


def test_steps_alternate_and_it_ends_at_once_where_it_is_clear():
    tried, steps = decided(lambda ours, step: 1.0 if ours else 1.2)
    assert steps == WARM_STEPS + 16
    assert tried.verdict is not None and tried.verdict.ours
    assert tried.verdict.low == pytest.approx(1.2) and tried.verdict.pairs == 8


def test_it_ends_after_so_many_steps_where_it_is_not():
    drawn = random.Random(3)
    tried, steps = decided(lambda ours, step: drawn.gauss(1, 0.2))
    assert steps == WARM_STEPS + MOST_STEPS
    assert tried.verdict is not None and not tried.verdict.ours


def test_steps_of_other_forwards_are_not_compared():
    """Every third step is a long one."""
    times = lambda ours, step: (5.0 if step % 3 == 0 else 1.0) * (1.0 if ours else 1.1)  # noqa: E731
    tried, _ = decided(times, keys=lambda step: step % 3 == 0)
    assert tried.verdict is not None and tried.verdict.ours
    assert tried.verdict.high == pytest.approx(1.1)


@on_ranks(2)
def test_both_ways_by_turns_change_no_bit(rank: int, world_size: int):
    mesh, step = mesh_of(world_size), Step(hidden=(96,), steps=WARM_STEPS + 18, micro=2)
    want = trained(made(step, mesh), step, rank)
    for ours in (True, False):
        model = made(step, mesh)
        overlapped = cp.overlap(model, trial_steps=16)
        ms = lambda self, i, ours=ours: 1.0 if self.ours(i) == ours else 2.0  # noqa: E731
        with mock.patch.object(Trial, "_ms", ms):
            got = trained(model, step, rank)
        assert same(want, got)
        assert overlapped.verdict is not None
        assert overlapped.verdict.ours == ours
        text = overlapped.explain()
        assert "tried on 16 steps" in text
        assert ("left to torch: overlapping was not faster" in text) != ours


@on_ranks(2)
def test_a_step_is_one_of_the_optimizer_not_one_forward(rank: int, world_size: int):
    model = made(Step(), mesh_of(world_size))
    cp.overlap(model, trial_steps=2)
    ways = list[bool]()
    asked = lambda self, step: ways.append(True) or step % 4 in (0, 3)  # noqa: E731
    with mock.patch.object(Trial, "ours", asked):
        for i in range(3):
            for _ in range(3):
                model.set_requires_gradient_sync(False)  # type: ignore[operator]
                model(batch(rank, i)).float().sum().backward()
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            model(batch(rank, i)).float().sum().backward()
            with torch.no_grad():
                model(torch.zeros(1, 1, DIM))
    assert len(ways) == 3
