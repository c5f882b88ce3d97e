"""Experts by routes that the host does not read: against fp64, no waits, in graphs, overflow.

On one island, and between several, where all tokens go along rails.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from routed_bodies import CHOICES, KINDS, LOCAL, TOP, chosen, differ, layer, named, told_of
from test_islands_gpu import on_islands, sizes
from test_routed_experts_gpu import a_thousand_calls, exact, near, operands

import counterpoint as cp
from counterpoint.experts.routes.launch import tell_into as tell_by_kernel
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.on_device import Sizes, found_by
from counterpoint.experts.routes.tell import found_by_kernels, tell_into
from counterpoint.gpu.capture import no_collector

SHAPES = [(64, 48, 96, torch.bfloat16), (24, 8, 16, torch.float16), (256, 512, 384, torch.bfloat16)]


def ours(experts, x, up, down, weights, dy, group, max_rows, plan="auto"):
    """A layer and its gradients, its routing included."""
    leaves = [t.clone().requires_grad_() for t in (x, up, down, weights)]
    every = dist.get_world_size() * LOCAL
    routes = cp.exchange_routes(
        experts, leaves[3], num_experts=every, group=group, max_rows=max_rows
    )
    y = layer(*leaves[:3], routes, plan, group)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@contextmanager
def no_waits():
    """What makes the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def islands():
    """Ranks of an island: of one, and of those that several have."""
    return [dist.get_world_size(), *sizes()]


@pytest.mark.parametrize("name", CHOICES)
def test_a_layer_and_its_gradients_against_fp64(gpus, name):
    """Also of fp32, which the host lays out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for k, n, hidden, dtype in [*SHAPES, (6, 5, 7, torch.float32)]:
        for tokens in (53, 1, 0):
            experts = chosen(name, rank, ranks, tokens).to(gpus)
            given = operands(tokens, k, n, hidden, dtype)
            wants = exact(experts, *given)
            room = ranks * tokens * TOP + 5
            for size in islands():
                with on_islands(size) as group:
                    torch.full((32 << 20,), torch.nan, device="cuda")
                    gots, again = (ours(experts, *given, group, room) for _ in range(2))
                    what = f"{name} {dtype} {tokens} tokens islands of {size}"
                    for i, (got, want, more) in enumerate(zip(gots, wants, again, strict=True)):
                        near(got, want, dtype, f"{what}: {i}")
                        assert torch.equal(got, more), f"{what}: {i}, bits of two runs"


def test_the_host_waits_for_nothing(gpus):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = operands(64, 64, 48, 96, torch.bfloat16)
    drawn = [chosen(name, rank, ranks, 64).to(gpus) for name in CHOICES]
    for size in islands():
        with on_islands(size) as group:
            wants = [ours(experts, *given, group, 64 * ranks * TOP) for experts in drawn]
            with no_waits():
                gots = [ours(experts, *given, group, 64 * ranks * TOP) for experts in drawn]
            for got, want in zip(gots, wants, strict=True):
                assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("several", [False, True], ids=["one island", "several"])
def test_a_graph_follows_its_routes(gpus, several):
    """One capture, forward and backward; each replay is of other experts, weights and tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    room = 64 * ranks * TOP
    with on_islands(islands()[-1 if several else 0]) as group:
        experts = chosen("uniform", rank, ranks, 64).to(gpus)
        given = operands(64, 64, 48, 96, torch.bfloat16)
        ours(experts, *given, group, room)  # warm
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph):
            found = ours(experts, *given, group, room)
        for i, name in enumerate([*CHOICES, "zipf", "uniform"]):
            experts.copy_(chosen(name, rank + i, ranks, 64))
            for mine, new in zip(given, operands(64, 64, 48, 96, torch.bfloat16), strict=True):
                mine.copy_(new)
            graph.replay()
            wants = ours(experts, *given, group, room)
            for got, want in zip(found, wants, strict=True):
                assert torch.equal(got, want), (i, name)
        torch.cuda.synchronize()
        del graph


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_more_rows_than_there_is_room_for_are_said_on_all_islands(gpus, back):
    """Also where none of its ranks gets any."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, up, down, weights, _ = operands(40, 64, 48, 96, torch.bfloat16)
    experts, full = chosen("last rank", rank, ranks, 40).to(gpus), ranks * 40 * TOP
    where = {"num_experts": ranks * LOCAL, "max_rows": full - 7}
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_ISLAND", str(rank // sizes()[-1]))
        routes = cp.exchange_routes(experts, weights, group=group, **where)
    if back:
        h = torch.randn(full - 7, 96, device="cuda").bfloat16()
        assert cp.matmul_all_to_all(h, down, counts=routes, group=group).isnan().all()
    else:
        y = cp.all_to_all_matmul(x, up, counts=routes, group=group)
        assert rank < ranks - 1 or y.isnan().all()
    with pytest.raises(cp.InputError, match=rf"for ranks \[{ranks - 1}\].*, got 7 fewer at an ear"):
        cp.check(group)
    dist.barrier()


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_more_rows_than_there_is_room_for_are_said_on_all_ranks(gpus, back):
    """What one call returns is NaN everywhere; then the group says how many rows were too many."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group, full = dist.new_group(), ranks * 40 * TOP
    x, up, down, weights, _ = operands(40, 64, 48, 96, torch.bfloat16)
    experts = chosen("last rank", rank, ranks, 40).to(gpus)
    where = {"num_experts": ranks * LOCAL, "group": group, "max_rows": full - 7}
    routes = cp.exchange_routes(experts, weights, **where)
    if back:
        h = torch.randn(full - 7, 96, device="cuda").bfloat16()
        y = cp.matmul_all_to_all(h, down, counts=routes, group=group)
        assert y.isnan().all()
    else:
        y = cp.all_to_all_matmul(x, up, counts=routes, group=group)
        assert rank < ranks - 1 or y.isnan().all()
    op = "matmul_all_to_all" if back else "all_to_all_matmul"
    text = rf"{op}: max_rows must be .* for ranks \[{ranks - 1}\].*, got 7 fewer at an earlier call"
    with pytest.raises(cp.InputError, match=text):
        cp.check(group)
    with pytest.raises(cp.InputError, match=text):
        cp.exchange_routes(experts, weights, **where)
    dist.barrier()


