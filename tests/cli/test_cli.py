"""Every command says what it does with an example, and does it on a machine without a GPU."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import benchmarks_here, example, invoke
from processes import python
from rich.console import Console
from typer.testing import CliRunner

import counterpoint
import counterpoint as cp
from counterpoint.choose.known import Place, save_machine, save_tuned
from counterpoint.cli import demo, doctor, main
from counterpoint.cli.characterize import table_of
from counterpoint.cli.shared import bars
from counterpoint.machine_of import shipped
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.spans import Span
from counterpoint.versions import untried

COMMANDS = sorted(typer.main.get_command(main.app).commands)
ROOT = Path(counterpoint.__file__).parents[2]
SMALL = ("demo", "--ranks", "2", "--scale", "64")
SLOW = ("demo", "--ranks", "2", "--scale", "2")  # for seconds on any machine


def run(*arguments: str) -> str:
    """What `python -m counterpoint` prints; it must succeed."""
    return python("-m", "counterpoint", *arguments, COLUMNS="100")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_what_it_prints(command: str):
    result = CliRunner().invoke(main.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: counterpoint {command}" in " ".join(result.output.split())
    assert 2 <= len(example(command)[1]) <= 3


def masked(text: str) -> str:
    """Without numbers, or how words are set apart."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", text).replace("│", " ").split())


