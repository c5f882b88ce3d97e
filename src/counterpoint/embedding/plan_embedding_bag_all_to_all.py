"""embedding_bag_all_to_all: each rank pools its tables for all bags, and gets the rows of its own.

What tables, indices, offsets and weights of a call are together is one operand: "bags", the pooled
rows of a rank's tables for the bags of all ranks. How many indices there are is no extent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from counterpoint.embedding import plan_islands
from counterpoint.embedding.plan_seconds import lookups_s, mean_bag, seconds
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.names import OWN, Y, collective, in_one_lane
from counterpoint.plan.operation import Operation, in_a_row, refuse_heads, refuse_norm
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.plan.values import Cell, Value
from counterpoint.problem import Problem
from counterpoint.schedules import islands
from counterpoint.schedules.sizes import check_gradient

OP = "embedding_bag_all_to_all"
BAGS = Region("bags", cols="own")
# up to so many indices in a bag on average: wide tiles where each bag is soon done, small ones,
# whose work differs less between programs, where there is much to pool. Bytes of rows that a
# program loads at a time, of one index of each bag; indices of a bag at a time; warps.
# 4xH200, 2026-11, 8 to 64 tables of 64 to 256 columns: within 4 % of the best of eight
POOLING = (("under_15", "4096x2x4"), ("under_50", "2048x4x4"), ("else", "2048x8x4"))


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The bags, as wide as those of the rank that has most columns, and y."""
    bags = Buffer("bags", (p.m, max(map(sum, p.tables))), p.dtype, "input", split=True)
    return bags, Buffer("y", (p.m, p.n), p.dtype, "output", split=True, holds="own")


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y: the rows of own bags of all ranks' tables, side by side."""
    starts = p.column_starts
    for s, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        box = Box(rank, "y", 0, 0, p.rows[rank], first, last)
        yield box, (Cell(s, "bags", p.row_starts[rank], -first),)


def serial(p: Problem) -> Plan:
    """A lookup of all own tables, then the library's all-to-all; columns side by side."""
    bags, y = operands(p)
    pooled = replace(bags, name="pooled", space="scratch")
    place = Region("pooled", cols="own")
    exchange = collective("exchange", "all_to_all", (place,), Y)
    return in_one_lane(p, "serial", (bags, y, pooled), _lookup("lookup", BAGS, place), exchange)


def fused(p: Problem) -> Plan:
    """One kernel, which stores each pooled row where it belongs in its owner's output."""
    peers = [(d,) for d in range(1, p.ranks)]
    flags = Buffer("flags", (p.ranks, 1), "int32", "flags", split=True)
    rows = Buffer("rows", (p.m, p.n), p.dtype, "turns", split=True, holds="own")
    target = "y" if p.out else "rows"
    stored = [Region(target, at, cols="own") for at in ((), *peers)]
    copied = [] if p.out else [Y]
    flagged = [Region("flags", at, OWN) for at in peers]
    step = Step("rows of own bags", "compute", "fused", (BAGS,), (*stored, *copied, *flagged),
                args=(("kernel", OP), *POOLING), spins=True)  # fmt: skip
    own = (flags,) if p.out else (rows, flags)
    return in_one_lane(p, "fused", (*operands(p), *own), step)


def after_barrier(p: Problem) -> Plan:
    """The same kernel behind a barrier.

    Outputs in turn need none: whoever stores has heard in the call before that the last but one has
    been read. A CUDA graph has one output for all of its replays, and what the last of them left
    there is read until the peer has come to this one.
    """
    peers = range(1, p.ranks)
    posts, waits = (tuple(Signal(d - 1, (sign * d,)) for d in peers) for sign in (1, -1))
    barrier, plan = Step("open", "compute", "barrier", waits=waits, posts=posts), fused(p)
    return replace(plan, family="fused_after_barrier", steps=(barrier, *plan.steps))


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return (_lookup("lookup", BAGS, Y),)


def _of_islands(p: Problem, grid: islands.Grid) -> Plan:
    return plan_islands.build(p, grid, operands(p), _lookup)


def _refusal(p: Problem) -> str:
    return islands.refusal(p) or ("results in new tensors" if p.out else "")


def _lookup(name: str, bags: Region, target: Region) -> Step:
    """The kernel without peers."""
    args = (("kernel", OP), *POOLING)
    return Step(name, "compute", "fused", (bags,), (target,), args=args)


def _candidates(p: Problem) -> tuple[str, ...]:
    return islands.candidates(p) if p.islands > 1 else ("serial", "fused")


def filled(p: Problem) -> Mapping[str, object]:
    """N and the number of ranks, which follow from tables.

    Raises:
        InputError: there are no tables, or no count of indices for each rank.
    """
    refuse_heads(p)
    refuse_norm(p)
    tables, indices = p.tables, p.indices
    if not any(tables) or min(min(each, default=1) for each in tables) < 1:
        want = "columns >= 1 of the tables of each rank, some at least"
        fix = "of two ranks ((64, 64), (64,)), for example"
        raise InputError(p.op, "tables", want=want, got=p.tables, fix=fix)
    ranks, columns = p.ranks or len(tables), sum(map(sum, tables))
    if ranks != len(tables):
        raise InputError(p.op, "tables", want=f"of each of {ranks} ranks", got=p.tables)
    if p.n not in (0, columns):
        raise InputError(p.op, "n", want=f"{columns}, columns of all tables, or 0", got=p.n)
    if indices and len(indices) != ranks:
        raise InputError(p.op, "indices", want=f"{ranks} counts", got=indices)
    if any(n and not each for n, each in zip(indices, tables, strict=False)):
        raise InputError(p.op, "indices", want="0 where a rank has no tables", got=indices)
    return {"n": columns, "ranks": ranks}


def check(p: Problem) -> None:
    """Refuse what embedding bags have none of."""
    check_gradient(p)
    if p.k:
        raise InputError(p.op, "k", want="0: nothing is contracted", got=p.k)


def described(p: Problem) -> str:
    """Tables of each rank as "8x128+64", and the mean of its bags."""
    runs = ([(len(list(same)), d) for d, same in groupby(each)] for each in p.tables)
    each = ("+".join(f"{n}x{d}" for n, d in found) or "none" for found in runs)
    text = f" tables {'/'.join(each)}"
    if p.indices:
        text += f", bags of {'/'.join(f'{mean_bag(p, r):.3g}' for r in range(p.ranks))} indices"
    return text + (", into outputs of its own," if p.out else ",")


def _step_s(p: Problem, step: Step, machine: Machine) -> float:
    if step.spins:
        return seconds(p, machine).fused_s
    bags = step.reads[0]
    shards = len(bags.shards) or p.ranks
    return max(lookups_s(p, machine, shards / p.ranks / bags.chunk[1]))


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        in_a_row("fused", fused),
        in_a_row("fused_after_barrier", after_barrier),
        islands.family(_of_islands, _refusal),
    ),
    candidates=_candidates,
    collectives=("all_to_all",),
    check=check,
    moved=lambda p: (0, p.n // p.ranks),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: "fused",
    gradient="serial",
    fused_s=_step_s,
    filled=filled,
    described=described,
    exchange_s=lambda p, machine: seconds(p, machine).exchange_s,
    computed_s=lambda p, machine: seconds(p, machine).lookup_s,
)
