"""docs/support.md: no cell without a row of a test that passed, no row without such a test."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import support
from benchmarks.rows import rows_of

ROWS = support.committed()
PAGE = support.ROOT / "docs" / "support.md"


def test_a_row_is_of_a_test_that_is_there_and_shows_as_much():
    declared = support.declared()
    wrong = [row["test"] for row in ROWS if declared.get(row["test"]) != row["shows"]]
    assert not wrong, "run `make support`; on GPUs `make gpu SUITE=tests`"


def test_the_page_says_what_the_rows_say():
    text = PAGE.read_text()
    for marker, said in support.sections(ROWS).items():
        assert f"<!-- {marker}:start -->\n{said}\n<!-- {marker}:end -->" in text, (
            "run `make readme`"
        )


def test_marks_are_of_words_that_the_page_has():
    whats = {"forward", "backward", "double backward", "compiled for"}
    whats |= {f"{way} {each}" for way in support.WAYS.values() for each in ("forward", "backward")}
    values = {"bf16", "fp16", "fp32", "fp8", "refused", *support.GPUS}
    for name, shows in support.declared().items():
        found = support.cells([{"shows": shows}])
        assert {op for op, _ in found} <= set(support.OPERATORS), name
        assert {what for _, what in found} <= whats and set().union(*found.values()) <= values, name


def test_declared_finds_marks_of_functions_alone(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        '@pytest.mark.shows("a b", "forward", "fp32")\n@other\ndef test_x(): ...\n'
        "def test_y(): ...\n"
    )
    assert support.declared(tmp_path) == {"tests/test_a.py::test_x": [["a b", "forward", "fp32"]]}


def test_what_failed_once_or_was_skipped_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support, "declared", lambda: {name: [["op", "x", "y"]] for name in "abc"})
    monkeypatch.setattr(support, "environment", lambda: {"date": "today", "commit": "c"})
    recorder = support.Recorder(tmp_path / "rows.jsonl")
    for name, when, outcome in (
        ("a[1]", "call", "passed"), ("a[2]", "call", "skipped"), ("b[1]", "call", "passed"),
        ("b[2]", "teardown", "failed"), ("c", "setup", "passed"), ("c", "call", "skipped"),
        ("d", "call", "passed"),
    ):  # fmt: skip
        recorder.pytest_runtest_logreport(
            SimpleNamespace(nodeid=name, when=when, passed=outcome == "passed",
                            failed=outcome == "failed")
        )  # fmt: skip
    recorder.pytest_sessionfinish()
    assert [row["test"] for row in rows_of(tmp_path / "rows.jsonl")] == ["a"]
