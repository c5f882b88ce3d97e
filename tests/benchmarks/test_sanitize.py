"""The cases of `make gpu SUITE=sanitize` on CPU ranks, its list of kernels, and what it reads."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import pytest
import sanitize
import torch
from on_ranks import on_ranks
from rank_bodies import world
from triton.runtime.jit import JITFunction

import benchmarks
import counterpoint
from benchmarks.gpu_suite import END_S, SANITIZE_S

NONE = "========= COMPUTE-SANITIZER\n{}\n========= {}\n"
SUMMARIES = {
    "memcheck": "ERROR SUMMARY: {} errors",
    "racecheck": "RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)",
}


def log(tool: str, found: int, kernels: frozenset[str] = sanitize.EXPECTED) -> str:
    return NONE.format(sanitize.SEEN + " ".join(kernels), SUMMARIES[tool].format(found, found))


def test_every_kernel_is_launched_or_left_out():
    found = set[str]()
    packages = counterpoint, benchmarks
    modules = [m.name for p in packages
               for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]  # fmt: skip
    for module in (m for m in modules if ".kernels." in m or ".kernel_" in m):
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found.add(value.__name__)
    assert found == sanitize.EXPECTED | set(sanitize.LEFT_OUT)
    assert not sanitize.EXPECTED & set(sanitize.LEFT_OUT)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", sanitize.CASES)
@on_ranks(sanitize.RANKS)
def test_cases_hold_on_cpu_ranks(rank: int, ranks: int, name: str):
    case, _ = sanitize.CASES[name]
    case(sanitize.At(rank, world(), torch.device("cpu")))


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_errors_are_those_of_the_summaries(tool: str):
    row = sanitize.row_of(tool, [log(tool, 0), log(tool, 0)], [0, 0], 61.23)
    assert row == {
        "tool": tool, "ranks": 2, "kernels": sorted(sanitize.EXPECTED), "missing": [],
        "errors": 0, "exit_codes": [0, 0], "seconds": 61.2,
    }  # fmt: skip
    assert sanitize.passed(row)
    found = sanitize.row_of(tool, [log(tool, 3), log(tool, 2) + log(tool, 1)], [1, 1], 1)
    assert found["errors"] == 6 and not sanitize.passed(found)
    # no summary: nobody has looked
    unseen = sanitize.row_of(tool, [log(tool, 0), "Killed"], [0, 0], 1)
    assert unseen["errors"] is None and not sanitize.passed(unseen)
    few = [log(tool, 0, frozenset({"signal_kernel"}))] * 2
    assert "reduce_kernel" in sanitize.row_of(tool, few, [0, 0], 1)["missing"]
    assert not sanitize.passed(sanitize.row_of(tool, few, [0, 0], 1))
    assert not sanitize.passed(sanitize.row_of(tool, [log(tool, 0)] * 2, [0, 124], 1))


def test_both_tools_end_in_eight_minutes():
    assert len(sanitize.TOOLS) * (sanitize.LIMIT_S + END_S) < SANITIZE_S <= 480


STAND_IN = """#!/bin/sh
# writes what the sanitizer would, behind what it was started with
echo "$@"
echo "{seen}"
case "$2" in
  memcheck) echo "========= ERROR SUMMARY: 0 errors";;
  racecheck) echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 1;;
esac
"""


def test_a_row_for_each_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = tmp_path / "compute-sanitizer"
    program.write_text(STAND_IN.format(seen=sanitize.SEEN + " ".join(sanitize.EXPECTED)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "argv", ["sanitize", "--out", str(tmp_path / "out")])
    assert sanitize.main() == 1
    rows = [*map(json.loads, (tmp_path / "out" / "sanitize.jsonl").read_text().splitlines())]
    assert [(row["tool"], row["errors"], row["exit_codes"]) for row in rows] == [
        ("memcheck", 0, [0, 0]), ("racecheck", 2, [1, 1]),
    ]  # fmt: skip
    assert [row["missing"] for row in rows] == [[], []]
    started = (tmp_path / "out" / "memcheck-1.log").read_text().splitlines()[0]
    assert started.startswith("--tool memcheck --report-api-errors no --target-processes all")
    assert started.endswith("-m sanitize --rank 1")
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main() == 2
    assert "no compute-sanitizer" in capsys.readouterr().out
