"""What the GPU ran for each step of a profiled call: the proof that copies are DMA copies."""

from typing import Any, NamedTuple

from counterpoint.measure.trace import MEMCPY, activities, steps


class Ran(NamedTuple):
    """Of one copy step: copy-engine copies, and kernels or fills on the SMs."""

    num_memcpy: int = 0
    num_kernels: int = 0


def copy_activities(content: dict[str, Any]) -> dict[str, Ran]:
    """By name of the copy step, summed over all calls in the trace."""
    found = {step.name: Ran() for step in steps(content) if step.kind == "copy"}
    assert found, "no copy step in the trace, so nothing is proved"
    for activity in activities(content):
        if activity.step is not None and activity.step.kind == "copy":
            memcpy, kernels = found[activity.step.name]
            is_memcpy = activity.category == MEMCPY
            found[activity.step.name] = Ran(memcpy + is_memcpy, kernels + (not is_memcpy))
    return found


class Activity(NamedTuple):
    """A kernel, a copy or a fill, and the kind and the name of its step; "" outside of steps."""

    name: str
    num_bytes: int
    kind: str
    step: str


def device_activities(content: dict[str, Any]) -> list[Activity]:
    """All that the GPU ran, in the trace's order."""
    return [
        Activity(a.name, a.num_bytes, a.step.kind if a.step else "", a.step.name if a.step else "")
        for a in activities(content)
    ]
