"""The layers under torch's own machinery: compile, checkpointing, autocast, no_grad."""

import warnings

import pytest
import torch
from layer_bodies import POSITIONS, K, Mlp, MlpCase, pair
from rankpool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import counterpoint.nn as cnn

CASE = MlpCase(plan="graded")


def gradients_of(model: Mlp, call, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = call(x)
    y.float().square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    assert all(g is not None for g in grads)
    return [y.detach(), *(g for g in grads if g is not None)]


def same_as_eager(rank: int, world_size: int, how: str) -> None:
    x = CASE.part(torch.randn(POSITIONS, K), None)
    model, _ = pair(CASE)
    want = gradients_of(model, model, x)
    model, _ = pair(CASE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
        if how == "checkpoint":
            got = gradients_of(model, lambda t: checkpoint(model, t, use_reentrant=False), x)
        else:
            compiled = torch.compile(model, fullgraph=True, backend=how)
            got = gradients_of(model, compiled, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", ["checkpoint", "aot_eager"])
def test_checkpointing_and_compilation(pool: RankPool, how: str):
    pool.run(same_as_eager, 2, how)


def under_autocast(rank: int, world_size: int) -> None:
    """In bf16, with gradients of the weights' own dtype; against the serial model likewise."""
    ours, plain = pair(CASE)
    whole = torch.randn(POSITIONS, K)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = ours(CASE.part(whole, None)), plain(whole)
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, CASE.part(want, None), rtol=0.05, atol=0.02)
    y.float().sum().backward()
    want.float().sum().backward()
    for p in ours.parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
    torch.testing.assert_close(ours.down.bias.grad, plain.down.bias.grad)


def test_autocast(pool: RankPool):
    pool.run(under_autocast, 2)


def saved_bytes(rank: int, world_size: int) -> tuple[int, int]:
    """What autograd keeps of a gather for two layers; their weights, and this rank's x."""
    model, _ = pair(CASE)
    x = CASE.part(torch.randn(POSITIONS, K), None).clone().requires_grad_()
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ys = cnn.gather_once(x, model.gate, model.up)
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return sum(kept.values()), x.nbytes + model.gate.weight.nbytes + model.up.weight.nbytes


def test_the_gathered_x_is_not_saved(pool: RankPool):
    for kept, given in pool.run(saved_bytes, 3):
        assert kept == given


def without_gradients(rank: int, world_size: int) -> None:
    ours, plain = pair(CASE)
    whole = torch.randn(POSITIONS, K)
    with torch.inference_mode():
        y = ours(CASE.part(whole, None))
        torch.testing.assert_close(y, CASE.part(plain(whole), None))
    # frozen, as a base model beside adapters: only x has a gradient
    ours.requires_grad_(False)
    x = CASE.part(whole, None).clone().requires_grad_()
    ours(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in ours.parameters())


def test_without_gradients(pool: RankPool):
    pool.run(without_gradients, 2)
