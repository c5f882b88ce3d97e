"""The README says what is true: its commands exist, and its code runs as it stands."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from rankpool import RankPool

from counterpoint.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run_block(rank: int, world_size: int, code: str, folder: str) -> list[int]:
    """The block, with what it says its names are."""
    names = {
        "x": torch.randn(6, 16),
        "w_up": torch.randn(16, 8),
        "w_down": torch.randn(8, 16),
        "tp": dist.group.WORLD,
    }
    code = code.replace('"overlap.png"', repr(f"{folder}/overlap-{rank}.png"))
    exec(code, names)
    return list(names["y"].shape)


def test_readme_code_runs(pool: RankPool, tmp_path: Path):
    (code,) = python_blocks(ROOT / "README.md")
    assert pool.run(run_block, 2, code, str(tmp_path), timeout_s=60) == [[6, 16]] * 2
    assert len(list(tmp_path.glob("*.png"))) == 2


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


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "gpu", "readme", "clean"):
        assert f"make {target} " in done.stdout
