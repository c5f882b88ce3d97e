"""The code of docs/ runs as it stands and prints what the page says; margins are the code's."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import DOCS, blocks, run_page
from on_ranks import on_ranks
from rankpool import RankPool
from typer.testing import CliRunner

import counterpoint as cp
from counterpoint.choose import by_model, gains
from counterpoint.cli.main import app
from counterpoint.measure import tune

OWN_TEST = "kernels"  # has files of a user: tests/kernels/test_kernels_page.py
PAGES = [p for p in sorted(DOCS.glob("*.md")) if blocks(p, "python") and p.stem != OWN_TEST]
PURE = ("counterpoint plan", "counterpoint occupancy")  # commands that need no GPU


@pytest.mark.drawn(5)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page: Path, pool: RankPool, tmp_path: Path):
    printed, _ = run_page(page, pool, tmp_path)[0]
    for line in "".join(blocks(page, "text")).splitlines():
        assert line in printed.splitlines(), printed


def test_commands_that_need_no_gpu_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    shown = "".join(text for page in sorted(DOCS.glob("*.md")) for text in blocks(page, ""))
    commands = [line for line in shown.splitlines() if line.startswith(PURE)]
    assert {command.split()[1] for command in commands} == {"plan", "occupancy"}
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_a_step_at_scale_is_priced_as_shown():
    commands, (shown, mechanisms, too_large) = (
        blocks(DOCS / "scale.md", "")[0], blocks(DOCS / "scale.md", "console")
    )  # fmt: skip
    first, *_, last = (line for line in commands.splitlines() if line.startswith("counterpoint"))

    def printed(line: str) -> str:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        return "\n".join(line.rstrip() for line in result.output.splitlines())

    assert printed(first).startswith(shown), printed(first)
    assert mechanisms in printed(last), printed(last)
    assert too_large in printed("counterpoint scale llama3-405b --gpus 8 --tp 8")


@on_ranks(4)
def test_own_plan_runs_on_four_ranks(rank: int, world_size: int, tmp_path: Path):
    """The file that docs/plans.md leaves, in a folder of each rank, and the call that takes it."""
    (tmp_path / str(rank)).mkdir()
    os.chdir(tmp_path / str(rank))
    names: dict[str, Any] = {}
    exec("".join(blocks(DOCS / "plans.md", "python")), names)
    x, w = torch.randn(128, 512), torch.randn(512, 448)
    y = cp.all_gather_matmul(x, w, plan="own.json")
    assert torch.equal(y, cp.all_gather_matmul(x, w, plan=names["plan"]))


def test_what_plans_says_of_shard_p2p():
    problem = cp.Problem("all_gather_matmul", m=512, n=448, k=512, ranks=4)
    assert cp.build(problem, "graded 1/1/1/1") == cp.build(problem, "shard_p2p")


def test_margins_are_those_of_the_code():
    text = " ".join((DOCS / "choosing.md").read_text().split())
    measured, datasheet = (round(gains.MARGINS[known] * 100 - 100) for known in (True, False))
    assert f"| be faster than serial, on a measured machine | {measured} % |" in text
    assert f"| the same, where only the datasheet is known | {datasheet} % |" in text
    least = f"{gains.MIN_GAIN_S * 1e6:.0f} us"
    assert f'| gain, unless it runs on one stream (`"direct"`, `"fused"`) | {least} |' in text
    close = f"{round(by_model.ROW_TIE * 100 - 100)} % or {by_model.ROW_TIE_S * 1e6:.0f} us"
    assert f"| beat a plan on one stream | {close} |" in text
    assert f"within {round(by_model.TIE * 100 - 100)} % of the fastest, `auto` takes" in text
    assert f"| the same, in a measurement | {round(tune.MIN_GAIN * 100 - 100)} % |" in text
    assert by_model.MAX_SIMULATED == 5 and "the five best ones and serial are then" in text
    assert tune.MAX_TIMED == 12 and "the twelve plans that the cost model finds best" in text
