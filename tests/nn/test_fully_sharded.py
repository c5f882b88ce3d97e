"""FullyShardedLinear: a data-parallel model with it trains as one with torch.nn.Linear does."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from rankpool import RankPool
from torch import nn

import counterpoint.nn as cnn
from counterpoint import InputError

K, HIDDEN, N, STEPS = 10, 24, 12, 3  # 1 to 4 ranks divide what is sliced


def trained(
    rank: int, ranks: int, shape: tuple[int, ...], plan: str, bias: bool, dtype: torch.dtype
) -> list[str]:
    """Steps of SGD on each rank's own x: what differs from the whole model on all of them."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(K, HIDDEN, bias), nn.Tanh(), nn.Linear(HIDDEN, N, bias)).to(
        dtype
    )
    ours = nn.Sequential(*(
        cnn.FullyShardedLinear.from_linear(copy.deepcopy(layer), plan=plan)
        if isinstance(layer, nn.Linear) else layer for layer in plain
    ))  # fmt: skip
    found: list[str] = []
    optimizers = [torch.optim.SGD(model.parameters(), 0.02) for model in (ours, plain)]
    for step in range(STEPS):
        xs = torch.randn(ranks, *shape, K, generator=torch.Generator().manual_seed(step)).to(dtype)
        mine = xs[rank].clone().requires_grad_()
        whole = xs.clone().requires_grad_()
        got, want = ours(mine), plain(whole)
        assert got.shape == (*shape, N)
        got.square().sum().backward()
        want.square().sum().backward()
        assert mine.grad is not None and whole.grad is not None
        pairs = {"y": (got, want[rank]), "dx": (mine.grad, whole.grad[rank])}
        for (name, p), (_, q) in zip(
            ours.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert p.grad is not None and q.grad is not None
            part = q.grad.chunk(ranks)[rank] if p.dim() == 2 else q.grad
            pairs[f"d{name}"] = p.grad, part
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        found += [
            f"step {step} {name}" for name, (a, b) in pairs.items()
            if not (a.double() - b.double()).norm() <= bound * b.double().norm()
        ]  # fmt: skip
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gathered = ours[0].to_linear()  # type: ignore[operator]
    if dtype == torch.float32 and not torch.allclose(gathered.weight, plain[0].weight, atol=1e-5):
        found.append("to_linear")
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_trains_as_a_linear_layer(pool: RankPool, ranks: int):
    for shape, plan, bias, dtype in (
        ((6,), "auto", True, torch.float32),
        ((3, 2), "shard_p2p", True, torch.float32),
        ((5,), "graded", False, torch.float32),
        ((8,), "serial", True, torch.bfloat16),
        ((), "auto", True, torch.float32),
    ):
        assert pool.run(trained, ranks, shape, plan, bias, dtype, timeout_s=60) == [[]] * ranks


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
