"""Published steps that are kept back are scored once."""

import json
from pathlib import Path

import pytest

from benchmarks import scale_scored
from benchmarks.rows import rows_of
from counterpoint.errors import InputError


def test_a_set_is_scored_once_each_step_as_its_entry_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sets = {"first": ("scored_steps.json", tmp_path / "rows.jsonl")}
    monkeypatch.setattr(scale_scored, "SETS", sets)
    text = Path(scale_scored.__file__).parents[1] / "src/counterpoint/scale/scored_steps.json"
    entries = json.loads(text.read_text())["steps"][:3]
    monkeypatch.setattr(scale_scored.json, "loads", lambda _: {"steps": entries})
    assert scale_scored.rows_of_set("first") == []
    path = scale_scored.score("first")
    monkeypatch.undo()
    rows = rows_of(path)
    assert [row["case"] for row in rows] == [each["name"] for each in entries]
    for row, entry in zip(rows, entries, strict=True):
        low, high = row["band"]
        assert row["reported_s"] == entry["reported_step_s"] and row["kind"] == entry["kind"]
        assert 0.5 < row["predicted_s"] / row["reported_s"] < 2 and low < 1 < high
        assert row["commit"] and row["date"]
    with pytest.raises(InputError, match="kept back"):
        scale_scored.score("first")
