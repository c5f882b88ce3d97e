"""Layers that multiply in fp8: forward, backward, compile, and how they train."""

import copy
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from scaled_bodies import exact
from torch import Tensor, nn

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.nn.rowwise import LARGEST, by_columns, quantised

K, HIDDEN, POSITIONS = 64, 96, 12  # 2 and 3 ranks: 48 and 32 hidden features on each
LLAMA = Path(__file__).parents[2] / "examples/01_train_llama.py"


class Mlp(nn.Module):
    def __init__(self, dim: int, plan: str) -> None:
        super().__init__()
        column, row = cnn.ColumnParallelLinear, cnn.RowParallelLinear
        self.gate, self.up = (column(K, HIDDEN, gather_dim=dim, plan=plan) for _ in range(2))
        self.down = row(HIDDEN, K, scatter_dim=dim, plan=plan)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = cnn.gather_once(x, self.gate, self.up)
        return self.down(torch.tanh(gate) * up)


def gradients(call, x: Tensor, layer: nn.Module, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = call(x)
    y.backward(dy)
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(g is not None for g in grads)
    return y.detach(), [g for g in grads if g is not None]


def test_rows_are_quantised_by_powers_of_2_and_nothing_overflows():
    t = torch.randn(200, 32) * torch.randn(200, 1).mul(8).exp2()
    t[0], t[1, 0], t[2] = 0, LARGEST, 2.0**-60
    data, scale = quantised(t)
    assert (data.dtype, scale.shape) == (torch.float8_e4m3fn, (200, 1))
    assert torch.equal(scale, scale.log2().round().exp2())
    assert data.float().isfinite().all() and not data[0].float().any()
    largest = t.abs().amax(1)
    assert (data.float().abs().amax(1)[largest > 1e-9] > LARGEST / 4).all(), "bits are wasted"
    # 3 bits of mantissa; below the least normal number, half of the least one
    off = (data.double() * scale.double() - t.double()).abs()
    assert (off <= t.double().abs() / 16 + scale.double() * 2**-10).all()
    assert torch.equal(by_columns(t).scale, scale.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_forward_in_fp8_and_backward_in_bf16(rank: int, ranks: int, dtype: torch.dtype):
    torch.manual_seed(3)
    gate = cnn.ColumnParallelLinear(K, HIDDEN, dtype=dtype)
    down = cnn.RowParallelLinear(HIDDEN, K, dtype=dtype)
    for layer, features, rows in ((gate, K, POSITIONS), (down, HIDDEN // ranks, POSITIONS * ranks)):
        torch.manual_seed(10 + rank)
        x = torch.randn(rows, 2, features).to(dtype)
        out = POSITIONS * ranks if layer is gate else POSITIONS
        dy = torch.randn(out, 2, layer.weight.shape[0]).to(dtype)
        # the same in bf16: gradients are those of it, to the bit
        half = copy.deepcopy(layer).bfloat16()
        _, want = gradients(half, x.bfloat16(), half, dy.bfloat16())
        y, got = gradients(cnn.to_fp8(layer), x, layer, dy)
        assert y.dtype == dtype
        assert [g.dtype for g in got] == [dtype] * 3
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(got[:2], want[:2], strict=True))
        # that of a bias on all ranks is summed in the dtype of the bias
        torch.testing.assert_close(got[2], want[2].to(dtype), rtol=0.02, atol=0.02)
        # against fp64 of what was quantised
        operands = exact(quantised(x.bfloat16())), exact(by_columns(layer.weight.bfloat16()))
        if layer is gate:
            parts = [torch.empty_like(operands[0]) for _ in range(ranks)]
            dist.all_gather(parts, operands[0])
            true = torch.cat(parts) @ operands[1]
        else:
            true = operands[0] @ operands[1]
            dist.all_reduce(true)
            true = true.chunk(ranks)[rank]
        assert layer.bias is not None
        true += layer.bias.detach().double()
        error = (y.double() - true).norm() / true.norm()
        assert error < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("plan", ["auto", "shard_p2p"])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2)
def test_compiled_and_gathered_once(rank: int, ranks: int, dim: int, plan: str):
    torch.manual_seed(5)
    model = cnn.to_fp8(Mlp(dim, plan))
    x, dy = torch.randn(2, 4, 4, K).unbind()
    y, want = gradients(model, x, model, dy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        again, got = gradients(compiled, x, model, dy)
    assert torch.equal(y, again)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    apart = torch.tanh(model.gate(x)) * model.up(x)
    torch.testing.assert_close(model.down(apart), y, rtol=0.05, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int):
    model = Mlp(0, "auto")
    for call, said in (
        (lambda: cnn.to_fp8(model, "tensorwise"), "recipe must be one of '', rowwise, got"),
        (lambda: cnn.to_fp8(nn.Linear(4, 4)),
         "module must be a module with a ColumnParallelLinear or RowParallelLinear, got Linear"),
        (lambda: cnn.to_fp8(3), "module must be a torch.nn.Module"),  # type: ignore[type-var]
        (lambda: cnn.to_fp8(cnn.RowParallelLinear(K, 24)),
         "module must be of layers whose features on a rank are multiples of 16, got a weight"),
    ):  # fmt: skip
        with pytest.raises(cp.InputError, match=re.escape(said)):
            call()
    cnn.to_fp8(model.gate)
    assert "fp8='rowwise'" in repr(model.gate) and "fp8" not in repr(model.up)
    with pytest.raises(cp.InputError, match="layers must be of one fp8, got rowwise and"):
        model(torch.randn(4, K))
    y = cnn.to_fp8(model, "")(torch.randn(4, K))
    assert y.isfinite().all() and not model.gate.fp8
    cnn.to_fp8(model)
    with pytest.raises(cp.InputError, match="scatter_dim must be a dim of x, 0 to"):
        cnn.to_fp8(cnn.RowParallelLinear(HIDDEN, K, scatter_dim=2))(torch.randn(4, HIDDEN // ranks))
    direct = cnn.to_fp8(cnn.ColumnParallelLinear(K, HIDDEN, plan="direct"))
    with pytest.raises(cp.InputError, match="plan must be for operands without scales"):
        direct(torch.randn(4, K))


@pytest.mark.parametrize("steps", [
    100, pytest.param(200, marks=pytest.mark.apart("make test-all"))])  # fmt: skip
@on_ranks(2)
def test_a_llama_in_fp8_follows_bf16(rank: int, ranks: int, steps: int):
    """Text of which half is noise, so that there is a loss to compare at the end."""
    example = runpy.run_path(str(LLAMA))
    sizes = example["Sizes"](128, 8, 4, 128, 1, 48, 16, 4, 2e-3)
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(example["Llama"](sizes, True, "auto").bfloat16())
    cnn.to_fp8(models[1])
    # weights in bf16 would not move by small steps
    masters = [[p.detach().float() for p in model.parameters()] for model in models]
    adam = [torch.optim.AdamW(each, lr=sizes.learning_rate) for each in masters]
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.arange(sizes.positions + 1)[:, None] * 5 + torch.randint(48, (sizes.batch,))
        noise = torch.randint(48, tokens.shape)
        tokens = torch.where(torch.rand(tokens.shape) < 0.5, noise, tokens) % sizes.vocab
        given, target = (t.chunk(ranks)[rank] for t in (tokens[:-1], tokens[1:]))
        for model, master, optimizer, kept in zip(models, masters, adam, losses, strict=True):
            loss = F.cross_entropy(model(given).flatten(0, 1).float(), target.flatten()) / ranks
            loss.backward()
            for p, m in zip(model.parameters(), master, strict=True):
                assert p.grad is not None
                m.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for p, m in zip(model.parameters(), master, strict=True):
                    p.copy_(m)
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            kept.append(whole.item())
    half, ours = (torch.tensor(each) for each in losses)
    assert half[-20:].mean() < 0.9 * half[:5].mean(), "it has learnt nothing"
    assert not torch.equal(half, ours), "it is not in fp8"
    torch.testing.assert_close(ours[-20:].mean(), half[-20:].mean(), rtol=0.01, atol=0)
    torch.testing.assert_close(ours.mean(), half.mean(), rtol=0.01, atol=0)
