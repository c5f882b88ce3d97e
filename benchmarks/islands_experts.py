"""A layer of experts between islands of CPU ranks: bytes on the NIC, and times.

gloo   a row for each expert of a token: its all-to-all there and back, as layers have it today
flat   our routes, each rank an island of its own: a row once to each rank
ours   islands of neighbours: a row once to each island

With max_rows, which no host reads, flat and ours send every token to each island; no gloo has that.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks.namespaces import CALLS, ISLANDS, RATES, Job, run, timed
from benchmarks.rows import Row

HIDDEN = 16
LAYER = (512, 2048, 4, 4)  # tokens, features, and experts of a rank, and experts of a token
# of routes that the device alone knows: their kernels are interpreted, which is slow, and want a
# power of 2 of ranks
DEVICE_ISLANDS, DEVICE_LAYER = ((2, 2),), (24, 4096, 1, 2)


class Layer:
    """Tokens of this rank, their experts, and the weights of its own experts; fp32.

    Args:
        local: experts of a rank.
        top: experts of a token, all different.
    """

    def __init__(self, rank: int, ranks: int, tokens: int, features: int, local: int, top: int):
        generator = torch.Generator().manual_seed(rank)
        self.rank, self.ranks, self.local, self.top = rank, ranks, local, top
        self.every = local * ranks
        draw = torch.rand(tokens, self.every, generator=generator)
        self.experts = draw.argsort(1)[:, :top]
        self.weights = torch.rand(tokens, top, generator=generator).softmax(1)
        self.x = torch.randn(tokens, features, generator=generator)
        self.up = torch.randn(local, features, HIDDEN, generator=generator) / features**0.5
        self.down = torch.randn(local, HIDDEN, features, generator=generator) / HIDDEN**0.5

    def by_routes(self, plan: str) -> Tensor:
        """Ours."""
        routes = cp.exchange_routes(self.experts, self.weights, num_experts=self.every)
        h = cp.all_to_all_matmul(self.x, self.up, counts=routes, plan=plan).relu_()
        return cp.matmul_all_to_all(h, self.down, counts=routes, plan=plan)

    def by_routes_of_device(self) -> Tensor:
        """Ours in fp16, with max_rows: all tokens go to each island."""
        x, up, down = self.x.half(), self.up.half(), self.down.half()
        room = self.ranks * len(x) * self.top
        given = {"num_experts": self.every, "max_rows": room}
        routes = cp.exchange_routes(self.experts, self.weights, **given)
        h = cp.all_to_all_matmul(x, up, counts=routes, plan="islands").relu_()
        return cp.matmul_all_to_all(h, down, counts=routes, plan="islands")

    def by_gloo(self) -> Tensor:
        """A row for each expert of a token."""
        ids, order = self.experts.flatten().sort(stable=True)
        own = torch.bincount(ids, minlength=self.every)
        tables = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(tables, own)
        counts = torch.stack(tables)
        gives = own.view(self.ranks, -1).sum(1).tolist()
        mine = counts[:, self.rank * self.local : (self.rank + 1) * self.local]
        gets = mine.sum(1).tolist()
        rows = self.x.new_empty(sum(gets), self.x.shape[1])
        dist.all_to_all_single(rows, self.x[order // self.top], gets, gives)
        expert = torch.arange(self.local).repeat(self.ranks).repeat_interleave(mine.flatten())
        for e in range(self.local):
            here = (expert == e).nonzero().flatten()
            rows[here] = (rows[here] @ self.up[e]).relu_() @ self.down[e]
        back = self.x.new_empty(len(order), self.x.shape[1])
        dist.all_to_all_single(back, rows, gives, gets)
        each = torch.empty_like(back)
        each[order] = back
        return torch.bmm(self.weights[:, None], each.view(-1, self.top, self.x.shape[1]))[:, 0]

    def exact(self) -> Tensor:
        """In fp64, of all experts' weights."""
        ups, downs = (
            [torch.empty_like(w) for _ in range(self.ranks)] for w in (self.up, self.down)
        )
        dist.all_gather(ups, self.up)
        dist.all_gather(downs, self.down)
        up, down, total = torch.cat(ups).double(), torch.cat(downs).double(), self.x.double() * 0
        for e in range(self.every):
            tokens, places = (self.experts == e).nonzero(as_tuple=True)
            each = (self.x[tokens].double() @ up[e]).relu_() @ down[e]
            total.index_add_(0, tokens, each * self.weights[tokens, places, None])
        return total


