"""A rank that does not come: the others give up in time, say who is missing, and drain."""

import time

import pytest
import torch
import torch.distributed as dist

import counterpoint
from counterpoint.runtime.workspace import workspace_of


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_missing_rank_is_named(gpus, op):
    group = dist.new_group()
    workspace = workspace_of(group, gpus)
    workspace.timeout_s = 2.0
    ranks, missing = group.size(), 1
    x = torch.randn(64 if op == "all_gather_matmul" else 64 * ranks, 64, device="cuda")
    w = torch.randn(64, 64, device="cuda")
    call = getattr(counterpoint, op)
    call(x, w, group=group, plan="graded")
    counterpoint.check(group)
    dist.barrier()
    if group.rank() != missing:
        start_s = time.monotonic()
        call(x, w, group=group, plan="graded")
        with pytest.raises(counterpoint.PeerTimeoutError, match=r"ranks \[.*1.*\] did not signal"):
            counterpoint.check(group)
        # the barrier that opens gives up after 2 s, and with it all that waits behind it
        assert time.monotonic() - start_s < 10
        with pytest.raises(counterpoint.PeerTimeoutError, match="the group is unusable"):
            call(x, w, group=group, plan="graded")
    dist.barrier()


def test_a_late_rank_is_waited_for(gpus):
    group = dist.group.WORLD
    for late in range(group.size()):
        x = torch.full((64, 64), group.rank() + 1.0, device="cuda") + late
        w = torch.eye(64, device="cuda")
        if group.rank() == late:
            time.sleep(0.3)
        y = counterpoint.all_gather_matmul(x, w, plan="shard_p2p ring")
        want = torch.arange(1.0, group.size() + 1, device="cuda").repeat_interleave(64) + late
        assert torch.equal(y, want[:, None].expand_as(y))
    counterpoint.check(group)
