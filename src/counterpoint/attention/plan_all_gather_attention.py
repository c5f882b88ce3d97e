"""all_gather_attention: y_r = softmax(scale q_r k^T) v, of the k and v of all ranks, by families.

The keys and values of a peer arrive in a slot of symmetric memory while those that are there are
attended to; what each gives is merged by its log-sum-exp, in fp32. Slots are as many as are in
flight, one at work and one on its way, and are used in turn: who has attended to what lies in one
tells the rank whose keys come next.

Buffers have a row for each token; heads, of all of a batch, are columns.
"""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any, NamedTuple

from counterpoint.attention import plan_seconds
from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.names import LANES, Y, collective, in_one_lane
from counterpoint.plan.operation import (
    Family,
    Operation,
    Options,
    in_a_row,
    refuse_norm,
    refuse_tables,
)
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.plan.values import Attended, Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Order, orders
from counterpoint.schedules.sizes import check_heads

Q, K, V, LSE = Region("q"), Region("k"), Region("v"), Region("lse")
SUM = Region("sum")
IN_FLIGHT = 2  # chunks of keys and values: one at work, one on its way
MAX_HEAD_DIM = 128  # that is taken where none is given


class Item(NamedTuple):
    """A chunk of a peer's keys and values.

    Args:
        number: in the order in which they come.
        d: the distance of the peer.
        chunk: of its shard.
        suffix: of names of its steps.
    """

    number: int
    d: int
    chunk: tuple[int, int]
    suffix: str


def shards(p: Problem, name: str, cols: int, *, output: bool = False) -> Buffer:
    """The user's own rows."""
    space = "output" if output else "input"
    return Buffer(name, (p.m, cols), p.dtype, space, split=True, holds="own")


def lse(p: Problem, *, output: bool = False) -> Buffer:
    """A number for each own row and head."""
    space = "output" if output else "input"
    return Buffer("lse", (p.m, heads(p)), "float32", space, split=True, holds="own")


def heads(p: Problem) -> int:
    """Query heads, of all of a batch."""
    return p.n // max(p.head_dim, 1)


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: own rows of all."""
    given = shards(p, "q", p.n), shards(p, "k", p.k), shards(p, "v", p.k)
    return *given, shards(p, "y", p.n, output=True), lse(p, output=True)


def items(p: Problem, order: Order, chunks: int) -> list[Item]:
    """What comes from peers, nearest first."""
    pairs = [(d, i) for d in order.distances for i in range(chunks)]
    return [
        Item(number, d, (i, chunks), f"_{d}_{i}" if chunks > 1 else f"_{d}")
        for number, (d, i) in enumerate(pairs)
    ]


def first_row(p: Problem, chunk: tuple[int, int]) -> int:
    """Of a shard, the first of a chunk."""
    return p.rows[0] * chunk[0] // chunk[1]


def keys_of(p: Problem, peer: int, chunk: tuple[int, int] = (0, 1)) -> tuple[tuple[str, int], ...]:
    """What a step is told of whose keys it is given, where it matters."""
    told = ("peer", peer), ("first", first_row(p, chunk))
    return tuple((name, value) for name, value in told if value and p.causal)


class Exchange:
    """The keys and values of all peers, through slots.

    Args:
        slot: the first of its signals.
    """

    def __init__(self, p: Problem, order: Order, chunks: int, slot: int) -> None:
        self.p, self.order, self.slot = p, order, slot
        self.items = items(p, order, chunks)
        self.in_flight = min(len(self.items), IN_FLIGHT)
        self.slot_rows = -(-p.rows[0] // chunks)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Slots of both."""
        shape = (self.in_flight * self.slot_rows, self.p.k)
        return tuple(Buffer(f"{x}_slots", shape, self.p.dtype, "symmetric") for x in "kv")

    @property
    def num_signals(self) -> int:
        """An arrival of each, and a slot that is free."""
        return 2 * len(self.items)

    def slots_of(self, item: Item, at: tuple[int, ...] = ()) -> tuple[Region, Region]:
        """Where the keys and values of an item lie."""
        start = item.number % self.in_flight * self.slot_rows
        i, of = item.chunk
        count = first_row(self.p, (i + 1, of)) - first_row(self.p, item.chunk)
        return both("{}_slots", at=at, rows=(start, start + count))

    def push(self, item: Item) -> Step:
        """My keys and values to the peer that takes them as this item."""
        sources = Region("k", chunk=item.chunk), Region("v", chunk=item.chunk)
        free = self.slot + len(self.items) + item.number
        waits = (Signal(free, self.order.to(item.d)),) if item.number >= self.in_flight else ()
        after = () if item.number else ("open",)
        posts = (self.order.post(self.slot + item.number, item.d),)
        targets = self.slots_of(item, self.order.to(item.d))
        return Step(f"push{item.suffix}", "copy", "copy", sources, targets, after, waits, posts)

    def arrival(self, item: Item) -> Signal:
        """An item is there."""
        return self.order.wait(self.slot + item.number, item.d)

    def freed(self, item: Item) -> tuple[Signal, ...]:
        """To whom it is told that an item has been used: whose comes into its slot."""
        number = item.number + self.in_flight
        if number >= len(self.items):
            return ()
        following = self.items[number]
        return (Signal(self.slot + len(self.items) + number, self.order.source(following.d)),)


