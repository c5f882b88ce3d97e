"""Layers whose group spans islands: they train as they do on one island."""

from collections.abc import Callable

import pytest
import torch
from island_bodies import on_islands, plans_run
from layer_bodies import MlpCase, wrong_training
from on_ranks import on_ranks
from sharded_bodies import fully_sharded
from torch import Tensor, nn

import counterpoint as cp
import counterpoint.nn as cnn

ROWS, K, HIDDEN = 8, 32, 64  # rows of a rank
TABLES = ((30, 8), (5, 4), (7, 16), (11, 8))


@pytest.mark.parametrize("plan", ["auto", "islands chunks=2"])
@on_ranks(4)
def test_tensor_parallel_layers_train_as_serial_ones(rank: int, ranks: int, plan: str) -> list[str]:
    found: list[str] = []
    for size in (1, 2):
        with on_islands(rank, size) as islands:
            found += wrong_training(MlpCase(plan=plan))
            assert {number for _, number, _ in plans_run()} == {islands}
            assert plan == "auto" or plan in {spec for *_, spec in plans_run()}
    return found


@on_ranks(4)
def test_a_fully_sharded_layer_trains_as_a_linear_layer(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for size in (1, 2):
        with on_islands(rank, size):
            found += fully_sharded(rank, ranks, (3,), "auto", True, torch.float32)
    return found


def gated(rank: int, ranks: int) -> list[Tensor]:
    """Gate and up of one gather, and what is added over the ranks: in fp8 too."""
    torch.manual_seed(3)
    layers = nn.ModuleList(cnn.ColumnParallelLinear(K, HIDDEN, bias=False) for _ in range(2))
    down = cnn.RowParallelLinear(HIDDEN, K)
    x = torch.randn(ranks, ROWS, K)[rank].requires_grad_()
    found: list[Tensor] = []
    for fp8 in (False, True):
        if fp8:
            cnn.to_fp8(layers), cnn.to_fp8(down)
        y = down(cnn.gather_gated(x, *layers))  # type: ignore[arg-type]
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layers.parameters()])]
    return found


def normed(rank: int, ranks: int) -> list[Tensor]:
    """A sum over ranks with its norm behind it, whose weight is a copy of each rank."""
    torch.manual_seed(5)
    shared, x = torch.randn(ROWS, K), torch.randn(ranks, ROWS, HIDDEN)[rank]
    weight, w = torch.rand(K).requires_grad_(), torch.randn(ranks, HIDDEN, K)[rank]
    y, h = cp.matmul_all_reduce_rms_norm(
        x, w, residual=shared, norm_weight=cnn.copy_to_group(weight)
    )
    return [y.detach(), h.detach(), *torch.autograd.grad((y * shared).sum(), [weight])]


def pooled(rank: int, ranks: int) -> list[Tensor]:
    torch.manual_seed(7)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=(0, 1, 3, 1))
    own = bags.own
    indices = torch.cat([torch.arange(4 * ROWS * ranks) % TABLES[t][0] for t in own] or
                        [torch.empty(0, dtype=torch.int64)])  # fmt: skip
    y = bags(indices, torch.arange(0, len(indices), 4), batch=[ROWS] * ranks)
    y.square().sum().backward()
    return [y.detach(), *(w.grad for w in bags.weights if w.grad is not None)]


@pytest.mark.parametrize("layers", [gated, normed, pooled])
@on_ranks(4)
def test_layers_give_what_they_do_on_one_island(
    rank: int, ranks: int, layers: Callable[[int, int], list[Tensor]]
):
    want = layers(rank, ranks)
    for size in (1, 2):
        with on_islands(rank, size):
            for got, exact in zip(layers(rank, ranks), want, strict=True):
                torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
