"""Seconds of one operator of this library on a group of ranks, by serial plans or by ours.

Ranks of one island take what `choose` takes there, and ranks of several what it takes between them:
serial, or the plans of islands. Where no plan is between islands, serial is all there is.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from counterpoint.choose.by_model import parts_s
from counterpoint.choose.choose import choose
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.scale.network.fabric import Group, Network
from counterpoint.scale.parts import Sent
from counterpoint.schedules.expected_rows import once

Overlap = Literal["none", "ours", "ideal"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
ITEM_BYTES = 2  # bf16
ONLY_SERIAL = "serially: no plan is between so many islands, or unequal ones"


def between(network: Network, group: Group) -> int:
    """How many islands plans of a group are between: 1 where they are within one, or none is."""
    return 1 if network.as_islands(group) is None else group.size // network.near(group)


def sent(problem: Problem, part: str, group: Group) -> dict[Sent, float]:
    """Bytes that collectives beside an operator's matmuls send: by routes, once to an island."""
    columns = problem.operation.moved(problem)
    gathered, scattered = (problem.m * each * ITEM_BYTES for each in columns)
    if problem.experts:
        scattered *= once(problem, problem.ranks // problem.islands)
        return {Sent(part, "all_to_all", group): scattered}
    if problem.op == "matmul_all_reduce":
        return {Sent(part, "all_reduce", group): gathered}
    return {
        Sent(part, "all_gather", group): gathered,
        Sent(part, "reduce_scatter", group): scattered,
    }


class Placed(NamedTuple):
    """A problem, and the machine that its plans see.

    Args:
        problem: with the islands that plans are between.
        machine: with links between these, or of the rate of an all-to-all.
        planned: whether there are plans besides serial.
        late_s: latency that the machine does not have.
    """

    problem: Problem
    machine: Machine
    planned: bool = True
    late_s: float = 0.0


def placed(problem: Problem, network: Network, group: Group) -> Placed:
    """Where a problem of a group's ranks runs.

    Where no plan is between the group's islands, it may be of fewer ranks, each of which does as
    one of the group.
    """
    machine = network.as_islands(group)
    if machine is not None:
        return Placed(replace(problem, islands=between(network, group), out=False), machine)
    machine = network.as_machine(group)
    if network.near(group) == group.size:
        return Placed(problem, machine.of_ranks(group.size))
    machine = replace(machine, num_devices=problem.ranks)  # with links of all of the group
    return Placed(problem, machine, False, 2 * network.nic.latency_s)


def pair_s(place: Placed, overlap: Overlap) -> tuple[float, float]:
    """Seconds of an operator with its communication, and of its matmuls (or lookups) alone.

    Args:
        place: see `placed`.
        overlap: "none": by serial; "ours": by what `choose` takes; "ideal": the longer side alone.
    """
    seconds, compute_s, comm_s = _serial_s(place.problem, place.machine)
    if place.planned and overlap != "none":
        seconds = min(_chosen_s(place.problem, place.machine), seconds)
    if overlap == "ideal":
        seconds = min(max(compute_s, comm_s), seconds)
    return seconds + place.late_s, compute_s


@lru_cache(maxsize=4096)
def _serial_s(problem: Problem, machine: Machine) -> tuple[float, float, float]:
    """Seconds of the serial plan, of its matmuls alone, and of its communication alone."""
    machine = machine.of_ranks(problem.ranks // problem.islands)  # as `choose` has it
    seconds = predicted_s(build(problem, "serial", machine), machine)
    return seconds, *parts_s(problem, machine)


@lru_cache(maxsize=4096)
def _chosen_s(problem: Problem, machine: Machine) -> float:
    """Seconds of the plan that `choose` takes."""
    return choose(problem, machine.of_ranks(problem.ranks // problem.islands)).seconds
