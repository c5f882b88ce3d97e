"""What ran when: spans on the lanes of each rank, and how much communication they hide.

One format with three writers (`model.estimate`, a profiled run, `measure.trace`), so that
"predicted against measured" is one picture. Pure: no torch, no numpy.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from counterpoint.errors import InputError
from counterpoint.spans import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    Interval,
    Span,
    difference,
    length_s,
    union,
)

FIRST_LANES = ("compute", "signal", "copy")
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Timeline:
    """Spans of one call or of several, on one clock.

    Args:
        spans: At least one, in any order.
        title: Heading of the picture.
        source: Where the times come from, e.g. "predicted for h200-8"; stands in the picture.

    Raises:
        InputError: There is no span.
    """

    spans: tuple[Span, ...]
    title: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.spans:
            raise InputError("Timeline", "spans", want="at least one span", got="none")

    @property
    def start_s(self) -> float:
        """Start of the first span."""
        return min(span.start_s for span in self.spans)

    @property
    def end_s(self) -> float:
        """End of the last span."""
        return max(span.end_s for span in self.spans)

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end, over all ranks."""
        return self.end_s - self.start_s

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a span, ascending."""
        return tuple(sorted({span.rank for span in self.spans}))

    def lanes(self, rank: int) -> tuple[str, ...]:
        """Return the lanes of `rank` from top to bottom, in one order on all ranks.

        Compute, signal and copy come first, then others as they appear in `spans`.

        Raises:
            InputError: `rank` has no span.
        """
        own = {span.lane for span in self._of_rank("lanes", rank)}
        order = dict.fromkeys((*FIRST_LANES, *(span.lane for span in self.spans)))
        return tuple(lane for lane in order if lane in own)

    def busy_s(self, rank: int, lane: str) -> float:
        """Return the seconds in which `lane` of `rank` runs something (overlaps count once).

        Raises:
            InputError: `rank` has no span, or none on `lane`.
        """
        return length_s(union(self._of_lane("busy_s", rank, lane)))

    def idle_s(self, rank: int, lane: str) -> float:
        """Return `duration_s - busy_s`: the lane's gaps, those at both ends included.

        Raises:
            InputError: `rank` has no span, or none on `lane`.
        """
        return self.duration_s - length_s(union(self._of_lane("idle_s", rank, lane)))

    def communication_s(self, rank: int) -> float:
        """Return the seconds in which a copy, collective, barrier or wait runs on `rank`.

        Raises:
            InputError: `rank` has no span.
        """
        spans = self._of_rank("communication_s", rank)
        return length_s(union(span for span in spans if span.kind in COMMUNICATION_KINDS))

    def exposed(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals, in seconds, in which `rank` communicates and does not compute.

        Communication is copy, collective, barrier and wait; compute is matmul, reduce, move,
        fused and opaque. A span of kind "other" neither hides nor is exposed.

        Raises:
            InputError: `rank` has no span.
        """
        spans = self._of_rank("exposed", rank)
        communication = union(span for span in spans if span.kind in COMMUNICATION_KINDS)
        compute = union(span for span in spans if span.kind in COMPUTE_KINDS)
        return tuple(difference(communication, compute))

    def exposed_s(self, rank: int) -> float:
        """Return the seconds of communication on `rank` that no compute hides.

        Raises:
            InputError: `rank` has no span.
        """
        return length_s(self.exposed(rank))

    def shifted(self, to_zero_s: float | None = None) -> "Timeline":
        """Return the same timeline with `to_zero_s` (the first start, if None) as time zero."""
        zero_s = self.start_s if to_zero_s is None else to_zero_s
        spans = (
            replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
            for span in self.spans
        )
        return replace(self, spans=tuple(spans))

    def beside(self, other: "Timeline") -> dict[str, "Timeline"]:
        """Name this and another one, both from time zero: what was predicted, then the measured.

        Their sources begin with "predicted" and "measured"; else they are "first" and "second", in
        the order given.
        """
        names = ("predicted", "measured")
        for pair in ((self, other), (other, self)):
            if all(t.source.startswith(name) for name, t in zip(names, pair, strict=True)):
                return {name: t.shifted() for name, t in zip(names, pair, strict=True)}
        return {"first": self.shifted(), "second": other.shifted()}

    def to_json(self) -> str:
        """Return all fields as JSON; `from_json` gives an equal timeline back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read what `to_json` wrote.

        Raises:
            InputError: `text` is not the JSON of a timeline.
        """
        try:
            fields = json.loads(text)
            spans = tuple(Span(**span) for span in fields["spans"])
            return cls(spans=spans, title=fields["title"], source=fields["source"])
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            want = "JSON written by Timeline.to_json"
            raise InputError("Timeline.from_json", "text", want=want, got=repr(error)) from error

    def to_perfetto(self, *, beside: "Timeline | None" = None) -> str:
        """Return Chrome trace event JSON for ui.perfetto.dev: rank = process, lane = thread.

        Times are rounded to 1 ns first: spans that touch must not overlap, because Perfetto
        drops a span that overlaps another one of its thread in part.

        Args:
            beside: Another timeline; then both start at 0, and each rank is two processes, such
                as "predicted: rank 0" above "measured: rank 0".

        Source: "Trace Event Format" (Google), complete and metadata events; ts and dur in us.
        """
        shown = {"": self} if beside is None else self.beside(beside)
        events: list[dict[str, Any]] = []
        about: dict[str, str] = {}
        for place, (name, timeline) in enumerate(shown.items()):
            prefix = f"{name}: " if name else ""
            processes = {rank: len(shown) * rank + place for rank in timeline.ranks}
            events += timeline._perfetto_events(processes, prefix)
            about |= {f"{prefix}title": timeline.title, f"{prefix}source": timeline.source}
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about})

    def _perfetto_events(self, processes: dict[int, int], prefix: str) -> list[dict[str, Any]]:
        """Return the events of all ranks; `processes` has the number of each rank's process."""
        events: list[dict[str, Any]] = []
        thread_ids: dict[tuple[int, str], int] = {}
        for rank, process in processes.items():
            events.append(_metadata(process, 0, "process_name", {"name": f"{prefix}rank {rank}"}))
            events.append(_metadata(process, 0, "process_sort_index", {"sort_index": process}))
            # a thread with its process's number is its main thread, which is shown on top
            for thread_id, lane in enumerate(self.lanes(rank), start=1000 * (process + 1)):
                thread_ids[rank, lane] = thread_id
                events.append(_metadata(process, thread_id, "thread_name", {"name": lane}))
                sort_index = {"sort_index": thread_id}
                events.append(_metadata(process, thread_id, "thread_sort_index", sort_index))
        for span in self.spans:
            start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
            events.append(
                {
                    "ph": "X",
                    "name": span.label,
                    "cat": span.kind,
                    "pid": processes[span.rank],
                    "tid": thread_ids[span.rank, span.lane],
                    "ts": start_ns / 1e3,
                    "dur": (end_ns - start_ns) / 1e3,
                    "args": {"kind": span.kind},
                }
            )
        return events

    def save(
        self,
        path: str | Path,
        *,
        beside: "Timeline | None" = None,
        ranks: Sequence[int] | None = None,
        dark: bool = False,
    ) -> Path:
        """Write a picture (.png, .svg, .pdf) or a Perfetto trace (.json), by the suffix of `path`.

        Folders that are missing are made.

        Args:
            path: What to write, and in which form.
            beside: Another timeline for the same file: what was measured beside what was
                predicted, on one time axis. Which is which, their `source` says.
            ranks: Ranks that a picture shows; `measure.draw.draw_timeline` has the defaults.
            dark: Draw a picture for a dark page.

        Returns:
            The path written.

        Raises:
            InputError: The suffix is none of these; `ranks` are not ranks of each timeline; they
                or `dark` are given for a trace; or the two timelines share no rank.
        """
        path = Path(path)
        if path.suffix not in (*PICTURE_SUFFIXES, ".json"):
            want = "a file name that ends in .png, .svg, .pdf or .json"
            raise InputError("Timeline.save", "path", want=want, got=str(path))
        if path.suffix in PICTURE_SUFFIXES:
            # here, not at the top: matplotlib takes a second to import, and models never draw
            from counterpoint.measure.draw import draw_timeline

            return draw_timeline(self, path, beside=beside, ranks=ranks, dark=dark)
        if ranks is not None:
            want = "left out for a Perfetto trace, which has all"
            raise InputError("Timeline.save", "ranks", want=want, got=tuple(ranks))
        if dark:
            raise InputError("Timeline.save", "dark", want="left out for a trace", got=dark)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_perfetto(beside=beside), encoding="utf-8")
        return path

    def _of_rank(self, op: str, rank: int) -> tuple[Span, ...]:
        spans = tuple(span for span in self.spans if span.rank == rank)
        if not spans:
            raise InputError(f"Timeline.{op}", "rank", want=f"one of {self.ranks}", got=rank)
        return spans

    def _of_lane(self, op: str, rank: int, lane: str) -> tuple[Span, ...]:
        spans = tuple(span for span in self._of_rank(op, rank) if span.lane == lane)
        if not spans:
            want = f"one of {self.lanes(rank)}"
            raise InputError(f"Timeline.{op}", "lane", want=want, got=repr(lane))
        return spans


def _metadata(process: int, thread_id: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread_id, "name": name, "args": args}
