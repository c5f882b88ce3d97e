"""matmul_all_reduce on GPUs: sums, bits, graphs, late and missing ranks, two groups at once."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from specs import SHORT_S

import counterpoint as cp
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error

SHAPES = [(1, 8192, 3584), (2, 8192, 1024), (8, 7168, 2304), (32, 8192, 3584), (64, 4096, 512),
          (128, 1024, 256), (4096, 4096, 2048), (5, 1000, 520), (3, 24, 40)]  # fmt: skip
WAYS = ("fused", "fused one_shot 32x64x4 warps=4", "fused two_shot 64x64x4 warps=4",
        "direct", "serial", "shard_p2p ring", "shard_p2p ring chunks=2",
        "running_sum chunks=2")  # fmt: skip


def operands(m, n, k, dtype=torch.bfloat16, columns=True, seed=0):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank())

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    w = normal(n, k).t() if columns else normal(k, n)
    return normal(m, k), w.mul_(k**-0.5)


def summed(x, w):
    want = x.double() @ w.double()
    dist.all_reduce(want)
    return want


def same_on_all(y):
    first = y.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, y)


@pytest.mark.drawn(10)
@pytest.mark.parametrize(
    ("shape", "plan"), [(shape, "auto") for shape in SHAPES]
    + [(shape, plan) for shape in (SHAPES[2], SHAPES[-1]) for plan in WAYS], ids=str,
)  # fmt: skip
def test_the_sum_over_ranks(gpus, shape, plan):
    m, n, k = shape
    if m > 128 and plan == "auto":
        problem = cp.Problem("matmul_all_reduce", m, n, k, dist.get_world_size())
        assert cp.choose(problem).plan.family in ("shard_p2p", "running_sum")
    for dtype in (torch.bfloat16, torch.float16) if m > 8 else (torch.bfloat16, torch.float32):
        for columns in (True, False):
            x, w = operands(m, n, k, dtype, columns)
            bias = torch.randn(n, device="cuda").to(dtype)
            dist.broadcast(bias, 0)
            want = summed(x, w) + bias
            plain = x @ w
            dist.all_reduce(plain)
            first = cp.matmul_all_reduce(x, w, bias=bias, plan=plan)
            again = cp.matmul_all_reduce(x, w, bias=bias, plan=plan)
            error = relative_error(first, want)
            # fp32 is added up in one chain of K, the library's in several
            chain = k**0.5 * torch.finfo(torch.float32).eps
            assert error <= 2 * relative_error(plain + bias, want) + chain, (dtype, columns, error)
            assert torch.equal(first, again) and same_on_all(first)


@pytest.mark.shows("matmul_all_reduce", "captured forward", "bf16")
def test_graphs_of_many_sizes_share_one_memory(gpus):
    """Captured after one warm call of the largest; replayed in any order, ranks late at random.

    No meeting between them, and each result is compared on the device: a large call must not
    overwrite what a late rank has not read of a small one.
    """
    n, k = 4096, 1024
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    _, w = operands(1, n, k)
    xs = {m: operands(m, n, k, seed=m)[0] for m in range(1, 49)}
    want = {m: cp.matmul_all_reduce(xs[m], w, plan="fused") for m in sorted(xs, reverse=True)}
    for m, y in want.items():
        assert relative_error(y, summed(xs[m], w)) < 1e-2, m
    graphs, wrong = {}, torch.zeros((), dtype=torch.int64, device="cuda")
    for m, x in xs.items():
        graphs[m] = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graphs[m]):
            wrong += (cp.matmul_all_reduce(x, w, plan="fused") != want[m]).any()
    order = list(xs) * 40
    random.Random(0).shuffle(order)
    for turn, m in enumerate(order):
        if draw.random() < 0.2:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        if turn % 7:
            graphs[m].replay()
        else:
            wrong += (cp.matmul_all_reduce(xs[m], w, plan="fused") != want[m]).any()
    torch.cuda.synchronize()
    cp.check()
    assert not wrong
    xs[5].copy_(operands(5, n, k, seed=99)[0])  # a graph reads its inputs anew
    graphs[5].replay()
    assert int(wrong) == 1


def test_capture_before_a_warm_call_is_refused(gpus):
    group = dist.new_group()
    x, w = operands(4, 512, 256)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(cp.InputError, match="call the op once at this size before capturing"),
        torch.cuda.graph(graph),
    ):
        cp.matmul_all_reduce(x, w, group=group, plan="fused")
    torch.cuda.synchronize()
    cp.matmul_all_reduce(x, w, group=group, plan="fused")
    cp.release(group)


@pytest.mark.parametrize("plan", WAYS[:4])
def test_late_ranks_change_no_bit(gpus, plan):
    """20,000 calls without a meeting in between; each is compared on the device."""
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    m = 2 if "one_shot" in plan else 6
    cases = [operands(m, 1024, 256, seed=s) for s in range(8)]
    want = [cp.matmul_all_reduce(x, w, plan=plan) for x, w in cases]
    for (x, w), y in zip(cases, want, strict=True):
        assert relative_error(y, summed(x, w)) < 1e-2
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(5000):
        x, w = cases[i % 8]
        if draw.random() < 0.05:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        wrong += (cp.matmul_all_reduce(x, w, plan=plan) != want[i % 8]).any()
    torch.cuda.synchronize()
    cp.check()
    assert not wrong


def in_turn(m, n, k, plan="fused", group=None):
    """Calls with three inputs in turn, and what each gives: what one leaves is not the next's."""
    cases = [operands(m, n, k, seed=s) for s in range(3)]
    want = [cp.matmul_all_reduce(x, w, plan=plan, group=group) for x, w in cases]
    for (x, w), y in zip(cases, want, strict=True):
        assert relative_error(y, summed(x, w)) < 1e-2

    def call(i):
        x, w = cases[i % 3]
        return cp.matmul_all_reduce(x, w, plan=plan, group=group), want[i % 3]

    return call


