"""The code of docs/training.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rankpool import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def run_block(rank: int, world_size: int, code: str) -> torch.Tensor:
    names: dict[str, Any] = {"tp": dist.group.WORLD}
    exec(code, names)
    assert names["mlp"].norm.grad is not None
    assert names["down"].weight.shape == (512, 1536)
    return names["down"].weight.detach()


def run_sharded(rank: int, world_size: int, code: str) -> None:
    names: dict[str, Any] = {"dp": dist.group.WORLD}
    exec(code, names)
    assert names["layer"].weight.shape == (1536 // world_size, 512)
    assert names["layer"].weight.grad.shape == (1536 // world_size, 512)


def test_the_code_runs(pool: RankPool):
    code, sharded = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    pool.run(run_sharded, 2, sharded)
    first, second = pool.run(run_block, 2, code)
    assert torch.equal(first, second)
