"""The layers under torch's own machinery: compile, checkpointing, autocast, no_grad."""

import warnings

import pytest
import torch
from layer_bodies import POSITIONS, K, Mlp, MlpCase, pair
from on_ranks import on_ranks
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


@pytest.mark.parametrize("how", ["checkpoint", "aot_eager"])
@on_ranks(2)
def test_checkpointing_and_compilation(rank: int, world_size: int, how: str):
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


@on_ranks(2)
def test_autocast(rank: int, world_size: int):
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


@on_ranks(3)
def test_the_gathered_x_is_not_saved(rank: int, world_size: int):
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
    given = x.nbytes + model.gate.weight.nbytes + model.up.weight.nbytes
    assert sum(kept.values()) == given


@on_ranks(2)
def test_without_gradients(rank: int, world_size: int):
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
