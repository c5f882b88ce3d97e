"""Gate and up of one gather, activated: as torch.nn.Linear trains, with a bias and in fp8 too."""

import re

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn

import counterpoint.nn as cnn
from counterpoint import InputError
from counterpoint.measure.timing import relative_error

F = torch.nn.functional


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul"])
@on_ranks(1, 2)
def test_it_trains_as_two_layers_do(rank: int, ranks: int, activation: str) -> list[str]:
    found = list[str]()
    for dim, bias in ((0, False), (1, False), (0, True)):
        torch.manual_seed(3)
        plain = [nn.Linear(10, 12, bias=bias) for _ in range(2)]
        ours = [cnn.ColumnParallelLinear.from_linear(each, gather_dim=dim) for each in plain]
        whole = torch.randn(4, 6, 10)

        def serial(x: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
            h = gate(x)
            h = F.silu(h) if activation == "silu_mul" else F.gelu(h, approximate="tanh")
            return h * up(x)

        x = whole.chunk(ranks, dim)[rank].clone().requires_grad_()
        y = cnn.gather_gated(x, *ours, activation=activation)
        want = serial(whole, *plain).chunk(ranks, -1)[rank]
        with torch.no_grad():
            forward = cnn.gather_gated(x, *ours, activation=activation)
        y.square().sum().backward()
        serial(whole, *plain).square().sum().backward()
        pairs = [(y, want), (forward, want)]
        for mine, theirs in zip(ours, plain, strict=True):
            grads = ((p.grad, q.grad) for p, q in zip(mine.parameters(), theirs.parameters(),
                                                      strict=True))  # fmt: skip
            pairs += [(p, q.chunk(ranks)[rank]) for p, q in grads if p is not None]
        off = [relative_error(got, exact.double()) for got, exact in pairs]
        if len(off) != 4 + 2 * bias or max(off) > 1e-5:
            found.append(f"{dim} {bias}: {off}")
    return found


@on_ranks(2)
def test_in_fp8_the_activation_is_behind_the_products(rank: int, ranks: int):
    torch.manual_seed(4)
    layers = nn.ModuleList(cnn.ColumnParallelLinear(32, 64, bias=False) for _ in range(2))
    x = torch.randn(8, 32)
    want = cnn.gather_gated(x, *layers)  # type: ignore[arg-type]
    cnn.to_fp8(layers)
    y = cnn.gather_gated(x, *layers)  # type: ignore[arg-type]
    assert 0 < relative_error(y, want.double()) < 0.1


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int, ranks: int):
    gate, up = (cnn.ColumnParallelLinear(4, 6, bias=False) for _ in range(2))
    wide = cnn.ColumnParallelLinear(4, 8, bias=False)
    x = torch.randn(2, 4)
    for layers, activation, text in (
        ((gate, wide), "silu_mul", "gather_gated: w must be of one shape, gate and up, got"),
        ((gate, up), "silu", "gather_gated: w must be a Tensor with activation='silu', got 2 w"),
        ((gate, up), "swish", "gather_gated: activation must be one of relu, silu,"),
        ((gate, nn.Linear(4, 3)), "silu_mul", "layers must be ColumnParallelLinear, got Linear"),
        ((gate, cnn.ColumnParallelLinear(4, 6, bias=False, plan="graded")), "silu_mul",
         "layers must be of one plan, got auto and graded"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=re.escape(text)):
            cnn.gather_gated(x, *layers, activation=activation)  # type: ignore[arg-type]
