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


def test_the_code_runs(pool: RankPool):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    first, second = pool.run(run_block, 2, code, timeout_s=60)
    assert torch.equal(first, second)
