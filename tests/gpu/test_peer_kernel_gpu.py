"""Fused kernels of one's own on GPUs: both examples, eagerly, replayed, and with a rank missing."""

import pytest
import torch
import torch.distributed as dist
from peer_examples import MATMUL, SUM, example, gathered, whole
from specs import SHORT_S

import counterpoint as cp
from counterpoint.group.workspace import workspace_of

CALLS = 6


def nan_next(*shape, dtype, device):
    """Have the allocator's next tensor of that size hold NaN: what is not written shows."""
    torch.full(shape, torch.nan, dtype=dtype, device=device)


@pytest.mark.parametrize("name", [SUM, MATMUL])
def test_an_example_runs(gpus, name):
    example(name).run(gpus)
    cp.check()


@pytest.mark.parametrize("numel", [1, 97, 1 << 20])
def test_a_sum_has_the_bits_of_its_order(gpus, numel):
    """Of more blocks than programs, too."""
    fused = example(SUM).AllReduceAdd(numel, torch.float32, gpus)
    for call in range(CALLS):
        x, residual = torch.randn(2, numel, device=gpus)
        want = residual.clone()
        for each in gathered(x):
            want += each
        nan_next(numel, dtype=x.dtype, device=gpus)
        assert torch.equal(fused(x.clone(), residual.clone()), want), call
    cp.check()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (17, 65, 33), (512, 1024, 256)])
def test_a_scattered_product_is_right_eagerly_and_replayed(gpus, m, n, k):
    """Whole numbers, whose sums fp32 holds: to the bit."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    fused = example(MATMUL).MatmulReduceScatter(m, n, torch.float32, gpus)
    x, w = torch.empty(ranks * m, k, device=gpus), torch.empty(k, n, device=gpus)
    graph = torch.cuda.CUDAGraph()
    for call in range(2 * CALLS):
        x.copy_(whole(x.shape, x.dtype))
        w.copy_(whole(w.shape, w.dtype))
        want = gathered((x.double() @ w.double()).view(ranks, m, n)).sum(0)[rank]
        if call < CALLS:
            nan_next(m, n, dtype=x.dtype, device=gpus)
            y = fused(x, w)
        else:
            if call == CALLS:
                with torch.cuda.graph(graph):
                    y = fused(x, w)
            y.fill_(torch.nan)
            graph.replay()
        assert torch.equal(y.double(), want), call
    cp.check()


@pytest.mark.own_gpu
def test_a_missing_rank_is_named(gpus):
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    module = example(SUM)
    kernel = module.PeerKernel(
        module.all_reduce_add_kernel, device=gpus, group=group, num_flags=group.size(),
        payload_bytes=4 * 64 * group.size(),
    )  # fmt: skip
    x = torch.ones(64, device=gpus)
    out = torch.empty_like(x)
    given = {"x_ptr": x, "residual_ptr": x, "out_ptr": out, "numel": 64, "BLOCK": 64}
    kernel(1, **given)
    cp.check(group)
    assert torch.equal(out, x * (group.size() + 1))
    dist.barrier()
    if group.rank() != 1:
        kernel(1, **given)
        with pytest.raises(cp.PeerTimeoutError, match=r"PeerKernel: ranks \[.*1.*\] did not"):
            cp.check(group)
        with pytest.raises(cp.PeerTimeoutError, match="the group is unusable"):
            kernel(1, **given)
    dist.barrier()
