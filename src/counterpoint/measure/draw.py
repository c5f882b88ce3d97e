"""A timeline as a picture, or two on one time axis: a row per lane, and what each rank hides.

Cool colours compute, warm colours communicate (Okabe and Ito's palette, safe for colour-blind
readers).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.canvas import Look
from counterpoint.spans import COMMUNICATION_KINDS, COMPUTE_KINDS, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from counterpoint.timeline import Timeline

# fill and hatch of each kind; Okabe-Ito hues
LOOKS = {
    "matmul": ("#0072B2", ""),
    "fused": ("#009E73", ""),
    "reduce": ("#56B4E9", ""),
    "move": ("#A6D5F2", ""),
    "opaque": ("#5A6B7B", ""),
    "copy": ("#E69F00", ""),
    "collective": ("#D55E00", ""),
    "barrier": ("#F0E442", ""),
    "wait": ("#FBF3B0", "////"),  # hatched: it holds a lane and does nothing
    "other": ("#C9C9C9", ""),
}
EXPOSED = "#B3001B"
IDLE = "#F1F1F1"
HATCH_INK = "#B9A93C"

# inches
LANE_HEIGHT, EXPOSED_HEIGHT, RANK_GAP = 0.30, 0.07, 0.16
FOOT_HEIGHT, SUMMARY_WIDTH = 1.05, 1.95
PANEL_HEAD, PANEL_GAP = 0.40, 0.20  # above each of two panels; between them


@dataclass(frozen=True)
class _Sheet:
    """What all lanes are drawn on: axes whose y is in inches from the top."""

    axes: "Axes"
    scale: float  # units of the time axis per second
    right: float  # end of the time axis, in its unit
    width_in: float  # of the whole picture
    left_in: float  # from its edge to the axes
    name_in: float  # of the lanes' names


def draw_timeline(
    timeline: "Timeline",
    path: str | Path,
    *,
    beside: "Timeline | Sequence[Timeline] | None" = None,
    ranks: Sequence[int] | None = None,
    width_in: float = 12.0,
) -> Path:
    """Draw one row per lane, grouped by rank, and what each rank hides.

    The red strip under the lanes of a rank marks exposed communication. Time starts at 0. Two
    timelines stand one above the other on one time axis, the predicted one above the measured.

    Args:
        timeline: What to draw; its title and its source stand above.
        path: Ends in .png, .svg or .pdf.
        beside: A second timeline, whose total is compared with that of the first; or several,
            which are not.
        ranks: Ranks to show; totals remain those of all ranks. By default all; of more timelines
            with more than two ranks, the first and the one that ends last in the lower panel.
        width_in: Width of the picture in inches; the height follows from the number of lanes.

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
    spans = [span for panel in panels for span in panel.spans if span.rank in ranks]
    heights_in = [_height_in(panel, ranks) for panel in panels]
    head_in = 0.0 if beside is None else PANEL_HEAD
    body_in = sum(heights_in) + len(panels) * head_in + (len(panels) - 1) * PANEL_GAP
    longest_s = max(panel.duration_s for panel in panels)
    figure, sheet = _new_sheet(spans, longest_s, width_in, body_in)

    title = panels[0].title or panels[-1].title
    top_in = 0.0
    for panel, height_in in zip(panels, heights_in, strict=True):
        if beside is not None:
            _draw_panel_head(sheet, panel, title, top_in)
        top_in += head_in
        end = sheet.right * (panel.duration_s / longest_s if longest_s else 1.0)
        _draw_panel(sheet, panel, ranks, top_in, height_in, end=end)
        if names and panel is panels[-1] and panel.duration_s:
            ratio = panels[0].duration_s / panel.duration_s
            _draw_ratio(sheet, f"{' / '.join(names)} {ratio:.2f}", top_in)
        top_in += height_in + PANEL_GAP

    canvas.heading(figure, title, _subtitle(panels, ranks))
    _kinds_legend(figure, {span.kind for span in spans}, sheet.left_in)
    return canvas.save(figure, path)


