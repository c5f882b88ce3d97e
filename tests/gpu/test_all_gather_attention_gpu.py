"""all_gather_attention on GPUs: against fp64, graphs, late ranks, memory, and the merge kernel."""

import random

import pytest
import torch
import torch.distributed as dist
from attention_bodies import gradients_by, mine, whole, wrong, wrong_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import counterpoint as cp
from counterpoint.attention.steps import CuDNN, Flash, Formula, Given, library_of, merge_into
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import Places, workspace_of
from counterpoint.measure.timing import relative_error
from counterpoint.problem import Problem

# batch, rows of a rank, heads, key heads, head dim
SHAPES = [(1, 1024, 8, 2, 128), (2, 384, 4, 4, 64), (1, 130, 4, 2, 128), (1, 2304, 16, 4, 128)]
PLANS = ("auto", "serial", "shard_p2p ring", "shard_p2p ring chunks=2", "shard_p2p chunks=3")


def test_the_merge_kernel_is_its_formula(gpus):
    draw = torch.Generator("cuda").manual_seed(3)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", generator=draw).to(dtype)

    # where both sums are about equal, each weight shows; where they differ much, none overflows
    for rows, heads, dim, dtype, spread in (
        (257, 3, 128, torch.bfloat16, 30), (64, 8, 80, torch.float32, 30),
        (1, 1, 1, torch.float16, 1), (4096, 32, 128, torch.float16, 0.1),
        (4096, 32, 64, torch.float32, 0.1),
    ):  # fmt: skip
        other_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        y, other = normal(rows, heads, dim, dtype=dtype), normal(rows, heads, dim).to(other_dtype)
        lse, lse_other = (normal(heads, rows) * spread for _ in range(2))
        here = [y.cpu().clone(), lse.cpu().clone(), other.cpu(), lse_other.cpu()]
        merge_into(*here)
        merge_into(y, lse, other, lse_other)
        torch.testing.assert_close(y.cpu(), here[0])
        torch.testing.assert_close(lse.cpu(), here[1])


def test_fp32_is_refused(gpus):
    q = torch.zeros(1, 4, 2, 64, device="cuda")
    with pytest.raises(cp.InputError, match=r"q must be bf16 or fp16, got torch\.float32"):
        cp.all_gather_attention(q, q, q)


@pytest.mark.shows("all_gather_attention", "forward, backward", "bf16 fp16")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_gradients_are_those_of_fp64(gpus, shape, causal):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for seed, plan in enumerate(PLANS if shape == SHAPES[0] else PLANS[1:3]):
        dtype = torch.float16 if seed == 2 else torch.bfloat16
        found += wrong(rank, ranks, plan, shape, dtype, causal, seed=seed)
    assert not found, found


BY_HEADS = ("by_heads ring", "by_heads ring chunks=2", "by_heads ring chunks=3")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_by_heads_are_those_of_fp64(gpus, shape):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for seed, plan in enumerate(BY_HEADS):
        dtype = torch.float16 if seed == 2 else torch.bfloat16
        found += wrong_gradients(rank, ranks, plan, shape, dtype, seed)
    assert not found, found


def test_late_ranks_change_no_gradient_by_heads(gpus):
    """Ranks that are late at random, calls of one plan and another on one memory."""
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    shape, ranks = (1, 512, 8, 4, 64), dist.get_world_size()
    plans = (*BY_HEADS, "shard_p2p ring")
    want = {p: gradients_by(dist.get_rank(), ranks, p, shape, torch.bfloat16) for p in plans}
    off = torch.zeros((), device="cuda")
    for turn in range(120):
        plan = plans[turn % len(plans)]
        if draw.random() < 0.3:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        found = gradients_by(dist.get_rank(), ranks, plan, shape, torch.bfloat16)
        for got, first in zip(found, want[plan], strict=True):
            off = torch.maximum(off, (got - first).float().norm() / first.float().norm())
    cp.check()
    assert float(off) < 2**-8


def operands(shape, causal, seed=0):
    ranks = dist.get_world_size()
    drawn = whole(ranks, shape, torch.bfloat16, seed)
    return [mine(x, dist.get_rank(), ranks, causal).contiguous() for x in drawn]


def attended(shards, causal, plan="shard_p2p"):
    return cp.all_gather_attention(*shards[:3], causal=causal, plan=plan)


