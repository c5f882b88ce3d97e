"""Islands of CPU ranks by their names alone, and what tests compare there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.group.ranks import gather_object
from counterpoint.group.workspace import forget, workspace_of

CPU = torch.device("cpu")


def shards(rank: int, *shape: int) -> Tensor:
    torch.manual_seed(rank)
    return torch.randn(*shape, dtype=torch.float32)


def everyone(t: Tensor) -> list[Tensor]:
    return [each.double() for each in gather_object(t, dist.group.WORLD)]  # type: ignore[arg-type]


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def plans_run() -> set[tuple[str, int, str]]:
    """Operator, islands and plan of all that was called on these islands so far."""
    group: Any = dist.group.WORLD
    return {(p.op, p.islands, spec) for p, spec in workspace_of(group, CPU).plans}


@contextmanager
def on_islands(rank: int, size: int) -> Iterator[int]:
    """Neighbours are on islands of that size; how many there are."""
    group: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_ISLAND", str(rank // size))
        workspace = workspace_of(group, CPU)
        yield workspace.islands.number
        dist.barrier()
        forget(workspace)
