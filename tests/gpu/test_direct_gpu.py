"""Collectives of our own on GPUs: results, graphs, late ranks, a rank that is missing."""

import random

import pytest
import torch
import torch.distributed as dist
from specs import SHORT_S

import counterpoint as cp
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error

DIRECT = "direct"
SHAPES = [(16, 512, 256), (64, 8192, 1024), (1024, 4096, 512), (24, 40, 72)]


def operands(op, m, n, k, dtype=torch.bfloat16, seed=0):
    """x and w of this rank; m over all ranks."""
    generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank())
    rows = m // dist.get_world_size() if op is cp.all_gather_matmul else m
    x = torch.randn(rows, k, device="cuda", generator=generator).to(dtype)
    w = torch.randn(n, k, device="cuda", generator=generator).to(dtype).mul_(k**-0.5)
    return x, w.t()


def wanted(op, x, w):
    """In fp64."""
    ranks = dist.get_world_size()
    if op is cp.all_gather_matmul:
        full = x.new_empty(ranks * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(full, x)
        return full.double() @ w.double()
    total = x.double() @ w.double()
    dist.all_reduce(total)
    return total if op is cp.matmul_all_reduce else total.chunk(ranks)[dist.get_rank()]


OPS = [cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce]


def test_a_matmul_and_its_reduce_scatter_in_one_kernel(gpus):
    """Sizes mix, ranks are late, graphs and eager calls; w of either order, odd addresses."""
    ranks, delay, draw = dist.get_world_size(), Delay(gpus), random.Random(dist.get_rank())
    op, plan = cp.matmul_reduce_scatter, "fused"
    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in ((ranks, 512, 256), (2 * ranks, 1000, 520), (64, 8192, 1024)):
            x, w = operands(op, m, n, k, dtype)
            bias = torch.randn(n, device="cuda").to(dtype)
            dist.broadcast(bias, 0)
            want = wanted(op, x, w) + bias
            plain = op(x, w, bias=bias, plan="serial")
            odd = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
            for given in (x, x, odd):
                for weight in (w, w.contiguous()):
                    y = op(given, weight, bias=bias, plan=plan)
                    assert relative_error(y, want) <= 2 * relative_error(plain, want), (m, n, k)
    cases = [operands(op, m, 1024, 256, seed=s) for s in range(3) for m in (ranks, 64)]
    want = [op(x, w, plan=plan) for x, w in cases]
    for (x, w), y in zip(cases, want, strict=True):
        assert relative_error(y, wanted(op, x, w)) < 1e-2
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with no_collector(), torch.cuda.graph(graph):
        for (x, w), y in zip(cases, want, strict=True):
            wrong += (op(x, w, plan=plan) != y).any()
    for turn in range(600):
        if draw.random() < 0.1:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        if turn % 2:
            graph.replay()
        else:
            x, w = cases[turn // 2 % len(cases)]
            wrong += (op(x, w, plan=plan) != want[turn // 2 % len(cases)]).any()
    torch.cuda.synchronize()
    cp.check()
    assert not wrong


@pytest.mark.drawn(6)
@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "forward", "bf16 fp16 fp32"
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result(gpus, op, shape):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w = operands(op, *shape, dtype)
        bias = torch.randn(shape[1], device="cuda").to(dtype)
        dist.broadcast(bias, 0)
        want = wanted(op, x, w) + bias
        plain = op(x, w, bias=bias, plan="serial")
        for _ in range(3):
            y = op(x, w, bias=bias, plan=DIRECT)
            assert relative_error(y, want) <= 2 * relative_error(plain, want), (dtype, op)
            if op is cp.matmul_all_reduce:
                first = y.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, y)


@pytest.mark.parametrize("op", OPS)
def test_graphs_and_eager_calls_mix_while_ranks_are_late(gpus, op):
    """Sizes mix, nobody meets in between, each result is compared on the device."""
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    sizes = [(64, 512, 256), (16, 1024, 128), (256, 2048, 256)]
    cases = [operands(op, *size, seed=s) for s in range(3) for size in sizes]
    plan = DIRECT
    want = [op(x, w, plan=plan) for x, w in cases]
    for (x, w), y in zip(cases, want, strict=True):
        assert relative_error(y, wanted(op, x, w)) < 1e-2
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graphs = []
    for (x, w), y in zip(cases, want, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with no_collector(), torch.cuda.graph(graphs[-1]):
            wrong += (op(x, w, plan=plan) != y).any()
    order = list(range(len(cases))) * 150
    random.Random(0).shuffle(order)
    for turn, i in enumerate(order):
        if draw.random() < 0.1:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        if turn % 3:
            graphs[i].replay()
        else:
            x, w = cases[i]
            wrong += (op(x, w, plan=plan) != want[i]).any()
    torch.cuda.synchronize()
    cp.check()
    assert not wrong


@pytest.mark.parametrize(
    ("op", "plan"),
    [*((op, DIRECT) for op in OPS), (cp.matmul_reduce_scatter, "fused")],
)
def test_a_missing_rank_is_named(gpus, op, plan):
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    x, w = operands(op, 64, 256, 128)
    op(x, w, group=group, plan=plan)
    torch.cuda.synchronize()
    dist.barrier()
    missing = group.size() - 1
    if group.rank() != missing:
        op(x, w, group=group, plan=plan)
        torch.cuda.synchronize()
        with pytest.raises(cp.PeerTimeoutError, match=rf"ranks \[{missing}\] did not signal"):
            cp.check(group)
    dist.barrier()


def test_uneven_rows_and_too_much_are_refused(gpus):
    ranks = dist.get_world_size()
    rows = [8] * (ranks - 1) + [4]
    x = torch.randn(rows[dist.get_rank()], 64, device="cuda").bfloat16()
    w = torch.randn(64, 32, device="cuda").bfloat16()
    with pytest.raises(cp.InputError, match="equal rows on all ranks"):
        cp.all_gather_matmul(x, w, plan=DIRECT, rows=rows)
