"""`make gpu`: each part has its limit, one that fails stops no other, and the exit code says so."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.runner import NAMES

# writes the names that it is done with; some end badly
RUNNER = """
import os, sys, threading
names, done = [w for w in sys.argv[1:] if w.startswith("t")], sys.argv[sys.argv.index("--done") + 1]
for name in names:
    print("in", name, os.environ["COUNTERPOINT_CACHE"], flush=True)
    if name == "t_wrong":
        sys.exit(7)
    if name == "t_hangs":
        threading.Event().wait()
    with open(done, "a") as file:
        file.write(name + chr(10))
"""


def test_the_short_suite_is_all_tests_and_every_table_in_nine_minutes(tmp_path: Path):
    found = gpu_suite.separate("short", tmp_path, 2)
    assert list(found) == ["tests", "characterize"] and set(gpu_suite.SHORT_S) == set(NAMES)
    seconds = sum(limit_s for _, limit_s in found.values())
    assert seconds + gpu_suite.START_S + sum(gpu_suite.SHORT_S.values()) <= 540


@pytest.mark.parametrize("suite", [*NAMES, "tests", "characterize"])
def test_a_long_suite_is_one_part(suite: str, tmp_path: Path):
    found = gpu_suite.separate(suite, tmp_path, 2)
    assert list(found) == ([] if suite in NAMES else [suite])
    assert all(limit_s < 600 for _, limit_s in found.values())


def test_a_part_that_fails_stops_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    parts = {
        "wrong": (["-c", "import sys; print('of wrong', flush=True); sys.exit(7)"], 60),
        "hangs": (["-c", "import threading; threading.Event().wait()"], 0),
        "right": (["-c", "import os; print(os.environ['COUNTERPOINT_CACHE'])"], 60),
    }
    assert gpu_suite.run_separate(parts, tmp_path / "cache") == ["wrong", "hangs"]
    text = capfd.readouterr().out
    assert "of wrong\n" in text and f"{tmp_path / 'cache'}\n" in text
    assert "make gpu: wrong, at most 60 s" in text and "wrong ended with 7" in text
    assert "make gpu: not done after 0 s" in text and "hangs ended with 124" in text


def test_tables_behind_one_that_fails_run_in_new_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a_runner.py").write_text(RUNNER)
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    limits_s = {"t_first": 60, "t_wrong": 60, "t_middle": 60, "t_last": 60}
    found = gpu_suite.run_tables(limits_s, ["--short"], tmp_path, tmp_path / "c", "a_runner")
    assert found == ["t_wrong"]
    text = capfd.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("in ")] == [
        "t_first", "t_wrong", "t_middle", "t_last"
    ]  # fmt: skip
    assert "make gpu: t_wrong ended with 7" in text
    monkeypatch.setattr(gpu_suite, "START_S", 0)
    found = gpu_suite.run_tables({"t_hangs": 0}, [], tmp_path, tmp_path / "c", "a_runner")
    assert found == ["t_hangs"]


def test_without_gpus_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["gpu_suite"])
    assert gpu_suite.main() == 2
    assert "make gpu: needs 2 GPUs or more" in capsys.readouterr().out
