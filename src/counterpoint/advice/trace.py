"""One rank's trace: what its GPU ran, when the host asked for it, and which steps there are."""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from counterpoint.advice.cover import Cover
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
BLOCKS = ("Synchronize", "cudaMemcpy", "hipMemcpyWithStream")  # ends of calls that wait for the GPU
STEP, LOADER, FSDP = "ProfilerStep#", "enumerate(DataLoader)", "FSDP::"
NCCL, FRAMEWORKS = "record_param_comms", ("DistributedDataParallel", "FullyShardedDataParallel")
MARKS = (STEP, LOADER, FSDP, NCCL, *FRAMEWORKS)
KEPT = GPU | LAUNCHES | {"cpu_op", "user_annotation"}


class Said(NamedTuple):
    """What a profiler says of a collective.

    Args:
        collective: e.g. "all-gather".
        num_bytes: of the larger of what goes in and what comes out; 0: it does not say.
        ranks: of the group; 0: it does not say.
        group: what it is for, or its name; "" if it does not say.
        members: what tells groups apart, of all ranks alike: its name and its ranks.
    """

    collective: str
    num_bytes: int
    ranks: int
    group: str
    members: str


class Activity(NamedTuple):
    """Something that the GPU ran. Times are in seconds from the first one's start.

    Args:
        kind: of `kinds`.
        launched_s: when the host had asked for it; NaN if the trace does not say.
        blocks: of its grid; 0 of a copy.
        grid: as the trace says it, for comparing kernels.
        said: of a collective.
        within: the range of FSDP2 in which the host launched it, "" for none.
        step: the profiler's mark in which the host launched it, "" for none.
    """

    start_s: float
    end_s: float
    name: str
    kind: int
    stream: str
    launched_s: float
    blocks: int
    grid: str
    said: Said | None
    within: str
    step: str


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
        blocked: the host waited for the GPU, in a thread that launches work.
        marks: ranges of frameworks that were seen, e.g. "FSDP::all_gather".
        others: GPUs of the same process whose activities are left out.
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
    others: int

    @cached_property
    def starts_s(self) -> list[float]:
        """When each activity began, in ascending order."""
        return [each.start_s for each in self.activities]

    @cached_property
    def loads(self) -> Cover:
        """When the host waited for data."""
        return Cover((each.start_s, each.end_s) for each in self.loading)

    @cached_property
    def blocks(self) -> Cover:
        """When the host waited for the GPU."""
        return Cover((each.start_s, each.end_s) for each in self.blocked)

    @cached_property
    def _reach_s(self) -> list[float]:
        return [*accumulate((each.end_s for each in self.activities), max)]

    def within(self, step: Range) -> list[tuple[int, Activity]]:
        """What ran in a step, in part or whole, and its place among all."""
        first = bisect_right(self._reach_s, step.start_s)
        last = bisect_left(self.starts_s, step.end_s)
        found = enumerate(self.activities[first:last], first)
        return [(i, each) for i, each in found if each.end_s > step.start_s]


