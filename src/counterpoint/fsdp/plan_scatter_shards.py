"""scatter_shards: each rank's rows of the sum over the ranks of gradients that all have whole.

A group of FSDP2's gradients, as `cp.overlap` scatters it. Copy engines push each block from where
autograd wrote it to its owner's inbox; the owner sums what has come in fp32, in rank order.
"""

from collections.abc import Iterator

from counterpoint.plan.bind import Box
from counterpoint.plan.names import COPY, OWN, SIGNAL, collective, in_one_lane
from counterpoint.plan.operation import Operation
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Cell, Value, normal
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Order
from counterpoint.schedules.sizes import check_plain

GRADIENT, INBOX, Y = "gradient", "inbox", "y"


def operands(p: Problem) -> tuple[Buffer, ...]:
    """Gradients of all rows, and this rank's rows of their sum."""
    return (
        Buffer(GRADIENT, (p.m, p.n), p.dtype, "input", split=True),
        Buffer(Y, (p.m, p.n), "float32", "output", split=True, holds="own"),
    )


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """The sum over the ranks."""
    start = p.row_starts[rank]
    total = normal([Cell(s, GRADIENT, start, 0) for s in range(p.ranks)])
    yield Box(rank, Y, 0, 0, p.rows[rank], 0, p.n), total


def in_place(p: Problem) -> Plan:
    """A copy to each owner, the nearest first; then one sum of all slots of the own inbox."""
    order = Order("ring", p.ranks)
    steps: list[Step] = [order.barrier("open", "signal", 0)]
    for d in order.distances:
        owner = order.to(d)
        steps.append(
            Step(f"push_{d}", "copy", "copy", (Region(GRADIENT, shards=(owner,)),),
                 (Region(INBOX, at=owner, shards=OWN),), after=("open",),
                 posts=(order.post(p.ranks + d, d),))
        )  # fmt: skip
    mine = Region(GRADIENT, shards=OWN)
    own = Region(INBOX, shards=OWN)
    steps.append(Step("own", "copy", "copy", (mine,), (own,), after=("open",)))
    slots = tuple(Region(INBOX, shards=(order.source(d),)) for d in range(p.ranks))
    waits = tuple(order.wait(p.ranks + d, d) for d in order.distances)
    steps.append(Step("sum", "signal", "reduce", slots, (Region(Y),), after=("own",), waits=waits))
    inbox = Buffer(INBOX, (p.m, p.n), p.dtype, "symmetric", split=True, holds="slots")
    buffers = (*operands(p), inbox)
    return Plan(p, "in place", "", "ring", buffers, (SIGNAL, COPY), tuple(steps))


def serial(p: Problem) -> Plan:
    """The library's reduce-scatter of a packed copy in fp32: FSDP2's own way."""
    packed = Buffer("packed", (p.m, p.n), "float32", "scratch", split=True)
    return in_one_lane(
        p, "serial", (*operands(p), packed),
        Step("pack", "compute", "move", (Region(GRADIENT),), (Region("packed"),)),
        collective("reduce_scatter", "reduce_scatter", (Region("packed"),), Region(Y)),
    )  # fmt: skip


# it has no families: nobody calls it by a spec, so it is no operator of the lists
OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=lambda p: (Step("cast", "compute", "move", (Region(GRADIENT),), (Region(Y),)),),
    families=(),
    candidates=lambda p: (),
    collectives=("reduce_scatter",),
    check=check_plain,
    moved=lambda p: (0, p.n),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: "",
)
