"""The README says what is true: its commands exist, and its code runs as it stands."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from on_ranks import on_ranks
from processes import python
from typer.testing import CliRunner

import counterpoint
from counterpoint.cli.main import app
from counterpoint.versions import rows, untried

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def under_torchrun(code: str, folder: Path) -> str:
    """What a script prints on 2 CPU ranks: only under torchrun it finds its group by itself."""
    script = folder / "layer.py"
    script.write_text(code)
    environment = os.environ | {
        "PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_code_runs_word_for_word(tmp_path: Path):
    (code,) = python_blocks(ROOT / "README.md")
    printed = under_torchrun(code, tmp_path)
    assert "predicted: shard_p2p ring chunks=2, 364 us, 1.68x serial" in printed, printed


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 700


@on_ranks(2)
def test_code_about_training_runs(rank: int, world_size: int):
    code, sharded = python_blocks(ROOT / "docs" / "training.md")
    names: dict[str, Any] = {"dp": dist.group.WORLD}
    exec(sharded, names)
    weight = names["layer"].weight
    assert weight.shape == weight.grad.shape == (1536 // world_size, 512)
    names = {"tp": dist.group.WORLD}
    exec(code, names)
    assert names["mlp"].norm.grad is not None
    down = names["down"].weight.detach()
    everyone = [torch.empty_like(down) for _ in range(world_size)]
    dist.all_gather(everyone, down.contiguous())
    assert down.shape == (512, 1536) and all(torch.equal(down, other) for other in everyone)


def test_torchrun_script_runs_on_cpu_ranks(tmp_path: Path):
    (code,) = (c for c in python_blocks(ROOT / "docs" / "running.md") if "init_process_group" in c)
    printed = under_torchrun(code, tmp_path)
    assert "(128, 512) -> (256, 256) -> (128, 512) on 2 ranks" in printed


def test_script_with_ranks_of_its_own_runs(tmp_path: Path):
    (code,) = (c for c in python_blocks(ROOT / "docs" / "running.md") if "run_on_ranks" in c)
    (tmp_path / "script.py").write_text(code)
    assert python(str(tmp_path / "script.py")).strip() == str([torch.Size([512, 80])] * 4)


@on_ranks(4)
def test_own_plan_of_the_docs_runs(rank: int, world_size: int, tmp_path: Path):
    """A page's plan of one's own, where each rank has a folder, and the call that takes it."""
    (code,), names = python_blocks(ROOT / "docs" / "plans.md"), {"cp": counterpoint}
    (tmp_path / str(rank)).mkdir()
    os.chdir(tmp_path / str(rank))
    exec(code, names)
    x, w = torch.randn(128, 512), torch.randn(512, 448)
    y = counterpoint.all_gather_matmul(x, w, plan=names["own"])
    assert torch.equal(y, counterpoint.all_gather_matmul(x, w, plan="shard_p2p"))


def test_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^\| `cp\.(\w+)`", text, re.MULTILINE)) == counterpoint.__all__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b(?=[`\s]* *(?:#|`|$))", text)) <= targets
    assert set(re.findall(r"\bcounterpoint ([a-z]+)`", text)) <= set(
        typer.main.get_command(app).commands
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_plan_in_the_docs_is_what_is_printed():
    from counterpoint import Problem, build

    problem = Problem("all_gather_matmul", m=512, n=448, k=512, ranks=4)
    assert str(build(problem, "graded 1/1/2")) in (ROOT / "docs" / "plans.md").read_text()
    # as it says below
    assert build(problem, "graded 1/1/1/1") == build(problem, "shard_p2p")


def test_the_choice_in_the_docs_is_what_is_printed():
    problem = counterpoint.Problem("matmul_reduce_scatter", m=8192, n=8192, k=3584, ranks=4)
    text = counterpoint.choose(problem, "b200-4").explain()
    page = (ROOT / "docs" / "choosing.md").read_text()
    assert f'>>> print(cp.choose(problem, "b200-4").explain())\n{text}\n```' in page


def test_the_predictions_in_the_docs_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "choosing.md").read_text()
    commands = re.findall(r"^counterpoint (plan .*)$", page, re.MULTILINE)
    assert commands
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, f"{command}\n{result.output}"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_the_notebook_prints_what_is_committed():
    """What needs neither ranks nor a display; `make package` runs all of it."""
    notebook = json.loads((ROOT / "examples" / "first_five_minutes.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and "run_on_ranks" not in code and "IPython" not in code:
            with redirect_stdout(StringIO()) as printed:
                exec(code, names)
            committed = ["".join(output["text"]) for output in cell["outputs"]]
            assert printed.getvalue() == "".join(committed), code
    assert {"choice", "plan", "steps"} <= set(names)


def test_the_constants_in_the_docs_are_those_of_the_code():
    from counterpoint.cli.characterize import meanings, units

    page = (ROOT / "docs" / "choosing.md").read_text()
    told = meanings()
    rows = [f"| `{name}` | {unit} | {told[name]} |" for name, unit, _ in units()]
    assert "\n".join(["| constant | unit | what it is |", "|---|---|---|", *rows, ""]) in page


def test_the_versions_in_the_docs_are_those_that_doctor_knows():
    page = (ROOT / "docs" / "versions.md").read_text()
    assert "\n".join(["", *rows(), ""]) in page
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().split("\n")
        if "==" in line
    )
    pinned = {name: pins[name] for name in ("torch", "triton", "numpy")}
    assert not untried(pinned, on_gpus=False), "what `make test` installs is tried"


def test_the_margins_in_the_docs_are_those_of_the_code():
    from counterpoint.choose import by_model, by_rule
    from counterpoint.measure import tune

    words = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    percent = {known: f"{margin - 1:.0%}".replace("%", " %") for known, margin in
               by_model.MARGINS.items()}  # fmt: skip
    assert f"predicted {percent[True]} faster than it on a machine that was measured, and" in words
    assert f"and {percent[False]} on one of which only the datasheet is known" in words
    assert f"and {by_model.MIN_GAIN_S * 1e6:.0f} us faster on both" in words
    assert f"within {round(by_model.TIE * 100 - 100)} % of the fastest" in words
    assert f"takes {by_rule.WORTHWHILE_S * 1e6:.0f} us or more" in words
    assert f"has to be {round(tune.MIN_GAIN * 100 - 100)} % faster than serial" in words


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "package", "gpu", "readme", "clean"):
        assert f"make {target} " in done.stdout