@pytest.mark.parametrize("command", [
    "plan", "advise", "scale", "occupancy", "bench",
    pytest.param("evaluate", marks=pytest.mark.apart("make test-all")),
])  # fmt: skip
def test_examples_print_what_help_shows(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    benchmarks_here(monkeypatch)
    (name, *words), lines = example(command)
    text = " ".join(invoke(name, *words, columns=80).stdout.split())
    assert [line for line in lines if " ".join(line.split()) not in text] == []


def test_an_example_of_characterize_is_of_the_machine_that_is_shipped():
    machine, file = shipped("NVIDIA H200", 4), StringIO()
    assert machine is not None
    Console(file=file, width=140).print(table_of(machine))
    text = " ".join(file.getvalue().split())
    assert [line for line in example("characterize")[1] if " ".join(line.split()) not in text] == []


def test_help_lists_the_commands_and_imports_no_torch():
    code = "import sys, counterpoint.cli.main; assert not {'torch', 'numpy'} & set(sys.modules)"
    python("-c", code)
    text = run("--help")
    assert all(f" {command} " in text for command in COMMANDS)
    assert "Exit codes: 0 done; 1 a check or a rank failed" in text


def test_every_command_stands_in_the_docs():
    docs = Path(counterpoint.__file__).parents[2] / "docs"
    text = "".join(page.read_text() for page in docs.rglob("*.md"))
    text += (docs.parent / "README.md").read_text()
    assert [
        c for c in COMMANDS if f"counterpoint {c}" not in text and f"make {c}" not in text
    ] == []


def test_version():
    assert run("--version") == f"{counterpoint.__version__}\n"


def test_demo_checks_every_family_and_ends_with_a_picture(tmp_path: Path):
    out = tmp_path / "pictures"
    text = re.sub(r"\.+(?=[✓ ])", "", run(*SMALL, "--out", str(out)))  # beats of a slow machine
    assert text.startswith("counterpoint demo: ") and "on 2 CPU ranks and " in text
    rows = re.findall(r"^  (\w+) +(\S+) +(✓+) (\d+) plans, error (.*) of torch's own$", text, re.M)
    assert [row[:2] for row in rows] == [
        (op, each) for op in demo.LAYERS for each in demo.LAYERS[op]
    ]
    plans = [int(count) for *_, count, _ in rows]
    assert [len(marks) for _, _, marks, *_ in rows] == plans and min(plans) >= 10
    assert all(float(error) <= demo.MOST_ERROR for *_, error in rows)
    assert f"{sum(plans)} of {sum(plans)} checks hold" in text

    assert [path.name for path in out.iterdir()] == ["demo.png"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    choice = cp.choose(cp.Problem("all_gather_matmul", demo.TOKENS, 2560, 8192, 4), demo.MACHINE)
    assert f"on 4 H100s: predicted, {choice.speedup(choice.seconds):.2f}x" in text
    serial, ours = (re.search(rf"^{name} .*", text, re.M)[0] for name in ("serial", "ours"))  # type: ignore[index]
    assert text.index(serial) < text.index(ours) < text.index("Every plan")
    assert text.splitlines()[-4:-1] == [f"  {line}" for line in demo.next_commands(out)]
    words = masked(text.replace(str(out), "out"))
    assert [line for line in example("demo")[1] if masked(line) not in words] == []


def test_bars_show_what_runs_when():
    def timeline(*spans: tuple[str, int, int, str]) -> cp.Timeline:
        return cp.Timeline(tuple(Span(0, lane, a, b, kind, "") for lane, a, b, kind in spans))

    serial = timeline(("compute", 0, 20, "collective"), ("compute", 20, 40, "matmul"))
    plan = timeline(
        ("compute", 0, 12, "matmul"), ("compute", 12, 16, "wait"), ("compute", 16, 24, "matmul"),
        ("copy", 4, 16, "copy"), ("signal", 0, 0, "barrier"),
    )  # fmt: skip
    width = len("serial  ") + bars.LANE_WIDTH + 10 + bars.TIME_WIDTH
    assert bars.bars({"serial": serial, "plan": plan}, width=width).plain.splitlines() == [
        "serial  compute  ▒▒▒▒▒█████ 40.0 s",
        "plan    compute  ███ ██",
        "        copy      ▒▒▒       24.0 s",
    ]


def test_what_to_try_next_works(tmp_path: Path):
    for line in demo.next_commands(tmp_path):
        name, *words = shlex.split(line.partition("counterpoint ")[2])
        invoke(name, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_next_commands_name_a_program_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(demo.sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    path = Path("my pictures")
    assert demo.next_commands(path)[2] == f"{folder}/python -m counterpoint doctor"
    program = folder / "counterpoint"
    program.touch(mode=0o755)
    assert demo.next_commands(path)[2] == ".venv/bin/counterpoint doctor"
    assert "'my pictures/plan.png'" in demo.next_commands(path)[0]
    monkeypatch.setenv("PATH", str(folder))
    assert demo.next_commands(path)[2] == "counterpoint doctor"


def test_a_terminal_without_these_characters_shows_others(tmp_path: Path):
    words = ("plan", "all_gather_matmul", "--shape", "64,64,64", "--out", str(tmp_path / "▒.json"))
    text = python("-m", "counterpoint", *words, PYTHONIOENCODING="ascii", COLUMNS="200")
    assert text.endswith(f"{tmp_path}/?.json\n") and (tmp_path / "▒.json").exists()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("moment", ["Loading", "on 2 CPU ranks", "✓"])
def test_ctrl_c_stops_the_demo_and_all_that_it_started(moment: str, tmp_path: Path):
    environment = {"PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "counterpoint", *SLOW, "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | environment | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert process.stdout is not None
    said = b""
    while moment.encode() not in said:
        said += os.read(process.stdout.fileno(), 4096)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    # ends with the last process that holds these pipes
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors.decode()) == (130, "\nstopped\n")
    # tempfile of a rank that is killed may leave the file by which it tries a folder
    assert not [*tmp_path.glob("counterpoint*")]
    # memory of ranks has no name, and is gone with the last process that maps it
    assert not list(Path("/dev/shm").glob("counterpoint*"))


@pytest.mark.parametrize("moment", ["at first", "before", "behind"])
def test_ctrl_c_as_the_demo_begins_to_listen_leaves_no_thread(
    moment: str, monkeypatch: pytest.MonkeyPatch
):
    """Before the thread begins, and in the midst of it: it is ended, and what is raised is that."""

    class Interrupted(threading.Thread):
        def start(self) -> None:
            if moment == "before":
                signal.raise_signal(signal.SIGINT)
            super().start()
            if moment == "behind":
                signal.raise_signal(signal.SIGINT)

    @contextmanager
    def at_first() -> Generator[None]:
        signal.raise_signal(signal.SIGINT)
        yield

    monkeypatch.setattr(demo.threading, "Thread", Interrupted)
    if moment == "at first":
        monkeypatch.setattr(demo, "interrupts_held_back", at_first)
    with pytest.raises(KeyboardInterrupt), demo._told():
        raise AssertionError
    assert "demo" not in {thread.name for thread in threading.enumerate()}


def test_demo_fails_when_a_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    checks = [demo.Check("all_gather_matmul", "QKV", f"plan {e}", e) for e in (1.0, 2.1, math.nan)]
    monkeypatch.setattr(demo, "spawn", lambda *_, **__: [checks])
    monkeypatch.setattr(demo.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert demo.demo(ranks=1, seed=0, out=tmp_path, scale=64) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "on 1 CPU rank and" in text and "1 of 3 checks hold" in text
    assert "plan 2.1: error 2.1 of torch's own" in text and "plan nan: error nan" in text
    assert "run `make test`" in text and "Try next" not in text


def test_the_demo_is_never_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ranks that take long to say something: a dot says that they are at it."""
    monkeypatch.setattr(demo, "BEAT_S", 0.01)
    with demo._told() as sender:
        while "..." not in (said := capsys.readouterr().out):
            time.sleep(0.05)
        sender.send("✓")
    assert set(said + capsys.readouterr().out) == {".", "✓"}


def test_the_demo_times_on_gpus_where_there_are_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ran: list[list[str]] = []
    monkeypatch.setattr(demo.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(demo.checkout, "run", lambda _, words: ran.append(words) or len(ran) - 1)
    assert demo.demo(ranks=0, seed=0, out=tmp_path, scale=64) == 1
    assert [table for table, *_ in ran] == ["overlap", "compile"]


def test_doctor_says_what_is_missing_here_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    facts = json.loads(run("doctor", "--json"))
    assert facts["gpus"] == []
    assert "CPU ranks" in facts["missing"]["GPUs"]
    assert facts["cpu_ranks"] == "yes"
    assert facts["versions"]["counterpoint"] == counterpoint.__version__
    assert facts["versions"]["torch"]
    assert {"COUNTERPOINT_TIMEOUT_S", "COUNTERPOINT_CACHE"} <= set(facts["environment"])
    assert facts["known"] | {"machine": None, "measured": False, "tuned_plans": 0} == facts["known"]
    text = invoke("doctor", columns=100).stdout
    assert [line for line in example("doctor")[1] if masked(line) not in masked(text)] == []
    assert "missing: GPUs" in text
    assert "nothing: auto is serial here" in text


def test_doctor_says_what_plans_are_chosen_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    gpus = [{"name": "NVIDIA B200"}] * 4
    place = Place(gpu="NVIDIA B200", ranks=4)
    monkeypatch.setattr("counterpoint.ops.place.place_of", lambda *_: place)
    sheet = "datasheet peaks of DGX B200 with 8 GPUs"
    measures = "not measured (`counterpoint characterize` measures)"
    assert (
        doctor._basis(doctor._known(gpus)) == f"{sheet}, {measures}; tuned plans in {tmp_path}: 0"
    )

    machine = preset("b200-4")
    machine = replace(machine, measured=machine.costs, source="measured on 4x NVIDIA B200")
    save_machine(machine, place, tmp_path)
    problem = Problem("all_gather_matmul", 256, 20, 128, 4)
    save_tuned(problem, {"spec": "graded 2/2"}, place, tmp_path)
    known = doctor._known(gpus)
    assert doctor._basis(known) == f"measured on 4x NVIDIA B200; tuned plans in {tmp_path}: 1"


LONE_GPU = {
    "gpus": [{}],
    "versions": {"CUDA": "13.0"} | dict.fromkeys(
        ("cuda-bindings", "triton", "numpy", "matplotlib")
    ),
    "symmetric_memory": "torch 2.0 has none; install torch >= 2.11", "peer_access": [[True]],
    "cpu_ranks": "no memfd; use Linux",
}  # fmt: skip
TWO_GPUS = LONE_GPU | {"gpus": [{}, {}], "peer_access": [[True, False], [False, True]]}
OTHER_CUDA = LONE_GPU | {"versions": LONE_GPU["versions"] | {
    "CUDA": "12.9", "cuda-bindings": "13.1.0"}}  # fmt: skip
NO_GPUS = LONE_GPU | {"gpus": [], "peer_access": []}
CPU_TORCH = NO_GPUS | {"versions": LONE_GPU["versions"] | {"CUDA": None}}


@pytest.mark.parametrize(
    ("facts", "what", "remedy"),
    [
        (NO_GPUS, "GPUs", "no NVIDIA GPU found; install its driver"),
        (CPU_TORCH, "GPUs", "install a CUDA build"),
        (LONE_GPU, "a second GPU", "take a node with two or more"),
        (TWO_GPUS, "peer access", "take those that `nvidia-smi topo -p2p n` shows as OK"),
        (LONE_GPU, "symmetric memory", "install torch >= 2.11"),
        (LONE_GPU, "cuda-bindings", "pip install 'cuda-bindings==13.*'"),
        (
            OTHER_CUDA,
            "cuda-bindings",
            "torch is of CUDA 12.9, cuda-bindings of 13.1.0; pip install 'cuda-bindings==12.*'",
        ),
        (LONE_GPU, "triton", "pip install 'numpy>=1.26' 'torch>=2.11' 'triton>=3.6'"),
        (LONE_GPU, "pictures", "pip install 'matplotlib>=3.9'"),
        (NO_GPUS, "CPU ranks", "use Linux"),
    ],
)
def test_doctor_has_a_remedy_for_each_missing_thing(
    facts: dict[str, Any], what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor.torch.version, "hip", None, raising=False)
    assert remedy in doctor._missing(facts)[what]


# of what ran on CPU ranks, and of it what ran on GPUs
TRIED = {"torch": "2.15.3+cpu", "triton": "3.9.1", "numpy": "2.4.0", "python": "3.11.0"}
ON_GPUS = {"torch": "2.11.0+cu128", "triton": "3.6.0", "numpy": "2.5.0", "python": "3.12.9"}


@pytest.mark.parametrize(
    ("versions", "on_gpus", "said"),
    [
        (TRIED, False, ""),
        (ON_GPUS, True, ""),
        (ON_GPUS, False, ""),
        (TRIED | {"triton": None}, False, ""),
        (TRIED | {"triton": "3.10.0"}, False, "triton 3.10.0, numpy 2.4.0, python 3.11.0 together "
         "on CPU ranks; the nearest that was: torch 2.15.0+cu132, triton 3.9.0,"),
        (TRIED | {"torch": "2.16.0"}, False, "torch 2.16.0, triton 3.9.1"),
        (TRIED, True, "together on GPUs; the nearest that was: torch 2.11.0+cu130, triton 3.6.0,"),
    ],
)  # fmt: skip
def test_versions_that_nobody_tried_are_said(
    versions: dict[str, str | None], on_gpus: bool, said: str
):
    text = untried(versions, on_gpus=on_gpus)
    assert said in text if said else text == ""


def test_doctor_says_what_nobody_tried(monkeypatch: pytest.MonkeyPatch, capsys):
    def named(versions: dict[str, str | None], on_gpus: bool) -> str:
        return f"{on_gpus} {sorted(versions)[-1]}"

    monkeypatch.setattr(doctor, "untried", named)
    doctor.doctor(as_json=False)
    assert "untried: False triton" in capsys.readouterr().out
