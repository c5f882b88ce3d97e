"""A timeline as a picture, or two on one time axis: a row per lane, and what each rank hides.

Cool colours compute, warm colours communicate. However many spans there are, little is drawn: what
is thinner than a point of the page joins its neighbours.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.canvas import DARK, LIGHT, Look, Theme
from counterpoint.spans import COMMUNICATION_KINDS, COMPUTE_KINDS, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from counterpoint.timeline import Timeline

FILLS = {
    "matmul": canvas.BLUE,
    "fused": canvas.GREEN,
    "reduce": canvas.SKY,
    "move": "#A6D5F2",
    "spread": "#C4E3F6",
    "fold": "#7FBEE3",
    "opaque": "#5A6B7B",
    "attention": "#1F4E79",
    "attention_backward": "#6C8EBF",
    "copy": canvas.ORANGE,
    "exchange": canvas.PURPLE,
    "collective": canvas.VERMILLION,
    "barrier": canvas.YELLOW,
    "other": "#9A9A9A",
}
# in the legend, where a kind's own name says little
NAMES = {
    "opaque": "other compute", "attention_backward": "attention, backward",
    "exchange": "exchange between islands",
}  # fmt: skip
# of a wait: it holds a lane and does nothing
HATCH, HATCH_INK = "////", "#B9A93C"

# inches
LANE_HEIGHT, EXPOSED_HEIGHT, RANK_GAP = 0.30, 0.10, 0.16
FOOT_HEIGHT, SUMMARY_WIDTH = 1.05, 1.95
PANEL_HEAD, PANEL_GAP = 0.40, 0.20  # above each of two panels; between them


@dataclass(frozen=True)
class _Sheet:
    """What all lanes are drawn on: axes whose y is in inches from the top."""

    axes: "Axes"
    theme: Theme
    scale: float  # units of the time axis per second
    right: float  # end of the time axis, in its unit
    width_in: float  # of the whole picture
    left_in: float  # from its edge to the axes
    name_in: float  # of the lanes' names

    @property
    def point_s(self) -> float:
        """Seconds of a point of the page."""
        width_pt = (self.width_in - self.left_in - SUMMARY_WIDTH) * 72
        return self.right / self.scale / width_pt


def draw_timeline(
    timeline: "Timeline",
    path: str | Path,
    *,
    beside: "Timeline | Sequence[Timeline] | None" = None,
    ranks: Sequence[int] | None = None,
    width_in: float = 12.0,
    dark: bool = False,
) -> Path:
    """Draw one row per lane, grouped by rank, and what each rank hides.

    The red strip under the lanes of a rank marks exposed communication. Time starts at 0. Two
    timelines stand one above the other on one time axis, the predicted one above the measured.

    Args:
        timeline: What to draw; its title and its source stand above.
        path: Ends in .png, .svg or .pdf.
        beside: A second timeline, whose speedup over the first is said, or how far off the
            prediction is where one is predicted and one measured; or several, without that.
        ranks: Ranks to show; totals remain those of all ranks. By default all that there are; of
            more timelines with more than two ranks, or where all would not fit on a screen, the
            first and the one that ends last in the lower panel.
        width_in: Width of the picture in inches; the height follows from the number of lanes.
        dark: Draw for a dark page.

    Returns:
        The path written.

    Raises:
        InputError: The suffix is none of these, `ranks` are not ranks of each timeline, or the
            first and the last share no rank.
    """
    path = canvas.checked("draw_timeline", path)
    if beside is None or isinstance(beside, Sequence):
        panels, names = [each.shifted() for each in (timeline, *(beside or ()))], list[str]()
    else:
        names, panels = map(list, zip(*timeline.beside(beside).items(), strict=True))
    ranks = _shown_ranks(panels, ranks)
    with canvas.themed(DARK if dark else LIGHT) as theme:
        return canvas.save(_draw_panels(panels, names, ranks, width_in, theme), path)


def _draw_panels(
    panels: "Sequence[Timeline]", names: Sequence[str], ranks: tuple[int, ...], width_in: float,
    theme: Theme,
) -> "Figure":  # fmt: skip
    """Draw all but the file; with names, the last panel says how it compares with the first."""
    spans = [span for panel in panels for span in panel.spans if span.rank in ranks]
    heights_in = [_height_in(panel, ranks) for panel in panels]
    head_in = PANEL_HEAD if len(panels) > 1 else 0.0
    body_in = sum(heights_in) + len(panels) * head_in + (len(panels) - 1) * PANEL_GAP
    longest_s = max(panel.duration_s for panel in panels)
    figure, sheet = _new_sheet(spans, longest_s, width_in, body_in, theme)

    title = panels[0].title or panels[-1].title
    top_in = 0.0
    for panel, height_in in zip(panels, heights_in, strict=True):
        if head_in:
            _draw_panel_head(sheet, panel, title, top_in)
        top_in += head_in
        end = sheet.right * (panel.duration_s / longest_s if longest_s else 1.0)
        _draw_panel(sheet, panel, ranks, top_in, height_in, end=end)
        if names and panel is panels[-1] and panel.duration_s:
            ratio = panels[0].duration_s / panel.duration_s
            predicted = f"predicted / measured {ratio:.2f}"
            text = predicted if names[0] == "predicted" else f"speedup {ratio:.2f}x"
            _draw_ratio(sheet, text, top_in)
        top_in += height_in + PANEL_GAP

    canvas.heading(figure, title, _subtitle(panels, ranks), theme)
    _kinds_legend(figure, {span.kind for span in spans}, sheet)
    return figure


def _new_sheet(
    spans: Sequence[Span], longest_s: float, width_in: float, body_in: float, theme: Theme
) -> "tuple[Figure, _Sheet]":
    """An empty picture with its time axis, with room for the names of the spans' lanes."""
    name_in = 0.25 + 0.075 * max(len(span.lane) for span in spans)
    left_in = name_in + 0.65
    figure, axes = canvas.new_figure(
        width_in, canvas.TITLE_HEIGHT + body_in + FOOT_HEIGHT,
        left_in=left_in, right_in=SUMMARY_WIDTH, top_in=canvas.TITLE_HEIGHT, foot_in=FOOT_HEIGHT,
    )  # fmt: skip
    scale, unit = canvas.time_unit(longest_s)
    # a timeline of no length still needs an axis
    sheet = _Sheet(axes, theme, scale, longest_s * scale or 1.0, width_in, left_in, name_in)
    axes.set_xlim(0, sheet.right)
    # a little air between the last red strip and the axis
    axes.set_ylim(body_in + 0.04, 0)
    canvas.time_axis(axes, unit)
    return figure, sheet


