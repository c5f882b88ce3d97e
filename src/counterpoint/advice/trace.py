"""One rank's trace: what its GPU ran, when the host asked for it, and which steps there are."""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from counterpoint.advice.cover import Cover, Times
from counterpoint.advice.events import Event, read_events
from counterpoint.advice.kinds import (
    COMMUNICATION,
    COMPUTATION,
    ITEM_BYTES,
    PACKING,
    collective_of,
    kind_of,
)
from counterpoint.errors import InputError

GPU = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver", "runtime"}  # AMD's, too
BLOCKS = ("Synchronize", "cudaMemcpy", "hipMemcpyWithStream")  # the host waits for the GPU in it
STEP, LOADER, FSDP = "ProfilerStep#", "enumerate(DataLoader)", "FSDP::"
NCCL, FRAMEWORKS = "record_param_comms", ("DistributedDataParallel", "Torch-Compiled Region")
MARKS = (STEP, LOADER, FSDP, NCCL, *FRAMEWORKS)
KEPT = GPU | LAUNCHES | {"cpu_op", "user_annotation"}


class Said(NamedTuple):
    """What a profiler says of a collective.

    Args:
        collective: e.g. "all-gather".
        num_bytes: of the larger of what goes in and what comes out; 0: it does not say.
        ranks: of the group; 0: it does not say.
        group: its name, and what it is for; "" if it does not say.
    """

    collective: str
    num_bytes: int
    ranks: int
    group: str


class Activity(NamedTuple):
    """Something that the GPU ran. Times are in seconds from the first one's start.

    Args:
        kind: of `kinds`.
        launched_s: when the host had asked for it; NaN if the trace does not say.
        blocks: of its grid; 0 of a copy.
        grid: as the trace says it, for comparing kernels.
        said: of a collective.
        within: the range of FSDP2 in which the host launched it, "" for none.
    """

    start_s: float
    end_s: float
    name: str
    kind: int
    stream: object
    launched_s: float
    blocks: int
    grid: str
    said: Said | None
    within: str


class Range(NamedTuple):
    """Something that the host did. Times as those of activities."""

    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True)
class Trace:
    """What a rank's trace holds.

    Args:
        path: its file.
        rank, world: as the file says; 0 and 1 if it does not.
        gpu: its name, e.g. "NVIDIA H200"; "" if the file does not say.
        activities: in the order of their start, at least one.
        steps: one or several, which lie side by side in time; one where none is marked.
        loading: the host waited for a data loader.
        blocked: the host waited for the GPU.
        marks: ranges of frameworks that were seen, e.g. "FSDP::all_gather".
        has_graphs: CUDA graphs were launched.
    """

    path: Path
    rank: int
    world: int
    gpu: str
    activities: tuple[Activity, ...]
    steps: tuple[Range, ...]
    loading: tuple[Range, ...]
    blocked: tuple[Range, ...]
    marks: frozenset[str]
    has_graphs: bool

    @cached_property
    def starts_s(self) -> Times:
        """When each activity began, in ascending order."""
        return np.array([each.start_s for each in self.activities])

    @cached_property
    def launched_s(self) -> Times:
        """When the host had asked for each."""
        return np.array([each.launched_s for each in self.activities])

    @cached_property
    def loads(self) -> Cover:
        """When the host waited for data."""
        return Cover((each.start_s, each.end_s) for each in self.loading)

    @cached_property
    def blocks(self) -> Cover:
        """When the host waited for the GPU."""
        return Cover((each.start_s, each.end_s) for each in self.blocked)

    @cached_property
    def _reach_s(self) -> Times:
        return np.maximum.accumulate([each.end_s for each in self.activities])

    def within(self, step: Range) -> list[tuple[int, Activity]]:
        """What ran in a step, in part or whole, and its place among all."""
        first = int(np.searchsorted(self._reach_s, step.start_s, side="right"))
        last = int(np.searchsorted(self.starts_s, step.end_s))
        found = enumerate(self.activities[first:last], first)
        return [(i, each) for i, each in found if each.end_s > step.start_s]


