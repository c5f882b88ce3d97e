"""How many slices of tables the backward of embedding bags has: by prediction, or one."""

from typing import NamedTuple

from counterpoint.choose.gains import MARGINS, MIN_GAIN_S
from counterpoint.embedding.plan_slices import backward_s, slice_s
from counterpoint.machine import Machine
from counterpoint.problem import Problem

COUNTS = (1, 2, 3, 4, 6, 8)
# exchange of a slice: the host takes about as long to enqueue one, and would be waited for
MIN_SLICE_S = 100e-6


class Slices(NamedTuple):
    """The number that is taken, and what was predicted of each that was weighed."""

    number: int
    seconds: dict[int, float]

    def __str__(self) -> str:
        us = {count: f"{seconds * 1e6:.0f}" for count, seconds in self.seconds.items()}
        if self.number > 1:
            return f"{self.number} slices of tables, {us[self.number]} us predicted, in one {us[1]}"
        others = ", ".join(f"{us[count]} in {count}" for count in us if count > 1)
        return f"1 slice of tables, {us[1]} us predicted" + (f" ({others})" if others else "")


def slices_of(problem: Problem, machine: Machine) -> Slices:
    """How many slices the gradient of such embedding bags is exchanged and summed in.

    More than one where that is predicted to gain as much as another plan has to over serial.
    """
    whole_s = backward_s(problem, machine, 1)
    seconds = {1: whole_s}
    own = slice_s(problem, machine, [sum(dims) for dims in problem.tables])
    most = max(map(len, problem.tables))
    for count in COUNTS[1:]:
        if problem.ranks > 1 and count <= most and own / count >= MIN_SLICE_S:
            seconds[count] = backward_s(problem, machine, count)
    enough_s = min(whole_s / MARGINS[machine.measured is not None], whole_s - MIN_GAIN_S)
    good = [count for count in seconds if seconds[count] <= enough_s]
    return Slices(min(good, key=seconds.__getitem__, default=1), seconds)
