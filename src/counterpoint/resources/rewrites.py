"""A pipeline as a plan of opaque steps; each control is a rewrite of it, Plan -> Plan. Pure.

Computation is one lane and communication another, each in the order written, with an edge wherever
a step touches what a step of the other lane writes. Controls change lanes, edges and steps; of
whatever they make, `plan.validate` finds every two accesses that conflict in order.

Args of a step: "collective", its op; "transport" and "max_ctas", of a collective; "chunks" and
"along", of a call whose matmuls are cut; "delay_ns", of a step that only waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Step
from counterpoint.problem import Problem
from counterpoint.resources.controls import OFF, Controls

COMPUTE, COMM = Lane("compute", "sm"), Lane("comm", "sm")
URGENT = -5  # the most urgent priority of any GPU here; a device with fewer takes its own
Span = tuple[int, int]  # first byte, and one behind the last


class Touch(NamedTuple):
    """A stage: the op of its collective, if it is one, and the bytes that it reads and writes."""

    name: str
    collective: str
    reads: Sequence[Span]
    writes: Sequence[Span]


def plan_of(stages: Sequence[Touch], ranks: int) -> Plan:
    """Plain overlap of `stages`, the same plan on all ranks wherever their tensors lie.

    Bytes that one stage or another touches together are one buffer; buffers are in order of use.
    """
    areas = _areas(span for stage in stages for span in (*stage.reads, *stage.writes))
    used: dict[Span, str] = {}

    def regions(spans: Sequence[Span]) -> tuple[Region, ...]:
        found: list[Region] = []
        for start, stop in spans:
            if start < stop:
                area = next(a for a in areas if a[0] <= start and stop <= a[1])
                name = used.setdefault(area, f"memory {len(used)}")
                found.append(Region(name, cols=(start - area[0], stop - area[0])))
        return tuple(found)

    steps: list[Step] = []
    for i, stage in enumerate(stages):
        taken = any(step.name == stage.name for step in steps)
        name = f"{stage.name} ({i})" if taken else stage.name
        lane = COMM if stage.collective else COMPUTE
        args = (("collective", stage.collective),) if stage.collective else ()
        step = Step(
            name, lane.name, "opaque", regions(stage.reads), regions(stage.writes), args=args
        )
        steps.append(replace(step, after=_edges(steps, step)))
    buffers = tuple(
        Buffer(name, (1, stop - start), "uint8", "input") for (start, stop), name in used.items()
    )
    problem = Problem("pipeline", 0, 0, 0, ranks)
    return Plan(problem, "pipeline", OFF.spec, "ring", buffers, (COMPUTE, COMM), tuple(steps))


def rewritten(plan: Plan, controls: Controls) -> Plan:
    """What `controls` make of plain overlap.

    Args:
        plan: as `plan_of` has made it.
        controls: "carve_out" and "num_sms" are none of a plan: see `run`.
    """
    if not controls.overlap:
        plan = in_sequence(plan)
    if controls.priority:
        plan = urgent(plan)
    if controls.blocks_per_sm:
        plan = _with_lane(plan, COMPUTE, blocks_per_sm=controls.blocks_per_sm)
    if controls.green_sms:
        plan = _with_lane(plan, COMPUTE, num_sms=controls.green_sms)
    if controls.chunks > 1:
        plan = _marked(plan, COMPUTE, chunks=controls.chunks, along=controls.along)
    if controls.transport != "sm":
        plan = carried(plan, controls.transport)
    if controls.max_ctas:
        plan = _marked(plan, COMM, max_ctas=controls.max_ctas)
    if controls.delay_s:
        plan = held_back(plan, controls.delay_s)
    return replace(plan, variant=controls.spec)


def in_sequence(plan: Plan) -> Plan:
    """Every step waits for the one before it."""
    steps = tuple(replace(step, lane=COMPUTE.name, after=()) for step in plan.steps)
    return replace(plan, lanes=(COMPUTE,), steps=steps)


def urgent(plan: Plan) -> Plan:
    """When computation and communication both have blocks to launch, those of the latter go first.

    A priority decides who gets an SM that becomes free; it takes none away. Beside a kernel whose
    blocks stay to its end it changes nothing.
    """
    return _with_lane(plan, COMM, priority=URGENT)


def held_back(plan: Plan, delay_s: float) -> Plan:
    """What computes behind a collective starts later, so that the collective has its SMs first.

    A persistent matmul takes every SM and keeps them to its end; a collective that is launched just
    after it waits for all of that.
    """
    steps: list[Step] = []
    for step in plan.steps:
        if step.lane == COMPUTE.name and steps and steps[-1].lane == COMM.name:
            args = (("delay_ns", round(delay_s * 1e9)),)
            wait = Step(
                f"delay before {step.name}", step.lane, "opaque", after=step.after, args=args
            )
            steps.append(wait)
            step = replace(step, after=())
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def carried(plan: Plan, transport: str) -> Plan:
    """Collectives go by `transport` where they can.

    A warp that waits for peers, before and behind copies, must not wait for SMs as well.
    """
    plan = _marked(plan, COMM, transport=transport)
    return urgent(plan) if transport == "copy_engine" else plan


def _with_lane(plan: Plan, lane: Lane, **settings: Any) -> Plan:
    lanes = (replace(one, **settings) if one.name == lane.name else one for one in plan.lanes)
    return replace(plan, lanes=tuple(lanes))


def _marked(plan: Plan, lane: Lane, **args: int | str) -> Plan:
    """`args` on every step of a lane that does not only wait."""
    steps = (
        replace(step, args=(*step.args, *args.items()))
        if step.lane == lane.name and not step.arg("delay_ns")
        else step
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))


def _areas(spans: Iterable[Span]) -> list[Span]:
    """The bytes of spans that overlap, together."""
    areas: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if areas and start < areas[-1][1]:
            areas[-1] = (areas[-1][0], max(areas[-1][1], stop))
        else:
            areas.append((start, stop))
    return areas


def _edges(earlier: Sequence[Step], step: Step) -> tuple[str, ...]:
    """The last step of the other lane that `step` conflicts with: what is before it is in order."""
    for other in reversed(earlier):
        if other.lane != step.lane and (
            _meet(step.reads, other.writes)
            or _meet(step.writes, other.reads)
            or _meet(step.writes, other.writes)
        ):
            return (other.name,)
    return ()


def _meet(some: Sequence[Region], others: Sequence[Region]) -> bool:
    spans = [(r.buffer, r.cols) for r in others if isinstance(r.cols, tuple)]
    return any(
        r.buffer == buffer and isinstance(r.cols, tuple) and overlap(r.cols, cols)
        for r in some
        for buffer, cols in spans
    )


def overlap(a: Span, b: Span) -> bool:
    """Whether they have a byte in common."""
    return a[0] < b[1] and b[0] < a[1]