def both(name: str, **place: Any) -> tuple[Region, Region]:
    """A region of k's buffer, and the same of v's."""
    keys, values = (Region(name.format(x), **place) for x in "kv")
    return keys, values


def attend(
    name: str, keys: tuple[Region, Region], target: Region, args: tuple[tuple[str, int], ...], *,
    merges: bool, after: tuple[str, ...] = (), waits: tuple[Signal, ...] = (),
    posts: tuple[Signal, ...] = (),
) -> Step:  # fmt: skip
    """Own queries by some keys, and their values."""
    writes = target, LSE
    reads = Q, *keys, *(writes if merges else ())
    return Step(name, "compute", "attention", reads, writes, after, waits, posts, args)


def into(merges: int) -> Region:
    """Where y is merged: of one merge in place; of several in fp32, so that y is rounded once."""
    return SUM if merges > 1 else Y


def ended(p: Problem, target: Region) -> tuple[tuple[Buffer, ...], tuple[Step, ...]]:
    """What is summed in fp32, and rounded."""
    if target == Y:
        return (), ()
    total = Buffer("sum", (p.m, p.n), "float32", "scratch", split=True, holds="own")
    return (total,), (Step("round", "compute", "move", (target,), (Y,)),)


def serial(p: Problem) -> Plan:
    """The library's all-gather of both, then attention: what users do today.

    Where it is causal, attention is by ranks, as some rows of each attend to nothing of others.
    """
    full = [Buffer(f"{x}_full", (p.m, p.k), p.dtype, "scratch", split=True) for x in "kv"]
    gathers = [
        collective(f"gather_{x}", "all_gather", (Region(x),), Region(f"{x}_full")) for x in "kv"
    ]
    if not p.causal:
        steps = (attend("attend", both("{}_full"), Y, (), merges=False),)
        return in_one_lane(p, "serial", (*operands(p), *full), *gathers, *steps)
    target = into(p.ranks - 1)
    more, last = ended(p, target)
    by_rank = [
        attend(f"attend_{d}", both("{}_full", shards=((d,),)), target, keys_of(p, d), merges=d > 0)
        for d in range(p.ranks)
    ]
    return in_one_lane(p, "serial", (*operands(p), *full, *more), *gathers, *by_rank, *last)


