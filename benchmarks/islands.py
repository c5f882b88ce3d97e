"""Operators between islands of CPU ranks, in network namespaces: bytes on the NIC, and times.

python -m benchmarks.islands --out rows.jsonl

gloo   its all-gather, then a matmul; a matmul, then its reduce-scatter
flat   our plan that takes every rank for an island of its own
ours   islands of neighbours: what goes to another island goes once"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks.namespaces import nic_bytes

CALLS = 5


def timed(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Median seconds of a call, the slowest rank's, and bytes that this island's NIC sent."""
    call()
    seconds: list[float] = []
    dist.barrier()
    before = nic_bytes()
    for _ in range(CALLS):
        dist.barrier()
        start_s = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - start_s])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        seconds.append(float(took))
    dist.barrier()
    return median(seconds), (nic_bytes() - before) / CALLS


def operator(rank: int, ranks: int, op: str, m: int, n: int, k: int, how: str) -> dict[str, Any]:
    """One operator in fp32, checked against gloo's way.

    Args:
        op: all_gather_matmul, whose m are rows of each rank, or one whose m are all rows.
        how: "gloo", or the spec of a plan.
    """
    torch.manual_seed(rank)
    x, w = torch.randn(m, k), torch.randn(k, n)

    def gathered() -> Tensor:
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x)
        return torch.cat(parts) @ w

    def scattered() -> Tensor:
        parts = [part.contiguous() for part in (x @ w).chunk(ranks)]
        mine = torch.empty_like(parts[rank])
        dist.reduce_scatter(mine, parts)
        return mine

    def reduced() -> Tensor:
        total = x @ w
        dist.all_reduce(total)
        return total

    by_gloo = {"all_gather_matmul": gathered, "matmul_reduce_scatter": scattered,
               "matmul_all_reduce": reduced}[op]  # fmt: skip
    call = by_gloo if how == "gloo" else lambda: getattr(cp, op)(x, w, plan=how)
    torch.testing.assert_close(call(), by_gloo(), rtol=1e-4, atol=1e-2)
    seconds, sent = timed(call)
    return {"seconds": seconds, "sent": sent}


def until_a_fault(rank: int, ranks: int, op: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Calls one operator again and again: the error that ends it, and how long its call took."""
    x, w = torch.randn(m, k), torch.randn(k, n)
    calls = 0
    while True:
        start_s = time.perf_counter()
        try:
            getattr(cp, op)(x, w, plan="islands chunks=2")
            calls += 1
        except cp.CounterpointError as error:
            took_s = time.perf_counter() - start_s
            return {"error": f"{type(error).__name__}: {error}", "seconds": took_s, "calls": calls}
