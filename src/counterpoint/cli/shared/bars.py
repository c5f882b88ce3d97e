"""Timelines in a terminal: a row of characters for each lane, on one time axis."""

from collections.abc import Mapping

from rich.text import Text

from counterpoint.measure.canvas import duration
from counterpoint.spans import COMPUTE_KINDS, Span
from counterpoint.timeline import Timeline

COMPUTE, COMMUNICATE = ("█", "blue"), ("▒", "yellow")
LEGEND = Text.assemble(COMPUTE, " computes  ", COMMUNICATE, " communicates")
LANE_WIDTH, TIME_WIDTH = 9, 12
LEAST_SHARE = 0.01  # of the time axis: a lane that does less is left out


def bars(timelines: Mapping[str, Timeline], *, rank: int = 0, width: int = 80) -> Text:
    """One rank of each timeline, one above the other.

    Args:
        timelines: by the words that stand before them.
        rank: the one that is shown; all have it.
        width: characters of a line.
    """
    name_width = max(map(len, timelines)) + 2
    num_cells = max(10, width - name_width - LANE_WIDTH - TIME_WIDTH)
    cell_s = max(timeline.duration_s for timeline in timelines.values()) / num_cells
    lines: list[Text] = []
    for name, timeline in timelines.items():
        shown = timeline.shifted()
        busy = {lane: shown.busy_s(rank, lane) for lane in shown.lanes(rank)}
        lanes = [lane for lane in busy if busy[lane] > LEAST_SHARE * shown.duration_s]
        for lane in lanes:
            spans = [span for span in shown.spans if (span.rank, span.lane) == (rank, lane)]
            first = f"{name if lane == lanes[0] else '':{name_width}}{lane:{LANE_WIDTH}}"
            cells = (_cell(spans, i * cell_s, (i + 1) * cell_s) for i in range(num_cells))
            line = Text(first).append_text(Text.assemble(*cells))
            if lane == lanes[-1]:
                line.append(f" {duration(timeline.duration_s)}", "bold")
            line.rstrip()
            lines.append(line)
    return Text("\n").join(lines)


def _cell(spans: list[Span], start_s: float, end_s: float) -> tuple[str, str]:
    """What fills most of that time, if it fills a third of it."""
    computed_s = communicated_s = 0.0
    for span in spans:
        shared_s = max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
        if span.kind in COMPUTE_KINDS:
            computed_s += shared_s
        elif span.kind != "wait":
            communicated_s += shared_s
    if computed_s + communicated_s < (end_s - start_s) / 3:
        return " ", ""
    return COMPUTE if computed_s >= communicated_s else COMMUNICATE
