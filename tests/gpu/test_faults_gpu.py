"""A rank that does not come: the others give up in time, say who is missing, and drain."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from specs import SHORT_S

import counterpoint
from counterpoint.group.workspace import workspace_of


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_missing_rank_is_named(gpus, op):
    group = dist.new_group()
    workspace = workspace_of(group, gpus)
    workspace.timeout_s = SHORT_S
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
        # a kernel that waits says it, or the host that waits for the kernel
        named = r"ranks \[.*1.*\] did not signal|rank 1 did not make its calls"
        with pytest.raises(counterpoint.PeerTimeoutError, match=named):
            counterpoint.check(group)
        # the barrier that opens gives up after 2 s, and with it all that waits behind it
        assert time.monotonic() - start_s < 10
        with pytest.raises(counterpoint.PeerTimeoutError, match="the group is unusable"):
            call(x, w, group=group, plan="graded")
    dist.barrier()


@pytest.mark.parametrize("plan", ["direct", "shard_p2p"])
def test_other_sizes_of_one_rank_are_told_on_all(gpus, plan):
    """All know both sizes, so nobody asks before kernels run; the next check says it."""
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    last = group.size() - 1
    w = torch.randn(64, 64, device="cuda").bfloat16()
    x, more = (torch.randn(rows, 64, device="cuda").bfloat16() for rows in (64, 128))
    for each in (x, more, x):
        counterpoint.all_gather_matmul(each, w, group=group, plan=plan)
    counterpoint.check(group)
    dist.barrier()
    said = ""
    try:
        given = more if group.rank() == last else x
        counterpoint.all_gather_matmul(given, w, group=group, plan=plan)
    except counterpoint.InputError as error:  # the last one to call has seen it before it launched
        said = str(error)
    dist.barrier()
    if not said:
        with pytest.raises(counterpoint.InputError) as info:
            counterpoint.check(group)
        said = str(info.value)
    text = r"x\.shape must be equal on all ranks, \(64, 64\) as on rank .*\(128, 64\) on rank"
    assert re.search(text, said), said


def test_a_rank_that_refuses_alone_is_told_on_all(gpus):
    """Sizes are new to all: nothing has run, and the group goes on."""
    group = dist.new_group()
    w, rows = torch.randn(64, 64, device="cuda"), [16] * group.size()
    counterpoint.all_gather_matmul(torch.randn(8, 64, device="cuda"), w, group=group)
    x = torch.randn(17 if group.rank() == 1 else 16, 64, device="cuda")
    with pytest.raises(counterpoint.InputError, match=r"x must be \[16") as info:
        counterpoint.all_gather_matmul(x, w, group=group, rows=rows)
    assert ("rank 1 has refused the call" in str(info.value)) == (group.rank() != 1)
    dist.barrier()
    counterpoint.all_gather_matmul(x[:16], w, group=group, rows=rows)
    counterpoint.check(group)


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
