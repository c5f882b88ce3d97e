"""Gradients of long rows and fused updates of embedding tables on GPUs: fp64, bits, graphs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.embedding.exchange import problem_from
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import workspace_of

TABLES = ((1000, 128), (3, 64), (200, 24), (1, 16), (50, 300))
BATCH, POOLING = 1024, 10  # of all ranks


def drawn(bags, seed, device, hot=0.0):
    """Indices of own tables, a share of them of one row, and offsets; indices of all tables."""
    draw = torch.Generator().manual_seed(seed)
    every = []
    for rows, _ in TABLES:
        some = torch.randint(rows, (BATCH, POOLING), generator=draw)
        some[torch.rand(some.shape, generator=draw) < hot] = rows // 2
        every.append(some)
    own = [every[t].flatten() for t in bags.own]
    offsets = torch.arange(0, BATCH * POOLING * len(own), POOLING, device=device)
    return torch.cat(own).to(device), offsets, every


def exact_gradients(every, weights, scale):
    """Of each table in fp64, of the sum over all bags of `scale` times the square of its rows."""
    found = []
    for indices, weight in zip(every, weights, strict=True):
        table = weight.detach().double().cpu().requires_grad_()
        y = table[indices].sum(1)
        (scale * y.square()).sum().backward()
        found.append(table.grad)
    return found


def whole(bags, device):
    """All tables, on each rank."""
    tables = []
    for t, size in enumerate(TABLES):
        table = torch.empty(size, device=device)
        if t in bags.own:
            table.copy_(getattr(bags, f"table_{t}"))
        dist.broadcast(table, bags.owners[t])
        tables.append(table)
    return tables


def near(got, want, least=1e-4):
    want = want.to(got.device)
    return ((got.double() - want).abs() <= least * (1 + want.abs().max())).all()


@pytest.mark.parametrize("hot", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_long_rows(gpus, hot, sparse):
    """Against fp64; the same bits in each run."""
    torch.manual_seed(1)
    bags = cnn.ShardedEmbeddingBags(TABLES, sparse=sparse, device=gpus)
    indices, offsets, every = drawn(bags, 1, gpus, hot)
    want = exact_gradients(every, whole(bags, gpus), 1e-2)
    bits = []
    for _ in range(3):
        y = bags(indices, offsets)
        (1e-2 * y.square()).sum().backward()
        bits.append([w.grad.to_dense() for w in bags.weights])
        for weight in bags.weights:
            weight.grad = None
    for t, grad in zip(bags.own, bits[0], strict=True):
        assert near(grad, want[t])
    for again in bits[1:]:
        assert all(map(torch.equal, again, bits[0]))
    torch.cuda.synchronize()
    cp.check()


@pytest.mark.shows("embedding_bag_all_to_all", "backward", "fp32")
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
@pytest.mark.parametrize("hot", [0.0, 0.8])
@pytest.mark.parametrize(
    "optimizer", [cnn.SGD(0.1, scale=0.5), cnn.RowWiseAdagrad(0.1, eps=1e-3)], ids=str
)
def test_updates(gpus, optimizer, hot, into):
    """Steps against fp64, ranks late at random; the same bits in a second run."""
    torch.manual_seed(1)
    first = cnn.ShardedEmbeddingBags(TABLES, device=gpus).fuse_optimizer(optimizer)
    start = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    out = cp.PooledOutputs(sum(map(sum, first.dims)), torch.float32, BATCH) if into else None
    delay, ends = Delay(gpus), []
    for run in range(2):
        first.load_state_dict(start)
        squares = [torch.zeros(rows).double() for rows, _ in TABLES]
        for step in range(4):
            indices, offsets, every = drawn(first, step, gpus, hot)
            if run == 0:
                before = whole(first, gpus)
                grads = exact_gradients(every, before, 1e-3)
            if run and dist.get_rank() == step % dist.get_world_size():
                delay(3e-4)
            y = first(indices, offsets, out=out)
            (1e-3 * y.square()).sum().backward()
            if run:
                continue
            for t, (g, old) in enumerate(zip(grads, before, strict=True)):
                g = optimizer.scale * g
                if isinstance(optimizer, cnn.RowWiseAdagrad):
                    squares[t] += g.square().mean(1)
                    g = g / (squares[t].sqrt() + optimizer.eps)[:, None]
                if t in first.own:
                    assert near(getattr(first, f"table_{t}"), old.double().cpu() - 0.1 * g)
        ends.append([w.clone() for w in first.weights])
    assert all(map(torch.equal, *ends))
    assert all(w.grad is None for w in first.weights)
    torch.cuda.synchronize()
    cp.check()


def model_of(device, fused):
    """A bottom MLP made before the bags: its backward comes after theirs, beside the update."""
    torch.manual_seed(2)
    bags = cnn.ShardedEmbeddingBags(TABLES, device=device)
    if fused:
        bags.fuse_optimizer(cnn.SGD(0.1))
    columns = sum(d for _, d in TABLES)
    bottom = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, columns)).to(device)
    return bags, bottom


def step_of(bags, bottom, x, batch, out=None):
    hidden = bottom(x)
    y = bags(*batch, out=out)
    (1e-3 * (hidden * y).square()).sum().backward()


def test_other_layers_run_beside_the_update(gpus):
    """What the backward of layers behind it computes, and the update, are those of one stream."""
    draw = torch.Generator(gpus).manual_seed(dist.get_rank())
    x = torch.randn(BATCH // dist.get_world_size(), 32, device=gpus, generator=draw)
    (plain, dense), (bags, bottom) = model_of(gpus, False), model_of(gpus, True)
    delay = Delay(gpus)
    for step in range(20):
        indices, offsets, _ = drawn(bags, step, gpus, 0.5)
        for some, layers in ((plain, dense), (bags, bottom)):
            layers.zero_grad()
            if dist.get_rank() == step % 2:
                delay(2e-4)
            step_of(some, layers, x, (indices, offsets))
        with torch.no_grad():
            for weight in plain.weights:
                weight -= 0.1 * weight.grad
                weight.grad = None
        for one, other in zip(bottom.parameters(), dense.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5)
        for one, other in zip(bags.weights, plain.weights, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
            one.data.copy_(other.data)  # no difference of rounding goes on
    torch.cuda.synchronize()
    cp.check()


def slices(bags, count):
    """As a first call decides where that is predicted to gain."""
    workspace = workspace_of(bags.group, bags._like.device)
    flat = [n for each in bags.dims for n in (len(each), *each)]
    batch = (BATCH // len(bags.dims),) * len(bags.dims)
    workspace.agreed[OP, problem_from(flat, batch, torch.float32)] = count


@pytest.fixture(params=[1, 3], ids=["whole", "slices"])
def count(request, gpus):
    """Slices of tables that the gradient is exchanged in; one again for who comes next."""
    yield request.param
    slices(cnn.ShardedEmbeddingBags(TABLES, device=gpus), 1)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("how", ["dense", "sparse", "weights", "sgd", "adagrad"])
@pytest.mark.parametrize("hot", [0.0, 0.8])
def test_slices_have_the_bits_of_one(gpus, how, hot):
    """Ranks late at random, so that slices come at other times."""
    draw, delay = torch.Generator(gpus).manual_seed(1 + dist.get_rank()), Delay(gpus)
    ends = []
    for number in (1, 2, 3, 5, 1):
        torch.manual_seed(1)
        bags = cnn.ShardedEmbeddingBags(TABLES, sparse=how == "sparse", device=gpus)
        if how in ("sgd", "adagrad"):
            bags.fuse_optimizer(cnn.SGD(0.1) if how == "sgd" else cnn.RowWiseAdagrad(0.1))
        indices, offsets, _ = drawn(bags, 1, gpus, hot)
        weights = torch.linspace(-1, 1, len(indices), device=gpus) if how == "weights" else None
        if weights is not None:
            weights.requires_grad_()
        leaves = [*bags.weights, *([] if weights is None else [weights])]
        for _ in range(3):
            for leaf in leaves:
                leaf.grad = None
            y = bags(indices, offsets, weights)
            slices(bags, number)
            if torch.rand((), generator=draw, device=gpus) < 0.5:
                delay(2e-4)
            (1e-3 * y.square()).sum().backward()
        ends.append([t if t.grad is None else t.grad.to_dense() for t in leaves])
    for other in ends[1:]:
        assert all(map(torch.equal, other, ends[0]))
    slices(bags, 1)
    torch.cuda.synchronize()
    cp.check()


@pytest.mark.shows("embedding_bag_all_to_all", "captured backward", "fp32")
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
def test_a_captured_step(gpus, into, count):
    """Forward, backward and update in one graph, with other indices and another learning rate."""
    (bags, bottom), (other, layers) = model_of(gpus, True), model_of(gpus, True)
    x = torch.randn(BATCH // dist.get_world_size(), 32, device=gpus)
    indices, offsets, _ = drawn(bags, 0, gpus, 0.5)
    columns = sum(d for _, d in TABLES)
    out = cp.PooledOutputs(columns, torch.float32, BATCH, captured=1) if into else None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(2):  # the first forward decides; what comes after it goes by as many slices
        with torch.cuda.stream(stream):
            step_of(bags, bottom, x, (indices, offsets), out)
        torch.cuda.current_stream().wait_stream(stream)
        step_of(other, layers, x, (indices, offsets))
        slices(bags, count)
    bottom.zero_grad(), layers.zero_grad()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        step_of(bags, bottom, x, (indices, offsets), out)
    bags.load_state_dict(other.state_dict())
    for step in range(5):
        for some in (bags, other):
            some.set_learning_rate(0.1 / (1 + step))
        indices.copy_(drawn(bags, step, gpus, 0.9 - 0.2 * step)[0])
        graph.replay()
        step_of(other, layers, x, (indices, offsets))
        assert all(map(torch.equal, bags.weights, other.weights))
    torch.cuda.synchronize()
    cp.check()
