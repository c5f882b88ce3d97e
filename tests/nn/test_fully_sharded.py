"""FullyShardedLinear: a data-parallel model with it trains as one with torch.nn.Linear does."""

import warnings

import pytest
import torch
import torch.distributed as dist
from rankpool import RankPool
from sharded_bodies import fully_sharded

import counterpoint.nn as cnn
from counterpoint import InputError

K, N = 10, 12  # 1 to 4 ranks divide what is sliced


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_trains_as_a_linear_layer(pool: RankPool, ranks: int):
    for shape, plan, bias, dtype in (
        ((6,), "auto", True, torch.float32),
        ((3, 2), "shard_p2p", True, torch.float32),
        ((5,), "graded", False, torch.float32),
        ((8,), "serial", True, torch.bfloat16),
        ((), "auto", True, torch.float32),
    ):
        assert pool.run(fully_sharded, ranks, shape, plan, bias, dtype) == [[]] * ranks


def compiled_and_refused(rank: int, ranks: int) -> list[str]:
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
    texts: list[str] = []
    for call in (lambda: layer(torch.randn(4, K + 1)), lambda: cnn.FullyShardedLinear(K, N + 1)):
        with pytest.raises(InputError) as error:
            call()
        texts.append(str(error.value))
    dist.barrier()
    return texts


def test_it_compiles_and_refuses_what_does_not_fit(pool: RankPool):
    for texts in pool.run(compiled_and_refused, 2):
        assert "FullyShardedLinear: x must be [..., 10], 10 in_features, got (4, 11)" in texts[0]
        assert "out_features must be a multiple of the 2 ranks, got 13" in texts[1]
