"""ShardedEmbeddingBags with a fused optimizer, on CPU ranks: against torch.optim and fp64."""

import copy
import pickle
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import world
from refusals import Refusal, wrongly_refused
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import counterpoint as cp
import counterpoint.nn as cnn

TABLES = ((30, 8), (5, 3), (7, 16), (1, 8), (4, 1))
OWNERS = (1, 0, 1, 1, 0)
BAGS = 6  # of each rank
Batch = tuple[list[Tensor], list[Tensor]]  # of each table its indices, and their offsets


def batch_of(ranks: int, seed: int, hot: bool = False) -> Batch:
    """Of the global batch, equal on all ranks; `hot`: one row of each table has all lookups."""
    draw = torch.Generator().manual_seed(seed)
    counts = [torch.randint(0, 5, (BAGS * ranks,), generator=draw) for _ in TABLES]
    indices = [torch.randint(0, rows, (int(c.sum()),), generator=draw)
               for (rows, _), c in zip(TABLES, counts, strict=True)]  # fmt: skip
    if hot:
        indices = [torch.full_like(i, rows - 1)
                   for i, (rows, _) in zip(indices, TABLES, strict=True)]  # fmt: skip
    return indices, [c.cumsum(0) - c for c in counts]


def given(bags: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a rank passes: those of its own tables, one after the other."""
    empty = torch.empty(0, dtype=torch.int64)
    parts, shifted, first = [empty], [empty], 0
    for t in bags.own:
        parts.append(batch[0][t])
        shifted.append(batch[1][t] + first)
        first += len(batch[0][t])
    return torch.cat(parts), torch.cat(shifted)


def loss_of(y: Tensor, tables: Any) -> Tensor:
    """A sum over own bags whose gradient differs in each element."""
    return sum(((i + 1) * y[:, columns].square()).sum() for i, columns in enumerate(tables))  # type: ignore[return-value]


class Exact:
    """All tables on one device in fp64, and the rule of row-wise Adagrad."""

    def __init__(self, tables: list[Tensor], mode: str) -> None:
        self.tables = [t.detach().double().requires_grad_() for t in tables]
        self.sums = [torch.zeros(len(t)).double() for t in tables]
        self.mode = mode

    def gradients(self, batch: Batch) -> None:
        bags = [torch.nn.functional.embedding_bag(i, t, o, mode=self.mode)
                for t, i, o in zip(self.tables, *batch, strict=True)]  # fmt: skip
        for i, y in enumerate(bags):
            ((i + 1) * y.square()).sum().backward()

    @torch.no_grad()
    def step(self, optimizer: cnn.SGD | cnn.RowWiseAdagrad) -> None:
        for table, squares in zip(self.tables, self.sums, strict=True):
            assert table.grad is not None
            g = optimizer.scale * table.grad
            if isinstance(optimizer, cnn.RowWiseAdagrad):
                squares += g.square().mean(1)
                g = g / (squares.sqrt() + optimizer.eps)[:, None]
            table -= optimizer.lr * g
            table.grad = None


OPTIMIZERS = (cnn.SGD(0.02), cnn.SGD(0.01, scale=0.5), cnn.RowWiseAdagrad(0.1, eps=1e-3, scale=0.5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("mode", "hot"), [("sum", False), ("mean", True)])
@on_ranks(1, 2, 3)
def test_steps_are_those_of_whole_tables(
    rank: int, ranks: int, optimizer: Any, mode: str, hot: bool
):
    """Three steps against fp64, of a learning rate that falls; rows that nobody named stay."""
    torch.manual_seed(3)
    owners = tuple(o % ranks for o in OWNERS)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=owners, mode=mode).fuse_optimizer(optimizer)
    torch.manual_seed(3)
    plain = cnn.ShardedEmbeddingBags(TABLES, owners=(0,) * len(TABLES))
    tables = [torch.empty(size) for size in TABLES]
    for t, weight in zip(plain.own, plain.weights, strict=True):
        tables[t].copy_(weight.detach())
    for table in tables:
        torch.distributed.broadcast(table, 0)
    exact = Exact(tables, mode)
    assert all(torch.equal(w, tables[t]) for t, w in zip(bags.own, bags.weights, strict=True))
    for step in range(3):
        batch, before = batch_of(ranks, step, hot), [w.detach().clone() for w in bags.weights]
        y = bags(*given(bags, batch), batch=[BAGS] * ranks)
        loss_of(y, bags.columns).backward()
        exact.gradients(batch)
        exact.step(optimizer)
        for t, weight, old in zip(bags.own, bags.weights, before, strict=True):
            assert weight.grad is None
            assert torch.allclose(weight.double(), exact.tables[t], atol=1e-5, rtol=1e-5)
            unnamed = torch.ones(len(weight), dtype=torch.bool)
            unnamed[batch[0][t]] = False
            assert torch.equal(weight[unnamed], old[unnamed])
            if isinstance(optimizer, cnn.RowWiseAdagrad):
                state = bags.state_dict()[f"table_{t}_sum"]
                assert torch.allclose(state.double(), exact.sums[t], rtol=1e-5)
        lr = optimizer.lr / (2 + step)
        bags.set_learning_rate(lr)
        optimizer = bags.fused_optimizer
        assert optimizer is not None and optimizer.lr == lr


@pytest.mark.parametrize("sparse", [False, True])
@on_ranks(2)
def test_sgd_is_that_of_torch(rank: int, ranks: int, sparse: bool):
    """Beside torch's own optimizers of dense and of sparse gradients, with the same tables."""
    torch.manual_seed(5)
    fused = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS).fuse_optimizer(cnn.SGD(0.01))
    plain = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS, sparse=sparse)
    plain.load_state_dict(fused.state_dict())
    other = copy.deepcopy(plain)
    sgd, adagrad = (
        torch.optim.SGD(plain.parameters(), 0.01),
        torch.optim.Adagrad(other.parameters()),
    )
    for step in range(3):
        batch = batch_of(ranks, step)
        for bags in (fused, plain, other):
            y = bags(*given(bags, batch), batch=[BAGS] * ranks)
            loss_of(y, bags.columns).backward()
        assert all(w.grad is not None and w.grad.is_sparse == sparse for w in plain.weights)
        for each in (sgd, adagrad):
            each.step()
            each.zero_grad()
        for one, want in zip(fused.weights, plain.weights, strict=True):
            assert torch.allclose(one, want, rtol=1e-6, atol=1e-6)
    assert not any(torch.equal(a, b) for a, b in zip(plain.weights, other.weights, strict=True))


