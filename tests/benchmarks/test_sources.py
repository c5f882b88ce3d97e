"""Rows say what they were made from, and whether that is still the tree."""

from pathlib import Path

import pytest

import counterpoint.problem
from benchmarks import front, sources
from benchmarks.options import NAMES
from counterpoint.cli.measuring import bench


def test_a_digest_is_of_names_and_contents(tmp_path: Path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(name)
    before = sources.digest_of(["a.py", "b.py"], tmp_path)
    assert before == sources.digest_of(["b.py", "a.py"], tmp_path)
    assert before != sources.digest_of(["a.py"], tmp_path)
    (tmp_path / "b.py").write_text("changed")
    assert before != (changed := sources.digest_of(["a.py", "b.py"], tmp_path))
    (tmp_path / "b.py").unlink()
    assert sources.digest_of(["a.py", "b.py"], tmp_path) not in (before, changed)


def test_rows_are_current_until_a_file_that_their_run_imported_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "problem.py" in sources.imported() and counterpoint.problem.__file__
    house, rows = tmp_path / "house", tmp_path / "rows"
    for folder in (house, rows):
        folder.mkdir()
    (house / "a.py").write_text("a")
    (house / "other.py").write_text("b")
    monkeypatch.setattr(sources, "imported", lambda: ["a.py"])
    monkeypatch.setattr(sources, "digest_of", lambda files, of=sources.digest_of: of(files, house))
    row = {"source": sources.digest_of(["a.py"])}
    assert not sources.is_current({}, rows) and not sources.is_current(row, rows)
    sources._current.cache_clear()
    sources.keep(rows)
    sources.keep(rows)
    assert len((rows / sources.SOURCES).read_text().splitlines()) == 1
    assert sources.is_current(row, rows)
    sources._current.cache_clear()
    (house / "other.py").write_text("changed")
    assert sources.is_current(row, rows)
    sources._current.cache_clear()
    (house / "a.py").write_text("changed")
    assert not sources.is_current(row, rows)
    sources._current.cache_clear()


def test_numbers_by_other_code_are_marked(monkeypatch: pytest.MonkeyPatch):
    for current in (True, False):
        monkeypatch.setattr(front, "is_current", lambda _, current=current: current)
        marked = [line for line in front.bullets().splitlines() if line.startswith("- ")]
        assert len(marked) == 4 and all(("†" in line) is not current for line in marked)
        assert (front.OTHER in front.table()) is not current


def test_the_help_of_bench_names_all_benchmarks():
    assert set(NAMES) <= {*(bench.__doc__ or "").replace(":", " ").replace(".", " ").split()}
