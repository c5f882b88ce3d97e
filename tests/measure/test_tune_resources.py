"""What is said of a tuned pipeline, and what is remembered of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.choose.known import Place
from counterpoint.measure import tune_resources
from counterpoint.measure.tune_resources import Tuned
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.search import Arm, Found

BEST = Controls(transport="copy_engine", chunks=4)
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


def tuned(mode: Any = "graph", *, remembered: bool = False) -> Tuned:
    runner: Any = SimpleNamespace()
    return Tuned(SimpleNamespace(), mode, FOUND, remembered, runner)  # type: ignore[arg-type]


def test_the_explanation_has_every_setting():
    assert tuned().explain().splitlines() == [
        "overlap copy_engine chunks=4 (graph): takes 20.0% less time, noise 1.0%",
        "  chunks: by TorchDispatchMode at capture",
        "  transport: by memcpy nodes",
        "  setting                            ms    less   noise  rounds",
        "  overlap copy_engine chunks=4    8.000   20.0%    1.0%      15",
        "  overlap                        10.000    0.0%    0.0%      15",
        "  sequential                     11.000   -9.9%    2.0%       3",
        "  overlap carve_out: cannot be had: nothing can be shaped",
        "  the time was up before nothing gained any more",
    ]


def test_what_was_remembered_says_so_and_has_every_setting_too():
    lines = tuned("eager", remembered=True).explain().splitlines()
    assert lines[2:4] == [
        "  transport: by copies on a stream",
        "  remembered from an earlier process",
    ]
    assert lines[4:] == tuned().explain().splitlines()[3:]


def test_leaving_the_context_brings_all_back():
    left: list[bool] = []
    made = tuned()
    made.runner = SimpleNamespace(__exit__=lambda *_: left.append(True))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="on purpose"), made:
        raise RuntimeError("on purpose")
    assert left == [True]


def remembered(kept: Any, monkeypatch: pytest.MonkeyPatch) -> Found | None:
    monkeypatch.setattr(tune_resources, "load_controls", lambda *_: kept)
    return tune_resources._remembered("graph abc", Place(gpu="NVIDIA H200", ranks=4))


def test_a_search_is_read_back_with_all_that_it_measured(monkeypatch: pytest.MonkeyPatch):
    written = json.loads(json.dumps(tune_resources._written(FOUND)))
    assert remembered(written, monkeypatch) == FOUND
    assert remembered(None, monkeypatch) is None


@pytest.mark.parametrize(
    "change",
    [{"spec": "overlap warp_speed"}, {"spec": 7}, {"arms": [["overlap"]]}, {"arms": 3},
     {"arms": [["overlap warp_speed", 1.0, 0.0, 0.0, 3]]}, {"refused": ["x"]}],
    ids=str,
)  # fmt: skip
def test_what_another_version_has_written_is_searched_afresh(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    assert remembered(tune_resources._written(FOUND) | change, monkeypatch) is None
    for name in ("spec", "why", "arms", "refused", "timed_out"):
        written = tune_resources._written(FOUND)
        del written[name]
        assert remembered(written, monkeypatch) is None
