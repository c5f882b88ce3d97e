"""ExpertParallelMLP with default arguments and with capacity="drop": no host waits, also in graphs.

Ranks bring other numbers of tokens.
"""

import pytest
import torch
import torch.distributed as dist
from rank_bodies import Watching
from test_routes_on_device_gpu import no_waits

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.experts import layer as expert_layer
from counterpoint.experts.fused import weighted_rows
from counterpoint.experts.routes.capacity import drop_least
from counterpoint.experts.routes.lists import NONE
from counterpoint.gpu.capture import no_collector
from counterpoint.run import replay

FEATURES, HIDDEN, LOCAL, TOP = 64, 48, 8, 3


def layer_of(gpus, **options):
    torch.manual_seed(0)
    every = LOCAL * dist.get_world_size()
    made = {"device": gpus, "dtype": torch.bfloat16} | options
    return cnn.ExpertParallelMLP(FEATURES, HIDDEN, every, **made)


def leaves_of(gpus, tokens, layer, seed=0):
    """x, logits, and the gradient of the result."""
    draw = torch.Generator(gpus).manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(tokens, FEATURES, device=gpus, generator=draw).bfloat16()
    logits = torch.randn(tokens, layer.num_experts, device=gpus, generator=draw) * 3
    dy = torch.randn(tokens, FEATURES, device=gpus, generator=draw).bfloat16()
    return x.requires_grad_(), logits.requires_grad_(), dy


def step(layer, x, logits, dy):
    y = layer(x, logits=logits, top_k=TOP)
    return [y.detach(), *torch.autograd.grad(y, [x, logits, *layer.parameters()], dy)]


def tokens_of(kind):
    """Of this rank."""
    rank = dist.get_rank()
    return {"equal": 96, "uneven": 37 + 50 * rank, "none": 0 if rank else 130}[kind]


@pytest.mark.parametrize("plan", ["auto", "fused", "routed"])
@pytest.mark.parametrize("kind", ["equal", "uneven", "none"])
def test_default_arguments_never_wait(gpus, kind, plan):
    """And compute what a layer does whose host knows all counts."""
    layer, told = layer_of(gpus, plan=plan), layer_of(gpus, plan="serial")
    given = leaves_of(gpus, tokens_of(kind), layer)
    first = step(layer, *given)  # compiles, and memory grows
    torch.full((32 << 20,), torch.nan, device=gpus)
    with no_waits():
        again = step(layer, *given)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert layer._fits and all(layer._fits.values()), "memory is short"
    for got, want in zip(first, step(told, *given), strict=True):
        most = float(want.abs().max()) if want.numel() else 0
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * most)
    cp.check()


def test_tokens_change_from_call_to_call_without_a_wait(gpus):
    """Sizes that are known: each rank goes through its own."""
    layer, rank = layer_of(gpus), dist.get_rank()
    sizes = [96, 40 + 8 * rank, 96, 130 - 16 * rank, 17]
    given = [leaves_of(gpus, tokens, layer, i) for i, tokens in enumerate(sizes)]
    wants = [step(layer, *each) for each in given]
    with no_waits():
        gots = [step(layer, *each) for each in given]
    for got, want in zip(gots, wants, strict=True):
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    cp.check()


def test_known_calls_have_the_bits_of_the_operators(gpus, monkeypatch):
    """Of two layers in turn, with other tokens and routes in each call, each replayed.

    Forwards of both come before their backwards, as in a model.
    """
    made, replays = [], []
    monkeypatch.setattr(expert_layer, "at_once", noted(expert_layer.at_once, made))
    monkeypatch.setattr(replay, "SEEN_BEFORE", 0)
    monkeypatch.setattr(replay.Replays, "run", noted(replay.Replays.run, replays))
    layers = [layer_of(gpus) for _ in range(2)]
    for layer, scale in zip(layers, (1.0, 0.5), strict=True):
        layer.down.data.mul_(scale)

    def both(given):
        ys = [layer(x, logits=logits, top_k=TOP)
              for layer, (x, logits, _) in zip(layers, given, strict=True)]  # fmt: skip
        grads = [
            torch.autograd.grad(y, [x, logits, *layer.parameters()], dy)
            for layer, y, (x, logits, dy) in zip(layers, ys, given, strict=True)
        ]
        return [*(y.detach() for y in ys), *grads[0], *grads[1]]

    for i in range(60):
        tokens = (96, 96 - 30 * dist.get_rank(), 128)[i % 3]
        given = [leaves_of(gpus, tokens, layer, 2 * i + j) for j, layer in enumerate(layers)]
        with Watching():
            wants = both(given)
        gots = both(given)
        wrong = [
            j for j, pair in enumerate(zip(gots, wants, strict=True)) if not torch.equal(*pair)
        ]
        assert not wrong, f"call {i}: results {wrong} are not those of the operators"
    assert sum(made) > 100, "calls went one by one"
    assert sum(replays) > 100, "nothing was replayed"
    cp.check()


class Late(torch.nn.Linear):
    """Shared experts that take long, forward and backward, and whose host does not wait."""

    def forward(self, x):
        torch.cuda._sleep(3_000_000)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: torch.cuda._sleep(3_000_000))
        return y