@on_ranks(2)
def test_the_state_is_saved_and_goes_on(rank: int, ranks: int):
    """To the bit, by a state_dict, a copy and a pickle, each with steps of its own."""

    def make() -> cnn.ShardedEmbeddingBags:
        bags = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS)
        return bags.fuse_optimizer(cnn.RowWiseAdagrad(0.1))

    bags = make()

    def step(some: Any, seed: int) -> None:
        batch = batch_of(ranks, seed)
        y = some(*given(some, batch), batch=[BAGS] * ranks)
        loss_of(y, some.columns).backward()

    step(bags, 0)
    names = sorted(bags.state_dict())
    assert names == sorted([f"table_{t}{end}" for t in bags.own for end in ("", "_sum")])
    again = make()
    again.load_state_dict(bags.state_dict())
    several = [bags, copy.deepcopy(bags), pickle.loads(pickle.dumps(bags)), again]
    for each in several:
        step(each, 1)
    for each in several[1:]:
        for name, want in bags.state_dict().items():
            assert torch.equal(each.state_dict()[name], want), name
    bags.reset_parameters()
    assert not any(bags.state_dict()[f"table_{t}_sum"].any() for t in bags.own)


@on_ranks(2)
def test_gradients_of_weights_are_of_tables_before_the_update(rank: int, ranks: int):
    batch = batch_of(ranks, 1)
    torch.manual_seed(7)
    fused = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS).fuse_optimizer(cnn.SGD(0.5))
    plain = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS)
    plain.load_state_dict(fused.state_dict())
    found: list[Tensor] = []
    for bags in (plain, fused):
        indices, offsets = given(bags, batch)
        weights = torch.randn(len(indices), generator=torch.Generator().manual_seed(rank))
        y = bags(indices, offsets, weights.requires_grad_(), batch=[BAGS] * ranks)
        loss_of(y, bags.columns).backward()
        assert weights.grad is not None
        found.append(weights.grad)
    assert torch.equal(*found)
    for one, other in zip(fused.weights, plain.weights, strict=True):
        assert other.grad is not None
        assert torch.allclose(one, other - 0.5 * other.grad, atol=1e-6)


