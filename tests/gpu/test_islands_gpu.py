"""Operators between islands of GPUs: NCCL's exchanges, against fp64, in graphs, memory flat."""

import time
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from embedding_cases import expected, problem_of, random_bags
from specs import SHORT_S
from test_overlap_ops import check

import counterpoint as cp
from counterpoint.group.workspace import forget, workspace_of
from counterpoint.run import compute

pytestmark = pytest.mark.hosts

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
SHAPES = [(8, 8, 16), (37, 24, 40), (512, 1024, 512)]  # rows of a rank, N, K


@lru_cache
def every_rank():
    """A group beside the default one. One for all tests: what NCCL has of each stays to the end."""
    return dist.new_group()


@contextmanager
def on_islands(size):
    """A group whose neighbours are on islands of that size."""
    group = every_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_ISLAND", str(group.rank() // size))
        workspace = workspace_of(group, torch.device("cuda", torch.cuda.current_device()))
    assert workspace.islands.number == group.size() // size
    yield group
    torch.cuda.synchronize()
    cp.check(group)
    dist.barrier()
    forget(workspace)


def sizes():
    """Of islands: all that leave at least two of them."""
    ranks = dist.get_world_size()
    return [size for size in (1, 2, 4) if ranks % size == 0 and ranks > size]


def operands(op, rows, n, k, dtype=torch.bfloat16):
    """x and w of this rank, the result in fp64, and that of plain torch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(rows if op == OPERATORS[0] else rows * ranks, k, device="cuda").to(dtype)
    w = torch.randn(n, k, device="cuda").to(dtype).t()
    if op == OPERATORS[0]:
        full = x.new_empty(rows * ranks, k)
        compute.all_gather(full, x)
        return x, w, full.double() @ w.double(), full @ w
    want, plain = x.double() @ w.double(), x @ w
    dist.all_reduce(want)
    dist.all_reduce(plain)
    own = slice(rank * rows, (rank + 1) * rows) if op == OPERATORS[1] else slice(None)
    return x, w, want[own], plain[own]


@pytest.mark.parametrize("op", OPERATORS)
def test_results_are_those_of_fp64_eager_and_captured(gpus, op):
    for size in sizes():
        with on_islands(size) as group:
            for i, shape in enumerate(SHAPES):
                for chunks in (1, 2, 4):
                    dtype = (torch.bfloat16, torch.float16, torch.float32)[(i + chunks) % 3]
                    x, w, want, plain = operands(op, *shape, dtype)
                    spec, call = f"islands chunks={chunks}", getattr(cp, op)
                    what = f"{op} {spec} {shape} {dtype} islands of {size}"
                    check(call(x, w, group=group, plan=spec), want, plain, what)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        y = call(x, w, group=group, plan=spec)
                    for _ in range(3):
                        y.fill_(torch.nan)
                        graph.replay()
                        check(y, want, plain, f"{what} captured")
                    del graph


@pytest.mark.parametrize("op", OPERATORS)
def test_gradients_between_islands_are_the_libraries(gpus, op):
    x, w, *_ = operands(op, 64, 96, 128, torch.float32)
    for size in sizes():
        with on_islands(size) as group:
            found = []
            for plan in ("islands chunks=2", "serial"):
                a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
                y = getattr(cp, op)(a, b, group=group, plan=plan)
                dy = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)
                found.append(torch.autograd.grad(y, (a, b), dy))
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


# columns of each rank's tables, and bags of each rank
EVEN = ((64, 32),) * 8, (48,) * 8
RAGGED = ((8, 3), (5, 16, 16), (1,), (64,), (), (7,), (2,), (128,)), (5, 90, 0, 33, 2, 4, 7, 1)


@pytest.mark.parametrize("bags", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_bags_are_those_of_fp64_eager_and_captured(gpus, bags, dtype):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dims, batch = (each[:ranks] for each in bags)
    p = problem_of(dims, batch, dtype)
    everyone = [random_bags(d, p.m, seed=r, dtype=dtype, longest=40) for r, d in enumerate(dims)]
    mine, want = everyone[rank].to(gpus), expected(everyone, p, rank, mean=False).cuda()
    for size in sizes():
        with on_islands(size) as group:

            def call(plan, tables, group=group):
                return cp.embedding_bag_all_to_all(
                    tables, mine.indices, mine.offsets, include_last_offset=True, batch=p.rows,
                    dims=p.tables, dtype=dtype, group=group, plan=plan,
                )  # fmt: skip

            def gradients(plan):
                tables = [t.clone().requires_grad_() for t in mine.tables]
                y = call(plan, tables)
                y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(dtype))
                return [t.grad for t in tables]

            for chunks in (1, 2, 4):
                plan = f"islands chunks={chunks}"
                for got, other in zip(gradients(plan), gradients("serial"), strict=True):
                    assert torch.equal(got, other), f"gradients {plan} islands of {size}"
                with torch.no_grad():
                    y = call(plan, mine.tables)
                    eps = torch.finfo(dtype).eps
                    torch.testing.assert_close(y.double(), want, rtol=2 * eps, atol=1e-5)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        again = call(plan, mine.tables)
                    for _ in range(3):
                        again.fill_(torch.nan)
                        graph.replay()
                        assert torch.equal(again, y), f"{plan} islands of {size}, captured"
                    del graph


@pytest.mark.alone
@pytest.mark.parametrize("op", OPERATORS)
def test_a_thousand_calls_of_varying_sizes_leave_memory_flat(gpus, op):
    """Each is compared with the library's, and the second half takes no memory."""
    rows = [1 + 37 * i % 96 for i in range(500)]
    sets = {m: operands(op, m, 64, 64) for m in sorted(set(rows))}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with on_islands(sizes()[-1]) as group:
        found = []
        for _ in range(2):
            for m in rows:
                x, w, want, _ = sets[m]
                y = getattr(cp, op)(x, w, group=group, plan="islands chunks=2")
                wrong += ((y - want).abs() > 2**-5 * want.abs().max()).any()
            torch.cuda.synchronize()
            found.append((torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]))
    assert int(wrong) == 0
    (reserved, free), now = found
    assert now[0] == reserved
    assert now[1] >= free - (8 << 20)  # the driver's own, in 2 MiB pages


