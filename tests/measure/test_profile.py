"""What profile gives on CPU ranks; tests/gpu has the same for GPUs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import counterpoint as cp


@on_ranks(1, 3)
def test_title_lanes_and_waits(rank: int, ranks: int):
    x, w = torch.randn(6, 16), torch.randn(16, 8)
    _, timeline = cp.profile(lambda: cp.all_gather_matmul(x, w, plan="shard_p2p"))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, timeline)
    assert everyone == [timeline] * ranks, "all ranks get the same"
    assert timeline.title == ("1 rank" if ranks == 1 else "3 ranks")
    assert timeline.source.startswith("measured on 3 CPU ranks:" if ranks > 1 else "measured on")
    for r in range(ranks if ranks > 1 else 0):
        assert timeline.lanes(r) == ("compute", "signal", "copy")
        spans = [(s.kind, s.label) for s in timeline.spans if s.rank == r]
        waits = [label for kind, label in spans if kind == "wait"]
        assert waits == ["wait for matmul_1", "wait for matmul_2"]
        assert ("matmul", "matmul_1") in spans


def test_without_a_group_it_is_refused_as_by_the_ops():
    text = "^profile: group must be an initialised process group, got None; start ranks with"
    with pytest.raises(cp.InputError, match=text):
        cp.profile(lambda: None)
