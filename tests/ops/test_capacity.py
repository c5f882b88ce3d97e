"""capacity="drop": rows of the least weights go, alike on all ranks; their gradients are 0."""

from typing import Any

import pytest
import torch
from expert_bodies import small_kernels
from island_bodies import everyone, on_islands, shards
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from routed_bodies import LOCAL, TOP, by_torch, chosen, layer
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.measure.timing import relative_error
from counterpoint.runtime.capacity import drop_least
from counterpoint.runtime.routes import NONE

K, N, HIDDEN = 8, 16, 24
ROOM = 14


def kept(lists: list[Tensor], weights: list[Tensor], experts: int, room: int) -> list[Tensor]:
    """Which of the experts of each rank's tokens are kept: entry by entry, as a person would."""
    ranks = len(lists)
    found = [torch.ones(each.shape, dtype=torch.bool) for each in lists]
    for d in range(ranks):
        rows = [
            (-float(weights[s][t, j]), s, t, j)
            for s, each in enumerate(lists)
            for t, row in enumerate(each.tolist())
            for j, e in enumerate(row)
            if e // (experts // ranks) == d
        ]
        for _, s, t, j in sorted(rows)[room:]:
            found[s][t, j] = False
    return found


@pytest.mark.parametrize("room", [1, 9, 100])
def test_what_is_dropped_is_of_the_least_weights(room: int):
    """Of equal weights the last ones; experts that are none are neither kept nor dropped."""
    torch.manual_seed(room)
    for ranks, local, top, tokens in ((2, 3, 2, 13), (4, 1, 1, 9), (3, 2, 4, 0)):
        lists = [torch.randint(ranks * local, (tokens, top)) for _ in range(ranks)]
        weights = [torch.randint(-2, 3, (tokens, top)).float() * 0.0625 for _ in range(ranks)]
        weights[0][:1] = torch.tensor([-0.0])
        for each in lists:
            each[torch.rand(each.shape) < 0.2] = NONE
        told = torch.cat([torch.cat((ids.int(), by.view(torch.int32)), 1)
                          for ids, by in zip(lists, weights, strict=True)])  # fmt: skip
        before = told.clone()
        dropped = drop_least(told, ranks, ranks * local, room)
        stay = torch.cat(kept(lists, weights, ranks * local, room))
        ids = torch.cat(lists)
        assert torch.equal(told[:, :top].long(), ids.masked_fill(~stay, NONE))
        assert torch.equal(told[:, top:], before[:, top:])
        each = [int((~stay & (ids // local == d)).sum()) for d in range(ranks)]
        assert dropped.tolist() == each and dropped.dtype == torch.int64


def compare(rank: int, ranks: int, name: str, plan: str, dtype: torch.dtype) -> None:
    """Sums and all gradients against fp64 of the rows that are kept; and bits of two runs."""
    experts = chosen(name, rank, ranks, 9)
    weights = shards(rank, 9, TOP).softmax(1)
    x, up, down, dy = (
        t.to(dtype)
        for t in (
            shards(rank, 9, K), shards(rank, LOCAL, K, HIDDEN) / 3,
            shards(rank, LOCAL, HIDDEN, N) / 5, shards(rank + 7, 9, N),
        )
    )  # fmt: skip
    leaves, every = [t.requires_grad_() for t in (x, up, down, weights)], ranks * LOCAL

    def run() -> tuple[cp.Routes, list[Tensor]]:
        routes = cp.exchange_routes(
            experts, weights, num_experts=every, max_rows=ROOM, capacity="drop"
        )
        y = layer(x, up, down, routes, plan)
        return routes, [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    routes, gots = run()
    _, again = run()
    assert all(torch.equal(*pair) for pair in zip(gots, again, strict=True))

    given = [everyone(t.detach().double()) for t in (x, up, down, weights, dy)]
    lists = [each.long() for each in everyone(experts)]
    stay = kept(lists, given[3], every, ROOM)
    xs, by = ([t.requires_grad_() for t in given[i]] for i in (0, 3))
    ups, downs = (torch.cat(given[i]).requires_grad_() for i in (1, 2))
    ys = [by_torch(a, ups, downs, e, b * k) for a, e, b, k in zip(xs, lists, by, stay, strict=True)]
    torch.autograd.backward(ys, given[4])
    own = slice(rank * LOCAL, (rank + 1) * LOCAL)
    assert ups.grad is not None and downs.grad is not None
    wants = ys[rank].detach(), xs[rank].grad, ups.grad[own], downs.grad[own], by[rank].grad
    for got, want in zip(gots, wants, strict=True):
        assert want is not None and got.shape == want.shape
        off = relative_error(got, want) if want.any() else float(got.abs().max())
        assert off <= (8 * torch.finfo(dtype).eps if want.any() else 0)
    assert not gots[4][~stay[rank]].any(), "gradients of weights that are dropped"
    lost = [sum(int((~k & (e // LOCAL == d)).sum()) for k, e in zip(stay, lists, strict=True))
            for d in range(ranks)]  # fmt: skip
    assert routes.dropped is not None and routes.dropped.tolist() == lost
    assert sum(lost), f"nothing is dropped of {name}"


@pytest.mark.parametrize("name", ["skewed", "last rank"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (3, 1)])
@on_ranks()
def test_a_layer_that_drops_against_fp64(rank: int, ranks: int, size: int, name: str):
    """On one island, and between several; of fp32, which kernels do not take, by host plans."""
    with on_islands(rank, size), by_reference():
        compare(rank, ranks, name, "auto", torch.float32)
        compare(rank, ranks, name, "auto", torch.float16)
        compare(rank, ranks, name, "serial", torch.float16)


@on_ranks(2)
def test_kernels_with_rows_that_are_dropped(rank: int, ranks: int):
    """Interpreted."""
    with on_islands(rank, ranks), small_kernels():
        compare(rank, ranks, "last rank", "fused", torch.float16)


@on_ranks(2)
def test_the_layer_counts_what_it_drops(rank: int, ranks: int):
    with on_islands(rank, ranks), by_reference():
        torch.manual_seed(0)
        made: dict[str, Any] = {"max_rows": 5, "capacity": "drop", "dtype": torch.bfloat16}
        mlp = cnn.ExpertParallelMLP(16, 8, ranks * LOCAL, **made)
        assert mlp.dropped is None and "max_rows=5, plan='auto', capacity='drop'" in repr(mlp)
        x, experts = shards(rank, 6, 16).bfloat16(), chosen("last rank", rank, ranks, 6)
        weights = shards(rank, 6, TOP).softmax(1)
        mlp(x, experts, weights)
        rows = ranks * 6 * TOP
        assert mlp.dropped is not None and mlp.dropped.tolist() == [0] * (ranks - 1) + [rows - 5]
        traced = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        mlp.dropped = None
        assert torch.equal(traced(x, experts, weights), mlp(x, experts, weights))
        assert mlp.dropped is not None and mlp.dropped[-1] == rows - 5
        mlp.max_rows = rows
        roomy = mlp(x, experts, weights)
        assert not mlp.dropped.any()
        mlp.capacity = "error"
        torch.testing.assert_close(roomy, mlp(x, experts, weights), rtol=2e-2, atol=1e-3)
        wrong = "capacity must be error or drop, got .none."
        with pytest.raises(cp.InputError, match=f"ExpertParallelMLP: {wrong}"):
            cnn.ExpertParallelMLP(16, 8, ranks * LOCAL, max_rows=5, capacity="none")
        with pytest.raises(cp.InputError, match="plan must be auto, fused, routed or serial with"):
            cnn.ExpertParallelMLP(16, 8, ranks * LOCAL, plan="grouped", **made)
        with pytest.raises(cp.InputError, match=f"exchange_routes: {wrong}"):
            cp.exchange_routes(experts, weights, num_experts=4, max_rows=5, capacity="none")
        with pytest.raises(cp.InputError, match='max_rows must be given with capacity="drop", got'):
            cp.exchange_routes(experts, weights, num_experts=4, capacity="drop")
        where = (world().group_name, ranks)
        given = experts, weights.requires_grad_(), ranks * LOCAL, 5, 1, True, *where
        torch.library.opcheck(torch.ops.counterpoint.exchange_routes, given)


@on_ranks(1)
def test_one_rank_drops_nothing(rank: int, ranks: int):
    text = "ExpertParallelMLP: capacity must be error in a group of one rank, got drop"
    with pytest.raises(cp.InputError, match=text):
        cnn.ExpertParallelMLP(16, 8, 2, max_rows=5, capacity="drop")
