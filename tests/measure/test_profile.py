"""What profile gives on CPU ranks; tests/gpu has the same for GPUs."""

import pytest
import torch
from rankpool import RankPool

import counterpoint as cp
from counterpoint.timeline import Timeline


def profiled(rank: int, world_size: int) -> Timeline:
    x, w = torch.randn(6, 16), torch.randn(16, 8)
    return cp.profile(lambda: cp.all_gather_matmul(x, w, plan="shard_p2p"))[1]


def test_title_lanes_and_waits(pool: RankPool):
    timelines = pool.run(profiled, 3)
    assert timelines[1:] == timelines[:1] * 2, "all ranks get the same"
    timeline = timelines[0]
    assert timeline.title == "3 ranks"
    assert timeline.source.startswith("measured on 3 CPU ranks:")
    for rank in range(3):
        assert timeline.lanes(rank) == ("compute", "signal", "copy")
        spans = [(s.kind, s.label) for s in timeline.spans if s.rank == rank]
        assert [label for kind, label in spans if kind == "wait"] == [
            "wait for matmul_1",
            "wait for matmul_2",
        ]
        assert ("matmul", "matmul_1") in spans


def test_one_rank_has_a_title_too(pool: RankPool):
    assert pool.run(profiled, 1)[0].title == "1 rank"


def test_without_a_group_it_is_refused_as_by_the_ops():
    text = "^profile: group must be an initialised process group, got None; start ranks with"
    with pytest.raises(cp.InputError, match=text):
        cp.profile(lambda: None)