def test_sums_of_a_token_of_no_expert_are_nan(gpus):
    """And of no other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = operands(20, 64, 48, 96, torch.bfloat16)
    with on_islands(ranks) as group:
        experts = chosen("uniform", rank, ranks, 20).to(gpus)
        right = ours(experts, *given, group, 20 * ranks * TOP)[0]
        experts[3, 1], experts[11, 2] = ranks * LOCAL, -1
        y = ours(experts, *given, group, 20 * ranks * TOP)[0]
        wrong = torch.zeros(20, dtype=torch.bool, device="cuda")
        wrong[[3, 11]] = True
        assert y[wrong].isnan().all() and torch.equal(y[~wrong], right[~wrong])


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_find_what_stable_sorts_find(gpus, kind):
    """To the bit, each time; ranks are played by one."""
    for ranks, experts, top, tokens in (
        (8, 256, 8, 4096), (2, 128, 8, 256), (4, 8, 2, 4096), (8, 256, 8, 1), (16, 64, 6, 700),
    ):  # fmt: skip
        every = told_of(named(kind, ranks * tokens, experts, top, ranks), experts).to(gpus)
        ids, weights = every[:, :top].long(), every[:, top:].contiguous().view(torch.float32)
        rank = ranks - 1
        rows = int((ids // (experts // ranks) == rank).sum())
        for room in (rows + 5, max(1, rows // 3)):
            sizes = Sizes(tokens, top, ranks, room)
            want = found_by(rank, sizes, ids, weights, experts)
            for _ in range(3):
                torch.full((32 << 20,), torch.nan, device="cuda")
                assert differ(found_by_kernels(rank, sizes, every, experts), want) == []


def test_the_kernel_tells_what_torch_tells(gpus):
    ids = torch.randint(-2, 42, (4097, 8), device=gpus)
    ids[torch.rand(ids.shape, device=gpus) < 0.1] = NONE
    weights = torch.randn(ids.shape, device=gpus)
    got, want = (torch.full((4097, 16), -7, dtype=torch.int32, device=gpus) for _ in range(2))
    tell_by_kernel(got, ids, weights, 40)
    tell_into(want, ids, weights, 40)
    assert torch.equal(got, want)


@pytest.mark.alone
def test_a_thousand_calls_of_varying_sizes_leave_memory_flat(gpus):
    every, most = dist.get_world_size() * LOCAL, dist.get_world_size() * 96 * TOP

    def call(_, experts, x, up, down, weights, group):
        where = {"num_experts": every, "group": group, "max_rows": most}
        return layer(x, up, down, cp.exchange_routes(experts, weights, **where), "auto", group)

    a_thousand_calls(gpus, islands(), False, call)