class _Reader:
    """Keeps of a file's events what is needed; microseconds as the file has them."""

    def __init__(self) -> None:
        self.gpu: list[Event] = []
        self.launched: dict[object, tuple[float, object]] = {}  # by correlation: end, thread
        self.comms: dict[object, Event] = {}  # by external id: what NCCL was called with
        self.steps: list[tuple[float, float, str]] = []
        self.loading: list[tuple[float, float, str]] = []
        self.blocked: list[tuple[float, float, str]] = []
        self.fsdp: defaultdict[object, list[tuple[float, float, str]]] = defaultdict(list)
        self.marks: set[str] = set()
        self.has_graphs = False

    def keep(self, event: Event) -> None:
        if event.get("ph") != "X":
            return
        category = str(event.get("cat", "")).lower()
        if category not in KEPT:
            return
        name = str(event.get("name", ""))
        if category == "cpu_op" and not name.startswith(MARKS):
            return
        start = event.get("ts")
        lasts = event.get("dur", 0)
        if not (isinstance(start, int | float) and isinstance(lasts, int | float)):
            return
        if not (math.isfinite(start) and 0 <= lasts < math.inf):
            return
        given: Any = event.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        if category in GPU:
            self.gpu.append({"cat": category, "name": name, "ts": start, "dur": lasts, "args": args,
                             "tid": event.get("tid")})  # fmt: skip
        elif category in LAUNCHES:
            self.has_graphs |= "GraphLaunch" in name
            if "correlation" in args:
                self.launched[args["correlation"]] = (start + lasts, event.get("tid"))
            if any(word in name for word in BLOCKS) and "Async" not in name:
                self.blocked.append((start, start + lasts, name))
        elif name == NCCL and "Collective name" in args:
            self.comms[args.get("External id")] = args
        else:
            self._keep_mark(name, start, start + lasts, event.get("tid"))

    def _keep_mark(self, name: str, start: float, end: float, thread: object) -> None:
        """Keep a range that says what the host did."""
        if name.startswith(STEP):
            self.steps.append((start, end, name))
        elif name.startswith(LOADER):
            self.loading.append((start, end, name))
        elif name.startswith(FSDP):
            self.fsdp[thread].append((start, end, name.partition(" ")[0]))
            self.marks.add(name.partition(" ")[0])
        elif name.startswith(FRAMEWORKS):
            self.marks.add(name.partition(".")[0].partition(":")[0])


def read_trace(path: Path, read: Callable[[int], None] = lambda _: None) -> Trace:
    """Read what torch.profiler wrote, or any profiler of Kineto's format.

    Raises:
        InputError: the file is none, was cut, or no GPU ran in it.
    """
    reader = _Reader()
    facts = read_events(path, reader.keep, read)
    devices = Counter(each["args"].get("device") for each in reader.gpu)
    if not reader.gpu:
        want = "a trace in which a GPU ran: profile with ProfilerActivity.CUDA"
        raise InputError("advise", "trace", want=want, got=f"{path}: no activity of a GPU")
    device = devices.most_common(1)[0][0]
    events = [each for each in reader.gpu if each["args"].get("device") == device]
    zero = min(each["ts"] for each in events)
    fsdp = {thread: sorted(ranges) for thread, ranges in reader.fsdp.items()}
    activities = [_activity(each, reader, fsdp, zero) for each in events]
    activities.sort(key=lambda each: (each.start_s, each.end_s))
    info: Any = facts.get("distributedInfo") or {}
    known = info if isinstance(info, dict) else {}

    def shifted(ranges: list[tuple[float, float, str]]) -> tuple[Range, ...]:
        found = (Range((a - zero) * 1e-6, (b - zero) * 1e-6, name) for a, b, name in ranges)
        return tuple(sorted(found))

    return Trace(
        path=path, rank=_whole(known.get("rank")), world=max(1, _whole(known.get("world_size"))),
        gpu=_gpu_of(facts, device), activities=tuple(activities),
        steps=_steps(activities, shifted(reader.steps)), loading=shifted(reader.loading),
        blocked=shifted(reader.blocked), marks=frozenset(reader.marks),
        has_graphs=reader.has_graphs,
    )  # fmt: skip


