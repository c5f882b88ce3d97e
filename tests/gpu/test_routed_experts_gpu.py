"""Experts by routes on GPUs, of one island and of several: against fp64, bits, memory flat."""

import pytest
import torch
import torch.distributed as dist
from routed_bodies import CHOICES, LOCAL, TOP, by_torch, chosen, layer, weights_by_row
from test_islands_gpu import on_islands

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.gpu.capture import no_collector
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error
from counterpoint.nn import expert_ways

SHAPES = [(6, 5, 7, torch.float32), (64, 48, 96, torch.bfloat16), (24, 8, 16, torch.float16)]


def cases():
    """Ranks of an island, and plans there."""
    ranks = dist.get_world_size()
    for size in (1, 2, 4, 8):
        if ranks % size == 0:
            yield size, ("serial", "auto", "islands" if size < ranks else "routed 1/1 ring")


def everyone(t):
    """The tensors of all ranks, which may differ in rows, in fp64."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, t.detach().cpu())
    return [each.double() if each.is_floating_point() else each for each in found]


def operands(tokens, k, n, hidden, dtype):
    """x, weights of both matmuls and of experts, and the gradient of y."""
    x, dy = (torch.randn(tokens, size, device="cuda").to(dtype) for size in (k, n))
    up = (torch.randn(LOCAL, k, hidden, device="cuda") / k**0.5).to(dtype)
    down = (torch.randn(LOCAL, hidden, n, device="cuda") / hidden**0.5).to(dtype)
    weights = torch.rand(tokens, TOP, device="cuda")
    return x, up, down, weights, dy


def exact(experts, x, up, down, weights, dy):
    """y and the gradients of this rank, in fp64 of all ranks' tokens."""
    rank = dist.get_rank()
    xs, ups, downs, every, dys = (everyone(t) for t in (x, up, down, weights, dy))
    leaves = [t.requires_grad_() for t in (xs[rank], torch.cat(ups), torch.cat(downs), every[rank])]
    xs[rank], ups, downs, every[rank] = leaves
    lists = everyone(experts)
    ys = [by_torch(a, ups, downs, e, b) for a, e, b in zip(xs, lists, every, strict=True)]
    grads = torch.autograd.grad(ys, leaves, dys)
    own = slice(rank * LOCAL, (rank + 1) * LOCAL)
    return ys[rank].detach(), grads[0], grads[1][own], grads[2][own], grads[3]


def ours(experts, x, up, down, weights, dy, plan, group):
    """The same by a layer of ours, its routing included."""
    leaves = [t.clone().requires_grad_() for t in (x, up, down, weights)]
    every = dist.get_world_size() * LOCAL
    routes = cp.exchange_routes(experts, leaves[3], num_experts=every, group=group)
    y = layer(*leaves[:3], routes, plan, group)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def near(got, want, dtype, what):
    assert got.shape == want.shape, what
    if not want.any():
        assert not got.any(), what
        return
    error = relative_error(got.cpu(), want)
    assert error <= 8 * torch.finfo(dtype).eps, (what, error)


@pytest.mark.shows("exchange_routes", "forward, backward", "fp32")
@pytest.mark.parametrize("name", CHOICES)
def test_a_layer_and_its_gradients_against_fp64(gpus, name):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for k, n, hidden, dtype in SHAPES:
        for tokens in (53 + 40 * rank, 2 * rank, 0):
            experts = chosen(name, rank, ranks, tokens).to(gpus)
            given = operands(tokens, k, n, hidden, dtype)
            wants = exact(experts, *given)
            for size, plans in cases():
                with on_islands(size) as group:
                    for plan in plans:
                        torch.full((32 << 20,), torch.nan, device="cuda")
                        gots = ours(experts, *given, plan, group)
                        again = ours(experts, *given, plan, group)
                        what = f"{name} {plan} {dtype} {tokens} tokens islands of {size}"
                        for i, (got, want, more) in enumerate(zip(gots, wants, again, strict=True)):
                            near(got, want, dtype, f"{what}: {i}")
                            assert torch.equal(got, more), f"{what}: {i}, bits of two runs"


