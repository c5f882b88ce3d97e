"""The example of experts: as a user starts it, and on other numbers of ranks."""

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rankpool import RankPool

SCRIPT = Path(__file__).parents[2] / "examples" / "04_mixture_of_experts.py"


def test_it_trains_as_plain_torch_does():
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "2", "--steps", "12", "--plan", "serial"],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^step +(\d+) of 12   loss ([\d.]+)   plain torch ([\d.]+)$",
                        done.stdout, re.MULTILINE)  # fmt: skip
    assert [int(step) for step, *_ in losses] == [1, 10, 12]
    for _, ours, plain in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-3)
    assert float(losses[-1][1]) < 0.3 * float(losses[0][1]), "it has learnt nothing"
    assert "the losses on 2 ranks and in plain torch agree" in done.stdout


def trained(rank: int, world_size: int, options: dict[str, Any]) -> None:
    example = runpy.run_path(str(SCRIPT))
    args = argparse.Namespace(steps=2, seed=1, **options)
    example["train"](rank, world_size, example["SMALL"], torch.device("cpu"), args)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"plan": "auto", "dtype": "fp32", "max_rows": None}),
        (3, {"plan": "serial", "dtype": "fp32", "max_rows": 600}),
        (4, {"plan": "auto", "dtype": "bf16", "max_rows": None}),
    ],
)
def test_other_ranks(pool: RankPool, ranks: int, options: dict[str, Any]):
    """It raises where the losses differ."""
    pool.run(trained, ranks, options)


@pytest.mark.parametrize("ranks", [5, 0, -2])
def test_ranks_that_do_not_divide_the_experts_are_refused(monkeypatch, capsys, ranks: int):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--ranks", str(ranks)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert f"must divide the 12 experts, got {ranks}" in capsys.readouterr().err
