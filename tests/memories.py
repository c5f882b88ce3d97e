"""What a launch of a fused kernel needs of each rank, all of them in one process."""

from types import SimpleNamespace
from typing import Any

import torch


def memories(ranks: int, num_bytes: int) -> list[Any]:
    """As `FusedMemory`, of `num_bytes` of each kind: the ranks' memory is a tensor each."""
    kept = [[torch.full((num_bytes // 4,), fill) for _ in range(ranks)] for fill in (-0.0, 0, 0, 0)]

    def shared(each: list[torch.Tensor]) -> Any:
        bases = torch.tensor([t.data_ptr() for t in each])
        return SimpleNamespace(bases=bases, half_bytes=num_bytes // 2,
                               reserve=lambda _: None)  # fmt: skip

    def workspace(rank: int) -> Any:
        group = SimpleNamespace(size=lambda: ranks)
        return SimpleNamespace(group=group, rank=rank, timeout_s=1e6, device=torch.device("cpu"))

    return [
        SimpleNamespace(
            words=shared(kept[0]), stamps=shared(kept[1]), tiles=shared(kept[2]),
            flags=shared(kept[3]), kept=kept, workspace=workspace(rank),
            state=torch.zeros(3, dtype=torch.int32), fault=torch.zeros(1, dtype=torch.int64),
        )
        for rank in range(ranks)
    ]  # fmt: skip
