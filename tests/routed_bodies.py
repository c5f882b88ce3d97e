"""Experts of tokens, and what a layer of them is by definition: for tests of experts by routes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import counterpoint as cp
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.on_device import Found
from counterpoint.experts.routes.tell import tell_into
from counterpoint.measure.timing import relative_error

LOCAL, TOP = 2, 3  # experts of a rank, and of a token
K, HIDDEN, N = 8, 24, 16  # of `wrong_layer`: what kernels take
ROOM = 14  # rows of a rank, where others are dropped
CHOICES = ("uniform", "skewed", "first island", "last rank")
KINDS = ("drawn", "skewed", "one expert", "last rank", "twice", "fewer")  # of `named`


def chosen(name: str, rank: int, ranks: int, tokens: int, local: int = LOCAL) -> Tensor:
    """Experts of each token of a rank, [tokens, TOP]; `local` experts of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return named(name, tokens, ranks * local, TOP, ranks, generator)


def named(
    kind: str, tokens: int, experts: int, top: int, ranks: int,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Experts of all tokens, none twice for a token of the kinds "uniform", "drawn" and "zipf".

    Of "fewer" some tokens have some experts less, and some none.
    """
    shape, some, local = (tokens, top), {"generator": generator}, experts // ranks
    different = torch.rand(tokens, experts, **some).argsort(1)[:, :top]
    match kind:
        case "zipf":
            share = (1 / torch.arange(1, experts + 1)).expand(max(tokens, 1), -1)
            return torch.multinomial(share, top, **some)[:tokens]
        case "fewer":
            different[torch.rand(shape, **some) < 0.3] = NONE
            different[torch.rand(tokens, **some) < 0.3] = NONE
        case "skewed":  # some experts have most rows, and tokens the same one twice
            return (torch.rand(shape, **some) ** 4 * experts).long()
        case "one expert":
            return torch.full(shape, experts // 2)
        case "first island" | "last rank":
            few = torch.randint(local, shape, **some)
            return few if kind == "first island" else experts - 1 - few
        case "twice":
            drawn = torch.randint(experts, shape, **some)
            drawn[:, -1] = drawn[:, 0]
            return drawn
    return different


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


def kept(lists: list[Tensor], weights: list[Tensor], experts: int, room: int) -> list[Tensor]:
    """Which of the experts of each rank's tokens are kept: entry by entry, as a person would."""
    ranks = len(lists)
    found = [torch.ones(each.shape, dtype=torch.bool) for each in lists]
    for d in range(ranks):
        rows = [
            (-float(weights[s][t, j]), s, t, j)
            for s, each in enumerate(lists)
            for t, row in enumerate(each.tolist())
            for j, e in enumerate(row)
            if e // (experts // ranks) == d
        ]
        for _, s, t, j in sorted(rows)[room:]:
            found[s][t, j] = False
    return found


class Given(NamedTuple):
    """What one rank brings. Any rank can make it."""

    x: Tensor
    up: Tensor
    down: Tensor
    weights: Tensor
    experts: Tensor
    dy: Tensor


def given(name: str, rank: int, ranks: int, tokens: int, dtype: torch.dtype) -> Given:
    generator = torch.Generator().manual_seed(1000 + rank)

    def drawn(*shape: int, by: float = 1) -> Tensor:
        return (torch.randn(shape, generator=generator) / by).to(dtype)

    x, up, down = drawn(tokens, K), drawn(LOCAL, K, HIDDEN, by=3), drawn(LOCAL, HIDDEN, N, by=5)
    weights = torch.randn(tokens, TOP, generator=generator).softmax(1)
    return Given(x, up, down, weights, chosen(name, rank, ranks, tokens), drawn(tokens, N))


def dense(every: list[Given], stay: list[Tensor], rank: int) -> list[Tensor]:
    """By torch in fp64: the result of a rank, and its gradients of x, up, down and weights.

    Args:
        stay: experts of tokens that are not dropped.
    """
    leaves = [[t.double().requires_grad_() for t in each[:4]] for each in every]
    ups, downs = (torch.cat([each[i] for each in leaves]) for i in (1, 2))
    ys = [by_torch(x, ups, downs, each.experts, weights * there)
          for (x, _, _, weights), each, there in zip(leaves, every, stay, strict=True)]  # fmt: skip
    torch.autograd.backward(ys, [each.dy.double() for each in every])
    return [ys[rank].detach(), *(t.grad for t in leaves[rank])]  # type: ignore[list-item]


def wrong_layer(
    rank: int, ranks: int, name: str, tokens: list[int], plans: tuple[str, ...],
    dtype: torch.dtype, known: str,
) -> list[str]:  # fmt: skip
    """What of a layer, forward and backward, is further from fp64 than roundings take it.

    Args:
        tokens: of each rank.
        known: how many rows come: to the "host"; to a device, whose memory has "room" for all, or
            for some, and others are dropped: "drop".
    """
    every = [given(name, r, ranks, tokens[r], dtype) for r in range(ranks)]
    mine, num = every[rank], ranks * LOCAL
    lists = [each.experts for each in every]
    stay = [torch.ones_like(each, dtype=torch.bool) for each in lists]
    room = {"host": None, "room": sum(tokens) * TOP + 3, "drop": ROOM}[known]
    how = {"max_rows": room, "capacity": "drop" if known == "drop" else "error"}
    if known == "drop":
        stay = kept(lists, [each.weights for each in every], num, ROOM)
    lost = [sum(int((~s & (e // LOCAL == d)).sum()) for s, e in zip(stay, lists, strict=True))
            for d in range(ranks)]  # fmt: skip
    wants, found = dense(every, stay, rank), list[str]()

    def run(plan: str) -> tuple[cp.Routes, list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in mine[:4]]
        x, up, down, weights = leaves
        routes = cp.exchange_routes(mine.experts, weights, num_experts=num, **how)  # type: ignore[arg-type]
        y = layer(x, up, down, routes, plan)
        return routes, [y.detach(), *torch.autograd.grad(y, leaves, mine.dy)]

    for plan in plans:
        routes, gots = run(plan)
        where = f"{plan} {dtype} {tokens}"
        if room and (routes.weights.shape != (room,) or routes.top_k != TOP):
            found.append(f"{where}: routes of {routes.weights.shape}, {routes.top_k} of a token")
        for what, got, want in zip(("y", "dx", "dup", "ddown", "dw"), gots, wants, strict=True):
            if got.shape != want.shape or too_far(got, want, dtype):
                found.append(f"{where}: {what}")
        if known == "drop":
            if routes.dropped is None or routes.dropped.tolist() != lost or not sum(lost):
                found.append(f"{where}: {routes.dropped} are dropped, and not {lost}")
            if gots[4][~stay[rank]].any():
                found.append(f"{where}: gradients of weights that are dropped")
            if not all(torch.equal(*pair) for pair in zip(gots, run(plan)[1], strict=True)):
                found.append(f"{where}: bits of two runs")
    return found


def too_far(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    if not want.any():
        return bool(got.any())
    if dtype == torch.float32 and not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5):
        return True
    return not relative_error(got, want) <= 8 * torch.finfo(dtype).eps


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