class _Reader:
    """Keeps of a file's events what is needed; microseconds as the file has them."""

    def __init__(self) -> None:
        self.gpu: list[Event] = []
        self.launched: dict[str, tuple[float, str]] = {}  # by correlation: when, and its thread
        self.comms: dict[str, Event] = {}  # by external id: what NCCL was called with
        self.steps: list[tuple[float, float, str]] = []
        self.loading: list[tuple[float, float, str]] = []
        self.blocked: list[tuple[float, float, str]] = []  # with the thread for a name
        self.fsdp: defaultdict[str, list[tuple[float, float, str]]] = defaultdict(list)
        self.marks: set[str] = set()

    def keep(self, event: Event) -> None:
        if event.get("ph") != "X":
            return
        category = str(event.get("cat", "")).lower()
        if category not in KEPT:
            return
        name = str(event.get("name", ""))
        if category == "cpu_op" and not name.startswith(MARKS):
            return
        try:
            start, lasts = float(event.get("ts", "")), float(event.get("dur", 0))
        except (TypeError, ValueError, OverflowError):
            return
        if not (math.isfinite(start) and 0 <= lasts < math.inf):
            return
        given: Any = event.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        thread = str(event.get("tid"))
        if category in GPU:
            if lasts:
                self.gpu.append({"cat": category, "name": name, "ts": start, "dur": lasts,
                                 "args": args, "tid": thread})  # fmt: skip
        elif category in LAUNCHES:
            # a copy that blocks was asked for when its call began
            asked = start if "Memcpy" in name else start + lasts
            self.launched[str(args.get("correlation"))] = asked, thread
            if name.endswith(BLOCKS):
                self.blocked.append((start, start + lasts, thread))
        elif name == NCCL and "Collective name" in args:
            self.comms[str(args.get("External id"))] = args
        else:
            self._keep_mark(name, start, start + lasts, thread)

    def _keep_mark(self, name: str, start: float, end: float, thread: str) -> None:
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

    Of a process with several GPUs the one counts that was busy for longest.

    Raises:
        InputError: the file is none, was cut, or no GPU ran in it.
    """
    reader = _Reader()
    facts = read_events(path, reader.keep, read)
    busy: defaultdict[str, float] = defaultdict(float)
    for each in reader.gpu:
        busy[str(each["args"].get("device"))] += each["dur"]
    if not busy:
        want = "a trace in which a GPU ran: profile with ProfilerActivity.CUDA"
        raise InputError("advise", "trace", want=want, got=f"{path}: no activity of a GPU")
    device = max(busy, key=lambda name: busy[name])
    events = [each for each in reader.gpu if str(each["args"].get("device")) == device]
    zero = min(each["ts"] for each in events)
    steps = _Ranges(reader.steps)
    fsdp = {thread: _Ranges(ranges) for thread, ranges in reader.fsdp.items()}
    activities = [_activity(each, reader, fsdp, steps, zero) for each in events]
    activities.sort(key=lambda each: (each.start_s, each.end_s))
    info: Any = facts.get("distributedInfo") or {}
    known = info if isinstance(info, dict) else {}
    called = (reader.launched.get(str(each["args"].get("correlation"))) for each in events)
    launching = {found[1] for found in called if found}

    def shifted(ranges: Iterable[tuple[float, float, str]]) -> tuple[Range, ...]:
        found = (Range((a - zero) * 1e-6, (b - zero) * 1e-6, name) for a, b, name in ranges)
        return tuple(sorted(found))

    return Trace(
        path=path, rank=_whole(known.get("rank")), world=max(1, _whole(known.get("world_size"))),
        gpu=_gpu_of(facts, device), activities=tuple(activities), steps=_steps(activities),
        loading=shifted(reader.loading),
        blocked=shifted(each for each in reader.blocked if each[2] in launching),
        marks=frozenset(reader.marks), others=len(busy) - 1,
    )  # fmt: skip


def _whole(value: object) -> int:
    try:
        return max(0, int(value))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return 0


def _gpu_of(facts: dict[str, Any], device: str) -> str:
    found: Any = facts.get("deviceProperties")
    known = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    names = {str(each.get("id")): str(each.get("name", "")) for each in known}
    return names.get(device) or next(iter(names.values()), "")


class _Ranges:
    """Ranges of a thread, which lie one after another or within another."""

    def __init__(self, ranges: list[tuple[float, float, str]]) -> None:
        self.ranges = sorted(ranges, key=lambda each: (each[0], -each[1]))
        self.starts = [start for start, *_ in self.ranges]
        self.around: list[int] = []  # of each range: that which holds it, -1 for none
        is_open: list[int] = []
        for i, (start, *_) in enumerate(self.ranges):
            while is_open and self.ranges[is_open[-1]][1] < start:
                is_open.pop()
            self.around.append(is_open[-1] if is_open else -1)
            is_open.append(i)

    def at(self, time: float) -> str:
        """The innermost range at a time; "" for none."""
        i = -1 if math.isnan(time) else bisect_right(self.starts, time) - 1
        while i >= 0:
            if time <= self.ranges[i][1]:
                return self.ranges[i][2]
            i = self.around[i]
        return ""


NOWHERE = _Ranges([])


def _activity(
    event: Event, reader: _Reader, fsdp: dict[str, _Ranges], steps: _Ranges, zero: float
) -> Activity:
    args, name = event["args"], event["name"]
    launched, thread = reader.launched.get(str(args.get("correlation")), (math.nan, ""))
    within = fsdp.get(thread, NOWHERE).at(launched)
    kind = kind_of(event["cat"], name)
    if "Collective name" in args and event["cat"] == "kernel":
        kind = COMMUNICATION
    elif kind == COMPUTATION and within:
        kind = PACKING
    comms = args if "Collective name" in args else reader.comms.get(str(args.get("External id")))
    grid = args.get("grid")
    blocks = grid if isinstance(grid, list) else []
    return Activity(
        start_s=(event["ts"] - zero) * 1e-6, end_s=(event["ts"] + event["dur"] - zero) * 1e-6,
        name=name, kind=kind, stream=str(args.get("stream", event["tid"])),
        launched_s=(launched - zero) * 1e-6,
        blocks=math.prod(map(_whole, blocks)) if blocks else 0, grid=str(grid),
        said=_said(name, comms or {}, args) if kind == COMMUNICATION else None,
        within=within, step=steps.at(launched if reader.launched else event["ts"]),
    )  # fmt: skip


def _said(name: str, comms: dict[str, Any], args: dict[str, Any]) -> Said:
    elements = max(_whole(comms.get("In msg nelems")), _whole(comms.get("Out msg nelems")))
    item_bytes = ITEM_BYTES.get(str(comms.get("dtype")).removeprefix("c10::"), 0)
    group, ranks = comms.get("Process Group Name") or "", comms.get("Process Group Ranks") or ""
    return Said(
        collective_of(str(comms.get("Collective name", "")), name),
        elements * item_bytes or _whole(args.get("bytes")), _whole(comms.get("Group size")),
        str(comms.get("Process Group Description") or group), f"{group} {ranks}",
    )  # fmt: skip


def _steps(activities: list[Activity]) -> tuple[Range, ...]:
    """The times of steps on the GPU: from the first work of one to that of the next.

    That of the stream which computes most: others run ahead, with copies of the next batch, say.
    """
    computes: defaultdict[str, float] = defaultdict(float)
    for each in activities:
        computes[each.stream] += each.end_s - each.start_s if each.kind == COMPUTATION else 0.0
    main = max(computes, key=lambda stream: computes[stream])
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for each in activities:
        if each.step and each.stream == main:
            starts.setdefault(each.step, each.start_s)
        ends[each.step] = max(ends.get(each.step, 0.0), each.end_s)
    found = sorted(starts, key=lambda name: starts[name])
    if not found:
        return (Range(0.0, max(ends.values()), "all"),)
    stops = [*(starts[name] for name in found[1:]), ends[found[-1]]]
    return tuple(Range(starts[name], stop, name) for name, stop in zip(found, stops, strict=True))
