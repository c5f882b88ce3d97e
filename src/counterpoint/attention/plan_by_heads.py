"""The gradients of an attention, some heads at a time: keys and values of all ranks come together.

Heads share nothing. So the gradients of some of them are one call of the library, over the keys of
all ranks: nothing of dq is added up afterwards, and what a call costs beside its matmuls is paid
once for each head, not once for each peer. The keys of the next heads arrive meanwhile, and what
the last ones give for dk and dv goes back to its owner, who sums it.

Slots are as many as are in flight, one at work and one on its way, and are used in turn. So the
memory that a call takes is that of few heads, whatever the ranks are.
"""

from collections.abc import Iterator
from itertools import pairwise, product

from counterpoint.attention.plan_all_gather_attention import IN_FLIGHT
from counterpoint.machine import Machine
from counterpoint.plan.names import LANES, OWN
from counterpoint.plan.operation import Options
from counterpoint.plan.steps import ME, Buffer, Peer, Plan, Region, Signal, Step
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Order

# what is told to a peer, for each part of the heads and each distance
ARRIVED, FREE, BACK, SUMMED = range(4)
PARTS = 8  # of the heads, where a spec names no number


class Heads:
    """The heads in parts, and where each lies.

    Args:
        order: of the peers.
        parts: as many as there are key heads, if those are fewer.
    """

    def __init__(self, p: Problem, order: Order, parts: int) -> None:
        self.p, self.order = p, order
        heads = p.k // max(p.head_dim, 1)
        self.count = max(1, min(parts, heads))
        firsts = [heads * i // self.count for i in range(self.count + 1)]
        self.of_part = list(pairwise(firsts))  # the key heads of each
        self.width = p.head_dim * max(stop - start for start, stop in self.of_part)
        self.slots = range(min(self.count, IN_FLIGHT))

    @property
    def buffers(self) -> Iterator[Buffer]:
        """Keys and values of all ranks, what they are given, and what comes back, of each slot."""
        shape, dtype = (self.p.m, self.width), self.p.dtype
        for x, i in product("kv", self.slots):
            yield Buffer(f"{x}_slot{i}", shape, dtype, "symmetric", split=True)
            yield Buffer(f"d{x}_part{i}", shape, dtype, "scratch", split=True)
            yield Buffer(f"d{x}_back{i}", shape, dtype, "symmetric", split=True, holds="slots")

    def own(self, name: str, part: int) -> Region:
        """The user's columns."""
        start, stop = self.of_part[part]
        dim, grouped = self.p.head_dim, self.p.n // max(self.p.k, 1)
        each = {"k": dim, "v": dim, "dk": dim, "dv": dim, "lse": grouped}.get(name, dim * grouped)
        return Region(name, cols=(start * each, stop * each))

    def slot(self, name: str, part: int, at: Peer = ME, shards: tuple[Peer, ...] = ()) -> Region:
        """Where it lies between ranks."""
        start, stop = self.of_part[part]
        cols = (0, (stop - start) * self.p.head_dim)
        return Region(f"{name}{part % IN_FLIGHT}", at, shards, cols=cols)

    def number(self, told: int, part: int, d: int) -> int:
        """Of a signal."""
        distances = self.order.ranks - 1
        return self.order.ranks + (told * self.count + part) * distances + d - 1

    def to(self, told: int, part: int, d: int) -> Signal:
        """Between me and the rank that my keys go to at distance d, who then has them."""
        return self.order.post(self.number(told, part, d), d)

    def source(self, told: int, part: int, d: int) -> Signal:
        """The same between me and the rank whose keys come to me."""
        return self.order.wait(self.number(told, part, d), d)


def by_heads(p: Problem, options: Options, machine: Machine) -> Plan:
    """Each part of the heads by the keys of all ranks."""
    order = Order(options.peers, p.ranks)
    heads = Heads(p, order, options.chunks or PARTS)
    parts, steps = range(heads.count), [order.barrier("open", "signal", 0)]
    for part in parts[:IN_FLIGHT]:
        steps += _gather(heads, part)
    for part in parts:
        steps += [_gradient(heads, part), *_give_back(heads, part)]
        if part + IN_FLIGHT in parts:  # into the slots that this part leaves
            steps += _gather(heads, part + IN_FLIGHT)
        steps += _sum(heads, part - 1) if part else ()
    steps += _sum(heads, heads.count - 1)
    tail = f" chunks={options.chunks}" if options.chunks else ""
    buffers = *p.operation.operands(p), *heads.buffers
    variant = f"{options.peers}{tail}"
    return Plan(p, "by_heads", variant, options.peers, buffers, LANES, tuple(steps))


def _gather(heads: Heads, part: int) -> Iterator[Step]:
    """My keys and values into my own slot and those of all peers."""
    sources = tuple(heads.own(x, part) for x in "kv")
    again = part >= IN_FLIGHT
    # the lane gave back what the heads before in the same slots had made: they have been used
    after = () if part else ("open",)
    for d in (0, *heads.order.distances):
        targets = tuple(heads.slot(f"{x}_slot", part, heads.order.to(d) if d else ME, OWN)
                        for x in "kv")  # fmt: skip
        waits = (heads.to(FREE, part, d),) if again and d else ()
        posts = (heads.to(ARRIVED, part, d),) if d else ()
        yield Step(f"push_{part}_{d}", "copy", "copy", sources, targets, () if d else after,
                   waits, posts)  # fmt: skip


def _gradient(heads: Heads, part: int) -> Step:
    """By the keys of all ranks, once they are there.

    My own came on the lane behind what was given back before: that place is free, too.
    """
    given = (heads.slot(f"{x}_slot", part) for x in "kv")
    reads = heads.own("q", part), *given, *(heads.own(x, part) for x in ("dy", "y", "lse"))
    made = (heads.slot(f"d{x}_part", part) for x in "kv")
    distances, later = heads.order.distances, part + IN_FLIGHT
    posts = (heads.source(FREE, later, d) for d in distances if later < heads.count)
    return Step(
        f"gradient_{part}", "compute", "attention_backward", reads,
        (heads.own("dq", part), *made), (f"push_{part}_0",),
        tuple(heads.source(ARRIVED, part, d) for d in distances), tuple(posts),
    )  # fmt: skip


def _give_back(heads: Heads, part: int) -> Iterator[Step]:
    """To each peer what its keys were given."""
    for d in heads.order.distances:
        peer = heads.order.source(d)
        given = tuple(heads.slot(f"d{x}_part", part, shards=(peer,)) for x in "kv")
        kept = tuple(heads.slot(f"d{x}_back", part, peer, OWN) for x in "kv")
        after = (f"gradient_{part}",) if d == 1 else ()  # the lane orders those behind
        waits = (heads.source(SUMMED, part, d),) if part >= IN_FLIGHT else ()
        posts = (heads.source(BACK, part, d),)
        yield Step(f"return_{part}_{d}", "copy", "copy", given, kept, after, waits, posts)


def _sum(heads: Heads, part: int) -> Iterator[Step]:
    """dk and dv of own keys, by the queries of all ranks."""
    distances, later = heads.order.distances, part + IN_FLIGHT
    waits = tuple(heads.to(BACK, part, d) for d in distances)
    for x in "kv":
        back = (heads.slot(f"d{x}_back", part, shards=(heads.order.to(d),)) for d in distances)
        reads = heads.slot(f"d{x}_part", part, shards=OWN), *back
        posts = tuple(heads.to(SUMMED, later, d) for d in distances
                      if x == "v" and later < heads.count)  # fmt: skip
        yield Step(f"sum_d{x}_{part}", "compute", "reduce", reads, (heads.own(f"d{x}", part),),
                   waits=waits, posts=posts)  # fmt: skip
        waits = ()


def refusal(p: Problem) -> str:
    """What it wants of a problem, or ""."""
    return "rows that attend to all others: causal=False" if p.causal else ""
