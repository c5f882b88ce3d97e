"""`make gpu`: each part has its limit, one that fails stops no other, and the exit code says so."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.runner import NAMES


def test_the_short_suite_is_all_tests_and_every_table_in_nine_minutes(tmp_path: Path):
    found = gpu_suite.parts("short", tmp_path, 2, "h200")
    assert list(found) == ["tests", "characterize", *NAMES]
    assert sum(limit_s for _, limit_s in found.values()) <= 540
    for name in NAMES:
        arguments, _ = found[name]
        assert arguments[:3] == ["-m", "benchmarks.runner", name] and arguments[-1] == "--short"


@pytest.mark.parametrize("suite", [*NAMES, "tests", "characterize"])
def test_a_long_suite_is_one_part(suite: str, tmp_path: Path):
    ((name, (arguments, limit_s)),) = gpu_suite.parts(suite, tmp_path, 2, "h200").items()
    assert name == suite and "--short" not in arguments and limit_s < 600


def test_a_part_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    parts = {
        "wrong": (["-c", "import sys; print('of wrong', flush=True); sys.exit(7)"], 60),
        "hangs": (["-c", "import threading; threading.Event().wait()"], 0),
        "right": (["-c", "import os; print(os.environ['COUNTERPOINT_CACHE'])"], 60),
    }
    assert gpu_suite.run_all(parts, tmp_path / "cache") == ["wrong", "hangs"]
    text = capfd.readouterr().out
    assert "of wrong\n" in text and f"{tmp_path / 'cache'}\n" in text
    assert "make gpu: wrong, at most 60 s" in text and "wrong ended with 7" in text
    assert "make gpu: not done after 0 s" in text and "hangs ended with 124" in text
    assert "1 of 3 parts passed; failed: wrong, hangs" in text


def test_without_gpus_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["gpu_suite"])
    assert gpu_suite.main() == 2
    assert "make gpu: needs 2 GPUs or more" in capsys.readouterr().out