def test_shared_experts_are_waited_for(gpus):
    """Bits are those of one behind the other, eager and in a graph; freed memory is used again."""
    plain = layer_of(gpus)
    shared = Late(FEATURES, FEATURES, device=gpus, dtype=torch.bfloat16)
    layer = layer_of(gpus, shared=shared)
    side = torch.cuda.Stream()
    for i in range(6):
        x, logits, dy = leaves_of(gpus, 96, layer, i)
        y = plain(x, logits=logits, top_k=TOP) + shared(x)
        leaves = x, logits, plain.gate_up, plain.down, *shared.parameters()
        want = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()), no_waits():
            y = layer(x * 1, logits=logits, top_k=TOP)  # tokens that nobody else keeps
            got = [y.detach(), *torch.autograd.grad(y, [x, logits, *layer.parameters()], dy)]
            del x, y
            torch.full((8 << 20,), torch.nan, device=gpus)
        torch.cuda.current_stream().wait_stream(side)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True)), i
    x, logits, _ = leaves_of(gpus, 96, layer)
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph, stream=side):
            y = layer(x, logits=logits, top_k=TOP)
        for i in range(3):
            there, route, _ = leaves_of(gpus, 96, layer, 10 + i)
            x.copy_(there), logits.copy_(route)
            graph.replay()
            assert torch.equal(y, plain(x, logits=logits, top_k=TOP) + shared(x))
    del graph
    cp.check()


def noted(call, found):
    """The same, and whether it returns something: what it is would be kept alive."""

    def run(*given):
        result = call(*given)
        found.append(result is not None and result is not False)
        return result

    return run


@pytest.mark.parametrize("options", [{}, {"max_rows": 250, "capacity": "drop"}], ids=str)
def test_a_graph_follows_its_router(gpus, options):
    """Forward and backward, captured once; by default with other numbers of tokens on each rank."""
    layer = layer_of(gpus, **options)
    tokens = tokens_of("uneven") if not options else 96
    x, logits, dy = leaves_of(gpus, tokens, layer)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer, x, logits, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collector(), torch.cuda.graph(graph):
        found = step(layer, x, logits, dy)
    counted = layer.dropped
    for i in range(3):
        with torch.no_grad():
            new = leaves_of(gpus, tokens, layer, i + 1)
            for mine, other in zip((x, logits, dy), new, strict=True):
                mine.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        got = [t.clone() for t in (*found, *([counted] if options else []))]
        want = [*step(layer, x, logits, dy), *([layer.dropped] if options else [])]
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True)), i
        assert not got[0].isnan().any()
    cp.check()
    del graph


def test_dropping_never_waits_and_counts(gpus):
    layer, roomy = layer_of(gpus, max_rows=250, capacity="drop"), layer_of(gpus)
    given = leaves_of(gpus, 96, layer)
    first = step(layer, *given)
    with no_waits():
        again = step(layer, *given)
        dropped = layer.dropped
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    logits = given[1].detach()
    weights, experts = logits.topk(TOP)
    weights = weights.softmax(-1)
    ranks = dist.get_world_size()
    told = torch.cat((experts.int(), weights.view(torch.int32)), 1)
    every = told.new_empty(ranks * 96, 2 * TOP)
    dist.all_gather_into_tensor(every, told)
    every = every.cpu()
    want = drop_least(every, ranks, ranks * LOCAL, 250)
    assert torch.equal(dropped.cpu(), want) and want.sum() > 0
    own = every[dist.get_rank() * 96 :][:96].to(gpus)
    stay = own[:, :TOP] != NONE
    x = given[0].detach()
    y, want = layer(x, experts, weights), roomy(x, experts, weights * stay)
    assert torch.equal(layer.dropped, dropped)
    torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    cp.check()


def test_the_device_drops_what_the_host_would(gpus):
    """To the bit, ties and NaN included; and no host waits."""
    for ranks, experts, top, tokens in ((8, 256, 8, 4096), (2, 128, 8, 256), (4, 8, 2, 1)):
        ids = torch.randint(experts, (ranks * tokens, top))
        ids[torch.rand(ids.shape) < 0.1] = NONE
        weights = torch.randint(-3, 9, ids.shape) / 16
        weights[torch.rand(ids.shape) < 0.01] = torch.nan
        told = torch.cat((ids.int(), weights.float().view(torch.int32)), 1)
        there = told.to(gpus)
        for room in (1, tokens * top // 2, tokens * top, 2**20):
            here, mine = told.clone(), there.clone()
            want = drop_least(here, ranks, experts, room)
            with no_waits():
                got = drop_least(mine, ranks, experts, room)
            assert torch.equal(got.cpu(), want) and torch.equal(mine.cpu(), here), (ranks, room)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [2048, 7168, 100, 7])
def test_weighted_rows_stop_at_the_rows_that_there_are(gpus, dtype, n):
    ranks, room = 4, 1000
    counts = torch.randint(0, 30, (ranks, ranks * LOCAL), device=gpus)
    for rank in range(ranks):
        rows = int(counts[:, rank * LOCAL : (rank + 1) * LOCAL].sum())
        x, other = (torch.randn(room, n, device=gpus).to(dtype) for _ in range(2))
        weights = torch.randn(room, device=gpus)
        x[rows:], other[rows:], weights[rows:] = torch.nan, torch.nan, torch.nan
        y, alone = (torch.full_like(x, 7) for _ in range(2))
        dots = torch.full_like(weights, 7)
        weighted_rows.into(y, dots, x, weights, other, counts, rank)
        weighted_rows.into(alone, dots[:0], x, weights, None, counts, rank)
        exact, products = x[:rows].double(), x[:rows].double() * other[:rows].double()
        eps = torch.finfo(dtype).eps
        want = exact * weights[:rows, None].double()
        torch.testing.assert_close(y[:rows].double(), want, rtol=eps, atol=1e-7)
        bound = 1e-6 * products.abs().sum(1)
        assert ((dots[:rows].double() - products.sum(1)).abs() <= bound).all()
        assert not y[rows:].any() and not dots[rows:].any()
        assert torch.equal(alone[:rows], y[:rows]) and (alone[rows:] == 7).all()