def _shown_ranks(panels: Sequence["Timeline"], ranks: Sequence[int] | None) -> tuple[int, ...]:
    """Return the ranks to show, all of which each panel has."""
    common = sorted(set(panels[0].ranks).intersection(panels[-1].ranks))
    if not common:
        want = f"a timeline with one of the ranks {panels[0].ranks}"
        raise InputError("draw_timeline", "beside", want=want, got=f"one with {panels[-1].ranks}")
    if ranks is None:
        few = len(common) <= 2 or (len(panels) == 1 and _fits(panels[0]))
        return tuple(common) if few else tuple(sorted({common[0], _last_rank(panels[-1], common)}))
    if not ranks or not set(ranks) <= set(common):
        raise InputError(
            "draw_timeline", "ranks", want=f"some of {tuple(common)}", got=tuple(ranks)
        )
    return tuple(sorted(set(ranks)))


def _fits(timeline: "Timeline") -> bool:
    """Whether all of its ranks fit on a screen."""
    around_in = canvas.TITLE_HEIGHT + FOOT_HEIGHT
    return around_in + _height_in(timeline, timeline.ranks) <= canvas.SCREEN_IN


def _last_rank(timeline: "Timeline", ranks: Iterable[int]) -> int:
    """Return the rank of `ranks` that ends last."""
    spans = (span for span in timeline.spans if span.rank in ranks)
    return max(spans, key=lambda span: span.end_s).rank


