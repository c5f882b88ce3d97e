"""Layers on GPUs: what CPU ranks train, and sizes at which the chooser takes other plans."""

import pytest
import torch
import torch.distributed as dist
from sharded_bodies import fully_sharded

import counterpoint as cp


@pytest.mark.parametrize("plan", ["auto", "serial", "shard_p2p", "graded"])
def test_a_gathered_weight_trains_as_a_whole_one(gpus, plan):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for shape, bias, dtype, sizes, lr in (
        ((6,), True, torch.float32, (16, 48, 24), 1e-2),
        ((3, 40), True, torch.bfloat16, (64, 96, 144), 1e-4),
        ((2048,), False, torch.bfloat16, (1024, 2048, 1536), 1e-6),
    ):
        found = fully_sharded(rank, ranks, shape, plan, bias, dtype, sizes, str(gpus), lr)
        assert not found, (sizes, found)
    cp.check()
