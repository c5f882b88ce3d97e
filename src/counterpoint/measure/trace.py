"""Read a torch.profiler trace: what the GPU ran, and which step of the plan asked for it.

The executor submits each step inside `record_function("counterpoint/<lane>/<kind>/<step>")`. A GPU
activity names its launch by a correlation number, and the launch lies in the step's range. The
kernels of a CUDA graph replay share one launch and so belong to no step: profile eager runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from counterpoint.errors import CounterpointError, InputError
from counterpoint.spans import KINDS, Span

RANGE_PREFIX = "counterpoint/"
MEMCPY = "gpu_memcpy"
GPU_CATEGORIES = ("kernel", MEMCPY, "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class StepRange:
    """A range that the executor recorded around one submission, on a CPU thread."""

    thread: tuple[object, object]  # pid, tid
    start_us: float
    end_us: float
    lane: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Activity:
    """Something the GPU ran, and the step that asked for it, if one did."""

    category: str
    name: str
    stream: object
    start_us: float
    end_us: float
    step: StepRange | None
    num_bytes: int = 0


def read_trace(content: dict[str, Any], rank: int = 0) -> tuple[Span, ...]:
    """Return the GPU activities of a profiled run, in order of their start.

    An activity of a step has the step's lane, kind and name as its label, after "wait for " where
    it is the step's wait; any other one has the lane "stream N", kind "other" and its own name.
    A step of several activities has several spans. Times count from the trace's base time, which
    is the same for all ranks of a host.

    Args:
        content: Of what `prof.export_chrome_trace` wrote.
        rank: Rank that wrote it.

    Raises:
        InputError: A step has a kind that a timeline lacks.
        CounterpointError: The trace holds no GPU activity.
    """
    spans = (_span(activity, rank) for activity in activities(content))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))


def _complete_events(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for event in content["traceEvents"]:
        if event.get("ph") == "X":
            yield event


def activities(content: dict[str, Any]) -> list[Activity]:
    """All that the GPU ran, in the order of the trace.

    Raises:
        InputError: a step has a kind that a timeline lacks.
        CounterpointError: there is none.
    """
    step_of = _step_of_correlation(content)
    found: list[Activity] = []
    for event in _complete_events(content):
        if event.get("cat") in GPU_CATEGORIES:
            args = event.get("args", {})
            activity = Activity(
                category=event["cat"],
                name=event["name"],
                stream=args.get("stream", event.get("tid")),
                start_us=event["ts"],
                end_us=event["ts"] + event.get("dur", 0),
                step=step_of.get(args.get("correlation")),
                num_bytes=int(args.get("bytes", 0)),
            )
            found.append(activity)
    if not found:
        raise CounterpointError(
            "read_trace: no GPU activity in the trace; profile with ProfilerActivity.CUDA and "
            "synchronize the device before the profiler stops"
        )
    return found


def steps(content: dict[str, Any]) -> list[StepRange]:
    """What the executor recorded around each submission.

    Raises:
        InputError: a step has a kind that a timeline lacks.
    """
    found: list[StepRange] = []
    for event in _complete_events(content):
        if event.get("cat") != "user_annotation" or not event["name"].startswith(RANGE_PREFIX):
            continue
        # a step's name may hold slashes; a range of ours with fewer parts is around many steps
        parts = event["name"].removeprefix(RANGE_PREFIX).split("/", 2)
        if len(parts) < 3:
            continue
        lane, kind, name = parts
        if kind not in KINDS:
            want = f"ranges with a kind of {', '.join(KINDS)}"
            raise InputError("read_trace", "trace", want=want, got=repr(event["name"]))
        thread = (event.get("pid"), event.get("tid"))
        found.append(StepRange(thread, event["ts"], event["ts"] + event["dur"], lane, kind, name))
    return found


def _step_of_correlation(content: dict[str, Any]) -> dict[object, StepRange]:
    """Map each launch, by its correlation number, to the innermost step range that holds it."""
    launches = [
        ((event.get("pid"), event.get("tid")), event["ts"], event["args"]["correlation"])
        for event in _complete_events(content)
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    ]
    launches.sort(key=lambda launch: launch[1])
    # outer range first where two start together: the one pushed last is the innermost
    ranges = sorted(steps(content), key=lambda step: (step.start_us, -step.end_us))

    found: dict[object, StepRange] = {}
    open_steps: dict[tuple[object, object], list[StepRange]] = {}
    next_step = 0
    for thread, launch_us, correlation in launches:
        while next_step < len(ranges) and ranges[next_step].start_us <= launch_us:
            open_steps.setdefault(ranges[next_step].thread, []).append(ranges[next_step])
            next_step += 1
        # ranges of a thread are nested, so those that have ended lie above those that have not
        stack = open_steps.get(thread, [])
        while stack and stack[-1].end_us < launch_us:
            stack.pop()
        if stack:
            found.setdefault(correlation, stack[-1])
    return found


def _span(activity: Activity, rank: int) -> Span:
    start_s, end_s = activity.start_us * 1e-6, activity.end_us * 1e-6
    if activity.step is None:
        return Span(rank, f"stream {activity.stream}", start_s, end_s, "other", activity.name)
    step = activity.step
    label = f"wait for {step.name}" if step.kind == "wait" else step.name
    return Span(rank, step.lane, start_s, end_s, step.kind, label)
