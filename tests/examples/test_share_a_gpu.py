"""The sharing example on CPU ranks: as a user starts it, and that its check can fail."""

import runpy
from pathlib import Path

import pytest
import torch
from processes import python
from rankpool import RankPool

SCRIPT = Path(__file__).parents[2] / "examples" / "02_share_a_gpu.py"


def test_it_exchanges_the_products():
    said = python(str(SCRIPT), "--ranks", "2", "--size", "48")
    assert "the exchanged products on 2 ranks agree with fp32" in said
    assert "there is nothing to tune" in said


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
    runpy.run_path(str(SCRIPT))["run"](torch.device("cpu"), size)


@pytest.mark.parametrize(("ranks", "size"), [(1, 16), (3, 20)])
def test_other_ranks(pool: RankPool, ranks: int, size: int):
    pool.run(run_on, ranks, size)
