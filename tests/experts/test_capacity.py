"""capacity="drop": rows of the least weights go, alike on all ranks; their gradients are 0."""

from typing import Any

import pytest
import torch
from island_bodies import on_islands, shards
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from routed_bodies import LOCAL, TOP, chosen, kept

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.experts.routes.capacity import drop_least
from counterpoint.experts.routes.lists import NONE


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
