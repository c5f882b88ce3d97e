"""A timeline as a picture: a row per lane, and what each rank hides.

Cool colours compute, warm colours communicate (Okabe and Ito's palette, safe for colour-blind
readers).
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.measure import canvas
from counterpoint.timeline import COMMUNICATION_KINDS, COMPUTE_KINDS, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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


def draw_timeline(timeline: Timeline, path: str | Path, *, width_in: float = 12.0) -> Path:
    """Draw one row per lane, grouped by rank, and what each rank hides.

    The red strip under the lanes of a rank marks exposed communication. Time starts at 0.

    Args:
        timeline: What to draw; its title and its source stand above.
        path: Ends in .png, .svg or .pdf.
        width_in: Width of the picture in inches; the height follows from the number of lanes.

    Returns:
        The path written.

    Raises:
        InputError: The suffix is none of these.
    """
    path = canvas.checked("draw_timeline", path)
    timeline = timeline.shifted()
    num_lanes = sum(len(timeline.lanes(rank)) for rank in timeline.ranks)
    num_ranks = len(timeline.ranks)
    body_in = num_lanes * LANE_HEIGHT + num_ranks * EXPOSED_HEIGHT + (num_ranks - 1) * RANK_GAP
    name_in = 0.25 + 0.075 * max(len(span.lane) for span in timeline.spans)
    left_in = name_in + 0.65
    figure, axes = canvas.new_figure(
        width_in, canvas.TITLE_HEIGHT + body_in + FOOT_HEIGHT,
        left_in=left_in, right_in=SUMMARY_WIDTH, top_in=canvas.TITLE_HEIGHT, foot_in=FOOT_HEIGHT,
    )  # fmt: skip
    scale, unit = canvas.time_unit(timeline.duration_s)
    # a timeline of no length still needs an axis
    end = timeline.duration_s * scale or 1.0
    axes.set_xlim(0, end)
    # a little air between the last red strip and the axis
    axes.set_ylim(body_in + 0.04, 0)

    top_in = 0.0
    for rank in timeline.ranks:
        top_in = _draw_rank(axes, timeline, rank, top_in, end=end, scale=scale, name_in=name_in)
        top_in += RANK_GAP

    canvas.time_axis(axes, unit)
    axes.axvline(end, color=canvas.INK, linewidth=1.0, zorder=4)
    total = f"total {canvas.duration(timeline.duration_s)}"
    canvas.note(axes, end, -0.06, total, ha="right", va="bottom", fontsize=9, fontweight="bold")
    canvas.heading(figure, timeline.title, timeline.source)
    _kinds_legend(figure, {span.kind for span in timeline.spans}, left_in)
    return canvas.save(figure, path)


def _draw_rank(
    axes: "Axes", timeline: Timeline, rank: int, top_in: float,
    *, end: float, scale: float, name_in: float,
) -> float:  # fmt: skip
    """Draw the lanes of one rank from `top_in` down; return where they end."""
    from matplotlib.patches import Rectangle

    lanes = timeline.lanes(rank)
    first_in = top_in
    for lane in lanes:
        axes.add_patch(Rectangle((0, top_in + 0.02), end, LANE_HEIGHT - 0.04, color=IDLE, zorder=1))
        canvas.note(axes, 0, top_in + LANE_HEIGHT / 2, lane, shift_pt=-6, ha="right", fontsize=8.5)
        for span in timeline.spans:
            if (span.rank, span.lane) == (rank, lane):
                _draw_span(axes, span, top_in, scale)
        top_in += LANE_HEIGHT
    for start_s, end_s in timeline.exposed(rank):
        box = ((start_s * scale, top_in), (end_s - start_s) * scale, EXPOSED_HEIGHT - 0.01)
        axes.add_patch(Rectangle(*box, color=EXPOSED, linewidth=0, zorder=2))

    middle_in = first_in + len(lanes) * LANE_HEIGHT / 2
    name, shift_pt = f"rank {rank}", -name_in * 72 - 2
    canvas.note(
        axes, 0, middle_in, name, shift_pt=shift_pt, ha="right", fontsize=9.5, fontweight="bold"
    )
    summary = _summary(timeline, rank)
    canvas.note(axes, end, middle_in, summary, shift_pt=8, fontsize=7.5, color=canvas.FAINT_INK)
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


def _summary(timeline: Timeline, rank: int) -> str:
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
