"""The backward of embedding bags by slices of tables, on CPU ranks: the same bits as in one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from embedding_cases import OP, Bags, problem_of, random_bags
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.choose.known import Knowledge
from counterpoint.embedding import exchange as embedding_exchange
from counterpoint.embedding.exchange import Sent, exchange, problem_from
from counterpoint.group.workspace import workspace_of
from counterpoint.machine_of import shipped
from counterpoint.problem import Problem

DIMS = ((8, 3, 20, 1), (), (5, 16))
BATCH = (5, 0, 3)
COUNTS = (2, 3, 5)


def given(ranks: int) -> tuple[Problem, list[Bags]]:
    p = problem_of(DIMS[-ranks:], BATCH[-ranks:])
    return p, [random_bags(d, p.m, seed=r, weighted=True) for r, d in enumerate(p.tables)]


def take(count: int, p: Problem) -> None:
    """As all ranks decide at their first call on a machine where that gains."""
    workspace_of(world(), torch.device("cpu")).agreed[OP, replace(p, indices=(), out=False)] = count


def flat(p: Problem) -> list[int]:
    return [n for each in p.tables for n in (len(each), *each)]


@on_ranks(1, 2, 3)
def test_gradients_arrive_at_their_place(rank: int, ranks: int):
    """Of all ranks' bags, each slice the columns of its tables; of a view with gaps."""
    p, _ = given(ranks)
    draw = torch.Generator().manual_seed(3)
    everyones = [torch.randn(n, p.n + 2, generator=draw)[:, 1:-1] for n in p.rows]
    start = p.column_starts[rank]
    want = torch.cat(everyones)[:, start : p.column_starts[rank + 1]]
    for count in (1, *COUNTS):
        take(count, p)
        sent = Sent(flat(p), p.rows, rank, world().group_name)
        slices = exchange(everyones[rank], sent)
        for each in slices:
            each.wait()
        assert len(slices) == (1 if ranks == 1 else count)
        assert [t for each in slices for t in each.tables] == list(range(len(p.tables[rank])))
        assert torch.equal(torch.cat([each.dy for each in slices], 1), want)
        assert all(each.dy.is_contiguous() for each in slices)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("how", ["eager", "compiled", "watched"])
@pytest.mark.parametrize("sparse", [False, True])
@on_ranks(2, 3)
def test_gradients_have_the_bits_of_one_slice(rank: int, ranks: int, sparse: bool, how: str):
    if sparse and how == "compiled":
        return  # a compiled backward has dense gradients alone
    p, everyone = given(ranks)
    bags = everyone[rank]
    leaves = [*bags.tables, bags.weights]
    dy = torch.randn(p.rows[rank], p.n, generator=torch.Generator().manual_seed(rank))

    def called(*tensors: Any) -> Tensor:
        *tables, weights = tensors
        return cp.embedding_bag_all_to_all(
            tables, bags.indices, bags.offsets, per_sample_weights=weights, dims=p.tables,
            include_last_offset=True, batch=p.rows, dtype=torch.float32, sparse=sparse,
        )  # fmt: skip

    call = (
        torch.compile(called, backend="aot_eager", fullgraph=True) if how == "compiled" else called
    )

    def gradients(count: int) -> list[Tensor]:
        own = [t.clone().requires_grad_() for t in leaves if t is not None]
        y = call(*own)
        take(count, p)
        grads = torch.autograd.grad(y, own, dy, create_graph=how == "watched")
        return [grad.detach().to_dense() for grad in grads]

    whole = gradients(1)
    assert any(bool(g.any()) for g in whole) or not bags.tables
    for count in COUNTS:
        assert all(map(torch.equal, gradients(count), whole))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", [cnn.SGD(0.1), cnn.RowWiseAdagrad(0.1)], ids=str)
@on_ranks(2, 3)
def test_updates_have_the_bits_of_one_slice(rank: int, ranks: int, optimizer: Any, weighted: bool):
    """Eager and compiled, two steps each; weights have their gradients of the tables before."""
    p, _ = given(ranks)
    tables = [(17, d) for dims in p.tables for d in dims]
    owners = [r for r, dims in enumerate(p.tables) for _ in dims]
    bags = random_bags(p.tables[rank], p.m, seed=rank, weighted=True)
    indices = bags.indices % 17

    def ends(count: int, compiled: bool) -> list[Tensor]:
        torch.manual_seed(5)
        module = cnn.ShardedEmbeddingBags(tables, owners=owners).fuse_optimizer(optimizer)
        assert bags.weights is not None
        weights = bags.weights.clone().requires_grad_() if weighted else None

        def called(offsets: Tensor) -> Tensor:
            return module(indices, offsets, weights, batch=p.rows, include_last_offset=True)

        if compiled:
            called = torch.compile(called, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            y = called(bags.offsets)
            take(count, p)
            y.square().sum().backward()
        found = [t.clone() for t in module.state_dict().values()]
        return found if weights is None or weights.grad is None else [*found, weights.grad]

    whole = ends(1, False)
    for count in COUNTS:
        assert all(map(torch.equal, ends(count, False), whole))
    assert all(map(torch.equal, ends(COUNTS[-1], True), whole))


@on_ranks(2)
def test_the_operator_of_gradients(rank: int, ranks: int):
    p, everyone = given(2)
    bags = everyone[rank]
    dy = torch.randn(p.rows[rank], p.n)
    take(2, p)
    where = flat(p), list(p.rows), rank, world().group_name
    for kind, of_weights in (("dense", True), ("", True), ("", False)):
        arguments = (dy, bags.tables, bags.indices, bags.offsets, bags.weights, True, False, *where,
                     kind, of_weights)  # fmt: skip
        op: Any = torch.ops.counterpoint.embedding_bag_gradients
        results: dict[str, str] = torch.library.opcheck(op, arguments, raise_exception=True)
        assert set(results.values()) == {"SUCCESS"}


@on_ranks(2)
def test_the_first_call_decides_by_what_is_known_of_the_machine(rank: int, ranks: int):
    """By all ranks' indices, and for all calls of as many bags; a CPU has one slice."""
    dims, batch = ((128,) * 8,) * 2, (32768, 32768)
    machine = shipped("NVIDIA H200", 2)
    workspace = workspace_of(world(), torch.device("cpu"))
    few = Problem(OP, 65536, rows=batch, tables=dims, indices=(65536 * 8,) * 2, out=True)
    bare = problem_from(flat(few), batch, torch.bfloat16)
    embedding_exchange.decide_slices(few, workspace)
    assert not workspace.agreed
    workspace.knowledge = Knowledge(machine, {})
    embedding_exchange.decide_slices(few, workspace)
    assert workspace.agreed[OP, bare] > 1
    first = dict(workspace.agreed)
    embedding_exchange.decide_slices(replace(few, indices=(65536 * 800,) * 2), workspace)
    assert workspace.agreed == first
