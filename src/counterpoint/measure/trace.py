"""Read a torch.profiler trace: what the GPU ran, and which step of the plan asked for it.

The executor submits each step inside `record_function("counterpoint/<lane>/<kind>/<step>")`. A GPU
activity names its launch by a correlation number, and the launch lies in the step's range. The
kernels of a CUDA graph replay share one launch and so belong to no step: profile eager runs.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from counterpoint.errors import CounterpointError, InputError
from counterpoint.spans import KINDS, Span
from counterpoint.timeline import Timeline

RANGE_PREFIX = "counterpoint/"
MEMCPY = "gpu_memcpy"
GPU_CATEGORIES = ("kernel", MEMCPY, "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")

Trace = dict[str, Any] | str | Path


class CopyActivities(NamedTuple):
    """What the GPU ran for one copy step: copy-engine copies, and kernels or fills on the SMs."""

    num_memcpy: int
    num_kernels: int


class Activity(NamedTuple):
    """What the GPU ran: a kernel, a copy or a fill, and the kind and name of the step it is of.

    `num_bytes` is of a copy or a fill, 0 of a kernel; kind and step are "" outside of steps.
    """

    name: str
    num_bytes: int
    kind: str
    step: str


@dataclass(frozen=True, slots=True)
class _Step:
    """A range that the executor recorded around one submission, on a CPU thread."""

    thread: tuple[object, object]  # pid, tid
    start_us: float
    end_us: float
    lane: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class _Activity:
    """Something the GPU ran, and the step that asked for it, if one did."""

    category: str
    name: str
    stream: object
    start_us: float
    end_us: float
    step: _Step | None
    num_bytes: int = 0


def read_trace(trace: Trace, rank: int = 0) -> Timeline:
    """Return the GPU activities of a profiled run as a timeline, in order of their start.

    An activity of a step has the step's lane, kind and name as its label, after "wait for " where
    it is the step's wait; any other one has the lane "stream N", kind "other" and its own name.
    A step of several activities has several spans. Times count from the trace's base time, which
    is the same for all ranks of a host.

    Args:
        trace: Path of what `prof.export_chrome_trace` wrote (.json or .json.gz), or its content.
        rank: Rank that wrote the trace.

    Raises:
        InputError: `trace` is not a Chrome trace, or a step has a kind that a timeline lacks.
        CounterpointError: The trace holds no GPU activity.
    """
    content = _load(trace, "read_trace")
    spans = (_span(activity, rank) for activity in _activities(content, "read_trace"))
    in_order = sorted(spans, key=lambda span: (span.start_s, span.end_s))
    return Timeline(spans=tuple(in_order), source=_source(content))


def copy_activities(trace: Trace) -> dict[str, CopyActivities]:
    """Count the copy-engine copies and the kernels that each copy step ran.

    The proof that "copies are DMA copies": num_kernels is 0 and num_memcpy is not, for every
    step. Fills (memset) count as kernels. A copy step that ran nothing on the GPU has (0, 0).

    Args:
        trace: As for `read_trace`.

    Returns:
        Step name -> (num_memcpy, num_kernels), summed over all calls in the trace.

    Raises:
        InputError: `trace` is not a Chrome trace, or a step has a kind that a timeline lacks.
        CounterpointError: The trace holds no GPU activity, or no copy step.
    """
    op = "copy_activities"
    content = _load(trace, op)
    activities = _activities(content, op)
    counts = {step.name: (0, 0) for step in _steps(content, op) if step.kind == "copy"}
    if not counts:
        raise CounterpointError(
            f"{op}: no copy step in the trace, so nothing is proved; profile a plan with copies, "
            f"run eagerly, so that the ranges {RANGE_PREFIX}<lane>/copy/<step> are recorded"
        )
    for activity in activities:
        if activity.step is not None and activity.step.kind == "copy":
            num_memcpy, num_kernels = counts[activity.step.name]
            is_memcpy = activity.category == MEMCPY
            counts[activity.step.name] = (num_memcpy + is_memcpy, num_kernels + (not is_memcpy))
    return {name: CopyActivities(*count) for name, count in counts.items()}


def device_activities(trace: Trace) -> list[Activity]:
    """All that the GPU ran, in the trace's order.

    Args:
        trace: As for `read_trace`.

    Raises:
        InputError: `trace` is not a Chrome trace, or a step has a kind that a timeline lacks.
        CounterpointError: The trace holds no GPU activity.
    """
    op = "device_activities"
    return [
        Activity(a.name, a.num_bytes, a.step.kind if a.step else "", a.step.name if a.step else "")
        for a in _activities(_load(trace, op), op)
    ]


def _load(trace: Trace, op: str) -> dict[str, Any]:
    content: Any = trace
    if not isinstance(trace, dict):
        path = Path(trace)
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        try:
            content = json.loads(raw)
        except json.JSONDecodeError as error:
            raise InputError(op, "trace", want="JSON", got=f"{path} ({error})") from error
    if not isinstance(content, dict) or "traceEvents" not in content:
        want = "a Chrome trace with traceEvents"
        fix = "write it with prof.export_chrome_trace"
        kind = type(cast(object, content)).__name__
        raise InputError(op, "trace", want=want, got=f"a {kind}", fix=fix)
    return cast(dict[str, Any], content)


def _complete_events(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for event in content["traceEvents"]:
        if event.get("ph") == "X":
            yield event


def _activities(content: dict[str, Any], op: str) -> list[_Activity]:
    step_of = _step_of_correlation(content, op)
    activities: list[_Activity] = []
    for event in _complete_events(content):
        if event.get("cat") in GPU_CATEGORIES:
            args = event.get("args", {})
            activity = _Activity(
                category=event["cat"],
                name=event["name"],
                stream=args.get("stream", event.get("tid")),
                start_us=event["ts"],
                end_us=event["ts"] + event.get("dur", 0),
                step=step_of.get(args.get("correlation")),
                num_bytes=int(args.get("bytes", 0)),
            )
            activities.append(activity)
    if not activities:
        raise CounterpointError(
            f"{op}: no GPU activity in the trace; profile with ProfilerActivity.CUDA and "
            f"synchronize the device before the profiler stops"
        )
    return activities


def _steps(content: dict[str, Any], op: str) -> list[_Step]:
    steps: list[_Step] = []
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
            raise InputError(op, "trace", want=want, got=repr(event["name"]))
        thread = (event.get("pid"), event.get("tid"))
        steps.append(_Step(thread, event["ts"], event["ts"] + event["dur"], lane, kind, name))
    return steps


def _step_of_correlation(content: dict[str, Any], op: str) -> dict[object, _Step]:
    """Map each launch, by its correlation number, to the innermost step range that holds it."""
    launches = [
        ((event.get("pid"), event.get("tid")), event["ts"], event["args"]["correlation"])
        for event in _complete_events(content)
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    ]
    launches.sort(key=lambda launch: launch[1])
    # outer range first where two start together: the one pushed last is the innermost
    steps = sorted(_steps(content, op), key=lambda step: (step.start_us, -step.end_us))

    found: dict[object, _Step] = {}
    open_steps: dict[tuple[object, object], list[_Step]] = {}
    next_step = 0
    for thread, launch_us, correlation in launches:
        while next_step < len(steps) and steps[next_step].start_us <= launch_us:
            open_steps.setdefault(steps[next_step].thread, []).append(steps[next_step])
            next_step += 1
        # ranges of a thread are nested, so those that have ended lie above those that have not
        stack = open_steps.get(thread, [])
        while stack and stack[-1].end_us < launch_us:
            stack.pop()
        if stack:
            found.setdefault(correlation, stack[-1])
    return found


def _span(activity: _Activity, rank: int) -> Span:
    start_s, end_s = activity.start_us * 1e-6, activity.end_us * 1e-6
    if activity.step is None:
        return Span(rank, f"stream {activity.stream}", start_s, end_s, "other", activity.name)
    step = activity.step
    label = f"wait for {step.name}" if step.kind == "wait" else step.name
    return Span(rank, step.lane, start_s, end_s, step.kind, label)


def _source(content: dict[str, Any]) -> str:
    devices: list[dict[str, Any]] = content.get("deviceProperties") or [{"name": "a GPU"}]
    return f"measured on {devices[0]['name']}, torch.profiler"
