"""The training example: as a user starts it, and on other numbers of ranks."""

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

SCRIPT = Path(__file__).parents[2] / "examples" / "01_train_llama.py"


def test_it_trains_as_plain_torch_does():
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "2", "--steps", "6", "--plan", "graded"],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^step +(\d+) of 6   loss ([\d.]+)   plain torch ([\d.]+)$",
                        done.stdout, re.MULTILINE)  # fmt: skip
    assert [int(step) for step, *_ in losses] == [1, 5, 6]
    for _, ours, plain in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-4)
    assert float(losses[-1][1]) < 0.5 * float(losses[0][1]), "it has learnt nothing"
    assert "the losses on 2 ranks and in plain torch agree" in done.stdout


def trained(rank: int, world_size: int, options: dict[str, Any]) -> None:
    example = runpy.run_path(str(SCRIPT))
    args = argparse.Namespace(steps=2, seed=1, **options)
    example["train"](rank, world_size, example["SMALL"], torch.device("cpu"), args)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"plan": "auto", "dtype": "fp32"}),
        (3, {"plan": "graded", "dtype": "fp32"}),
        (4, {"plan": "shard_p2p", "dtype": "bf16"}),
    ],
)
def test_other_ranks(pool: RankPool, ranks: int, options: dict[str, Any]):
    """It raises where the losses differ."""
    pool.run(trained, ranks, options)


def test_ranks_that_do_not_divide_the_heads_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--ranks", "5"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "must divide the 12 KV heads, got 5" in capsys.readouterr().err