def _whole(value: object) -> int:
    try:
        return max(0, int(value))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return 0


def _gpu_of(facts: dict[str, Any], device: object) -> str:
    found: Any = facts.get("deviceProperties")
    known = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    names = {each.get("id"): str(each.get("name", "")) for each in known}
    return names.get(device) or next(iter(names.values()), "")


def _activity(
    event: Event, reader: _Reader, fsdp: dict[object, list[tuple[float, float, str]]], zero: float
) -> Activity:
    args, name = event["args"], event["name"]
    launched, thread = reader.launched.get(args.get("correlation"), (math.nan, None))
    within = _within(fsdp.get(thread, []), launched)
    kind = kind_of(event["cat"], name)
    comms = args if "Collective name" in args else reader.comms.get(args.get("External id"))
    if comms is not None and event["cat"] == "kernel" and kind == COMPUTATION and comms is args:
        kind = COMMUNICATION
    if kind == COMPUTATION and within and event["cat"] == "kernel":
        kind = PACKING
    grid = args.get("grid")
    blocks = grid if isinstance(grid, list) else []
    return Activity(
        start_s=(event["ts"] - zero) * 1e-6,
        end_s=(event["ts"] + event["dur"] - zero) * 1e-6,
        name=name,
        kind=kind,
        stream=args.get("stream", event["tid"]),
        launched_s=(launched - zero) * 1e-6,
        blocks=math.prod(map(_whole, blocks)) if blocks else 0,
        grid=str(grid),
        said=_said(name, comms or {}, args) if kind == COMMUNICATION else None,
        within=within,
    )


def _within(ranges: list[tuple[float, float, str]], launched: float) -> str:
    """The range that began last of those that hold a launch; "" for none."""
    i = bisect_right(ranges, (launched, math.inf, "")) - 1
    for start, end, name in reversed(ranges[max(0, i - 3) : i + 1]):  # they are nested 3 deep
        if start <= launched <= end:
            return name
    return ""


def _said(name: str, comms: dict[str, Any], args: dict[str, Any]) -> Said:
    elements = max(_whole(comms.get("In msg nelems")), _whole(comms.get("Out msg nelems")))
    num_bytes = elements * ITEM_BYTES.get(str(comms.get("dtype")), 0) or _whole(args.get("bytes"))
    group = comms.get("Process Group Description") or comms.get("Process Group Name") or ""
    said = str(comms.get("Collective name", ""))
    return Said(collective_of(said, name), num_bytes, _whole(comms.get("Group size")), str(group))


def _steps(activities: list[Activity], marks: tuple[Range, ...]) -> tuple[Range, ...]:
    """The times of steps on the GPU: from the first work that a step launched to the next one's."""
    starts: dict[Range, float] = {}
    ends: dict[Range, float] = {}
    begins = [mark.start_s for mark in marks]
    for each in activities:
        at_s = each.start_s if math.isnan(each.launched_s) else each.launched_s
        i = bisect_right(begins, at_s) - 1
        if i >= 0 and at_s <= marks[i].end_s:
            starts.setdefault(marks[i], each.start_s)
            ends[marks[i]] = max(ends.get(marks[i], 0.0), each.end_s)
    found = sorted(starts, key=lambda mark: starts[mark])
    if not found:
        return (Range(0.0, max(each.end_s for each in activities), "all"),)
    stops = [*(starts[mark] for mark in found[1:]), ends[found[-1]]]
    return tuple(
        Range(starts[mark], stop, mark.name)
        for mark, stop in zip(found, stops, strict=True)
        if stop > starts[mark]
    )