def _height_in(timeline: "Timeline", ranks: Sequence[int]) -> float:
    """Return the height of the lanes of `ranks`, with a strip for each rank, and gaps between."""
    num_lanes = sum(len(timeline.lanes(rank)) for rank in ranks)
    return num_lanes * LANE_HEIGHT + len(ranks) * EXPOSED_HEIGHT + (len(ranks) - 1) * RANK_GAP


def _subtitle(panels: Sequence["Timeline"], ranks: Sequence[int]) -> str:
    """Say which ranks are shown; before it the source, unless each panel has its own above it."""
    alone = len(panels) == 1
    facts = [panels[0].source] if alone else []
    num_ranks = len({rank for panel in panels for rank in panel.ranks})
    if len(ranks) < num_ranks:
        plural = "s" * (len(ranks) > 1)
        facts.append(f"rank{plural} {', '.join(str(rank) for rank in ranks)} of {num_ranks}")
        if not alone and len(ranks) > 1:
            facts.append(f"below, rank {_last_rank(panels[-1], panels[-1].ranks)} ends last")
        facts.append("totals are over all ranks")
    elif not alone:
        facts.append("all ranks")
    return "; ".join(facts)


def _draw_ratio(sheet: _Sheet, text: str, top_in: float) -> None:
    """Write what the totals say to the right of a panel whose lanes begin at `top_in`."""
    size_pt = canvas.fitting_pt(text, canvas.TEXT_PT, SUMMARY_WIDTH - 0.11 - canvas.EDGE)
    look = Look(size_pt, weight="bold")
    canvas.note(sheet.axes, sheet.right, top_in - 0.06, text, look, shift_pt=8, va="bottom")


def _draw_panel_head(sheet: _Sheet, timeline: "Timeline", title: str, top_in: float) -> None:
    """Write where the times come from, on the page: grid lines end below it."""
    from matplotlib.patches import Rectangle

    box = ((0, top_in - PANEL_GAP), sheet.right, PANEL_HEAD + PANEL_GAP)
    sheet.axes.add_patch(Rectangle(*box, color=sheet.theme.page, linewidth=0, zorder=1))
    own = "" if timeline.title in ("", title) else timeline.title
    text = ": ".join(part for part in (timeline.source, own) if part)
    room_in = sheet.width_in - 2 * canvas.EDGE
    look = Look(canvas.fitting_pt(text, canvas.HEAD_PT, room_in), weight="bold")
    shift_pt = (canvas.EDGE - sheet.left_in) * 72
    canvas.note(sheet.axes, 0, top_in + 0.10, text, look, shift_pt=shift_pt)


def _draw_panel(
    sheet: _Sheet, timeline: "Timeline", ranks: Sequence[int], top_in: float, height_in: float,
    *, end: float,
) -> None:  # fmt: skip
    """Draw the ranks of one timeline from `top_in` down, with a line where it ends."""
    rank_in = top_in
    for rank in ranks:
        rank_in = _draw_rank(sheet, timeline, rank, rank_in, end=end) + RANK_GAP
    # to the time axis, if this is the lowest panel
    bottom_in = top_in + height_in + 0.04
    # at the edge of the axes half of it is cut off
    width_pt = 1.0 if end == sheet.right else 0.5
    ink = sheet.theme.ink
    sheet.axes.plot([end, end], [top_in, bottom_in], color=ink, linewidth=width_pt, zorder=4)
    total = f"total {canvas.duration(timeline.duration_s)}"
    look = Look(canvas.HEAD_PT, weight="bold")
    canvas.note(sheet.axes, end, top_in - 0.06, total, look, ha="right", va="bottom")