def shard_p2p(p: Problem, options: Options, machine: Machine) -> Plan:
    """Own keys, then those of each peer as they arrive; with `chunks`, a part of a shard at a time.

    Each rank pushes its keys and values into slots of its peers, straight from the user's tensors,
    and posts a signal behind each.
    """
    order, chunks = Order(options.peers, p.ranks), max(options.chunks, 1)
    exchange = Exchange(p, order, chunks, p.ranks)
    target = into(len(exchange.items))
    more, last = ended(p, target)
    steps = [order.barrier("open", "signal", 0),
             attend("attend_0", (K, V), target, keys_of(p, 0), merges=False)]  # fmt: skip
    for item in exchange.items:
        steps.append(exchange.push(item))
        # the push behind it waits for a slot, which this frees
        if (used := item.number - exchange.in_flight + 1) >= 0:
            steps.append(_attend_to(exchange, exchange.items[used], target))
    for item in exchange.items[len(exchange.items) - exchange.in_flight + 1 :]:
        steps.append(_attend_to(exchange, item, target))
    tail = f" chunks={chunks}" if chunks > 1 else ""
    buffers = *operands(p), *exchange.buffers, *more
    variant = f"{options.peers}{tail}"
    return Plan(p, "shard_p2p", variant, options.peers, buffers, LANES, (*steps, *last))


def _attend_to(exchange: Exchange, item: Item, target: Region) -> Step:
    (peer,) = exchange.order.source(item.d)
    return attend(
        f"attend{item.suffix}", exchange.slots_of(item), target,
        keys_of(exchange.p, peer, item.chunk), merges=True, posts=exchange.freed(item),
        after=() if item.number else ("open",), waits=(exchange.arrival(item),),
    )  # fmt: skip


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return (attend("attend", (K, V), Y, keys_of(p, 0), merges=False),)


def attended_rows(p: Problem, of: str, rank: int) -> Iterator[tuple[tuple[int, int], Value]]:
    """What each row of y, lse or dq holds, as intervals of rows that hold alike."""
    rows, half = p.rows[rank], p.rows[rank] // 2
    if not p.causal:
        yield (0, rows), normal(Attended(of, rank, 0, s, 0, rows) for s in range(p.ranks))
        return
    own = Attended(of, rank, 0, rank, 0, 1, 0, 1)
    lower = [Attended(of, rank, 0, s, 0, half) for s in range(rank)]
    higher = [Attended(of, rank, 0, s, 0, rows) for s in range(rank + 1, p.ranks)]
    yield (0, half), normal((own, *lower))
    yield (half, rows), normal((own, *lower, *higher))


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y and lse: own rows, by the keys of all ranks that they attend to."""
    if p.empty:
        return
    for of, cols in (("y", p.n), ("lse", heads(p))):
        for (start, stop), value in attended_rows(p, of, rank):
            yield Box(rank, of, 0, start, stop, 0, cols), value


def filled(p: Problem) -> Mapping[str, object]:
    """The head dim, where none is given."""
    refuse_tables(p)
    refuse_norm(p)
    both = gcd(p.n, p.k)
    return {} if p.head_dim else {
        "head_dim": max(d for d in range(1, MAX_HEAD_DIM + 1) if both % d == 0)
    }  # fmt: skip


def described(p: Problem) -> str:
    """The heads."""
    text = f" head dim {p.head_dim}" + " causal" * p.causal
    return text + (f" scale {p.scale:g}" if p.scale else "")


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    return "serial", *(f"shard_p2p {peers}" for peers in orders(p.ranks)), "shard_p2p ring chunks=2"


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        Family(name="shard_p2p", takes=("peers", "chunks"), build=shard_p2p),
    ),
    candidates=candidates,
    collectives=("all_gather",),
    check=check_heads,
    moved=lambda p: (2 * p.k, 0),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: (
        "shard_p2p ring chunks=2" if copy_longer else "shard_p2p ring"
    ),
    gradient="shard_p2p",
    filled=filled,
    described=described,
    computed_s=plan_seconds.computed_s,
)
