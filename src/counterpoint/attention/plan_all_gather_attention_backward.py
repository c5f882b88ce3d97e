"""all_gather_attention_backward: dq_r, dk_r and dv_r, from dy and lse, and its families.

With y and the log-sum-exp (lse) of all keys, the gradient by some keys is a sum of its own. So keys
and values of peers come once more, as in the forward, and what they give for dk and dv goes back to
their owner, who sums. `shard_p2p` takes own keys in halves: the first hides the arrival of a
peer's, the last the way back. `by_heads` takes some heads at a time: see plan_by_heads.py.
"""

from collections.abc import Iterator
from dataclasses import replace

from counterpoint.attention import plan_by_heads
from counterpoint.attention.plan_all_gather_attention import (
    Exchange,
    Item,
    attended_rows,
    both,
    described,
    filled,
    keys_of,
    lse,
    shards,
)
from counterpoint.attention.plan_seconds import computed_s
from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.names import LANES, OWN, collective, in_one_lane
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.plan.values import Attended, Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Chunk, Order, cuts, orders
from counterpoint.schedules.sizes import check_heads

GIVEN = tuple(Region(name) for name in ("dy", "y", "lse"))
DQ, TOTAL = Region("dq"), Region("dq_sum")


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: own rows of all."""
    given = (shards(p, name, p.k if name in "kv" else p.n) for name in ("q", "k", "v", "dy", "y"))
    made = (shards(p, f"d{x}", p.n if x == "q" else p.k, output=True) for x in "qkv")
    return *given, lse(p), *made


def gradient(
    name: str, keys: tuple[Region, Region], dq: Region, made: tuple[Region, Region],
    args: tuple[tuple[str, int], ...], *, adds: bool,
) -> Step:  # fmt: skip
    """The gradients by some keys."""
    reads = Region("q"), *keys, *GIVEN, *((dq,) if adds else ())
    return Step(name, "compute", "attention_backward", reads, (dq, *made), args=args)


def summed_in_fp32(p: Problem) -> Buffer:
    """dq, before it is rounded."""
    return Buffer("dq_sum", (p.m, p.n), "float32", "scratch", split=True, holds="own")


ROUND = Step("round_dq", "compute", "move", (TOTAL,), (DQ,))


def serial(p: Problem) -> Plan:
    """The library's collectives, and the gradient between them: what users do today."""
    more = [Buffer(f"{x}_full", (p.m, p.k), p.dtype, "scratch", split=True)
            for x in ("k", "v", "dk", "dv")]  # fmt: skip
    gathers = [
        collective(f"gather_{x}", "all_gather", (Region(x),), Region(f"{x}_full")) for x in "kv"
    ]
    scatters = [
        collective(f"scatter_d{x}", "reduce_scatter", (Region(f"d{x}_full"),), Region(f"d{x}"))
        for x in "kv"
    ]
    if not p.causal:
        whole = gradient("gradient", both("{}_full"), DQ, both("d{}_full"), (), adds=False)
        steps: tuple[Step, ...] = (whole,)
    else:
        more.append(summed_in_fp32(p))
        steps = tuple(
            gradient(f"gradient_{d}", both("{}_full", shards=((d,),)), TOTAL,
                     both("d{}_full", shards=((d,),)), keys_of(p, d), adds=d > 0)
            for d in range(p.ranks)
        )  # fmt: skip
        steps = (*steps, ROUND)
    return in_one_lane(p, "serial", (*operands(p), *more), *gathers, *steps, *scatters)


