"""FullyShardedLinear: a data-parallel model with it trains as one with torch.nn.Linear does."""

import warnings

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from sharded_bodies import fully_sharded

import counterpoint.nn as cnn
from counterpoint import InputError

K, N = 10, 12  # 1 to 4 ranks divide what is sliced


@on_ranks(1, 2, 3, 4)
def test_it_trains_as_a_linear_layer(rank: int, ranks: int) -> list[str]:
    cases = (
        ((6,), "auto", True, torch.float32),
        ((3, 2), "shard_p2p", True, torch.float32),
        ((5,), "graded", False, torch.float32),
        ((8,), "serial", True, torch.bfloat16),
        ((), "auto", True, torch.float32),
    )
    return [f"{case}: {text}" for case in cases for text in fully_sharded(rank, ranks, *case)]


@on_ranks(2)
def test_it_compiles_and_refuses_what_does_not_fit(rank: int, ranks: int):
    bare = cnn.FullyShardedLinear(K, N, bias=False)
    assert bare.weight.shape == (N // ranks, K) and bare.bias is None
    torch.manual_seed(1)
    layer = cnn.FullyShardedLinear(K, N)
    x = torch.randn(4, K)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads: list[list[torch.Tensor]] = []
    for call in (layer, traced):
        layer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
            y = call(x)
        y.square().sum().backward()
        grads.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])  # type: ignore[union-attr]
    torch.testing.assert_close(*grads)
    want = r"FullyShardedLinear: x must be \[\.\.\., 10\], 10 in_features, got \(4, 11\)"
    with pytest.raises(InputError, match=want):
        layer(torch.randn(4, K + 1))
    with pytest.raises(InputError, match="out_features must be a multiple of the 2 ranks, got 13"):
        cnn.FullyShardedLinear(K, N + 1)
    dist.barrier()
