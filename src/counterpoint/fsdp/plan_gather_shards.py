"""gather_shards: every rank's shard, in the dtype of the computation, in its place on every rank.

A group of FSDP2's parameters, as `cp.overlap` gathers it. y[M, N] has rank r's block, all its rows
of all parameters, where the matmuls read it. Each rank publishes its shard once; copy engines pull
every other from its owner, once that owner has published.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from counterpoint.plan.bind import Box
from counterpoint.plan.names import COPY, OWN, SIGNAL, collective, in_one_lane
from counterpoint.plan.operation import Operation
from counterpoint.plan.steps import ME, Buffer, Peer, Plan, Region, Step
from counterpoint.plan.values import Cell, Value
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Order
from counterpoint.schedules.sizes import check_plain

MASTER, PUBLISHED, Y = "master", "published", "y"


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The shard as the optimizer has it, and all shards as the computation reads them."""
    return (
        Buffer(MASTER, (p.m, p.n), "float32", "input", split=True, holds="own"),
        Buffer(Y, (p.m, p.n), p.dtype, "output", split=True),
    )


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """Each block is its owner's."""
    for s, (first, last) in enumerate(zip(p.row_starts, p.row_starts[1:], strict=False)):
        yield Box(rank, Y, 0, first, last, 0, p.n), (Cell(s, MASTER, -first, 0),)


def in_place(p: Problem) -> Plan:
    """One cast on an SM; then a copy from each owner to the place of its block."""
    own = Step("own", "copy", "copy", (Region(PUBLISHED),), (Region(Y, shards=OWN),),
               after=("publish",))  # fmt: skip
    published = Buffer(PUBLISHED, (p.m, p.n), p.dtype, "symmetric", split=True, holds="own")
    steps = (*_by_copies(p, lambda owner: Region(PUBLISHED, at=owner)), own)
    return Plan(p, "in place", "", "ring", (*operands(p), published), (SIGNAL, COPY), steps)


def in_turn(p: Problem) -> Plan:
    """The same without memory to publish in: each owner casts to its block's place, and y is read
    by peers.
    """
    master, y = operands(p)
    shared = replace(y, space="symmetric")
    steps = _by_copies(p, lambda owner: Region(Y, at=owner, shards=(owner,)))
    return Plan(p, "in turn", "", "ring", (master, shared), (SIGNAL, COPY), steps)


def _by_copies(p: Problem, published: Callable[[Peer], Region]) -> tuple[Step, ...]:
    """A cast to where this rank's block is published, and a copy from each peer's.

    Args:
        published: where a rank at that distance publishes its block.
    """
    order = Order("ring", p.ranks)
    steps: list[Step] = [
        order.barrier("open", "signal", 0),
        Step("publish", "signal", "move", (Region(MASTER),), (published(ME),), after=("open",),
             posts=tuple(order.post(p.ranks + d, d) for d in order.distances)),
    ]  # fmt: skip
    for d in order.distances:
        owner = order.source(d)
        steps.append(
            Step(f"pull_{d}", "copy", "copy", (published(owner),), (Region(Y, shards=(owner,)),),
                 after=("open",), waits=(order.wait(p.ranks + d, d),))
        )  # fmt: skip
    return tuple(steps)


def serial(p: Problem) -> Plan:
    """The library's all-gather of a packed copy, and copies to their places: FSDP2's own way."""
    packed = Buffer("packed", (p.m, p.n), p.dtype, "scratch", split=True, holds="own")
    gathered = Buffer("gathered", (p.m, p.n), p.dtype, "scratch", split=True)
    return in_one_lane(
        p, "serial", (*operands(p), packed, gathered),
        Step("pack", "compute", "move", (Region(MASTER),), (Region("packed"),)),
        collective("all_gather", "all_gather", (Region("packed"),), Region("gathered")),
        Step("unpack", "compute", "move", (Region("gathered"),), (Region(Y),)),
    )  # fmt: skip


# it has no families: nobody calls it by a spec, so it is no operator of the lists
OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=lambda p: (Step("cast", "compute", "move", (Region(MASTER),), (Region(Y),)),),
    families=(),
    candidates=lambda p: (),
    collectives=("all_gather",),
    check=check_plain,
    moved=lambda p: (p.n, 0),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: "",
)
