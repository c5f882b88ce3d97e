"""Steps of experts: rows whose number or place only a call says, by its counts or its routes."""

from collections.abc import Callable, Sequence

from counterpoint.experts import steps_counted, steps_routed
from counterpoint.group.workspace import Action, Operands, Places
from counterpoint.plan.bind import BoundStep, Box
from counterpoint.run.compute import library


def actions(
    bounds: Sequence[BoundStep], places: Places, like: Operands | None
) -> list[Action] | None:
    """Of a step, or matmuls of one launch, that reads counts or routes; None: of any other."""
    bound, step = bounds[0], bounds[0].step
    match step.kind:
        case kind if step.routed and kind in steps_routed.ACTIONS:
            return [steps_routed.action(bound, places)]
        case "collective" if step.routed:
            return [steps_routed.all_to_all(bound, places, library(bound, places))]
        case "collective" if step.counted:
            return [steps_counted.all_to_all(bound, places, library(bound, places))]
        case "matmul" if step.counted:
            return [steps_counted.matmuls(bounds, places)]
        case "copy" if step.counted:
            return [steps_counted.copies(bound, places)]
        case _:
            return None


def boxes(bound: BoundStep, places: Places) -> Callable[[Operands], list[tuple[Box, Box]]]:
    """What a copy step copies in a call, and where it goes; none empty."""
    return steps_counted.boxes(bound, places)