def test_a_rank_that_is_late_by_100_ms(gpus):
    call = in_turn(4, 4096, 512)
    for late in range(dist.get_world_size()):
        dist.barrier()
        if dist.get_rank() == late:
            time.sleep(0.1)
        for i in range(3):
            assert torch.equal(*call(i))
    cp.check()


def test_two_groups_at_once(gpus):
    """Ours on one stream, NCCL's of another group on a second, ours of a third: none starves."""
    other, third = dist.new_group(), dist.new_group()
    call, call_third = in_turn(8, 8192, 3584), in_turn(8, 8192, 3584, group=third)
    big = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(big, op=dist.ReduceOp.AVG, group=other)
    delay, draw = Delay(gpus), random.Random(7 + dist.get_rank())
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    pairs = []
    for i in range(60):
        with torch.cuda.stream(streams[0]):
            delay(draw.random() * 1e-4)
            pairs.append(call(i))
        with torch.cuda.stream(streams[1]):
            delay(draw.random() * 1e-4)
            dist.all_reduce(big, op=dist.ReduceOp.AVG, group=other)
        with torch.cuda.stream(streams[2]):
            delay(draw.random() * 1e-4)
            pairs.append(call_third(i))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y, want in pairs)
    assert torch.equal(big, torch.ones_like(big))
    cp.check()
    cp.release(third)


def test_two_streams_of_one_group(gpus):
    call = in_turn(4, 4096, 512)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    pairs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            pairs.append(call(i))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y, want in pairs)


@pytest.mark.parametrize("plan", ["fused", "direct"])
@pytest.mark.parametrize("groups", [1, 2])
def test_two_streams_of_one_capture(gpus, plan, groups):
    """Calls side by side in a graph share an epoch, or the SMs: the capture puts them in order."""
    calls, (m, n, k) = 6, (4, 4096, 512)
    every = [dist.group.WORLD, dist.new_group()][:groups]
    x, w = zip(*(operands(m, n, k) for _ in range(calls)), strict=True)

    def call(i):
        return cp.matmul_all_reduce(x[i], w[i], group=every[i % groups], plan=plan)

    for i in range(calls):
        call(i)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with no_collector(), torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        ys = []
        for i in range(calls):
            with torch.cuda.stream(side if i % 2 else main):
                ys.append(call(i))
        main.wait_stream(side)
    for _ in range(50):
        for each in x:
            each.normal_()
        graph.replay()
        for i in range(calls):
            assert torch.equal(ys[i], call(i))
    cp.check()
    del graph
    if groups == 2:
        cp.release(every[1])


