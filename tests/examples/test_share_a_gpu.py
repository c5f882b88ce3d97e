"""The sharing example on CPU ranks: as a user starts it, and that its check can fail."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rankpool import RankPool

SCRIPT = Path(__file__).parents[2] / "examples" / "02_share_a_gpu.py"


def test_it_exchanges_the_products():
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "2", "--size", "48"],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the exchanged products on 2 ranks agree with fp32" in done.stdout
    assert "there is nothing to tune" in done.stdout


def disturbed(rank: int, world_size: int) -> str:
    example = runpy.run_path(str(SCRIPT))
    x, weights = torch.randn(6, 6), [torch.randn(6, 6) for _ in range(4)]
    received = [torch.zeros(6, 6) for _ in range(2)]
    try:
        example["check"](rank, x, weights, received)
    except AssertionError as error:
        return str(error)
    return ""


def test_its_check_can_fail(pool: RankPool):
    for rank, said in enumerate(pool.run(disturbed, 3)):
        assert said == f"layer 2: error 1.0e+00 on rank {rank}"


def run_on(rank: int, world_size: int, size: int) -> None:
    runpy.run_path(str(SCRIPT))["run"](rank, world_size, torch.device("cpu"), size)


@pytest.mark.parametrize(("ranks", "size"), [(1, 16), (3, 20)])
def test_other_ranks(pool: RankPool, ranks: int, size: int):
    pool.run(run_on, ranks, size)
