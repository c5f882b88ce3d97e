"""A layer of experts beside the dense one that it stands for: all experts in one process."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint.nn as cnn


class Plain(nn.Module):
    """All experts here, one after the other: drawn as ExpertParallelMLP draws them."""

    def __init__(self, features: int, hidden: int, experts: int) -> None:
        super().__init__()
        drawn = [
            torch.empty(shape).uniform_(-1, 1) * shape[1] ** -0.5
            for _ in range(experts)
            for shape in ((2 * hidden, features), (features, hidden))
        ]
        self.gate_up = nn.Parameter(torch.stack(drawn[::2]))
        self.down = nn.Parameter(torch.stack(drawn[1::2]))

    def forward(
        self, x: Tensor, experts: Any = None, weights: Any = None, *, logits: Any = None,
        top_k: int = 1, renormalize: bool = True,
    ) -> Tensor:  # fmt: skip
        if logits is not None:  # as models write it: softmax, then topk
            wide = logits if logits.dtype == torch.float64 else logits.float()
            weights, experts = wide.softmax(-1).topk(top_k)
            weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
        gate, up = torch.einsum("...f,ehf->...eh", x, self.gate_up).chunk(2, -1)
        y = torch.einsum("...eh,efh->...ef", F.silu(gate) * up, self.down)
        chosen = torch.gather(y, -2, experts[..., None].expand(*experts.shape, x.shape[-1]).long())
        return (weights.to(x.dtype)[..., None] * chosen).sum(-2)


def pair(*sizes: int, dtype: torch.dtype, **options: Any) -> tuple[cnn.ExpertParallelMLP, Plain]:
    """Ours and the dense layer of equal parameters: features, hidden and all experts."""
    torch.manual_seed(0)
    layer = cnn.ExpertParallelMLP(*sizes, **options).to(dtype)
    torch.manual_seed(0)
    return layer, Plain(*sizes).to(dtype)


def trained(model: Any, x: Tensor, dy: Tensor, **route: Any) -> dict[str, Tensor]:
    """The result, and gradients: of x, of logits or weights, of parameters."""
    leaves = {"x": x, **route}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()
              if isinstance(t, Tensor) and t.is_floating_point()}  # fmt: skip
    y = model(**{**route, **leaves})
    leaves |= dict(model.named_parameters())
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def wrong_mlp(
    rank: int, ranks: int, layer: Any, plain: Plain, tokens: list[int], *,
    again: bool = False, norm: float = 2, **given: Any,
) -> list[str]:  # fmt: skip
    """What of a layer is further from fp64 than twice the dense one in the same dtype.

    Args:
        tokens: of each rank.
        again: a second run has the same bits.
        norm: of what is too far.
        given: x, dy and the route, of the tokens of all ranks.
    """
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    own = {name: v[mine] if isinstance(v, Tensor) else v for name, v in given.items()}
    got, dtype = trained(layer, **own), given["x"].dtype
    near, want = (trained(copy.deepcopy(plain).to(d), **as_dtype(given, d))
                  for d in (dtype, torch.float64))  # fmt: skip
    found = list[str]()
    if again:
        second = trained(layer, **own)
        found += [f"{name} of two runs" for name in got if not torch.equal(got[name], second[name])]
    local, of_experts = len(plain.down) // ranks, ("dgate_up", "ddown")
    for name, value in got.items():
        part = slice(rank * local, (rank + 1) * local) if name in of_experts else mine
        text = too_far(value, near[name][part], want[name][part], norm)
        found += [f"{name} {text}"] if text else []
    return found


def as_dtype(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for name, v in given.items()}  # fmt: skip


def too_far(got: Tensor, near: Tensor, want: Tensor, norm: float) -> str:
    """How far in that norm, if it is more than twice what `near` is off."""
    if got.shape != want.shape:
        return f"is {tuple(got.shape)}"
    size, ours, plainly = (
        float(torch.linalg.vector_norm(t.detach().double().flatten(), norm)) if t.numel() else 0.0
        for t in (want, got.double() - want, near.double() - want)
    )
    bound = 2 * plainly + 4 * torch.finfo(got.dtype).eps * size
    return "" if ours <= bound else f"{ours:.1e} over {bound:.1e}"
