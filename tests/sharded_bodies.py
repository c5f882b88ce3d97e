"""What each rank of a layer's test does, on CPU ranks and on GPUs."""

import copy

import torch
from torch import nn

import counterpoint.nn as cnn


def fully_sharded(
    rank: int, ranks: int, shape: tuple[int, ...], plan: str, bias: bool, dtype: torch.dtype,
    sizes: tuple[int, int, int] = (10, 24, 12), device: str = "cpu", lr: float = 0.02,
) -> list[str]:  # fmt: skip
    """Steps of SGD on each rank's own x: what differs from the whole model on all of them.

    Args:
        shape: of a rank's x, but for the features.
        sizes: features of x, between both layers, of y; the ranks divide the last two.
        lr: small enough for the number of rows, of whose losses the sum is taken.
    """
    torch.manual_seed(0)
    k, hidden, n = sizes
    plain = nn.Sequential(nn.Linear(k, hidden, bias), nn.Tanh(), nn.Linear(hidden, n, bias)).to(
        device, dtype
    )
    ours = nn.Sequential(*(
        cnn.FullyShardedLinear.from_linear(copy.deepcopy(layer), plan=plan)
        if isinstance(layer, nn.Linear) else layer for layer in plain
    ))  # fmt: skip
    found: list[str] = []
    optimizers = [torch.optim.SGD(model.parameters(), lr) for model in (ours, plain)]
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        xs = torch.randn(ranks, *shape, k, generator=draw).to(device, dtype)
        mine = xs[rank].clone().requires_grad_()
        whole = xs.clone().requires_grad_()
        got, want = ours(mine), plain(whole)
        assert got.shape == (*shape, n)
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
