"""The family "running_sum": a rank adds its product to the sum that has come, and passes that on.

The rows of each owner go once around the ring. The rank behind the owner multiplies them first; the
owner, who adds its product last, has nothing left to sum behind its matmuls: matmuls add. Blocks go
in chunks, so that one is on its way while another is multiplied. To be chosen where matmuls take
longer than copies, and a rank that is late holds up all behind it.

Each rank rounds the sum once: on 2, 4 and 8 ranks the error is 0.8, 1.1 and 1.5 times that of one
sum in fp32, and 0.8 to 0.9 of that of a ring of the library's, which rounds the products, too.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from counterpoint.costs import Tiles
from counterpoint.machine import Machine
from counterpoint.plan.names import LANES, with_bias
from counterpoint.plan.operation import Family, Options
from counterpoint.plan.scaled import REFUSAL
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import Problem
from counterpoint.schedules.makespan import running_sum_s
from counterpoint.schedules.peers import Chunk, Order, cuts

CHUNKS = 2
# steps of x w (+ a sum) -> y: name, regions of x, of y and of the sum
Matmuls = Callable[..., tuple[Step, ...]]


def family(
    build: Callable[[Problem, Options, Machine], Plan],
    guess_s: Callable[[Problem, Options, Machine, Tiles], float] | None = None,
) -> Family:
    """The family of an operator whose plans `build` makes of `scatter`."""
    return Family(
        name="running_sum", takes=("chunks",), build=build, guess_s=guess_s,
        # the library's matmul of operands with scales adds to nothing
        wants=lambda p: REFUSAL if p.scales else "",
    )  # fmt: skip


def guess_s(p: Problem, options: Options, machine: Machine, tiles: Tiles) -> float:
    """Seconds of a `scatter` by a closed form."""
    return running_sum_s(p, options.chunks or CHUNKS, machine, tiles)


def scatter(
    p: Problem, operands: tuple[Buffer, ...], matmuls: Matmuls, y: Region, chunks: int
) -> Plan:
    """A matmul_reduce_scatter, or that of an all-reduce.

    Args:
        operands: the user's.
        matmuls: on the compute lane.
        y: own rows of the result.
        chunks: of each block; 0: CHUNKS.
    """
    chunks, order, last = chunks or CHUNKS, Order("ring", p.ranks), p.ranks - 1
    steps: list[Step] = [order.barrier("open", "signal", 0)]

    def slot(hop: int, chunk: Chunk) -> int:
        return p.ranks + hop * chunks + chunk[0]

    for hop, (suffix, chunk) in product(range(p.ranks), cuts(chunks)):
        block = (order.to(last - hop),)  # the rank before me had it one hop earlier
        x, sums = (Region(name, shards=block, chunk=chunk) for name in ("x", "sums"))
        opened = ("open",) if chunk[0] == 0 else ()
        target = replace(y, chunk=chunk) if hop == last else sums
        if hop == 0:
            target = replace(sums, buffer="partial")
            steps += matmuls(f"matmul_0{suffix}", x, target)
        else:
            first, *rest = matmuls(f"matmul_{hop}{suffix}", x, target, sums)
            come = (order.wait(slot(hop - 1, chunk), 1),)
            steps += (replace(first, after=opened if hop == 1 else (), waits=come), *rest)
        if hop < last:
            after = (steps[-1].name, *(opened if hop == 0 else ()))
            there = Region("sums", order.to(1), block, chunk)
            post = (order.post(slot(hop, chunk), 1),)
            steps.append(Step(f"push_{hop}{suffix}", "copy", "copy", (target,), (there,), after,
                              posts=post))  # fmt: skip
    if p.bias:
        added, args = with_bias(p)
        steps.append(Step("add_bias", "compute", "move", (y, *added), (y,), args=args))
    buffers = (
        *operands,
        Buffer("partial", (p.m, p.n), p.dtype, "scratch", split=True, holds="peers"),
        Buffer("sums", (p.m, p.n), p.dtype, "symmetric", split=True),
    )
    return Plan(p, "running_sum", f"chunks={chunks}", "ring", buffers, LANES, tuple(steps))