def shard_p2p(p: Problem, options: Options, machine: Machine) -> Plan:
    """Half of the own keys, those of each peer as they arrive, and the other half.

    What the keys of a peer give is pushed into the slot that it keeps for this rank, beside what
    follows; it sums its slots in fp32 and rounds once.
    """
    order, chunks = Order(options.peers, p.ranks), max(options.chunks, 1)
    exchange = Exchange(p, order, chunks, p.ranks)
    halves = [chunk for _, chunk in cuts(min(2, max(p.rows[0], 1)))]
    back = p.ranks + exchange.num_signals  # the first signal of what goes back
    steps = [order.barrier("open", "signal", 0),
             replace(_own(p, halves[0], adds=False), after=("open",))]  # fmt: skip
    for item in exchange.items:
        steps.append(exchange.push(item))
        # the push behind it waits for a slot, which this frees
        if (used := item.number - exchange.in_flight + 1) >= 0:
            steps += _by_item(exchange, exchange.items[used], back)
    for item in exchange.items[len(exchange.items) - exchange.in_flight + 1 :]:
        steps += _by_item(exchange, item, back)
    steps += [*(_own(p, half, adds=True) for half in halves[1:]), ROUND]
    waits = tuple(Signal(back + i.number, order.to(i.d)) for i in exchange.items if _is_last(i))
    for x in "kv":
        slots = (Region(f"d{x}_slots", shards=(order.source(d),)) for d in range(p.ranks))
        target = (Region(f"d{x}"),)
        steps.append(Step(f"sum_d{x}", "compute", "reduce", tuple(slots), target, waits=waits))
        waits = ()
    buffers = [*operands(p), *exchange.buffers, summed_in_fp32(p)]
    for x in "kv":
        shape = (p.m, p.k)
        buffers += [Buffer(f"d{x}_part", shape, p.dtype, "scratch", split=True, holds="peers"),
                    Buffer(f"d{x}_slots", shape, p.dtype, "symmetric", split=True,
                           holds="slots")]  # fmt: skip
    tail = f" chunks={chunks}" if chunks > 1 else ""
    variant = f"{options.peers}{tail}"
    return Plan(p, "shard_p2p", variant, options.peers, tuple(buffers), LANES, tuple(steps))


def _own(p: Problem, half: Chunk, *, adds: bool) -> Step:
    """By a half of the own keys."""
    made = both("d{}_slots", shards=OWN, chunk=half)
    name = f"own_{half[0]}"
    return gradient(name, both("{}", chunk=half), TOTAL, made, keys_of(p, 0, half), adds=adds)


def _by_item(exchange: Exchange, item: Item, back: int) -> tuple[Step, Step]:
    """By a peer's keys, and what they give back to it."""
    source = exchange.order.source(item.d)
    part = both("d{}_part", shards=(source,), chunk=item.chunk)
    slots = both("d{}_slots", at=source, shards=OWN, chunk=item.chunk)
    name, suffix = f"gradient{item.suffix}", item.suffix
    step = gradient(
        name, exchange.slots_of(item), TOTAL, part, keys_of(exchange.p, source[0], item.chunk),
        adds=True,
    )  # fmt: skip
    step = replace(step, waits=(exchange.arrival(item),), posts=exchange.freed(item))
    posts = (Signal(back + item.number, source),) if _is_last(item) else ()
    return step, Step(f"return{suffix}", "copy", "copy", part, slots, (name,), posts=posts)


def _is_last(item: Item) -> bool:
    """Whether it is the last chunk of its peer: what goes back to one comes in order."""
    return item.chunk[0] == item.chunk[1] - 1


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return (gradient("gradient", both("{}"), DQ, both("d{}"), keys_of(p, 0), adds=False),)


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """dq by all keys that a row attends to; dk and dv by all queries that attend to a row."""
    for (start, stop), value in attended_rows(p, "dq", rank) if not p.empty else ():
        yield Box(rank, "dq", 0, start, stop, 0, p.n), value
    rows, half = p.rows[rank], p.rows[rank] // 2
    if p.empty:
        yield from ((Box(rank, of, 0, 0, rows, 0, p.k), ()) for of in ("dk", "dv"))
        return
    for of in ("dk", "dv"):
        if not p.causal:
            terms = (Attended(of, rank, 0, s, 0, rows) for s in range(p.ranks))
            yield Box(rank, of, 0, 0, rows, 0, p.k), normal(terms)
            continue
        own = Attended(of, rank, 0, rank, 0, rows, 1)
        lower = [Attended(of, rank, 0, s, half, rows) for s in range(rank)]
        higher = [Attended(of, rank, 0, s, 0, rows) for s in range(rank + 1, p.ranks)]
        yield Box(rank, of, 0, 0, half, 0, p.k), normal((own, *lower, *higher))
        yield Box(rank, of, 0, half, rows, 0, p.k), normal((own, *lower))


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    by_heads = () if p.causal else ("by_heads ring chunks=2", "by_heads ring chunks=8")
    return "serial", *(f"shard_p2p {peers}" for peers in orders(p.ranks)), *by_heads


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        Family(name="shard_p2p", takes=("peers", "chunks"), build=shard_p2p),
        Family(
            name="by_heads",
            takes=("peers", "chunks"),
            build=plan_by_heads.by_heads,
            wants=plan_by_heads.refusal,
        ),
    ),
    candidates=candidates,
    collectives=("all_gather", "reduce_scatter"),
    check=check_heads,
    moved=lambda p: (2 * p.k, 2 * p.k),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: "shard_p2p ring",
    gradient="shard_p2p",
    filled=filled,
    described=described,
    computed_s=lambda p, machine: computed_s(p, machine, backward=True),
)
