"""Sets of soak.py whose calls are layers by routes: exchange of routes, dispatch, combine.

Each set has other routes: even ones, random ones, those of few busy experts, all to one rank. There
is room for all rows; or for three quarters of the mean, and the rows above are dropped; or for a
quarter more than the mean, and some sets overflow: all that they give is NaN, on all ranks, and the
sets behind them have to be right."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Bench
from counterpoint.group.workspace import workspace_of
from counterpoint.run.fused import fused_memory

LOCAL, TOP = 4, 2  # experts of a rank, and of a token
SEEDS = 3  # of each kind of routes that is drawn
ROOMS = {"": 0.0, "drop": 0.75, "overflows": 1.25}  # of the mean; 0: for all that can come
ROUTED = {f"layer by routes{', ' * bool(room)}{room}": room for room in ROOMS}


class Set(NamedTuple):
    """One set of operands: the call, and what it has to give in fp64."""

    call: Callable[[], Tensor]
    exact: Tensor
    limit: float
    overflows: bool = False  # what it gives is NaN


def routes_of(kind: str, tokens: int, ranks: int, draw: torch.Generator) -> Tensor:
    """Experts of a rank's tokens, int64 [tokens, TOP]: those of a token differ.

    Args:
        kind: "even", "random", "busy" or "one rank".
        tokens: of the rank.
        ranks: that have LOCAL experts each.
        draw: on the CPU, another one for each rank.
    """
    every = ranks * LOCAL
    if kind == "even":
        return torch.arange(tokens * TOP).view(-1, TOP) % every
    if kind == "one rank":
        return every - LOCAL + torch.rand(tokens, LOCAL, generator=draw).argsort(1)[:, :TOP]
    share = torch.ones(every) if kind == "random" else torch.arange(1, every + 1) ** -1.5
    return torch.multinomial(share.expand(tokens, -1), TOP, generator=draw)


def routed_sets(op: str, bench: Bench, limit: float) -> list[Set]:
    """The sets of one kind of room.

    Args:
        op: a key of ROUTED.
        bench: this rank.
        limit: error of a result.
    """
    tokens, wide, seeds = (64, 256, SEEDS) if bench.on_gpu else (8, 16, 1)
    dtype = torch.bfloat16 if bench.on_gpu else torch.float16
    up, down = (bench.normal(LOCAL, wide, wide, scale=wide**-0.5, dtype=dtype) for _ in range(2))
    capacity = "drop" if ROUTED[op] == "drop" else "error"
    most = bench.ranks * tokens * TOP
    room = int(ROOMS[ROUTED[op]] * tokens * TOP) or most
    sets: list[Set] = []
    for kind in ("even", *("random", "busy") * seeds, "one rank"):
        draw = torch.Generator().manual_seed(1000 * len(sets) + bench.rank)
        experts = routes_of(kind, tokens, bench.ranks, draw).to(bench.device)
        weights = torch.rand(tokens, TOP, device=bench.device, generator=bench.draw)
        x = bench.normal(tokens, wide, dtype=dtype)

        def call(x: Tensor = x, experts: Tensor = experts, weights: Tensor = weights) -> Tensor:
            routes = cp.exchange_routes(
                experts, weights, num_experts=bench.ranks * LOCAL, max_rows=room,
                capacity=capacity, group=bench.group,
            )  # fmt: skip
            h = cp.all_to_all_matmul(x, up, counts=routes, group=bench.group)
            return cp.matmul_all_to_all(h, down, counts=routes, group=bench.group)

        owners = bench.whole(experts) // LOCAL
        over = int(owners.flatten().bincount(minlength=bench.ranks).max()) > room
        kept = kept_of(owners, bench.whole(weights), room)
        own = slice(bench.rank * tokens, (bench.rank + 1) * tokens)
        ups, downs = (bench.whole(w).double() for w in (up, down))
        each = torch.einsum("tk,tjkh->tjh", x.double(), ups[experts])
        each = torch.einsum("tjh,tjhn->tjn", each, downs[experts])
        exact = (each * (weights * kept[own])[..., None]).sum(1)
        sets.append(Set(call, exact, limit, over and capacity == "error"))
    return sets


def kept_of(owners: Tensor, weights: Tensor, room: int) -> Tensor:
    """Which entries of all ranks' tokens stay: for each rank the `room` of greatest weights.

    Args:
        owners: int64 [tokens of all ranks, TOP]: ranks of the experts.
        weights: [tokens of all ranks, TOP].
        room: rows of a rank.
    """
    kept = torch.ones_like(owners, dtype=torch.bool).flatten()
    for rank in owners.unique().tolist():
        at = (owners.flatten() == rank).nonzero().squeeze(1)
        order = weights.flatten()[at].sort(descending=True, stable=True).indices
        kept[at[order[room:]]] = False
    return kept.view(owners.shape)


def forgiven(bench: Bench) -> bool:
    """Whether an overflow was told since the last time; it does not stop the group any more."""
    over = fused_memory(workspace_of(bench.group, bench.device)).over
    told = bool(over[0])
    over.zero_()
    return told