def test_tensors_that_lie_otherwise(gpus):
    """Odd addresses, a strided bias: other kernels, or copies, and the same sums."""
    m, n, k = 4, 1024, 512
    x, w = operands(m, n, k)
    bias = torch.randn(n, 3, device="cuda").bfloat16()
    dist.broadcast(bias, 0)
    want = summed(x, w) + bias[:, 1]
    room = torch.empty(n * k + 1, dtype=x.dtype, device="cuda")[1:].view(n, k).copy_(w.t())
    odd = torch.empty(m * k + 1, dtype=x.dtype, device="cuda")[1:].view(m, k).copy_(x)
    for x_, w_ in ((x, w), (x, room.t()), (odd, w), (odd, room.t())):
        y = cp.matmul_all_reduce(x_, w_, bias=bias[:, 1], plan="fused")
        assert relative_error(y, want) < 1e-2 and same_on_all(y)


def test_a_second_launch_keeps_to_the_memory_of_the_first(gpus):
    """Of a w at an odd address on one rank, after a larger call has made the memory grow."""
    group = dist.new_group()
    (x, w), (large, weight) = operands(4, 256, 128), operands(64, 16384, 128)
    first = cp.matmul_all_reduce(x, w, group=group, plan="fused")
    cp.matmul_all_reduce(large, weight, group=group, plan="fused")
    room = torch.empty(w.numel() + 1, dtype=w.dtype, device="cuda")[1:].view(256, 128).copy_(w.t())
    for _ in range(4):
        odd = room.t() if dist.get_rank() == 0 else w
        assert torch.equal(cp.matmul_all_reduce(x, odd, group=group, plan="fused"), first)
    torch.cuda.synchronize()
    cp.check(group)
    cp.release(group)


@pytest.mark.shows("matmul_all_reduce", "compiled forward, compiled backward", "bf16")
def test_compiled_and_differentiated(gpus):
    x, w = operands(8, 1024, 512)
    x.requires_grad_(), w.requires_grad_()
    compiled = torch.compile(lambda x, w: cp.matmul_all_reduce(x, w, plan="fused"), fullgraph=True)
    y = compiled(x, w)
    assert torch.equal(y, cp.matmul_all_reduce(x.detach(), w.detach(), plan="fused"))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert relative_error(x.grad, dy.double() @ w.detach().double().t()) < 1e-2
    assert relative_error(w.grad, x.detach().double().t() @ dy.double()) < 1e-2


def test_a_missing_rank_is_named(gpus):
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    x, w = operands(4, 1024, 256)
    cp.matmul_all_reduce(x, w, group=group, plan="fused")
    cp.check(group)
    dist.barrier()
    missing = group.size() - 1
    if group.rank() != missing:
        start_s = time.monotonic()
        cp.matmul_all_reduce(x, w, group=group, plan="fused")
        cp.matmul_all_reduce(x, w, group=group, plan="fused")  # waits no more
        torch.cuda.synchronize()
        assert time.monotonic() - start_s < 10  # the bound of other groups
        with pytest.raises(cp.PeerTimeoutError, match=rf"ranks \[{missing}\] did not .*all_reduce|"
                           rf"matmul_all_reduce: ranks \[{missing}\] did not signal"):  # fmt: skip
            cp.check(group)
    dist.barrier()


@pytest.mark.shows("matmul_all_reduce_rms_norm", "forward", "bf16")
@pytest.mark.parametrize("shape", [(1, 8192, 1024), (32, 7168, 512), (3, 1000, 64)], ids=str)
def test_the_residual_and_the_norm_that_follow(gpus, shape):
    m, n, k = shape
    x, w = operands(m, n, k)
    residual, weight = torch.randn(m, n, device="cuda").bfloat16(), torch.randn(n, device="cuda")
    weight = weight.bfloat16()
    for t in (residual, weight):
        dist.broadcast(t, 0)
    y, total = cp.matmul_all_reduce_rms_norm(
        x, w, residual=residual, norm_weight=weight, plan="fused"
    )
    want = summed(x, w) + residual
    assert relative_error(total, want) < 1e-2 and same_on_all(y) and same_on_all(total)
    norm = torch.nn.functional.rms_norm(total.double(), (n,), weight.double(), 1e-6)
    assert relative_error(y, norm) < 5e-3
