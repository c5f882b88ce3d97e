"""Every command says what it does with an example, and does it on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from counterpoint.cli import demo, main
from counterpoint.problem import Problem

COMMANDS = sorted(typer.main.get_command(main.app).commands)
SMALL = ("demo", "--ranks", "2", "--scale", "64")


def run(*arguments: str) -> str:
    """What `python -m counterpoint` prints; it must succeed."""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "COLUMNS": "100"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-m", "counterpoint", *arguments],
        capture_output=True, text=True, env=environment, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str):
    result = CliRunner().invoke(main.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: counterpoint {command}" in " ".join(result.output.split())


def test_help_lists_the_commands_and_imports_no_torch():
    code = "import sys, counterpoint.cli.main; assert not {'torch', 'numpy'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    text = run("--help")
    assert all(f" {command} " in text for command in COMMANDS)


def test_demo_checks_every_family_and_leaves_a_picture_and_a_trace(tmp_path: Path):
    text = run(*SMALL, "--out", str(tmp_path))
    assert "16 of 16 checks hold" in text
    assert "CPU ms says nothing about a GPU" in " ".join(text.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-cpu.json", "demo-cpu.png"]
    assert (tmp_path / "demo-cpu.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "demo-cpu.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1}
    assert {"copy", "matmul", "barrier"} <= {span["cat"] for span in spans}
    assert "CPU ranks" in trace["otherData"]["source"]


@pytest.mark.parametrize("squares", [5.0, float("nan")], ids=["wrong", "nan"])
def test_demo_fails_when_a_result_is_wrong(
    squares: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    problem = Problem("all_gather_matmul", 256, 20, 128, 2)
    check = demo.Check("QKV", problem, "graded", squares, 1.0, 100.0, 1e-3)
    right = check._replace(family="serial", squares=1.0)
    monkeypatch.setattr(demo, "spawn", lambda *_, **__: [([right, check], None)] * 2)
    monkeypatch.setattr(demo, "_save_timeline", lambda *_: None)
    monkeypatch.setattr(demo.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert demo.demo(ranks=2, seed=0, out=tmp_path, scale=64) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 checks hold" in text
    assert "run `make test`" in text


def test_doctor_says_what_is_missing_here_and_how_to_get_it():
    facts = json.loads(run("doctor", "--json"))
    assert facts["gpus"] == []
    assert "CPU ranks" in facts["missing"]["GPUs"]
    assert facts["cpu_ranks"] == ""
    assert facts["versions"]["torch"]
    assert "COUNTERPOINT_TIMEOUT_S" in facts["environment"]
    assert "missing: GPUs" in run("doctor")
