"""matmul_all_reduce: y = the sum over ranks of x_s w_s, on every rank; its families of plans.

Of many rows each rank sums its share as in a reduce-scatter, and pushes what it has summed to all.
"""

from collections.abc import Iterator
from dataclasses import replace

from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.definition import bias, reduced
from counterpoint.plan.names import (
    OWN,
    W,
    X,
    Y,
    alone,
    bias_row,
    collective,
    in_one_lane,
    with_bias,
)
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules import direct, island_matmuls, islands, running_sum
from counterpoint.schedules.peers import Order, cuts
from counterpoint.schedules.sizes import check_plain, check_sum
from counterpoint.tensor_parallel import plan_fused_sum, plan_matmul_reduce_scatter

MINE = Region("y", shards=OWN)
MAX_DIRECT_BYTES = 16 << 20  # of y; more is worth a matmul for each share


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: all ranks have all rows of x and of y."""
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True)
    y = Buffer("y", (p.m, p.n), p.dtype, "output", split=True)
    return x, Buffer("w", (p.k, p.n), p.dtype, "input"), *bias_row(p), y


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y: the sum of all ranks' products, plus the bias of this rank."""
    value = normal((*reduced(p, "x", "w", p.k), *bias(p, rank)))
    yield Box(rank, "y", 0, 0, p.m, 0, p.n), value


def serial(p: Problem) -> Plan:
    """One matmul, then the library's all-reduce in place: what users do today."""
    return _summed(p, operands(p), Y)


def _apart(p: Problem) -> Plan:
    """The same from one tensor into another, as an all-reduce of ours needs it."""
    partial = Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True)
    return _summed(p, (*operands(p), partial), Region("partial"))


def _summed(p: Problem, buffers: tuple[Buffer, ...], product: Region) -> Plan:
    """One matmul, the library's all-reduce into y, and the bias, added once."""
    multiply = Step("matmul", "compute", "matmul", (X, W), (product,))
    total = collective("all_reduce", "all_reduce", (product,), Y)
    return in_one_lane(p, "serial", buffers, multiply, total, *_biased(p))


def _biased(p: Problem) -> tuple[Step, ...]:
    """The bias, added to the sum."""
    added, args = with_bias(p)
    return (Step("add_bias", "compute", "move", (Y, *added), (Y,), args=args),) * p.bias


def by_shares(p: Problem, options: Options, machine: Machine) -> Plan:
    """A reduce-scatter by shards, whose sums go on to all peers, part by part.

    A part is on its way while the next one is summed.
    """
    chunks = max(options.chunks, 1)
    ones = (1,) * p.ranks
    scatter = plan_matmul_reduce_scatter.graded(_shares(p), ones, options.peers, chunks)
    steps = (
        replace(s, writes=(replace(MINE, chunk=s.writes[0].chunk),)) if s.kind == "reduce" else s
        for s in scatter.steps
    )
    order = Order(options.peers, p.ranks)
    return _gathered(p, replace(scatter, steps=tuple(steps)), order, chunks)


def _in_a_ring(p: Problem, options: Options, machine: Machine) -> Plan:
    """A reduce-scatter whose sums go around, and then, part by part, to all peers."""
    chunks = options.chunks or running_sum.CHUNKS
    scatter = running_sum.scatter(_shares(p), (), _multiplied, MINE, chunks)
    return _gathered(p, scatter, Order("ring", p.ranks), chunks)


def _shares(p: Problem) -> Problem:
    """What each rank sums; a bias is added when all are there."""
    return Problem("matmul_reduce_scatter", p.m, p.n, p.k, p.ranks, p.dtype, p.rows)


