"""Predictions of our own steps, kept before the steps are run."""

import pytest

from benchmarks import scale_ahead
from benchmarks.rows import rows_of
from counterpoint.machine_of import machine_of

MACHINE = machine_of("test", "h200-2")


def test_a_step_that_was_measured_or_predicted_is_not_predicted_again():
    first = scale_ahead.predict_ahead([], MACHINE)
    assert first and all(0 < row["predicted_s"] < 10 for row in first)
    measured = {bench: {*scale_ahead.measured_of(bench)} for bench in ("tp_training", "steps")}
    assert "8B, 8 layers, 8192 tokens" in measured["tp_training"]
    assert not any(row["case"] in measured.get(row["bench"], ()) for row in first)
    assert scale_ahead.predict_ahead(first, MACHINE) == []


def test_what_was_kept_is_older_than_what_was_measured():
    for row in rows_of(scale_ahead.AHEAD) if scale_ahead.AHEAD.is_file() else []:
        arms = scale_ahead.measured_of(row["bench"]).get(row["case"], {})
        assert all(row["date"] <= each["date"] for each in arms.values())
        assert row["commit"] and "dirty" not in row["commit"]


def test_errors_are_over_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    rows = {"a": {"ours": {"median_s": 2.0}, "as is": {"median_s": 4.0}}}
    monkeypatch.setattr(scale_ahead, "measured_of", lambda _: rows)
    kept = [{"bench": "x", "case": case, "arm": arm, "predicted_s": 3.0, "date": "d", "commit": "c"}
            for case, arm in (("a", "ours"), ("a", "as is"), ("b", "ours"))]  # fmt: skip
    assert scale_ahead.errors(kept) == [0.5, -0.25, None]
    table = scale_ahead.ahead_table(kept)
    assert "| a | ours | 3000.000 | 2000.000 | +50.0% |" in table
    assert "| b | ours | 3000.000 | - | - |" in table
    assert "2 of 3 were run since: median error 37.5%, worst 50.0%." in table