def layer(
    rank: int, ranks: int, size: int, shape: tuple[int, int, int, int], how: str, flat: bool
) -> dict[str, Any]:
    """A forward of a layer, its routing included, checked against fp64.

    Args:
        size: ranks of an island.
        shape: tokens and features of a rank, its experts, experts of a token.
        how: "gloo", "max_rows", or the spec of a plan.
        flat: of our plan, each rank is an island of its own.

    Returns:
        Seconds; bytes that this island's NIC sent; and how many the rule says.
    """
    made = Layer(rank, ranks, *shape)
    ways = {"gloo": made.by_gloo, "max_rows": made.by_routes_of_device}
    call, off = ways.get(how, lambda: made.by_routes(how)), 1e-2 if how == "max_rows" else 1e-4
    torch.testing.assert_close(call().double(), made.exact(), rtol=off, atol=off)
    seconds, sent = timed(call, 1 if how == "max_rows" else CALLS)
    return {"seconds": seconds, "sent": sent, "rule": rule(made, size, how, flat)}


def rule(made: Layer, size: int, how: str, flat: bool) -> int:
    """Bytes that this island sends by the rule: its rows there, with their lists, others' back.

    With max_rows, see `exchange_routes`: each of its tokens to each other island, and one back for
    each of theirs; the lists, which all ranks gather, are left out.
    """
    unit = 1 if flat or how == "gloo" else size
    if how == "max_rows":
        each = 2 * made.x.numel() * 2  # there and back, of fp16
        return (made.ranks - size) // unit * size * each
    ids, far = made.experts // made.local, torch.zeros(1)
    for first in range(0, made.ranks, unit):
        if first // size == made.rank // size:
            continue
        there = (ids >= first) & (ids < first + unit)
        far[0] += there.sum() if how == "gloo" else there.any(1).sum()
    everyone = [torch.empty_like(far) for _ in range(made.ranks)]
    dist.all_gather(everyone, far)
    rows = [int(each[0]) for each in everyone]
    island = made.rank // size * size
    here = sum(rows[island : island + size])
    features, lists = made.x.shape[1], 0 if how == "gloo" else 2 * made.top
    return 4 * (here * (features + lists) + (sum(rows) - here) * features)


def rows() -> Iterator[Row]:
    """A row for a layer of experts, each way and network; where the device knows routes, of bytes.

    Times of these would be the interpreter's.
    """
    for where in product(ISLANDS, RATES, ("gloo", "flat", "ours")):
        found = run(job_of(*where))[0]
        yield {**_about(*where), "op": "experts", "shape": [*LAYER], "median_s": found["seconds"],
               "sent": found["sent"], "rule": found["rule"]}  # fmt: skip
    for where in product(DEVICE_ISLANDS, RATES[-1:], ("flat", "ours")):
        found = run(job_of(*where, device=True))[0]
        yield {**_about(*where), "op": "experts, max_rows", "shape": [*DEVICE_LAYER],
               "sent": found["sent"], "rule": found["rule"]}  # fmt: skip


def _about(places: tuple[int, int], rate: str, way: str) -> Row:
    return {"table": "islands", "arm": way, "islands": places[0], "size": places[1], "rate": rate}


def job_of(places: tuple[int, int], rate: str, way: str, *, device: bool = False) -> Job:
    """A layer on ranks of islands.

    Args:
        places: islands, and ranks of each.
        rate: of a NIC.
        way: "gloo", "flat" or "ours".
        device: whether the device alone knows the routes: by kernels, interpreted.
    """
    (islands, size), flat = places, way == "flat"
    how = "max_rows" if device else "gloo" if way == "gloo" else "islands"
    env = {"TRITON_INTERPRET": "1"} if device else {}
    args = (size, DEVICE_LAYER if device else LAYER, how, flat)
    return Job("benchmarks.islands_experts:layer", islands=islands, size=size, rate=rate,
               args=args, flat=flat, env=env, timeout_s=300.0)  # fmt: skip