@pytest.mark.shows("embedding_bag_all_to_all", "compiled backward", "fp32")
@on_ranks(2)
def test_a_compiled_step_is_an_eager_one(rank: int, ranks: int):
    """With a learning rate that changes, without being compiled anew."""
    torch.manual_seed(9)

    def make() -> cnn.ShardedEmbeddingBags:
        bags = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS)
        return bags.fuse_optimizer(cnn.RowWiseAdagrad(0.1))

    eager = make()
    other = copy.deepcopy(eager)
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda *g: other(*g, batch=[BAGS] * ranks) * 2, backend=backend,
                             fullgraph=True, dynamic=False)  # fmt: skip
    batch = batch_of(ranks, 1)
    for step in range(3):
        y = eager(*given(eager, batch), batch=[BAGS] * ranks) * 2
        same = compiled(*given(other, batch))
        assert torch.equal(y, same)
        y.square().sum().backward()
        same.square().sum().backward()
        for name, want in eager.state_dict().items():
            assert torch.equal(other.state_dict()[name], want), name
        for bags in (eager, other):
            bags.set_learning_rate(0.1 / (2 + step))
    assert len(graphs) == 1


@on_ranks(1)
def test_the_operator_of_an_update(rank: int, ranks: int):
    draw = torch.Generator().manual_seed(1)
    tables = [torch.randn(5, 4, generator=draw), torch.randn(3, 2, generator=draw)]
    sums = [torch.zeros(5), torch.zeros(3)]
    arguments = (torch.randn(2, 6, generator=draw), tables, sums, torch.tensor([0.1, 1e-8, 1.0]),
                 torch.tensor([0, 4, 4, 2, 0]), torch.tensor([0, 2, 3, 5]), None, False, False,
                 "rowwise_adagrad", [2, 4, 2], [2], 0, world().group_name, False)  # fmt: skip
    op: Any = torch.ops.counterpoint.embedding_bag_update
    results: dict[str, str] = torch.library.opcheck(op, arguments, raise_exception=True)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@on_ranks(2)
def test_several_uses_in_one_backward_are_one_update_by_their_sum(
    rank: int, ranks: int, optimizer: Any
):
    """Three uses of which one gets no gradient, then one; gradients of weights are as before."""
    torch.manual_seed(3)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS).fuse_optimizer(optimizer)
    tables = [torch.empty(size) for size in TABLES]
    for t, weight in zip(bags.own, bags.weights, strict=True):
        tables[t].copy_(weight)
    for t, table in enumerate(tables):
        torch.distributed.broadcast(table, OWNERS[t])
    exact = Exact(tables, "sum")

    def used(batch: Batch, weights: Tensor | None = None) -> Tensor:
        y = bags(*given(bags, batch), weights, batch=[BAGS] * ranks)
        return loss_of(y, bags.columns)

    for round in range(2):
        batches = [batch_of(ranks, 10 * round + i) for i in range(4)]
        ones = torch.ones(len(given(bags, batches[1])[0]), requires_grad=True)
        plain = torch.ones_like(ones).requires_grad_()
        wanted = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS)
        with torch.no_grad():
            for weight, own in zip(wanted.weights, bags.weights, strict=True):
                weight.copy_(own)
        y = wanted(*given(wanted, batches[1]), plain, batch=[BAGS] * ranks)
        loss_of(y, bags.columns).backward()

        first, second, unused = used(batches[0]), used(batches[1], ones), used(batches[2])
        (first + second + unused.detach()).backward()
        assert torch.equal(ones.grad, plain.grad)  # type: ignore[arg-type]
        for batch in batches[:2]:
            exact.gradients(batch)
        exact.step(optimizer)
        del unused
        used(batches[3]).backward()
        exact.gradients(batches[3])
        exact.step(optimizer)
        for t, weight in zip(bags.own, bags.weights, strict=True):
            assert torch.allclose(weight.double(), exact.tables[t], atol=1e-5, rtol=1e-5)
        if isinstance(optimizer, cnn.RowWiseAdagrad):
            for t, state in zip(bags.own, bags._sums(), strict=True):
                assert torch.allclose(state.double(), exact.sums[t], atol=1e-5, rtol=1e-5)


@on_ranks(2)
def test_a_backward_that_raised_between_two_uses_leaves_nothing(rank: int, ranks: int):
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS).fuse_optimizer(cnn.SGD(0.1))
    batch, before = batch_of(ranks, 1), [w.clone() for w in bags.weights]

    def called() -> Tensor:
        return bags(*given(bags, batch), batch=[BAGS] * ranks)

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    one = called()
    other = called()
    one.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        (one + other).sum().backward()
    assert all(map(torch.equal, bags.weights, before))
    del one, other
    again = copy.deepcopy(bags)
    called().sum().backward()
    again(*given(again, batch), batch=[BAGS] * ranks).sum().backward()
    assert all(map(torch.equal, bags.weights, again.weights))


