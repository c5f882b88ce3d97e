"""The published steps: all are predicted, and what comes out stays within the bars it reached."""

import json
from importlib.resources import files

from counterpoint.scale.checked import (
    RUNS,
    band,
    dense,
    fitted_error,
    held,
    mean_error,
    published,
    scored,
)
from counterpoint.scale.constants import CONSTANTS
from counterpoint.scale.prediction import BAND, WIDEST


def test_every_published_step_is_there_with_its_source():
    rows = json.loads((files("counterpoint.scale") / "published_steps.json").read_text())
    steps = published()
    assert [s.name for s in steps] == [row["name"] for row in rows] and len(steps) == 29
    assert all("arXiv" in s.source or "README" in s.source for s in steps)
    assert {s.paper for s in steps} == set(RUNS)


def test_errors_of_published_steps():
    """No constant was fitted; each paper, and the worst step, within what is asked."""
    steps = published()
    assert mean_error(steps) <= 0.07
    assert max(abs(s.ratio - 1) for s in steps) <= 0.2
    for paper in RUNS:
        assert mean_error(tuple(s for s in steps if s.paper == paper)) <= 0.09
    assert fitted_error(steps) <= 0.085


def test_the_band_is_that_of_papers_that_differ():
    """It holds steps of a paper that it does not know, and is no wider than is said."""
    steps = dense()
    assert len(steps) == 66 and {s.kind for s in steps} == {"pipeline", "fsdp"}
    assert tuple(round(each, 2) for each in band(steps)) == BAND
    assert held(steps) >= 0.9 * len(steps)
    assert WIDEST[0] <= 1 / BAND[1] < 1 / BAND[0] <= WIDEST[1]


def test_experts_need_the_widest_band():
    """Their papers differ more than others do, and each step is near or short."""
    experts = tuple(s for s in scored() if s.kind == "experts")
    assert len({s.paper for s in experts}) == 5 and len(experts) == 9
    assert max(s.ratio for s in experts) < 1.1
    inside = [s for s in experts if 1 / WIDEST[1] <= s.ratio <= 1 / WIDEST[0]]
    assert {s.paper for s in experts} - {s.paper for s in inside} == {"Kempner"}
    assert mean_error(tuple(inside)) < 0.14


def test_each_constant_says_what_it_stands_on():
    assert len(CONSTANTS) == 39
    assert all(c.source and c.unit and c.value > 0 for c in CONSTANTS.values())
