"""`make gpu`: each part has its limit, one that fails stops no other, and the exit code says so."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.options import NAMES

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


FILES = {f.stem: f for f in (gpu_suite.ROOT / "tests" / "gpu").glob("test_*.py")}
TESTS = {*FILES, *(f"{name} alone" for name, f in FILES.items() if "mark.alone" in f.read_text())}


def test_the_short_suite_is_all_tests_and_every_table_in_ten_minutes(tmp_path: Path):
    found = gpu_suite.separate("short", tmp_path, 2)
    assert set(found) == {*TESTS, "characterize"} and set(gpu_suite.SHORT_S) == set(NAMES)
    assert list(found)[-1] == "characterize" and {*gpu_suite.FIRST} < {*FILES}
    alone = {name: part for name, part in found.items() if not part.beside}
    assert len(alone) == len(TESTS) - len(FILES) + 1 > 6
    assert all(
        ("alone" in part.arguments) == name.endswith(" alone") for name, part in found.items()
    )
    seconds = gpu_suite.TESTS_S + gpu_suite.CHARACTERIZE_S + gpu_suite.START_S
    assert seconds + sum(gpu_suite.SHORT_S.values()) <= 600


@pytest.mark.parametrize("suite", [*NAMES, "tests", "characterize", "sanitize", "models"])
def test_a_long_suite_has_its_parts_alone(suite: str, tmp_path: Path):
    found = gpu_suite.separate(suite, tmp_path, 2)
    assert set(found) == (TESTS if suite == "tests" else {suite} - {*NAMES, "models"})
    tables = set(gpu_suite.WHOLE) if suite == "models" else {suite} & set(NAMES)
    assert set(gpu_suite.tables_of(suite)) == tables
    assert all(part.limit_s < 600 for part in found.values())


def test_a_part_that_fails_stops_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    parts = {
        "wrong": gpu_suite.Part(
            ["-c", "import sys; print('of wrong', flush=True); sys.exit(7)"], 60, beside=True
        ),
        "hangs": gpu_suite.Part(["-c", "import threading; threading.Event().wait()"], 0),
        "right": gpu_suite.Part(["-c", "import os; print(os.environ['COUNTERPOINT_CACHE'])"], 60),
    }
    assert gpu_suite.run_separate(parts, tmp_path, total_s=90) == ["wrong", "hangs"]
    text = capfd.readouterr().out
    assert "of wrong\n" in text and f"{tmp_path / 'cache' / 'right'}\n" in text
    assert "wrong ended with 7" in text
    assert "hangs ended with 124" in text and "make gpu: not done after 0 s" in text
    assert "make gpu: not done after 0 s" in (tmp_path / "hangs.log").read_text()


def test_parts_beside_others_run_at_the_same_time(tmp_path: Path):
    meet = (
        "import sys, pathlib, time\nmine, other = map(pathlib.Path, sys.argv[1:])\nmine.touch()\n"
    )
    meet += "while not other.exists(): time.sleep(0.01)"
    names = [str(tmp_path / name) for name in "ab"]
    parts = {
        name: gpu_suite.Part(["-c", meet, *order], 60, beside=True)
        for name, order in (("one", names), ("two", names[::-1]))
    }
    assert gpu_suite.run_separate(parts, tmp_path, total_s=60) == []


def test_what_begins_behind_the_limit_of_all_fails(tmp_path: Path):
    parts = {"late": gpu_suite.Part(["-c", "import threading; threading.Event().wait()"], 60)}
    assert gpu_suite.run_separate(parts, tmp_path, total_s=0) == ["late"]


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