@on_ranks(2)
def test_a_compiled_graph_of_two_uses_is_refused(rank: int, ranks: int):
    """When it is traced, before anything is updated."""
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=OWNERS).fuse_optimizer(cnn.SGD(0.1))
    batch, before = batch_of(ranks, 1), [w.clone() for w in bags.weights]
    inputs = given(bags, batch)

    def both(indices: Tensor, offsets: Tensor) -> Tensor:
        one = bags(indices, offsets, batch=[BAGS] * ranks)
        return (one + bags(indices, offsets, batch=[BAGS] * ranks)).sum()

    text = "embedding_bag_all_to_all: backward must be of one call of a module"
    with pytest.raises(Exception, match=text):
        torch.compile(both, backend="aot_eager", fullgraph=True)(*inputs).backward()
    assert all(map(torch.equal, bags.weights, before))
    compiled = torch.compile(bags, backend="aot_eager")
    one, other = (compiled(*inputs, batch=[BAGS] * ranks).sum() for _ in range(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # a graph each
        (one + other).backward()
    compiled(*inputs, batch=[BAGS] * ranks).sum().backward()
    assert not any(map(torch.equal, bags.weights, before))


@on_ranks(2)
def test_one_backward_for_each_forward(rank: int, ranks: int):
    """Those of two backwards cannot be added up; what came before stays, and ranks go on."""
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=(1,) * len(TABLES)).fuse_optimizer(cnn.SGD(0.1))
    batch = batch_of(ranks, 1)

    def called() -> Tensor:
        return bags(*given(bags, batch), batch=[BAGS] * ranks).sum()

    first, second = called(), called()
    first.backward()
    after = [weight.clone() for weight in bags.weights]
    text = "backward must be one for all forwards since the last, got tables that 1 updates"
    with pytest.raises(cp.InputError, match=text):
        second.backward()
    assert all(map(torch.equal, bags.weights, after))
    called().backward()
    with torch.no_grad():
        called()
    assert not any(map(torch.equal, bags.weights, after))


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> list[str]:
    sgd = {"optimizer": cnn.SGD(0.1)}
    plain, sparse = (cnn.ShardedEmbeddingBags(TABLES, sparse=s) for s in (False, True))
    text = "optimizer must be SGD or RowWiseAdagrad of counterpoint.nn, got"
    found = wrongly_refused(plain.fuse_optimizer, sgd, [({"optimizer": torch.optim.SGD}, text)])
    text = "self must be a module with dense gradients, got a module of sparse gradients"
    found += wrongly_refused(sparse.fuse_optimizer, sgd, [({}, text)])
    with pytest.raises(cp.InputError, match="fused_optimizer must be SGD or RowWiseAdagrad, got"):
        plain.set_learning_rate(0.1)
    plain.fuse_optimizer(cnn.SGD(0.1))
    text = "self must be a module with dense gradients, got one that has an optimizer"
    found += wrongly_refused(plain.fuse_optimizer, sgd, [({}, text)])
    rates: list[Refusal] = [
        ({"lr": -1.0}, "lr must be a number from 0 to 1e+06, got -1.0"),
        ({"lr": float("nan")}, "lr must be a number from 0 to 1e+06, got nan"),
        ({"lr": "1"}, "lr must be a number from 0 to 1e+06, got '1'"),
        ({"eps": True}, "eps must be a number from 0 to 1e+06, got True"),
    ]
    found += wrongly_refused(cnn.RowWiseAdagrad, {"lr": 1.0}, rates)
    batch = batch_of(ranks, 1)

    def refused(bags: Any, text: str) -> None:
        with pytest.raises(cp.InputError, match=text):
            bags(*given(bags, batch), batch=[BAGS] * ranks)

    half = cnn.ShardedEmbeddingBags(TABLES).fuse_optimizer(cnn.SGD(0.1)).half()
    refused(half, "state must be torch.float32, got torch.float16; pass dtype= to the module")
    for spoil in ("requires_grad_", "grad"):
        bags = cnn.ShardedEmbeddingBags(TABLES).fuse_optimizer(cnn.SGD(0.1))
        assert not any(p.requires_grad for p in bags.parameters())
        for weight in bags.weights:
            if spoil == "grad":
                weight.grad = torch.zeros_like(weight)
            else:
                weight.requires_grad_()
        refused(bags, "must be without a gradient, as fused_optimizer updates it, got one that")
    return found