@pytest.mark.shows("all_gather_attention", "captured forward", "bf16")
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_reads_its_operands_anew(gpus, causal):
    shards, others = (operands(SHAPES[0], causal, seed) for seed in (0, 1))
    first, second = attended(shards, causal), attended(others, causal)
    assert torch.equal(first, attended(shards, causal)), "the same bits in every run"
    graph = torch.cuda.CUDAGraph()
    with no_collector(), torch.cuda.graph(graph):
        y = attended(shards, causal)
    graph.replay()
    assert torch.equal(y, first)
    for old, new in zip(shards, others, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(y, second)


@pytest.mark.parametrize("plan", ["shard_p2p", "shard_p2p ring chunks=4"])
def test_late_ranks_change_no_bit(gpus, plan):
    """Calls without a meeting in between, forward and backward; compared on the device."""
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    cases = [operands((1, 256, 4, 2, 64), causal, s) for s, causal in ((0, True), (1, False)) * 2]
    want = [attended(shards, i % 2 == 0, plan) for i, shards in enumerate(cases)]
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        i = turn % len(cases)
        if draw.random() < 0.1:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        bad += (attended(cases[i], i % 2 == 0, plan) != want[i]).any()
    torch.cuda.synchronize()
    cp.check()
    assert not bad


def test_late_ranks_change_no_gradient(gpus):
    """The sums of dq are as reproducible as the library's: they are compared within rounding."""
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    q, k, v, dy = operands((1, 512, 4, 2, 64), causal=True)
    for x in (q, k, v):
        x.requires_grad_()
    want = torch.autograd.grad(attended((q, k, v), causal=True), (q, k, v), dy)
    off = torch.zeros((), device="cuda")
    for _ in range(300):
        if draw.random() < 0.2:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        found = torch.autograd.grad(attended((q, k, v), causal=True), (q, k, v), dy)
        for got, first in zip(found, want, strict=True):
            off = torch.maximum(off, (got - first).float().norm() / first.float().norm())
    cp.check()
    assert float(off) < 2**-8


def test_it_takes_less_memory_than_gathered_keys(gpus):
    """Beside its result, which torch's attention has too, and its log-sum-exp."""
    ranks = dist.get_world_size()
    for shape in ((1, 8192, 32, 8, 128), (1, 4096, 16, 16, 128)):
        for causal in (False, True):
            shards = operands(shape, causal)
            plan = "shard_p2p ring"
            y = attended(shards, causal, plan)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            attended(shards, causal, plan)
            torch.cuda.synchronize()
            _, rows, heads, kv_heads, dim = shape
            columns = heads * dim, kv_heads * dim
            problem = Problem("all_gather_attention", ranks * rows, *columns, ranks,
                              head_dim=dim, causal=causal)  # fmt: skip
            taken = torch.cuda.max_memory_allocated() - before
            taken += cp.build(problem, plan).workspace_bytes
            taken -= y.numel() * 2 + rows * heads * 4
            gathered = 2 * 2 * ranks * shards[1].numel()
            assert ranks > 2 or taken < gathered, (shape, causal, taken, gathered)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("library", [Flash(), CuDNN()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_library_takes_the_log_sum_exp_of_more_keys(gpus, library, causal, key_heads):
    """A gradient by half of the keys, with y and the log-sum-exp of all."""
    if isinstance(library, CuDNN) and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is for Hopper and later")
    draw = torch.Generator("cuda").manual_seed(3)
    sizes = [(1, h, 256, 128) for h in (4, key_heads, key_heads, 4)]
    q, k, v, dy = (torch.randn(*s, device="cuda", generator=draw).bfloat16() for s in sizes)
    plain, scale = Formula(), 128**-0.5
    y, lse = library.forward(q, k, v, causal, scale)
    want, sums = plain.forward(q, k, v, causal, scale)
    assert relative_error(y, want) < 1e-2 and lse.shape == (4, 256)
    torch.testing.assert_close(lse, sums, atol=1e-3, rtol=1e-3)
    half = Given(q[:, :, :128], k[:, :, :128], v[:, :, :128], dy[:, :, :128], y[:, :, :128],
                 (lse[:, :128] + 0.5).contiguous())  # fmt: skip
    grads = zip(library.backward(half, causal, scale), plain.backward(half, causal, scale),
                strict=True)  # fmt: skip
    assert max(relative_error(got, each) for got, each in grads) < 2e-2


@pytest.mark.parametrize("ours_first", [False, True])
def test_gradients_are_right_beside_those_of_torch_s_own_attention(gpus, ours_first):
    """Which has a dy of other strides for the same q, k and v, and one cache of cuDNN's graphs."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is for Hopper and later")
    draw = torch.Generator("cuda").manual_seed(3)
    heads, rows, dim, scale = 4, 384 if ours_first else 256, 128, 128**-0.5
    q, k, v, dy = (
        torch.randn(rows, heads, dim, device="cuda", generator=draw)
        .bfloat16()
        .transpose(0, 1)[None]
        for _ in range(4)
    )
    y, lse = CuDNN().forward(q, k, v, True, scale)
    want = Formula().backward(Given(q, k, v, dy, y, lse), True, scale)

    def by_ours():
        return CuDNN().backward(Given(q, k, v, dy, y, lse), True, scale)

    def by_torch():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
            return torch.autograd.grad(out, leaves, dy.contiguous())

    for way in (by_ours, by_torch) if ours_first else (by_torch, by_ours):
        for got, each in zip(way(), want, strict=True):
            assert relative_error(got, each) < 2e-2, way


def test_hopper_takes_cudnn(gpus):
    """Whose attention is the faster one there; it says so where it is not."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("of Hopper")
    q, k, v, _ = operands((1, 256, 8, 2, 128), causal=True)
    ranks = dist.get_world_size()
    plan = cp.build(Problem("all_gather_attention", 256 * ranks, 1024, 256, ranks, head_dim=128,
                            causal=True), "shard_p2p")  # fmt: skip
    places = Places(workspace_of(dist.group.WORLD, gpus), plan)
    like = {name: x[0].flatten(1) for name, x in zip("qkv", (q, k, v), strict=True)}
    assert isinstance(library_of(places, like), CuDNN)