def _draw_rank(
    sheet: _Sheet, timeline: "Timeline", rank: int, top_in: float, *, end: float
) -> float:
    """Draw the lanes of one rank from `top_in` down; return where they end."""
    from matplotlib.patches import Rectangle

    axes, theme = sheet.axes, sheet.theme
    of_lane: dict[str, list[Span]] = {lane: [] for lane in timeline.lanes(rank)}
    for span in timeline.spans:
        if span.rank == rank:
            of_lane[span.lane].append(span)
    first_in = top_in
    for lane, spans in of_lane.items():
        idle = (0, top_in + 0.02), end, LANE_HEIGHT - 0.04
        axes.add_patch(Rectangle(*idle, color=theme.idle, zorder=1))
        middle_in = top_in + LANE_HEIGHT / 2
        canvas.note(axes, 0, middle_in, lane, Look(), shift_pt=-6, ha="right")
        _draw_lane(sheet, spans, top_in)
        top_in += LANE_HEIGHT
    strips = [Span(rank, "", *ends, "wait", "") for ends in timeline.exposed(rank)]
    ranges = [_range(sheet, strip) for strip in boxes(strips, sheet.point_s)]
    place = (top_in, EXPOSED_HEIGHT - 0.01)
    axes.broken_barh(ranges, place, color=theme.exposed, linewidth=0, zorder=2)
    if strips:
        look = Look(canvas.SMALL_PT, theme.exposed)
        canvas.note(axes, 0, top_in + EXPOSED_HEIGHT / 2, "exposed", look, shift_pt=-6, ha="right")

    middle_in = first_in + len(of_lane) * LANE_HEIGHT / 2
    name, shift_pt = f"rank {rank}", -sheet.name_in * 72 - 2
    look = Look(canvas.HEAD_PT, weight="bold")
    canvas.note(axes, 0, middle_in, name, look, shift_pt=shift_pt, ha="right")
    look = Look(canvas.SMALL_PT, theme.faint)
    canvas.note(axes, sheet.right, middle_in, _summary(timeline, rank), look, shift_pt=8)
    return top_in + EXPOSED_HEIGHT


def boxes(spans: Iterable[Span], least_s: float) -> list[Span]:
    """Return what is drawn of one lane, in order of time.

    Spans shorter than `least_s` that start within such a time are one box, of the kind that takes
    most of it. It is as long as they are together, so that no box shows more work than there is.
    """
    found: list[Span] = []
    crowd: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        long = span.duration_s >= least_s
        if crowd and (long or span.start_s >= crowd[0].start_s + least_s):
            found.append(_joined(crowd))
            crowd = []
        if long:
            found.append(span)
        else:
            crowd.append(span)
    return [*found, _joined(crowd)] if crowd else found


def _joined(crowd: Sequence[Span]) -> Span:
    seconds: dict[str, float] = {}
    for span in crowd:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.duration_s
    first, kind = crowd[0], max(seconds, key=seconds.__getitem__)
    return replace(first, end_s=first.start_s + sum(seconds.values()), kind=kind)


def _range(sheet: _Sheet, span: Span) -> tuple[float, float]:
    """Start and width on the time axis."""
    return span.start_s * sheet.scale, span.duration_s * sheet.scale


