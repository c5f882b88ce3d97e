"""Every command says what it does with an example, and does it on a machine without a GPU."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from processes import python
from typer.testing import CliRunner

import counterpoint
from counterpoint.choose.known import save_machine, save_tuned
from counterpoint.cli import demo, doctor, main
from counterpoint.presets import preset
from counterpoint.problem import Problem

COMMANDS = sorted(typer.main.get_command(main.app).commands)
SMALL = ("demo", "--ranks", "2", "--scale", "64")


def run(*arguments: str) -> str:
    """What `python -m counterpoint` prints; it must succeed."""
    return python("-m", "counterpoint", *arguments, COLUMNS="100")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str):
    result = CliRunner().invoke(main.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: counterpoint {command}" in " ".join(result.output.split())


def test_help_lists_the_commands_and_imports_no_torch():
    code = "import sys, counterpoint.cli.main; assert not {'torch', 'numpy'} & set(sys.modules)"
    python("-c", code)
    text = run("--help")
    assert all(f" {command} " in text for command in COMMANDS)
    assert "Exit codes: 0 done; 1 a check" in text


def test_every_command_stands_in_the_docs():
    docs = Path(counterpoint.__file__).parents[2] / "docs"
    text = "".join(page.read_text() for page in docs.glob("*.md"))
    text += (docs.parent / "README.md").read_text()
    assert [
        c for c in COMMANDS if f"counterpoint {c}" not in text and f"make {c}" not in text
    ] == []


def test_version():
    assert run("--version") == f"{counterpoint.__version__}\n"


def test_one_rank_is_not_ranks(tmp_path: Path):
    text = run("demo", "--ranks", "1", "--scale", "64", "--out", str(tmp_path))
    assert re.search(r"^counterpoint on 1 CPU rank and \d+ cores?$", text, re.MULTILINE)
    trace = json.loads((tmp_path / "demo-cpu.json").read_text())
    assert trace["otherData"]["source"].startswith("measured on 1 CPU rank:")


def test_demo_checks_every_family_and_leaves_a_picture_and_a_trace(tmp_path: Path):
    text = run(*SMALL, "--out", str(tmp_path))
    assert "40 of 40 checks hold" in text
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
    assert facts["cpu_ranks"] == "yes"
    assert facts["versions"]["counterpoint"] == counterpoint.__version__
    assert facts["versions"]["torch"]
    assert {"COUNTERPOINT_TIMEOUT_S", "COUNTERPOINT_CACHE"} <= set(facts["environment"])
    assert facts["known"] | {"machine": None, "measured": False, "tuned_plans": 0} == facts["known"]
    text = run("doctor")
    assert "missing: GPUs" in text
    assert "nothing: auto is serial here" in text


def test_doctor_says_what_plans_are_chosen_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    gpus = [{"name": "NVIDIA B200"}] * 4
    sheet = "datasheet peaks of DGX B200 with 8 GPUs"
    measures = "not measured (`counterpoint characterize` measures)"
    assert (
        doctor._basis(doctor._known(gpus)) == f"{sheet}, {measures}; tuned plans in {tmp_path}: 0"
    )

    machine = preset("b200-4")
    machine = replace(machine, measured=machine.costs, source="measured on 4x NVIDIA B200")
    save_machine(machine, "NVIDIA B200", 4, tmp_path)
    problem = Problem("all_gather_matmul", 256, 20, 128, 4)
    save_tuned(problem, {"spec": "graded 2/2"}, "NVIDIA B200", doctor.torch.__version__, tmp_path)
    known = doctor._known(gpus)
    assert doctor._basis(known) == f"measured on 4x NVIDIA B200; tuned plans in {tmp_path}: 1"


LONE_GPU = {
    "gpus": [{}], "versions": {"CUDA": "13.0", "cuda-bindings": None, "triton": None},
    "symmetric_memory": "torch 2.0 has none; install torch >= 2.11", "peer_access": [[True]],
    "cpu_ranks": "no memfd; use Linux",
}  # fmt: skip
TWO_GPUS = LONE_GPU | {"gpus": [{}, {}], "peer_access": [[True, False], [False, True]]}
NO_GPUS = LONE_GPU | {"gpus": [], "peer_access": []}


@pytest.mark.parametrize(
    ("facts", "what", "remedy"),
    [
        (NO_GPUS, "GPUs", "no NVIDIA GPU found; install its driver"),
        (NO_GPUS | {"versions": {"CUDA": None, "triton": "3.6"}}, "GPUs", "install a CUDA build"),
        (LONE_GPU, "a second GPU", "take a node with two or more"),
        (TWO_GPUS, "peer access", "take those that `nvidia-smi topo -p2p n` shows as OK"),
        (LONE_GPU, "symmetric memory", "install torch >= 2.11"),
        (LONE_GPU, "cuda-bindings", "pip install 'cuda-bindings==13.*'"),
        (LONE_GPU, "triton", "pip install 'triton>=3.6'"),
        (NO_GPUS, "CPU ranks", "use Linux"),
    ],
)
def test_doctor_has_a_remedy_for_each_missing_thing(
    facts: dict[str, Any], what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor.torch.version, "hip", None, raising=False)
    assert remedy in doctor._missing(facts)[what]
