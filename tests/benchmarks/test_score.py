"""Scores of choices: right, regret, constants and luck, by numbers worked out by hand."""

import pytest

from benchmarks.score import Measured, at_random, constants, score
from counterpoint.errors import InputError
from counterpoint.problem import Problem

P = Problem("all_gather_matmul", 64, 8, 8, 2)
MEASURED = [
    Measured("one", P, {"serial": 2.0, "a": 1.0, "b": 1.015}),
    Measured("two", P, {"serial": 3.0, "a": 4.0, "b": 1.5}),
]


def test_a_pick_within_two_percent_is_right():
    b = score("always b", lambda _: "b", MEASURED)
    assert (b.scenarios, b.asked, b.right) == (2, 2, 1.0)
    assert b.mean_regret == pytest.approx(0.0075) and b.worst_regret == pytest.approx(0.015)
    assert b.worst == "one"
    assert b.speedup == pytest.approx((2 / 1.015 * 2) ** 0.5) and b.least_speedup < 2
    a = score("always a", lambda _: "a", MEASURED)
    assert a.right == 0.5 and a.worst == "two" and a.worst_regret == pytest.approx(4 / 1.5 - 1)
    assert a.least_speedup == 0.75


def test_what_was_not_measured_does_not_count_and_is_said():
    some = score("c", lambda m: "c" if m.name == "one" else "b", MEASURED)
    assert (some.scenarios, some.asked) == (1, 2)
    with pytest.raises(InputError, match="a scenario with a pick of nothing, got none"):
        score("nothing", lambda _: "c", MEASURED)


def test_constants_come_best_first_and_take_serial_where_there_is_no_other():
    more = [*MEASURED, Measured("three", P, {"serial": 1.0, "a": 0.5})]
    found = constants(more)
    assert [s.way for s in found] == ["always b", "always a", "always serial"]
    assert found[0].right == pytest.approx(2 / 3) and found[0].worst == "three"
    assert found[0].worst_regret == pytest.approx(1.0)


def test_luck_is_the_mean_over_all_candidates():
    luck = at_random(MEASURED)
    assert luck.right == pytest.approx((2 / 3 + 1 / 3) / 2)
    ratios = (2 + 1 + 1.015) / 3, (2 + 4 / 1.5 + 1) / 3
    assert luck.mean_regret == pytest.approx(sum(ratios) / 2 - 1)
    assert luck.worst == "two" and luck.worst_regret == pytest.approx(4 / 1.5 - 1)
    assert luck.least_speedup == 0.75


def test_times_that_mean_nothing_are_refused():
    for times, text in (({"a": 1.0}, "serial among them"), ({"serial": 0.0}, "above 0")):
        with pytest.raises(InputError, match=text):
            Measured("x", P, times)