def _new_sheet(
    spans: Sequence[Span], longest_s: float, width_in: float, body_in: float
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
    sheet = _Sheet(axes, scale, longest_s * scale or 1.0, width_in, left_in, name_in)
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
        few = len(panels) == 1 or len(common) <= 2
        return tuple(common) if few else tuple(sorted({common[0], _last_rank(panels[-1], common)}))
    if not ranks or not set(ranks) <= set(common):
        raise InputError(
            "draw_timeline", "ranks", want=f"some of {tuple(common)}", got=tuple(ranks)
        )
    return tuple(sorted(set(ranks)))


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
        if not alone:
            facts.append(f"below, rank {_last_rank(panels[-1], panels[-1].ranks)} ends last")
        facts.append("totals are over all ranks")
    elif not alone:
        facts.append("all ranks")
    return "; ".join(facts)


def _draw_ratio(sheet: _Sheet, text: str, top_in: float) -> None:
    """Write what the totals say to the right of a panel whose lanes begin at `top_in`."""
    size_pt = canvas.fitting_pt(text, 8.5, SUMMARY_WIDTH - 0.11 - canvas.EDGE)
    look = Look(size_pt, weight="bold")
    canvas.note(sheet.axes, sheet.right, top_in - 0.06, text, look, shift_pt=8, va="bottom")


def _draw_panel_head(sheet: _Sheet, timeline: "Timeline", title: str, top_in: float) -> None:
    """Write where the times come from, on white: grid lines end below it."""
    from matplotlib.patches import Rectangle

    box = ((0, top_in - PANEL_GAP), sheet.right, PANEL_HEAD + PANEL_GAP)
    sheet.axes.add_patch(Rectangle(*box, color="white", linewidth=0, zorder=1))
    own = "" if timeline.title in ("", title) else timeline.title
    text = ": ".join(part for part in (timeline.source, own) if part)
    room_in = sheet.width_in - 2 * canvas.EDGE
    look = Look(canvas.fitting_pt(text, 9.5, room_in), weight="bold")
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
    sheet.axes.plot([end, end], [top_in, bottom_in], color=canvas.INK, linewidth=width_pt, zorder=4)
    total = f"total {canvas.duration(timeline.duration_s)}"
    look = Look(9, weight="bold")
    canvas.note(sheet.axes, end, top_in - 0.06, total, look, ha="right", va="bottom")


def _draw_rank(
    sheet: _Sheet, timeline: "Timeline", rank: int, top_in: float, *, end: float
) -> float:
    """Draw the lanes of one rank from `top_in` down; return where they end."""
    from matplotlib.patches import Rectangle

    axes, scale = sheet.axes, sheet.scale
    lanes = timeline.lanes(rank)
    first_in = top_in
    for lane in lanes:
        axes.add_patch(Rectangle((0, top_in + 0.02), end, LANE_HEIGHT - 0.04, color=IDLE, zorder=1))
        middle_in = top_in + LANE_HEIGHT / 2
        canvas.note(axes, 0, middle_in, lane, Look(8.5), shift_pt=-6, ha="right")
        for span in timeline.spans:
            if (span.rank, span.lane) == (rank, lane):
                _draw_span(axes, span, top_in, scale)
        top_in += LANE_HEIGHT
    for start_s, end_s in timeline.exposed(rank):
        box = ((start_s * scale, top_in), (end_s - start_s) * scale, EXPOSED_HEIGHT - 0.01)
        axes.add_patch(Rectangle(*box, color=EXPOSED, linewidth=0, zorder=2))

    middle_in = first_in + len(lanes) * LANE_HEIGHT / 2
    name, shift_pt = f"rank {rank}", -sheet.name_in * 72 - 2
    look = Look(9.5, weight="bold")
    canvas.note(axes, 0, middle_in, name, look, shift_pt=shift_pt, ha="right")
    look = Look(7.5, canvas.FAINT_INK)
    canvas.note(axes, sheet.right, middle_in, _summary(timeline, rank), look, shift_pt=8)
    return top_in + EXPOSED_HEIGHT


def _draw_span(axes: "Axes", span: Span, top_in: float, scale: float) -> None:
    """Draw one box, and its label where the box holds it."""
    from matplotlib.patches import Rectangle

    fill, hatch = LOOKS[span.kind]
    corners_px = axes.transData.transform([(span.start_s * scale, 0), (span.end_s * scale, 0)])
    width_pt = float(corners_px[1, 0] - corners_px[0, 0]) * 72 / canvas.DPI
    box = Rectangle(
        (span.start_s * scale, top_in + 0.02), span.duration_s * scale, LANE_HEIGHT - 0.04,
        facecolor=fill, hatch=hatch, edgecolor=HATCH_INK if hatch else "white",
        linewidth=0.6 if width_pt > 2 else 0.0, zorder=3,  # an edge would cover a short span
    )  # fmt: skip
    axes.add_patch(box)
    # on a hatch, letters need a ground of their own
    ground = {"facecolor": fill, "edgecolor": "none", "pad": 0.8} if hatch else None
    for text, size_pt in _label_forms(span.label):
        if canvas.text_width_pt(text, size_pt) + 5 <= width_pt:
            axes.text(
                (span.start_s + span.end_s) / 2 * scale, top_in + LANE_HEIGHT / 2, text,
                ha="center", va="center_baseline", fontsize=size_pt, color=_ink_on(fill),
                zorder=5, parse_math=False, bbox=ground,
            )  # fmt: skip
            return


def _label_forms(label: str) -> Iterable[tuple[str, float]]:
    """Yield texts and their sizes, best first: the label, smaller, then only its last number."""
    for size_pt in (7.5, 6.5, 5.5):
        yield label, size_pt
    # half a word would mislead, the number of a step does not
    if match := re.search(r"\d+$", label):
        yield match[0], 6.5


def _kinds_legend(figure: "Figure", kinds: set[str], left_in: float) -> None:
    """Explain the kinds that occur: one line of compute, one of communication."""
    from matplotlib.patches import Patch

    def patches(names: Iterable[str]) -> "list[Patch]":
        looks = ((name, *LOOKS[name]) for name in names if name in kinds)
        return [
            Patch(facecolor=fill, hatch=hatch, edgecolor=HATCH_INK if hatch else fill, label=name)
            for name, fill, hatch in looks
        ]

    if compute := patches(COMPUTE_KINDS):
        canvas.legend(figure, compute, left_in=left_in, bottom_in=0.29, name="compute")
    idle = Patch(facecolor=IDLE, edgecolor="#CFCFCF", label="idle")
    right_in = float(figure.get_size_inches()[0]) - SUMMARY_WIDTH + 0.11
    canvas.legend(figure, [idle, *patches(["other"])], left_in=right_in, bottom_in=0.29)
    if kinds.intersection(COMMUNICATION_KINDS):
        exposed = Patch(color=EXPOSED, label="not hidden by compute")
        communication = [*patches(COMMUNICATION_KINDS), exposed]
        canvas.legend(figure, communication, left_in=left_in, bottom_in=0.08, name="communication")


def _summary(timeline: "Timeline", rank: int) -> str:
    communication_s = timeline.communication_s(rank)
    if communication_s == 0:
        return "no communication"
    exposed_s = timeline.exposed_s(rank)
    share = f"{1 - exposed_s / communication_s:.0%} hidden, {canvas.duration(exposed_s)} exposed"
    return (
        f"communication {canvas.duration(communication_s)}\n{share if exposed_s else 'all hidden'}"
    )


def _ink_on(fill: str) -> str:
    """Black or white, whichever contrasts more.

    Source: relative luminance, WCAG 2.1 (gamma taken as 2.2).
    """
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#FFFFFF" if luminance < 0.25 else "#111111"
