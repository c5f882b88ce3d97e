"""Ranks on several islands: found from their names, and operators between them."""

import pytest
import torch
from island_bodies import everyone, near, on_islands, shards
from on_ranks import on_ranks

import counterpoint as cp
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.runtime.islands import islands_of


def test_islands_are_neighbours_of_one_name():
    found = islands_of(["a", "a", "b", "b", "c", "c"], 3)
    assert (found.number, found.size, [*found.mine], found.why) == (3, 2, [2, 3], "")
    assert found.named(5) == "rank 5 (island 2)"
    assert islands_of(["a"] * 3, 1)[:3] == (1, 3, 1)


@pytest.mark.parametrize(
    ("names", "why"),
    [("aab", "islands have 1 and 2 ranks"), ("abab", "ranks of one island are not neighbours")],
)
def test_what_is_no_grid_is_islands_of_one_rank(names: str, why: str):
    found = islands_of([*names], 2)
    assert (found.number, found.size, [*found.mine], found.why) == (len(names), 1, [2], why)


@on_ranks(4)
def test_operators_between_islands(rank: int, world_size: int):
    for size in (1, 2):
        with on_islands(rank, size) as islands:
            assert islands == world_size // size
            for call, rows in enumerate((8, 4, 12)):
                compare(rank, world_size, rows, f"islands chunks={(1, 2, 4)[call]}")


def compare(rank: int, world_size: int, rows: int, plan: str) -> None:
    """All operators that have such plans, with their gradients, against fp64."""
    x, w, bias = shards(rank, rows, 16), shards(rank + 9, 16, 8), shards(rank, 8)
    y = cp.all_gather_matmul(x, w, bias=bias, plan=plan)
    near(y, torch.cat(everyone(x)) @ w.double() + bias.double())
    partial = shards(rank, rows * world_size, 16)
    products = [p @ v for p, v in zip(everyone(partial), everyone(w), strict=True)]
    total = torch.stack(products).sum(0)
    own = slice(rank * rows, (rank + 1) * rows)
    near(cp.matmul_reduce_scatter(partial, w, bias=bias, plan=plan), total[own] + bias.double())
    near(cp.matmul_all_reduce(partial, w, plan=plan), total)

    x, w = x.requires_grad_(), w.requires_grad_()
    dy = shards(rank, rows * world_size, 8)
    dx, dw = torch.autograd.grad(cp.all_gather_matmul(x, w, plan=plan), (x, w), dy)
    back = [a @ b.T for a, b in zip(everyone(dy), everyone(w.detach()), strict=True)]
    near(dx, torch.stack(back).sum(0)[own])
    near(dw, torch.cat(everyone(x.detach())).T @ dy.double())


@on_ranks(4)
def test_rows_may_differ_where_islands_gather(rank: int, world_size: int):
    counts = (3, 0, 4, 2)
    with on_islands(rank, 2):
        x, w = shards(rank, counts[rank], 16), shards(rank, 16, 8)
        y = cp.all_gather_matmul(x, w, rows=counts, plan="islands chunks=2")
        near(y, torch.cat(everyone(x)) @ w.double())
        with pytest.raises(InputError, match="plan must be for equal rows on all ranks"):
            cp.matmul_reduce_scatter(shards(rank, 9, 16), w, rows=counts, plan="islands")


@on_ranks(4)
def test_what_reaches_no_other_island_is_refused_or_left_to_the_library(rank: int, world_size: int):
    with on_islands(rank, 2):
        x, w = shards(rank, 8, 16), shards(rank, 16, 8)
        near(cp.all_gather_matmul(x, w), torch.cat(everyone(x)) @ w.double())
        with pytest.raises(InputError, match="plan must be for ranks of one island"):
            cp.all_gather_matmul(x, w, plan="shard_p2p ring")
        with pytest.raises(UnsupportedError, match=r"PooledOutputs: .* they are on 2 islands"):
            cp.PooledOutputs(8, batch=[4] * 4, dtype=torch.float32, device="cpu")
        table = shards(rank, 10, 8)
        indices = torch.arange(16) % 10
        y = cp.embedding_bag_all_to_all(
            [table], indices, torch.arange(0, 17, 1), include_last_offset=True
        )
        want = torch.cat([each[indices][4 * rank : 4 * rank + 4] for each in everyone(table)], 1)
        near(y, want)


@on_ranks(2)
def test_one_island_has_no_plan_between_islands(rank: int, world_size: int):
    x, w = shards(rank, 8, 16), shards(rank, 16, 8)
    with pytest.raises(InputError, match="plan must be for ranks of several islands"):
        cp.all_gather_matmul(x, w, plan="islands")