def test_an_island_that_is_missing_is_named_and_the_gpu_drains(gpus):
    """A rank that waits in a collective of the library's hears of it as in any other wait."""
    group = dist.new_group()
    size = group.size() // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_ISLAND", str(group.rank() // size))
        workspace = workspace_of(group, gpus)
    workspace.timeout_s = SHORT_S
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    cp.all_gather_matmul(x, w, group=group, plan="islands")
    cp.check(group)
    dist.barrier()
    if group.rank() < size:
        start_s = time.monotonic()
        cp.all_gather_matmul(x, w, group=group, plan="islands")
        torch.cuda.synchronize()  # nobody looks at the notice board meanwhile but the watchdog
        assert time.monotonic() - start_s < 15
        with pytest.raises(cp.PeerTimeoutError, match=r"rank \d+ \(island 1\) did not"):
            cp.check(group)
    dist.barrier()


@pytest.mark.alone
def test_a_workspace_finds_the_communicator_of_the_last_one_unless_it_was_ended(gpus):
    """Memory stays flat over released groups, and an ended one's turn is over on all ranks."""
    group = dist.new_group()
    x, w, want, plain = operands(OPERATORS[0], 64, 96, 128)
    found, free = [], []
    for ended in (False, False, True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COUNTERPOINT_ISLAND", str(group.rank()))
            workspace = workspace_of(group, gpus)
        check(cp.all_gather_matmul(x, w, group=group, plan="islands"), want, plain, f"{len(found)}")
        torch.cuda.synchronize()
        found.append(workspace.wire.communicator)
        free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()
        if ended and group.rank() == 0:
            workspace.wire.end()
        forget(workspace)
    assert found[0] is found[1] is found[2] is not found[3]
    assert free[1] >= free[0] - (8 << 20)