def test_routes_are_those_of_cpu_ranks(gpus):
    """Counts, weights by row, and what stands on the host; int32 experts, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts, weights = chosen("skewed", rank, ranks, 31), torch.rand(31, TOP)
    with on_islands(ranks) as group:
        given = experts.to(gpus).int(), weights.to(gpus).bfloat16()
        routes = cp.exchange_routes(*given, num_experts=ranks * LOCAL, group=group)
    lists = everyone(experts)
    want = torch.stack([torch.bincount(e.flatten(), minlength=ranks * LOCAL) for e in lists])
    assert torch.equal(routes.counts, want) and routes.numbers.is_cpu and routes.lists.is_cuda
    want = weights_by_row(rank, ranks, lists, everyone(weights.bfloat16()))
    assert routes.weights.tolist() == want


def test_the_layer_takes_routes_between_islands(gpus):
    """ExpertParallelMLP: the same on one island, by rows, as on several, by routes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(40 + rank, 64, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(len(x), LOCAL * ranks, device="cuda")
    dy, found = torch.randn_like(x), []
    for size in (ranks, 1):
        with on_islands(size) as group, pytest.MonkeyPatch.context() as patch:
            if size == 1:
                patch.delattr(expert_ways, "_by_counts")  # by routes it is not called
            torch.manual_seed(0)
            mlp = cnn.ExpertParallelMLP(64, 48, LOCAL * ranks, group=group).cuda().bfloat16()
            leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
            y = mlp(leaves[0], logits=leaves[1], top_k=TOP)
            found.append([y, *torch.autograd.grad(y, [*leaves, mlp.gate_up, mlp.down], dy)])
    for by_rows, by_routes in zip(*found, strict=True):
        error = relative_error(by_routes.detach().cpu(), by_rows.detach().double().cpu())
        assert error <= 8 * torch.finfo(torch.bfloat16).eps


def test_nothing_of_it_is_captured(gpus):
    """The host lays out each call, so a graph could not follow its routes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = chosen("uniform", rank, ranks, 40).to(gpus)
    x, up, down, weights, _ = operands(40, 64, 48, 96, torch.bfloat16)
    every = ranks * LOCAL
    routes = cp.exchange_routes(experts, weights, num_experts=every)
    y = layer(x, up, down, routes, "serial")
    calls = {
        "experts must be of a call that waits": lambda: cp.exchange_routes(
            experts, weights, num_experts=every
        ),
        "counts must be a table on the GPU": lambda: layer(x, up, down, routes, "serial"),
    }
    for text, call in calls.items():
        refused, graph = pytest.raises(cp.InputError, match=text), torch.cuda.CUDAGraph()
        with refused, no_collector(), torch.cuda.graph(graph):
            x.add(1)  # torch warns of an empty graph
            call()
    assert torch.equal(layer(x, up, down, routes, "serial"), y)


def a_thousand_calls(gpus, sizes, uneven, call):
    """Of varying sizes: each is compared with fp64, and all but the first hundred take no memory.

    Args:
        sizes: of islands.
        uneven: ranks have other numbers of tokens.
        call: (number, experts, x, up, down, weights, group) -> sums of a layer.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, up, down, *_ = operands(0, 64, 48, 32, torch.bfloat16)
    ups, downs = (torch.cat(everyone(t)).cuda() for t in (up, down))
    drawn = []
    for i in range(100):
        own = uneven * rank
        tokens = (1 + 37 * i % 96 + 13 * own) * (i % 7 != 3 * own)
        experts = chosen(("uniform", "skewed", "zipf")[i % 3], rank + i, ranks, tokens).to(gpus)
        x, weights = torch.randn(tokens, 64, device="cuda"), torch.rand(tokens, TOP, device="cuda")
        x = x.bfloat16()
        want = by_torch(x.double(), ups, downs, experts, weights.double())
        drawn.append((experts, x, weights, want, 2**-5 * want.abs().amax() if tokens else 1.0))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for size in sizes:
        with on_islands(size) as group:
            found = []
            for _ in range(10):
                for i, (experts, x, weights, want, bound) in enumerate(drawn):
                    y = call(i, experts, x, up, down, weights, group)
                    wrong += ((y - want).abs() > bound).any()
                torch.cuda.synchronize()
                found.append((torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]))
            (reserved, free), *_, now = found
            assert now[0] == reserved, f"islands of {size}"
            assert now[1] >= free - (8 << 20)  # the driver's own, in 2 MiB pages
    assert int(wrong) == 0


@pytest.mark.alone
def test_a_thousand_calls_of_varying_sizes_leave_memory_flat(gpus):
    every, plans = dist.get_world_size() * LOCAL, dict(cases())

    def call(i, experts, x, up, down, weights, group):
        routes = cp.exchange_routes(experts, weights, num_experts=every, group=group)
        known = plans[workspace_of(group, gpus).islands.size]
        return layer(x, up, down, routes, known[i % len(known)], group)

    a_thousand_calls(gpus, plans, True, call)


def test_wrong_experts_are_refused_on_all_ranks(gpus):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = chosen("uniform", rank, ranks, 5).to(gpus) + (rank == ranks - 1) * ranks * LOCAL
    with pytest.raises(cp.InputError, match=f"experts must be 0 to .* on rank {ranks - 1}"):
        cp.exchange_routes(experts, torch.rand(5, TOP, device="cuda"), num_experts=ranks * LOCAL)
