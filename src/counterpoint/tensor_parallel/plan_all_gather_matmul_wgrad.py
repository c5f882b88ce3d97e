"""all_gather_matmul_wgrad: dw[K, N] = gather(x)[M, K]^T dy[M, N], and its families of plans.

The matmul sums over all ranks' rows, so it cannot start with some of them, as the forward one does,
without a sum in fp32. It can with some of the columns of x: those are rows of dw.

Of several weights, dw_i = gather(x)^T dy_i, x is gathered once.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.compose import without_implied_edges
from counterpoint.plan.definition import weight_gradient
from counterpoint.plan.names import LANES, X, collective, in_one_lane, numbered
from counterpoint.plan.operation import Family, Operation, Options, in_a_row
from counterpoint.plan.steps import Buffer, Plan, Region, Signal, Step
from counterpoint.plan.values import Value
from counterpoint.problem import Problem
from counterpoint.schedules import islands
from counterpoint.schedules.finer import after_exchange, exchange, slices
from counterpoint.schedules.island_matmuls import begun
from counterpoint.schedules.peers import Order, orders
from counterpoint.schedules.sizes import check_gradients

FULL, DY, DW = Region("full"), Region("dy"), Region("dw")
OVER_ROWS = (("contract", "rows"),)


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: x is the shard, dy the whole."""
    x = Buffer("x", (p.m, p.k), p.dtype, "input", split=True, holds="own")
    dy = (Buffer(f"dy{i}", (p.m, n), p.dtype, "input", split=True) for i, n in numbered(p, p.n))
    dw = (Buffer(f"dw{i}", (p.k, n), p.dtype, "output") for i, n in numbered(p, p.n))
    return x, *dy, *dw


def wgrad(
    x: Region,
    dy: Region,
    *,
    name: str = "wgrad",
    after: tuple[str, ...] = (),
    waits: tuple[Signal, ...] = (),
) -> Step:
    """x^T dy -> dw on the compute lane."""
    return Step(name, "compute", "matmul", (x, dy), (DW,), after, waits, args=OVER_ROWS)


def wgrads(p: Problem, first: Step, rows: tuple[int, int] | None = None) -> tuple[Step, ...]:
    """x^T dy_i -> dw_i for each weight; `first` is that of dy and dw, which alone waits."""
    steps: list[Step] = []
    for i, _ in numbered(p, p.n):
        reads = first.reads[0], Region(f"dy{i}")
        one = replace(first, reads=reads, writes=(Region(f"dw{i}", rows=rows),))
        if steps:
            one = replace(one, name=f"{first.name}_w{i}", after=(), waits=())
        steps.append(one)
    return tuple(steps)


def gather(buffer: str) -> Step:
    """The library's all-gather of an input into `full`."""
    return collective("gather", "all_gather", (Region(buffer),), FULL)


def serial(p: Problem) -> Plan:
    """The library's all-gather, then one matmul: what users do today."""
    full = Buffer("full", (p.m, p.k), p.dtype, "scratch", split=True)
    multiply = wgrads(p, wgrad(FULL, DY, name="matmul"))
    return in_one_lane(p, "serial", (*operands(p), full), gather("x"), *multiply)


def sliced(p: Problem, options: Options, machine: Machine) -> Plan:
    """Slices of columns from all ranks; the matmul of each writes its rows of dw, beside the next.

    Strided copies, as of uniform_fused_2d, but nothing is accumulated.
    """
    peers, chunks = options.peers, options.chunks or 2
    order = Order(peers, p.ranks)
    steps: list[Step] = [order.barrier("open", "signal", 0)]
    for i, cols in enumerate(slices(p.k, chunks)):
        source, part = Region("x", cols=cols), Region("full", cols=cols)
        steps.append(exchange(order, i, source, part))
        multiply = after_exchange(order, i, (part, DY), DW, OVER_ROWS)
        steps += wgrads(p, multiply, cols)
    full = Buffer("full", (p.m, p.k), p.dtype, "symmetric", split=True)
    variant = f"{peers} chunks={chunks}"
    return Plan(p, "sliced", variant, peers, (*operands(p), full), LANES, tuple(steps))


def of_islands(p: Problem, grid: islands.Grid) -> Plan:
    """Likewise, of what goes to another island once.

    Each slice has a `full` of its own, as what comes from another island has no gaps. It is
    multiplied beside the exchanges of the next one, or where it has to be passed on inside, of the
    next but one.
    """
    given, products, fulls = list[list[Step]](), list[tuple[Step, ...]](), [*operands(p)]
    for i, cols in enumerate(slices(p.k, grid.chunks)):
        slot = i * grid.size * (grid.islands + 1)
        each = replace(grid, chunks=1, first_slot=slot, part=f"_{i}")
        own, full = Region("x", cols=cols), Region(f"full{each.part}")
        kept = replace(full, shards=islands.OWN)
        keep = islands.copied(grid, f"keep{each.part}", own, kept)
        given.append([*islands.giving(each, own, () if i else grid.opened), keep])
        after, waits = [keep.name], list[Signal]()
        for _, _, _, came, heard in islands.arrivals(each):
            after += came
            waits += heard
        name = f"matmul{each.part}"
        multiply = wgrad(full, DY, name=name, after=tuple(after), waits=tuple(waits))
        products.append(tuple(wgrads(p, multiply, cols)))
        shape = p.m, cols[1] - cols[0]
        fulls.append(Buffer(full.buffer, shape, p.dtype, grid.space, split=True))
    steps, late = [*grid.opening()], 2 if grid.near else 1
    for i, slice_given in enumerate(given):
        before = [step for step in steps if step.kind == "exchange"]
        first, *others = slice_given
        turn = begun(products[max(i - late, 0) : max(i - late + 1, 0)], before)
        steps += [first, *turn, *others]
    steps += chain.from_iterable(products[max(len(given) - late, 0) :])
    return islands.plan_of(p, grid, tuple(fulls), [*without_implied_edges(steps)])


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return wgrads(p, wgrad(X, DY, name="matmul"))


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """dw_i on `rank`."""
    for i, n in numbered(p, p.n):
        yield Box(rank, f"dw{i}", 0, 0, p.k, 0, n), weight_gradient(p, rank, "x", f"dy{i}")


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    if p.islands > 1:
        return islands.candidates(p)
    xor = [f"sliced {order} chunks=2" for order in orders(p.ranks)[1:]]
    return "serial", *(f"sliced ring chunks={n}" for n in (2, 3, 4)), *xor


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        Family(name="sliced", takes=("peers", "chunks"), build=sliced),
        islands.family(of_islands, islands.refusal),
    ),
    candidates=candidates,
    collectives=("all_gather",),
    check=check_gradients,
    moved=lambda p: (p.k, 0),
    matmuls=lambda p: ((p.k, p.n, p.m),),
    overlapped=lambda p, copy_longer: "sliced",
    gradient="sliced",
)
