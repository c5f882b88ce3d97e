"""The serial plans with a collective of our own, on CPU ranks: there gloo does what it does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rankpool import RankPool

import counterpoint as cp


def results(rank: int, ranks: int, op: str, spec: str) -> list[bool]:
    torch.manual_seed(rank)
    rows = 4 if op == "all_gather_matmul" else 4 * ranks
    x, w, bias = torch.randn(rows, 12), torch.randn(12, 8), torch.ones(8)
    x, w, bias = (t.bfloat16() for t in (x, w, bias))
    x.requires_grad_(), w.requires_grad_()
    call: Any = getattr(cp, op)
    y, want = (call(x, w, bias=bias, plan=plan) for plan in (spec, "serial"))
    found = [torch.equal(y, want)]
    y.sum().backward()
    assert x.grad is not None
    found.append(bool(x.grad.isfinite().all()))
    traced = torch.compile(lambda x, w: call(x, w, plan=spec), backend="eager", fullgraph=True)
    x, w = x.detach(), w.detach()
    found.append(torch.equal(traced(x, w), call(x, w, plan=spec)))
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("op", "spec"),
    [
        ("all_gather_matmul", "serial direct"),
        ("matmul_reduce_scatter", "serial direct"),
        ("matmul_reduce_scatter", "serial fused"),
    ],
)
def test_as_serial(pool: RankPool, op: str, spec: str):
    for ranks in (2, 4):
        found = pool.run(results, ranks, op, spec)
        assert found == [[True] * 3] * ranks
