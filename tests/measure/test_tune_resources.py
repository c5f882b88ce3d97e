"""What is said of a tuned pipeline, and what is remembered of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.measure import tune_resources
from counterpoint.measure.tune_resources import Tuned
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.search import Arm, Found

BEST = Controls(transport="copy_engine", pieces=4)
FOUND = Found(
    BEST,
    (
        Arm(BEST, 8e-3, 0.25, 0.01, 15), Arm(OFF, 10e-3, 0.0, 0.0, 15),
        Arm(SEQUENTIAL, 11e-3, -0.09, 0.02, 3),
    ),
    "takes 20.0% less time, noise 1.0%",
    {"overlap carve_out": "nothing can be shaped"},
    timed_out=True,
)  # fmt: skip


def tuned(found: Found | None, mode: Any = "graph") -> Tuned:
    runner = SimpleNamespace(closed=False, calls=0)
    return Tuned(SimpleNamespace(), mode, BEST, found, FOUND.why, runner)  # type: ignore[arg-type]


def test_the_explanation_has_every_setting():
    assert tuned(FOUND).explain().splitlines() == [
        "overlap copy_engine pieces=4 (graph): takes 20.0% less time, noise 1.0%",
        "  pieces: by TorchDispatchMode at capture",
        "  transport: by memcpy nodes",
        "  setting                            ms    less   noise  rounds",
        "  overlap copy_engine pieces=4    8.000   20.0%    1.0%      15",
        "  overlap                        10.000    0.0%    0.0%      15",
        "  sequential                     11.000   -9.9%    2.0%       3",
        "  overlap carve_out: cannot be had: nothing can be shaped",
        "  the time was up before nothing gained any more",
    ]


def test_what_was_remembered_says_so():
    text = tuned(None, "eager").explain()
    assert "transport: by copies on a stream" in text
    assert text.endswith("remembered from an earlier process")


def test_leaving_the_context_brings_all_back():
    left: list[bool] = []
    made = tuned(FOUND)
    made.runner = SimpleNamespace(__exit__=lambda *_: left.append(True))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="on purpose"), made:
        raise RuntimeError("on purpose")
    assert left == [True]


@pytest.mark.parametrize(
    ("kept", "taken"),
    [
        (None, None),
        ({"spec": "overlap priority", "why": "it is faster"},
         {"spec": "overlap priority", "why": "it is faster"}),
        ({"spec": "overlap warp_speed", "why": ""}, None),  # of another version
        ({"spec": 7, "why": ""}, None),
        ({"why": "no spec"}, None),
    ],
)  # fmt: skip
def test_only_controls_are_remembered(kept: Any, taken: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune_resources, "load_controls", lambda *_: kept)
    assert tune_resources._remembered("graph abc", "NVIDIA H200", 4, "2.11") == taken
