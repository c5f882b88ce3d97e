"""A warm eager call of any operator runs few functions of ours on the host."""

import pytest
import torch
import torch.distributed as dist
from own_calls import own_calls, too_many

import counterpoint as cp

WARM = 6  # calls until each is replayed


def matmul(op, plan, trains=False):
    ranks = dist.get_world_size()
    x = torch.randn(4 * ranks, 512, device="cuda").bfloat16()
    w = torch.randn(1024, 512, device="cuda").bfloat16().requires_grad_(trains).t()
    return lambda: op(x, w, plan=plan)


def experts(op, plan, device):
    """Equal counts; in one kernel they may be on the GPU."""
    ranks, local, rows = dist.get_world_size(), 2, 8
    counts = torch.full((ranks, ranks * local), rows, device=device)
    x = torch.randn(ranks * local * rows, 512, device="cuda").bfloat16()
    w = torch.randn(local, 512, 256, device="cuda").bfloat16()
    room = {"max_rows": len(x)} if device == "cuda" else {}
    return lambda: op(x, w, counts=counts, plan=plan, **room)


def bags(plan):
    ranks, tables, batch = dist.get_world_size(), 8, 64
    weights = [torch.randn(1000, 64, device="cuda") for _ in range(tables)]
    number = tables * batch * ranks
    indices = torch.randint(0, 1000, (4 * number,), device="cuda")
    offsets = torch.arange(0, 4 * number, 4, device="cuda")
    dims = [[64] * tables] * ranks
    call = cp.embedding_bag_all_to_all
    return lambda: call(weights, indices, offsets, batch=[batch] * ranks, dims=dims, plan=plan)


CALLS = {
    "all_gather_matmul direct": lambda: matmul(cp.all_gather_matmul, "direct"),
    "all_gather_matmul shard_p2p": lambda: matmul(cp.all_gather_matmul, "shard_p2p"),
    "matmul_reduce_scatter fused": lambda: matmul(cp.matmul_reduce_scatter, "fused"),
    "matmul_reduce_scatter graded": lambda: matmul(cp.matmul_reduce_scatter, "graded"),
    "matmul_all_reduce fused": lambda: matmul(cp.matmul_all_reduce, "fused"),
    "matmul_all_reduce auto": lambda: matmul(cp.matmul_all_reduce, "auto"),
    "matmul_all_reduce serial": lambda: matmul(cp.matmul_all_reduce, "serial"),
    "all_gather_matmul shard_p2p, gradient": lambda: matmul(
        cp.all_gather_matmul, "shard_p2p", True
    ),
    "matmul_reduce_scatter graded, gradient": lambda: matmul(
        cp.matmul_reduce_scatter, "graded", True
    ),
    "matmul_all_reduce auto, gradient": lambda: matmul(cp.matmul_all_reduce, "auto", True),
    "all_to_all_matmul fused": lambda: experts(cp.all_to_all_matmul, "fused", "cuda"),
    "all_to_all_matmul auto": lambda: experts(cp.all_to_all_matmul, "auto", "cuda"),
    "matmul_all_to_all fused": lambda: experts(cp.matmul_all_to_all, "fused", "cuda"),
    "embedding_bag_all_to_all fused": lambda: bags("fused"),
    "embedding_bag_all_to_all auto": lambda: bags("auto"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_runs_few_functions_of_ours(gpus, name):
    call = CALLS[name]()
    with torch.set_grad_enabled("gradient" in name):
        for _ in range(WARM):
            call()
        found = own_calls(call)
    torch.cuda.synchronize()
    cp.check()
    assert not too_many(found, saves=int("gradient" in name))