def _draw_lane(sheet: _Sheet, spans: Iterable[Span], top_in: float) -> None:
    """Draw the boxes of a lane, all of one look at once, and labels where a box holds them."""
    found = boxes(spans, sheet.point_s)
    looks: dict[tuple[str, bool], list[Span]] = {}
    for span in found:
        # an edge would cover a short span
        looks.setdefault((span.kind, span.duration_s > 2 * sheet.point_s), []).append(span)
    for (kind, edged), some in looks.items():
        waits = kind == "wait"
        sheet.axes.broken_barh(
            [_range(sheet, span) for span in some], (top_in + 0.02, LANE_HEIGHT - 0.04),
            facecolor=_fill(kind, sheet.theme), hatch=HATCH if waits else None,
            edgecolor=HATCH_INK if waits else sheet.theme.page, linewidth=0.6 if edged else 0.0,
            zorder=3,
        )  # fmt: skip
    for span in found:
        room_pt = span.duration_s / sheet.point_s - 3
        if room_pt > 4 and span.kind != "wait":
            _draw_label(sheet, span, top_in, room_pt)


def _draw_label(sheet: _Sheet, span: Span, top_in: float, room_pt: float) -> None:
    for text, size_pt in _label_forms(span.label):
        if canvas.text_width_pt(text, size_pt) <= room_pt:
            sheet.axes.text(
                (span.start_s + span.end_s) / 2 * sheet.scale, top_in + LANE_HEIGHT / 2, text,
                ha="center", va="center_baseline", fontsize=size_pt,
                color=ink_on(FILLS[span.kind]), zorder=5, parse_math=False,
            )  # fmt: skip
            return


def _fill(kind: str, theme: Theme) -> str:
    return theme.wait if kind == "wait" else FILLS[kind]


def _label_forms(label: str) -> Iterable[tuple[str, float]]:
    """Yield texts and their sizes, best first: the label, smaller, then only its last numbers."""
    for size_pt in (canvas.SMALL_PT, 6.5):
        yield label, size_pt
    # half a word would mislead, the number of a step does not
    if match := re.search(r"\d+(_\d+)*$", label):
        yield match[0], 6.5


def _kinds_legend(figure: "Figure", kinds: set[str], sheet: _Sheet) -> None:
    """Explain the kinds that occur: one line of compute, one of communication."""
    from matplotlib.patches import Patch

    def patches(names: Iterable[str]) -> "list[Patch]":
        fills = {name: _fill(name, sheet.theme) for name in names if name in kinds}
        return [
            Patch(facecolor=fill, hatch=HATCH if name == "wait" else None,
                  label=NAMES.get(name, name), edgecolor=HATCH_INK if name == "wait" else fill)
            for name, fill in fills.items()
        ]  # fmt: skip

    left_in = sheet.left_in
    if compute := patches(COMPUTE_KINDS):
        canvas.legend(figure, compute, left_in=left_in, bottom_in=0.33, name="compute")
    idle = Patch(facecolor=sheet.theme.idle, edgecolor=sheet.theme.faint, label="idle")
    right_in = sheet.width_in - SUMMARY_WIDTH + 0.11
    canvas.legend(figure, [idle, *patches(["other"])], left_in=right_in, bottom_in=0.33)
    if kinds.intersection(COMMUNICATION_KINDS):
        exposed = Patch(color=sheet.theme.exposed, label="exposed: not hidden by compute")
        communication = [*patches(COMMUNICATION_KINDS), exposed]
        canvas.legend(figure, communication, left_in=left_in, bottom_in=0.1, name="communication")


def _summary(timeline: "Timeline", rank: int) -> str:
    communication_s = timeline.communication_s(rank)
    if communication_s == 0:
        fused = any(span.kind == "fused" for span in timeline.spans if span.rank == rank)
        return "communication\ninside the kernel" if fused else "no communication"
    exposed_s = timeline.exposed_s(rank)
    share = f"{1 - exposed_s / communication_s:.0%} hidden, {canvas.duration(exposed_s)} exposed"
    return (
        f"communication {canvas.duration(communication_s)}\n{share if exposed_s else 'all hidden'}"
    )


def ink_on(fill: str) -> str:
    """Black or white, whichever contrasts more.

    Source: relative luminance, WCAG 2.1 (gamma taken as 2.2).
    """
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#FFFFFF" if luminance < 0.25 else "#111111"
