"""Experts of tokens, and what a layer of them is by definition: for tests of experts by routes."""

from typing import Any

import torch
from torch import Tensor

import counterpoint as cp
from counterpoint.runtime.device_routes import Found, tell_into
from counterpoint.runtime.routes import NONE

LOCAL, TOP = 2, 3  # experts of a rank, and of a token
CHOICES = ("uniform", "skewed", "first island", "last rank")
KINDS = ("drawn", "skewed", "one expert", "last rank", "twice", "fewer")  # of `named`


def chosen(name: str, rank: int, ranks: int, tokens: int, local: int = LOCAL) -> Tensor:
    """Experts of each token, [tokens, TOP].

    Args:
        name: one of CHOICES, or "zipf".
        local: experts of a rank.
    """
    generator = torch.Generator().manual_seed(rank)
    experts = ranks * local
    if name == "uniform":
        return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :TOP]
    if name == "zipf":
        share = (1 / torch.arange(1, experts + 1)).expand(max(tokens, 1), -1)
        return torch.multinomial(share, TOP, generator=generator)[:tokens]
    if name == "skewed":  # some experts have most rows, and tokens the same one twice
        draw = torch.rand(tokens, TOP, generator=generator) ** 4
        return (draw * experts).long()
    first = {"first island": 0, "last rank": experts - local}[name]
    few = torch.randint(local, (tokens, TOP), generator=generator)
    return first + few


def layer(
    x: Tensor, up: Tensor, down: Tensor, routes: cp.Routes, plan: str, group: Any = None
) -> Tensor:  # fmt: skip
    """Ours."""
    h = cp.all_to_all_matmul(x, up, counts=routes, plan=plan, group=group)
    return cp.matmul_all_to_all(torch.tanh(h), down, counts=routes, plan=plan, group=group)


def by_torch(x: Tensor, ups: Tensor, downs: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The same of one rank's tokens, with the experts of all."""
    each = torch.einsum("tk,tjkh->tjh", x, ups[experts]).tanh()
    return (torch.einsum("tjh,tjhn->tjn", each, downs[experts]) * weights[..., None]).sum(1)


def weights_by_row(
    rank: int, ranks: int, lists: list[Tensor], weights: list[Tensor]
) -> list[float]:  # fmt: skip
    """Those of a rank's rows: by expert, then source, then first expert here, then token.

    Args:
        lists, weights: experts of all ranks' tokens, and their weights.
    """
    found: list[float] = []
    for e in range(rank * LOCAL, (rank + 1) * LOCAL):
        for experts, each in zip(lists, weights, strict=True):
            here = torch.where(experts // LOCAL == rank, experts, ranks * LOCAL)
            order = here.amin(1).sort(stable=True).indices
            found += each[order][experts[order] == e].tolist()
    return found


def named(kind: str, tokens: int, experts: int, top: int, ranks: int) -> Tensor:
    """Experts of all tokens; but for "drawn", a token may have one of them several times.

    Of "fewer" some tokens have some experts less, and some none.
    """
    if kind == "drawn":
        return torch.rand(tokens, experts).argsort(1)[:, :top]
    if kind == "fewer":
        drawn = torch.rand(tokens, experts).argsort(1)[:, :top]
        drawn[torch.rand(tokens, top) < 0.3] = NONE
        drawn[torch.rand(tokens) < 0.3] = NONE
        return drawn
    if kind == "skewed":
        return (torch.rand(tokens, top) ** 4 * experts).long()
    if kind == "one expert":
        return torch.full((tokens, top), experts // 2)
    if kind == "last rank":
        return experts - 1 - torch.randint(experts // ranks, (tokens, top))
    drawn = torch.randint(experts, (tokens, top))
    drawn[:, -1] = drawn[:, 0]
    return drawn


def differ(got: Found, want: Found) -> list[str]:
    """What is not to the bit."""
    bits = (got.weights.view(torch.int32), want.weights.view(torch.int32))
    pairs = {"weights": bits, "counts": (got.counts, want.counts)}
    pairs |= {"firsts": (got.firsts, want.firsts), "lists": (got.lists, want.lists)}
    return [name for name, pair in pairs.items()
            if pair[0].dtype != pair[1].dtype or not torch.equal(*pair)]  # fmt: skip


def told_of(ids: Tensor, experts: int) -> Tensor:
    """What all ranks tell, of random weights."""
    told = torch.full((len(ids), 2 * ids.shape[1]), -7, dtype=torch.int32)
    tell_into(told, ids, torch.randn(ids.shape), experts)
    return told
