"""Where the time of a step goes: computation, communication that nothing hides, copies, idleness.

    computation + exposed + late + packing + idle = the step

What is hidden by computation counts as computation; communication comes before packing where both
run beside no computation.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median
from typing import NamedTuple

from counterpoint.advice.cover import Cover
from counterpoint.advice.kinds import (
    COMMUNICATION,
    COMPUTATION,
    PACKING,
    family_of,
)
from counterpoint.advice.trace import FSDP, Activity, Range, Trace

# kernels that are compared with themselves: as long, beside no communication or beside some
COMPARED_S, ALONE, LEAST = 5e-6, 0.05, 2
ALIKE = 1.15  # times of kernels of one shape: the longest over the shortest
MOST = 2.5  # times as long as alone: beyond, it is a kernel of another shape
# all of whose ranks wait for each other
MEETS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
# by NCCL's own convention for its bus bandwidth: how often (n - 1) / n of the bytes are sent
SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


@dataclass(frozen=True)
class Collective:
    """All calls of one kind and group in a step, of one rank. Seconds are those of all calls.

    Args:
        kind: e.g. "all-gather"; "peer copy" of what a copy engine moves.
        group: as the program names it; "FSDP2" of what FSDP2 launches; "" if nothing says it.
        ranks: of the group; 0 if nothing says it.
        calls: of a step.
        num_bytes: of a call, the larger of input and output; 0 if nothing says it.
        time_s: from start to end.
        exposed_s: beside no computation, waiting for a late rank included; where several run,
            that of the one that began first.
        late_s: of `exposed_s`, waiting for the last rank; None where that is not known.
        bus_bytes_per_s: while it did not wait; 0 if bytes or ranks are unknown.
        blocks: of the largest kernel: as many SMs, where each takes one.
        before, after: what computed last before it, and first after it, e.g. "matmul".
    """

    kind: str
    group: str
    ranks: int
    calls: float
    num_bytes: float
    time_s: float
    exposed_s: float
    late_s: float | None
    bus_bytes_per_s: float
    blocks: int
    before: str
    after: str


@dataclass(frozen=True)
class Losses:
    """Where the time of a rank's step went, in seconds; see the head of this file.

    Args:
        rank: as its trace says.
        time_s: of the step.
        computation_s: at least one kernel computed.
        exposed_s: communication beside no computation, less `late_s`.
        late_s: of such communication, what waited for a late rank; 0 without the others' traces.
        packing_s: copies that pack and unpack for collectives, beside neither.
        idle_s: by cause, nothing of these ran: "launching" (the host was late), "data" (it waited
            for a loader), "synchronizing" (it waited for the GPU before), "host copies" (to or
            from the host), "dependencies" (the work was launched in time),
            "unknown" (the trace does not say when it was).
        packed_s: all that packs and unpacks, hidden or not.
        slowed_s: what computation lost beside communication; a part of `computation_s`.
        beside_s, compared_s: kernels beside communication, and those that ran alone, too.
        collectives: the most exposed first.
    """

    rank: int
    time_s: float
    computation_s: float
    exposed_s: float
    late_s: float
    packing_s: float
    idle_s: Mapping[str, float]
    packed_s: float
    slowed_s: float
    beside_s: float
    compared_s: float
    collectives: tuple[Collective, ...]

    @property
    def lost_s(self) -> float:
        """To communication in all: what ran beside it and not alone lost as much as what did."""
        slowed_s = self.slowed_s * self.beside_s / self.compared_s if self.compared_s else 0.0
        return self.exposed_s + self.late_s + self.packing_s + slowed_s


CAUSES = ("launching", "data", "synchronizing", "host copies", "dependencies", "unknown")
Late = Mapping[int, float]  # by place among a trace's activities, seconds


def late_ranks(traces: Sequence[Trace]) -> list[Late]:
    """How long each collective waited for the last rank: its time less the shortest of all ranks.

    Calls are matched by the step that launched them, kind, group and order. Where ranks have
    unequal numbers of calls, nothing is known of that group in that step; nor of what is sent from
    one rank to another.
    """
    places = [_calls(trace) for trace in traces]
    found: list[dict[int, float]] = [{} for _ in traces]
    for key in {key for each in places for key in each}:
        have = [r for r, each in enumerate(places) if key in each]
        if len(have) < 2 or len({len(places[r][key]) for r in have}) > 1:
            continue
        for calls in zip(*(places[r][key] for r in have), strict=True):
            lasted = [_lasts(traces[r].activities[i]) for r, i in zip(have, calls, strict=True)]
            for r, i, time_s in zip(have, calls, lasted, strict=True):
                found[r][i] = time_s - min(lasted)
    return list(found)


def _calls(trace: Trace) -> dict[tuple[str, ...], list[int]]:
    """The places of collectives at which all ranks meet, by step, kind and group."""
    found: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, each in enumerate(trace.activities):
        if each.said is not None and each.said.collective in MEETS:
            said = each.said
            found[each.step, said.collective, said.group, said.members, str(said.ranks)].append(i)
    return found


def _lasts(each: Activity) -> float:
    return each.end_s - each.start_s


class Bases(NamedTuple):
    """What kernels take that run beside no communication.

    A persistent matmul has one name and one grid whatever it multiplies. What runs before and
    behind it tells one shape from another: layers repeat each other.

    Args:
        keys: name and grid of each activity, and of its neighbours among its stream's computation.
        seconds: by such a key; and by the first two of it, where all of them are alike.
    """

    keys: Sequence[tuple[str, ...]]
    seconds: Mapping[tuple[str, ...], float]

    def of(self, place: int) -> float:
        """Of an activity by its place in the trace; 0: unknown."""
        key = self.keys[place]
        return self.seconds.get(key) or self.seconds.get(key[:2], 0.0)


def bases(trace: Trace) -> Bases:
    """Of all steps."""
    communicates = Cover(_spans(each for each in trace.activities if each.kind == COMMUNICATION))
    keys = _keys(trace.activities)
    alone: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    compared = _compared(enumerate(trace.activities))
    for (place, each), share in zip(compared, _shares(compared, communicates), strict=True):
        if share < ALONE:
            for key in (keys[place], keys[place][:2]):
                alone[key].append(_lasts(each))
    return Bases(keys, {
        key: median(times) for key, times in alone.items() if len(times) >= LEAST
        and (len(key) > 2 or max(times) <= ALIKE * min(times))
    })  # fmt: skip


def _keys(activities: Sequence[Activity]) -> list[tuple[str, ...]]:
    """See `Bases`; of what is no computation, its own name and grid."""
    found: list[tuple[str, ...]] = [(each.name, each.grid) for each in activities]
    streams: defaultdict[str, list[int]] = defaultdict(list)
    for place, each in enumerate(activities):
        if each.kind == COMPUTATION:
            streams[each.stream].append(place)
    for places in streams.values():
        own = [found[place] for place in places]
        for place, *near in zip(places, own, [("", ""), *own], [*own[1:], ("", "")], strict=False):
            found[place] = tuple(word for each in near for word in each)
    return found


def losses_of(trace: Trace, step: Range, late: Late, base: Bases) -> Losses:
    """Where a step of a rank went.

    Args:
        trace: of the rank.
        step: one of its steps.
        late: of `late_ranks`; empty without other ranks.
        base: of `bases`.
    """
    start_s, end_s = step.start_s, step.end_s
    inside = trace.within(step)
    of = {kind: [each for _, each in inside if each.kind == kind] for kind in range(4)}

    def cover(*kinds: int) -> Cover:
        return Cover(_spans(each for kind in kinds for each in of[kind]))

    computes, communicates = cover(COMPUTATION), cover(COMMUNICATION)
    both, packs = cover(COMPUTATION, COMMUNICATION), cover(COMPUTATION, COMMUNICATION, PACKING)
    computation_s, both_s, packs_s = (
        each.within(start_s, end_s) for each in (computes, both, packs)
    )
    rows = _collectives(inside, step, late, computes, of[COMPUTATION])
    late_s = sum(each.late_s or 0.0 for each in rows)
    slowed_s, beside_s, compared_s = _slowed(inside, communicates, base)
    return Losses(
        rank=trace.rank, time_s=end_s - start_s, computation_s=computation_s,
        exposed_s=max(0.0, both_s - computation_s - late_s), late_s=late_s,
        packing_s=packs_s - both_s,
        idle_s=_idle(trace, cover(*range(4)), packs_s, start_s, end_s),
        packed_s=cover(PACKING).within(start_s, end_s), slowed_s=slowed_s,
        beside_s=beside_s, compared_s=compared_s, collectives=rows,
    )  # fmt: skip


def _spans(activities: Iterable[Activity]) -> Iterable[tuple[float, float]]:
    return ((each.start_s, each.end_s) for each in activities)


def _compared(activities: Iterable[tuple[int, Activity]]) -> list[tuple[int, Activity]]:
    return [
        (place, each) for place, each in activities
        if each.kind == COMPUTATION and each.blocks and _lasts(each) >= COMPARED_S
    ]  # fmt: skip


def _shares(activities: Sequence[tuple[int, Activity]], covered: Cover) -> list[float]:
    """Which share of each is covered."""
    return [covered.within(each.start_s, each.end_s) / _lasts(each) for _, each in activities]


def _slowed(
    inside: Iterable[tuple[int, Activity]], communicates: Cover, base: Bases
) -> tuple[float, float, float]:
    """Seconds lost beside communication, of computation there, and of what could be compared."""
    lost: defaultdict[tuple[str, ...], float] = defaultdict(float)
    beside_s = compared_s = 0.0
    compared = _compared(inside)
    for (place, each), share in zip(compared, _shares(compared, communicates), strict=True):
        if share < ALONE:
            continue
        beside_s += _lasts(each)
        alone_s = base.of(place)
        if _lasts(each) < MOST * alone_s:
            compared_s += _lasts(each)
            lost[base.keys[place]] += _lasts(each) - alone_s
    return sum(max(0.0, each) for each in lost.values()), beside_s, compared_s


def _idle(
    trace: Trace, runs: Cover, busy_s: float, start_s: float, end_s: float
) -> dict[str, float]:
    """Idle seconds by cause. What begins after a gap says why the gap was there."""
    found: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    for begin_s, stop_s in runs.gaps(start_s, end_s):
        place = bisect_left(trace.starts_s, stop_s)
        launched_s = trace.activities[place].launched_s if place < len(trace.starts_s) else nan
        asked_s = begin_s if isnan(launched_s) else min(max(launched_s, begin_s), stop_s)
        data_s = trace.loads.within(begin_s, asked_s)
        waited_s = min(trace.blocks.within(begin_s, asked_s), asked_s - begin_s - data_s)
        found["launching"] += asked_s - begin_s - data_s - waited_s
        found["data"] += data_s
        found["synchronizing"] += waited_s
        found["unknown" if isnan(launched_s) else "dependencies"] += stop_s - asked_s
    found["host copies"] = runs.within(start_s, end_s) - busy_s
    return found


class _Tally:
    """What is counted of the calls of a kind and a group."""

    def __init__(self) -> None:
        self.calls = self.num_bytes = self.blocks = 0
        self.time_s = self.exposed_s = self.waited_s = self.late_s = 0.0
        self.is_known = False  # whether any waits for a late rank are
        self.before, self.after = Counter[str](), Counter[str]()

    def row(self, kind: str, group: str, ranks: int) -> Collective:
        """The row of a table."""
        moving_s = self.time_s - self.waited_s
        moved = self.num_bytes * SENT.get(kind, 0) * (ranks - 1) / ranks if ranks else 0.0
        return Collective(
            kind, group, ranks, self.calls, self.num_bytes / max(1, self.calls), self.time_s,
            self.exposed_s, self.late_s if self.is_known else None,
            moved / moving_s if moving_s > 0 else 0.0, self.blocks, _most(self.before),
            _most(self.after),
        )  # fmt: skip


def _collectives(
    inside: Sequence[tuple[int, Activity]], step: Range, late: Late, computes: Cover,
    computation: Sequence[Activity],
) -> tuple[Collective, ...]:  # fmt: skip
    """A row for each kind and group. Calls count where they begin, exposed time where it is."""
    tallies: defaultdict[tuple[str, str, int], _Tally] = defaultdict(_Tally)
    begins = [each.start_s for each in computation]
    by_end = sorted(computation, key=lambda each: each.end_s)
    ends = [each.end_s for each in by_end]
    reach_s = step.start_s
    for i, each in inside:
        said = each.said
        if said is None:
            continue
        group = "FSDP2" if each.within.startswith(FSDP) else said.group
        tally = tallies[said.collective, group, said.ranks]
        start_s, end_s = max(each.start_s, reach_s), min(each.end_s, step.end_s)
        reach_s = max(reach_s, end_s)
        waited_s = late.get(i, 0.0)
        tally.is_known |= i in late
        if end_s > start_s:
            tally.exposed_s += end_s - start_s - computes.within(start_s, end_s)
            until_s = min(each.start_s + waited_s, end_s)
            if until_s > start_s:
                tally.late_s += until_s - start_s - computes.within(start_s, until_s)
        if each.start_s >= step.start_s:
            tally.calls += 1
            tally.time_s += _lasts(each)
            tally.waited_s += waited_s
            tally.num_bytes += said.num_bytes
            tally.blocks = max(tally.blocks, each.blocks)
            j, k = bisect_right(ends, each.start_s) - 1, bisect_left(begins, each.end_s)
            tally.before.update([family_of(by_end[j].name)] if j >= 0 else [])
            tally.after.update([family_of(computation[k].name)] if k < len(computation) else [])
    rows = [tally.row(*key) for key, tally in tallies.items()]
    return tuple(sorted(rows, key=lambda each: -each.exposed_s))


def _most(found: Counter[str]) -> str:
    return found.most_common(1)[0][0] if found else ""
