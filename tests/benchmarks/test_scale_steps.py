"""Our own measured steps, predicted, and the tables and picture of them."""

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.rows import results
from benchmarks.scale_dlrm import dlrm_step, gradients_of_ranks_s
from benchmarks.scale_scored import LATEST, SETS, errors_of, rows_of_set
from benchmarks.scale_steps import GPU, own_steps, picture, sections
from benchmarks.tables import ROOT
from counterpoint.machine_of import machine_of
from counterpoint.scale.checked import mean_error, published


def test_errors_of_our_own_steps():
    """The worst are of experts at 1024 tokens, eager: their matmuls and routing take longer."""
    errors = {step.point.label: abs(step.point.error) for step in own_steps()}
    assert len(errors) == 32
    assert median(errors.values()) <= 0.08
    over = {label for label, error in errors.items() if error > 0.15}
    assert len(over) <= 5 and all("1024" in label or "Qwen3" in label for label in over)
    assert max(errors.values()) <= 0.23
    assert max(e for label, e in errors.items() if label.startswith("DLRM")) <= 0.098


def test_the_readme_has_the_errors_of_steps_scored_once():
    page = " ".join((ROOT / "README.md").read_text().split())
    known = mean_error(published())
    kinds = {"fsdp": "FSDP", "pipeline": "pipelines", "experts": "experts"}
    unseen = ", ".join(
        f"{errors_of(LATEST, kind)[1] * 100:.0f} % ({name})" for kind, name in kinds.items()
    )
    said = f"predictions {known * 100:.0f} % off published steps we knew; off unseen ones {unseen}"
    assert said in page
    for name, (steps, _) in SETS.items():
        text = (ROOT / "src" / "counterpoint" / "scale" / steps).read_text()
        cases = {row["case"] for row in rows_of_set(name)}
        assert cases == {step["name"] for step in json.loads(text)["steps"]}


def test_a_step_measured_again_counts_once_as_it_was_last(monkeypatch: pytest.MonkeyPatch):
    steps = [row for row in results("steps", gpu=GPU)[2] if row["model"] == "DLRM-DCNv2"]
    again = [row | {"median_s": 2 * row["median_s"], "named": "uniform"} for row in steps]
    found = {"compile": {2: []}, "training": {2: []}, "steps": {2: steps + again}}
    monkeypatch.setattr("benchmarks.scale_steps.results", lambda name, gpu: found[name])
    times = {row["median_s"] for row in again}
    assert len(own_steps()) == 4 and all(own.row["median_s"] in times for own in own_steps())


def test_ranks_of_a_dlrm_differ_by_the_gradients_of_their_tables():
    """What one rank takes longer than the other, as it was measured: 14 and 19 % off."""
    found = [
        row
        for row in results("steps", gpu=GPU)[2]
        if row["arm"] == "forward + backward, by fused" and row["model"].startswith("DLRM")
    ]
    assert len(found) == 2
    for row in found:
        machine = machine_of("test", "h200-2")
        each = gradients_of_ranks_s(dlrm_step(row["size"], row["rows"], machine, "ours"))
        assert max(each) - min(each) == pytest.approx(row["skew_s"], rel=0.2)


def test_tables_and_picture(tmp_path: Path):
    found = sections()
    assert found["scale-published"].count("\n| ") == 29 + 5 + 2 + 1
    assert found["scale-own"].count("\n| ") == 32 + 1
    assert found["scale-mlperf"].count("\n| ") == 2 + 1
    assert "Median error" in found["scale-own"] and "2x NVIDIA H200" in found["scale-own"]
    assert "MCore-H100" in picture(tmp_path).read_text()
