"""ExpertParallelMLP(shared=...): experts of all tokens, beside those that a router picks."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor, nn
from torch.nn import functional

import counterpoint as cp
import counterpoint.nn as cnn

FEATURES, HIDDEN, EXPERTS, TOP = 16, 8, 4, 2


class Mlp(nn.Module):
    """SwiGLU, as models have it for their shared experts."""

    def __init__(self, out: int = FEATURES) -> None:
        super().__init__()
        self.gate_up = nn.Linear(FEATURES, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Broken(nn.Module):
    """It ends in an error that is none of ours."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("of the module")


def layers(shared: Any = None, **options: Any) -> tuple[cnn.ExpertParallelMLP, Any]:
    """One with shared experts, and the same without."""
    torch.manual_seed(0)
    shared = Mlp() if shared is None else shared
    torch.manual_seed(1)
    plain = cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS, **options)
    torch.manual_seed(1)
    layer = cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS, shared=shared, **options)
    return layer.to(torch.bfloat16), plain.to(torch.bfloat16)


def gradients(layer: Any, shared: Any, x: Tensor, logits: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and all gradients; by hand where the layer has no shared experts."""
    x, logits = (t.clone().requires_grad_() for t in (x, logits))
    y = layer(x, logits=logits, top_k=TOP)
    y = y if layer.shared is not None else y + shared(x)
    leaves = x, logits, layer.gate_up, layer.down, *shared.parameters()
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@on_ranks(2)
def test_they_are_added_with_the_bits_of_the_sum(
    rank: int, ranks: int, shape: tuple[int, ...]
) -> list[bool]:
    found = list[bool]()
    with by_reference():
        layer, plain = layers()
        shared = layer.shared
        torch.manual_seed(2 + rank)
        for _ in range(3):  # the last of them are known
            given = [torch.randn(*shape, n).bfloat16() for n in (FEATURES, EXPERTS, FEATURES)]
            got, want = (gradients(each, shared, *given) for each in (layer, plain))
            found += [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    assert found and all(found), f"rank {rank} of {ranks}: {found}"
    return []


@on_ranks(2)
def test_they_are_the_layers_own(rank: int, ranks: int) -> list[str]:
    """In its state, when it moves, in copies, and from before there were any."""
    layer, plain = layers()
    names = {"gate_up", "down", "shared.gate_up.weight", "shared.down.weight"}
    assert {*layer.state_dict()} == names and {*plain.state_dict()} == {"gate_up", "down"}
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(copied.shared, Mlp) and copied.shared is not layer.shared
    before = plain.__getstate__()
    del before["_modules"]["shared"]
    old = cnn.ExpertParallelMLP.__new__(cnn.ExpertParallelMLP)
    old.__setstate__(before)
    assert old.shared is None
    return []


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int, ranks: int) -> list[str]:
    """Behind the call over the ranks, which have all made it: the group goes on."""
    x, logits = torch.zeros(4, FEATURES).bfloat16(), torch.zeros(4, EXPERTS)
    with pytest.raises(cp.InputError, match="shared must be a Module"):
        cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS, shared=torch.relu)  # type: ignore[arg-type]
    wrong = r"shared must be a module that makes \(4, 16\) of x, got \(4, 3\)"
    with by_reference():
        fits, _ = layers()
        for module, kind, text in (
            (Mlp(out=3), cp.InputError, wrong), (Broken(), RuntimeError, "of the module")
        ):  # fmt: skip
            layer, _ = layers(module if rank else Mlp())
            with pytest.raises(kind, match=text) if rank else nullcontext():
                layer(x, logits=logits, top_k=TOP)
            assert fits(x, logits=logits, top_k=TOP).shape == x.shape
        with pytest.raises(cp.InputError, match=r"x must be \[\.\.\., 16\]"):
            fits(x[:, :3], logits=logits, top_k=TOP)
    return []
