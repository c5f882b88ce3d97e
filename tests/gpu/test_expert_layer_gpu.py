"""Routing and SwiGLU on GPUs: orders to the bit, graphs that follow their inputs, whole layers."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.experts.routes import router
from counterpoint.ops.activations import swiglu

SHAPES = [
    (tokens, experts, top)
    for tokens, (experts, top) in product(
        (1, 3, 256, 4096, 16384), ((8, 1), (8, 2), (60, 4), (128, 8), (256, 8), (512, 16))
    )
]


def first_ones(logits, top):
    values, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :top], experts[:, :top]


@pytest.mark.drawn(10)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routing_is_that_of_stable_sorts(gpus, shape):
    tokens, experts, top = shape
    drawn = torch.randn(tokens, experts, device=gpus)
    special = drawn.clone()
    special[torch.rand_like(drawn) < 0.05] = torch.nan
    special[torch.rand_like(drawn) < 0.05] = torch.inf
    for name, logits in {
        "drawn": drawn, "bf16": drawn.bfloat16(), "ties": drawn.round(), "special": special,
        "columns": drawn.t().contiguous().t(),
    }.items():  # fmt: skip
        values, want = first_ones(logits, top)
        assert torch.equal(
            logits.float().topk(top)[0].nan_to_num(9e9, 8e9), values.nan_to_num(9e9, 8e9)
        ), "torch's topk"
        for renormalize in (True, False):
            given = logits.detach().clone().requires_grad_()
            weights, chosen = router.choose_experts(given, top, renormalize)
            assert torch.equal(chosen.long(), want), name
            exact = logits.double().requires_grad_()
            shares = exact.gather(1, want).softmax(-1)
            if not renormalize:
                shares = exact.softmax(-1).gather(1, want)
            torch.testing.assert_close(
                weights.double(), shares, rtol=1e-5, atol=1e-7, equal_nan=True
            )
            if name != "special":
                dweights = torch.randn_like(weights)
                (found,) = torch.autograd.grad(weights, given, dweights)
                (dwant,) = torch.autograd.grad(shares, exact, dweights.double())
                torch.testing.assert_close(
                    found.double(), dwant, rtol=2 * torch.finfo(logits.dtype).eps, atol=1e-5
                )
        skewed = torch.where(torch.rand_like(weights) < 0.5, 0, chosen)  # twice in a token
        for ids in (chosen, chosen.long(), skewed, torch.zeros_like(chosen)):
            got = router.order_by_expert(ids, experts)
            for g, w in zip(got, router.order_by_expert(ids.cpu(), experts), strict=True):
                assert torch.equal(g.cpu(), w), name
            again = router.order_by_expert(ids, experts)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2048, 1536, 100, 7])
def test_swiglu_stops_at_the_rows_that_there_are(gpus, dtype, n):
    ranks, local, room = 4, 8, 1000
    counts = torch.randint(0, 30, (ranks, ranks * local), device=gpus)
    counts[:, 2 * local] = 0
    counts[:, 3 * local :] = 0
    for rank in range(ranks):
        rows = int(counts[:, rank * local : (rank + 1) * local].sum())
        gate_up = torch.randn(room, 2 * n, device=gpus).to(dtype)
        dy = torch.randn(room, n, device=gpus).to(dtype)
        gate_up[rows:], dy[rows:] = torch.nan, torch.nan
        given = gate_up.clone().requires_grad_()
        y = swiglu(given, counts, rank)
        (found,) = torch.autograd.grad(y, given, dy)
        exact = gate_up[:rows].double().requires_grad_()
        gate, up = exact.chunk(2, -1)
        want = F.silu(gate) * up
        (dwant,) = torch.autograd.grad(want, exact, dy[:rows].double())
        eps = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(y[:rows].double(), want, rtol=eps, atol=1e-5)
        torch.testing.assert_close(found[:rows].double(), dwant, rtol=eps, atol=1e-5)
    whole = torch.randn(room, 2 * n, device=gpus).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.counterpoint.activated, (whole, None, "silu_mul", None, 0))


def layer_of(gpus, room):
    torch.manual_seed(0)
    return cnn.ExpertParallelMLP(
        64, 48, 8 * dist.get_world_size(), max_rows=room, device=gpus, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_layer_in_a_graph_follows_its_router(gpus, renormalize):
    """Forward and backward, captured once; results of replays are those of calls."""
    layer, tokens, top = layer_of(gpus, 700), 96, 3
    draw = torch.Generator(gpus).manual_seed(dist.get_rank())
    x, logits, dy = (torch.zeros(tokens, width, device=gpus, dtype=dtype) for width, dtype in
                     ((64, torch.bfloat16), (layer.num_experts, torch.float32),
                      (64, torch.bfloat16)))  # fmt: skip
    leaves = [x.requires_grad_(), logits.requires_grad_(), *layer.parameters()]

    def fill():
        with torch.no_grad():
            for tensor in (x, logits, dy):
                tensor.copy_(torch.randn(tensor.shape, device=gpus, generator=draw))

    def step():
        y = layer(x, logits=logits, top_k=top, renormalize=renormalize)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    fill()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        fill()
        graph.replay()
        torch.cuda.synchronize()
        got = [t.clone() for t in found]
        want = step()
        assert all(torch.equal(g, w) and not g.isnan().any() for g, w in
                   zip(got, want, strict=True))  # fmt: skip
    cp.check()


def test_a_compiled_layer_computes_the_same(gpus):
    layer, tokens = layer_of(gpus, 700), 96
    draw = torch.Generator(gpus).manual_seed(dist.get_rank())
    x = torch.randn(tokens, 64, device=gpus, generator=draw).bfloat16().requires_grad_()
    logits = torch.randn(tokens, layer.num_experts, device=gpus, generator=draw).requires_grad_()
    leaves = [x, logits, *layer.parameters()]
    traced = torch.compile(layer, fullgraph=True)
    results = []
    for call in (layer, traced):
        y = call(x, logits=logits, top_k=3)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    cp.check()


def test_room_does_not_matter(gpus):
    """Results and gradients with just enough room, with much, and by routes with room for all."""
    tokens, top = 96, 3
    draw = torch.Generator(gpus).manual_seed(dist.get_rank())
    x = torch.randn(tokens, 64, device=gpus, generator=draw).bfloat16()
    results = []
    for room in (700, 4000, None):
        layer = layer_of(gpus, room)
        logits = torch.linspace(-1, 1, tokens * layer.num_experts, device=gpus).sin_()
        logits = (logits.view(tokens, -1) * 1e4).sin().requires_grad_()
        given = x.clone().requires_grad_()
        y = layer(given, logits=logits, top_k=top)
        y.float().square().sum().backward()
        results.append([y.detach(), given.grad, logits.grad, *(p.grad for p in layer.parameters())])
    # by routes a token's rows are summed in another order
    for a, b, c in zip(*results, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=2e-2, atol=2e-2 * float(c.abs().max()))
    cp.check()