def _gathered(p: Problem, scatter: Plan, order: Order, chunks: int) -> Plan:
    """A reduce-scatter into own rows of y, and behind each part of it the pushes to all peers.

    Args:
        order: of the peers.
        chunks: of own rows.
    """
    slots, steps = scatter.num_slots, [*scatter.steps]
    last = {s.writes[0]: s.name for s in steps if s.writes}
    others = tuple(order.source(d) for d in order.distances)
    for suffix, chunk in cuts(chunks):
        source = replace(MINE, chunk=chunk)
        for d in order.distances:
            target = Region("full", order.to(d), OWN, chunk)
            after = (last[source],) if d == 1 else ()
            posts = (order.post(slots + chunk[0] * p.ranks + d, d),)
            push = Step(f"give_{d}{suffix}", "copy", "copy", (source,), (target,), after,
                        posts=posts)  # fmt: skip
            steps.append(push)
    for suffix, chunk in cuts(chunks):
        waits = tuple(order.wait(slots + chunk[0] * p.ranks + d, d) for d in order.distances)
        arrived, target = (Region(name, shards=others, chunk=chunk) for name in ("full", "y"))
        steps.append(Step(f"take{suffix}", "compute", "move", (arrived,), (target,), waits=waits))
    pushed = next(s.name for s in reversed(steps) if s.kind == "copy")
    steps += (replace(s, after=(pushed,)) for s in _biased(p))
    buffers = (
        *operands(p), *(b for b in scatter.buffers if b.space in ("scratch", "symmetric")),
        Buffer("full", (p.m, p.n), p.dtype, "symmetric", split=True),
    )  # fmt: skip
    return replace(scatter, problem=p, buffers=buffers, steps=tuple(steps))


def _of_islands(p: Problem, grid: islands.Grid) -> Plan:
    return island_matmuls.all_reduce(p, grid, operands(p), _multiplied, _biased(p))


def _multiplied(
    name: str, x: Region, y: Region, onto: Region | None = None
) -> tuple[Step, ...]:  # fmt: skip
    return (Step(name, "compute", "matmul", (x, W, *((onto,) if onto else ())), (y,)),)


def refusal_of_direct(p: Problem) -> str:
    """What the collective of ours wants that this problem does not have, or ""."""
    whole = p.m * p.n * p.item_bytes
    return direct.refusal(p, whole // p.ranks) if whole % p.ranks == 0 else "equal shares of y"


def _check(p: Problem) -> None:
    check_plain(p)
    check_sum(p)


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    if p.islands > 1:
        return islands.candidates(p)
    if p.m * p.n * p.item_bytes > MAX_DIRECT_BYTES:
        chunked = ("shard_p2p ring chunks", "running_sum chunks")
        return "serial", "shard_p2p ring", *(f"{name}={n}" for name in chunked for n in (2, 4))
    few = p.m <= plan_fused_sum.FEW_ROWS and p.item_bytes == 2
    return "serial", "direct", *(("fused",) if few else ())


def _rule(p: Problem, machine: Machine) -> str:
    """Few rows: one kernel, unless a wide w gives an SM two tiles."""
    wide = p.n > 64 * machine.device.num_sms
    rows = plan_fused_sum.FEW_ROWS // 2 if wide else plan_fused_sum.FEW_ROWS
    if p.m <= rows and p.item_bytes == 2 and not plan_fused_sum.refusal(p):
        return "fused"
    return _direct_if_small(p)


def _overlapped(p: Problem, copy_longer: bool) -> str:
    return _direct_if_small(p) or "shard_p2p ring chunks=2"


def _direct_if_small(p: Problem) -> str:
    small = p.m * p.n * p.item_bytes <= MAX_DIRECT_BYTES
    return "direct" if small and not refusal_of_direct(p) else ""


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        direct.family(_apart, refusal_of_direct),
        plan_fused_sum.family(operands, scatters=False),
        Family(name="shard_p2p", takes=("peers", "chunks"), build=by_shares),
        running_sum.family(_in_a_ring),
        islands.family(_of_islands),
    ),
    candidates=candidates,
    collectives=("all_reduce",),
    check=_check,
    moved=lambda p: (p.n, p.n),
    overlapped=_overlapped,
    gradient="serial",
    shares_rows=False,
    fused_s=plan_fused_sum.seconds,
    invariant=True,
    rule=_rule,
    scales=True,
)  # fmt: skip
