"""The two examples of a fused kernel of one's own, as modules: on CPU ranks, in turn, on GPUs."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(__file__).parents[1] / "examples"
SUM, MATMUL = "03_write_a_fused_kernel", "06_overlap_in_one_kernel"


def example(name: str) -> Any:
    """The example as a fresh module."""
    spec = importlib.util.spec_from_file_location(f"example_{name[:2]}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random whole numbers from -8 to 8: sums of their products are exact in fp32."""
    return torch.randint(-8, 9, shape).to(dtype)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """What all ranks have, [ranks, ...]."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.stack(found)
