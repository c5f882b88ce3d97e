"""Pictures: a timeline with a row per lane, and bars of serial, ours and ideal per shape.

Cool colours compute, warm colours communicate (Okabe and Ito's palette, safe for colour-blind
readers). matplotlib is imported on the first drawing; no pyplot, so no global figure and no window.
"""

# matplotlib's own stubs leave **kwargs without a type
# pyright: reportUnknownMemberType=false

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.timeline import COMMUNICATION_KINDS, COMPUTE_KINDS, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150

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
INK, FAINT_INK, GRID_INK = "#222222", "#666666", "#DDDDDD"
BAR_FILLS = ("#B8B8B8", "#0072B2", "#D9EDF8")

# inches
LANE_HEIGHT, EXPOSED_HEIGHT, RANK_GAP = 0.30, 0.07, 0.16
TITLE_HEIGHT, FOOT_HEIGHT, SUMMARY_WIDTH, EDGE = 0.72, 1.05, 1.95, 0.2
BAR_HEIGHT, BAR_GAP = 0.17, 0.19


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """One shape of a comparison, in seconds.

    Args:
        label: Name of the shape.
        serial_s: Communication, then compute.
        ours_s: What this library took.
        ideal_s: max(communication, compute) of the same rounds.

    Raises:
        InputError: A time is not positive.
    """

    label: str
    serial_s: float
    ours_s: float
    ideal_s: float

    def __post_init__(self) -> None:
        for field in ("serial_s", "ours_s", "ideal_s"):
            if not getattr(self, field) > 0:
                raise InputError("BarRow", field, want="above 0", got=getattr(self, field))


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
    path = _checked("draw_timeline", path)
    timeline = timeline.shifted()
    num_lanes = sum(len(timeline.lanes(rank)) for rank in timeline.ranks)
    num_ranks = len(timeline.ranks)
    body_in = num_lanes * LANE_HEIGHT + num_ranks * EXPOSED_HEIGHT + (num_ranks - 1) * RANK_GAP
    name_in = 0.25 + 0.075 * max(len(span.lane) for span in timeline.spans)
    left_in = name_in + 0.65
    figure, axes = _figure(
        width_in, TITLE_HEIGHT + body_in + FOOT_HEIGHT,
        left_in=left_in, right_in=SUMMARY_WIDTH, top_in=TITLE_HEIGHT, foot_in=FOOT_HEIGHT,
    )  # fmt: skip
    scale, unit = _unit(timeline.duration_s)
    # a timeline of no length still needs an axis
    end = timeline.duration_s * scale or 1.0
    axes.set_xlim(0, end)
    # a little air between the last red strip and the axis
    axes.set_ylim(body_in + 0.04, 0)

    top_in = 0.0
    for rank in timeline.ranks:
        top_in = _draw_rank(axes, timeline, rank, top_in, end=end, scale=scale, name_in=name_in)
        top_in += RANK_GAP

    _time_axis(axes, unit)
    axes.axvline(end, color=INK, linewidth=1.0, zorder=4)
    total = f"total {_duration(timeline.duration_s)}"
    _note(axes, end, -0.06, total, ha="right", va="bottom", fontsize=9, fontweight="bold")
    _heading(figure, timeline.title, timeline.source)
    _kinds_legend(figure, {span.kind for span in timeline.spans}, left_in)
    return _save(figure, path)


def draw_bars(
    rows: Sequence[BarRow],
    path: str | Path,
    *,
    title: str = "",
    source: str = "",
    ours: str = "counterpoint",
    relative_to_serial: bool = False,
    width_in: float = 9.0,
) -> Path:
    """Draw three bars per shape: serial, ours, ideal, in ms, with ours' speedup over serial.

    Args:
        rows: Shapes, first at the top.
        path: Ends in .png, .svg or .pdf.
        title: Heading of the picture.
        source: Machine, dtype and date; stands under the title.
        ours: Name of the second bar.
        relative_to_serial: Length of a bar is its share of the row's serial time. For shapes
            that differ so much in time that the small ones would vanish.
        width_in: Width of the picture in inches; the height follows from the number of rows.

    Returns:
        The path written.

    Raises:
        InputError: There is no row, or the suffix is none of these.
    """
    path = _checked("draw_bars", path)
    if not rows:
        raise InputError("draw_bars", "rows", want="at least one row", got="none")
    from matplotlib.patches import Patch

    body_in = len(rows) * (3 * BAR_HEIGHT + BAR_GAP) + 0.05
    left_in = 0.45 + 0.082 * max(len(row.label) for row in rows)
    foot_in = 0.42 if relative_to_serial else 0.62
    figure, axes = _figure(
        width_in, TITLE_HEIGHT + 0.28 + body_in + foot_in,
        left_in=left_in, right_in=0.3, top_in=TITLE_HEIGHT + 0.28, foot_in=foot_in,
    )  # fmt: skip
    # seconds per unit of length, for each row
    units_s = [row.serial_s if relative_to_serial else 1e-3 for row in rows]
    longest = max(
        max(row.serial_s, row.ours_s, row.ideal_s) / unit_s
        for row, unit_s in zip(rows, units_s, strict=True)
    )
    for index, (row, unit_s) in enumerate(zip(rows, units_s, strict=True)):
        top_in = index * (3 * BAR_HEIGHT + BAR_GAP) + BAR_GAP / 2
        _draw_bar_row(axes, row, top_in, unit_s)
    # room for the numbers behind the longest bar
    axes.set_xlim(0, longest * 1.2)
    axes.set_ylim(body_in, 0)
    _time_axis(axes, "ms")
    axes.axvline(0, color=INK, linewidth=0.8, zorder=3)
    if relative_to_serial:
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_xlabel("length of a bar: its share of the serial time of its row", fontsize=8)

    _heading(figure, title, source)
    names = ("serial", ours, "ideal: the longer of compute and communication")
    patches = [Patch(color=fill, label=name) for fill, name in zip(BAR_FILLS, names, strict=True)]
    _, height_in = figure.get_size_inches()
    _legend(figure, patches, left_in=EDGE, bottom_in=height_in - TITLE_HEIGHT - 0.2)
    return _save(figure, path)


def _draw_bar_row(axes: "Axes", row: BarRow, top_in: float, unit_s: float) -> None:
    """Draw the three bars of one shape, with their times, and the speedup beside ours."""
    middle_in = top_in + 1.5 * BAR_HEIGHT
    _note(axes, 0, middle_in, row.label, shift_pt=-7, ha="right", fontsize=9)
    values_s = (row.serial_s, row.ours_s, row.ideal_s)
    for place, (value_s, fill) in enumerate(zip(values_s, BAR_FILLS, strict=True)):
        center_in = top_in + (place + 0.5) * BAR_HEIGHT
        axes.barh(center_in, value_s / unit_s, BAR_HEIGHT * 0.9, color=fill, zorder=2)
        text = f"{_digits(value_s * 1e3)} ms"
        look: dict[str, str] = {"color": FAINT_INK}
        if place == 1:
            text += f"   {row.serial_s / row.ours_s:.2f}x"
            look = {"fontweight": "bold"}
        _note(axes, value_s / unit_s, center_in, text, shift_pt=4, fontsize=7.5, **look)


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
        _note(axes, 0, top_in + LANE_HEIGHT / 2, lane, shift_pt=-6, ha="right", fontsize=8.5)
        for span in timeline.spans:
            if (span.rank, span.lane) == (rank, lane):
                _draw_span(axes, span, top_in, scale)
        top_in += LANE_HEIGHT
    for start_s, end_s in timeline.exposed(rank):
        box = ((start_s * scale, top_in), (end_s - start_s) * scale, EXPOSED_HEIGHT - 0.01)
        axes.add_patch(Rectangle(*box, color=EXPOSED, linewidth=0, zorder=2))

    middle_in = first_in + len(lanes) * LANE_HEIGHT / 2
    name, shift_pt = f"rank {rank}", -name_in * 72 - 2
    _note(axes, 0, middle_in, name, shift_pt=shift_pt, ha="right", fontsize=9.5, fontweight="bold")
    summary = _summary(timeline, rank)
    _note(axes, end, middle_in, summary, shift_pt=8, fontsize=7.5, color=FAINT_INK)
    return top_in + EXPOSED_HEIGHT


def _draw_span(axes: "Axes", span: Span, top_in: float, scale: float) -> None:
    """Draw one box, and its label where the box holds it."""
    from matplotlib.patches import Rectangle

    fill, hatch = LOOKS[span.kind]
    box = Rectangle(
        (span.start_s * scale, top_in + 0.02), span.duration_s * scale, LANE_HEIGHT - 0.04,
        facecolor=fill, hatch=hatch, edgecolor=HATCH_INK if hatch else "white",
        linewidth=0.6, zorder=3,
    )  # fmt: skip
    axes.add_patch(box)
    corners_px = axes.transData.transform([(span.start_s * scale, 0), (span.end_s * scale, 0)])
    width_pt = float(corners_px[1, 0] - corners_px[0, 0]) * 72 / DPI
    for text, size_pt in _label_forms(span.label):
        if _text_width_pt(text, size_pt) + 2 <= width_pt:
            axes.text(
                (span.start_s + span.end_s) / 2 * scale, top_in + LANE_HEIGHT / 2, text,
                ha="center", va="center_baseline", fontsize=size_pt, color=_ink_on(fill),
                zorder=5, parse_math=False,
            )  # fmt: skip
            return


def _label_forms(label: str) -> Iterable[tuple[str, float]]:
    """Yield texts and their sizes, best first: the label, smaller, then only its last number."""
    for size_pt in (7.5, 6.5, 5.5):
        yield label, size_pt
    # half a word would mislead, the number of a step does not
    if match := re.search(r"\d+$", label):
        yield match[0], 6.5


def _text_width_pt(text: str, size_pt: float) -> float:
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    # a dollar would start a formula
    path = TextPath((0, 0), text.replace("$", r"\$"), size=size_pt)
    return float(path.get_extents().width)


def _note(
    axes: "Axes", x: float, y: float, text: str, *, shift_pt: float = 0.0, ha: str = "left",
    va: str = "center", fontsize: float = 8, color: str = INK, fontweight: str = "normal",
) -> None:  # fmt: skip
    """Write `text` at the data point (x, y), moved right by `shift_pt`; it may leave the axes."""
    axes.annotate(
        text, (x, y), xytext=(shift_pt, 0), textcoords="offset points", annotation_clip=False,
        ha=ha, va=va, fontsize=fontsize, color=color, fontweight=fontweight, parse_math=False,
    )  # fmt: skip


def _figure(
    width_in: float, height_in: float,
    *, left_in: float, right_in: float, top_in: float, foot_in: float,
) -> "tuple[Figure, Axes]":  # fmt: skip
    """Return a white figure of this size and its axes, inside these margins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (
            left_in / width_in,
            foot_in / height_in,
            (width_in - left_in - right_in) / width_in,
            (height_in - top_in - foot_in) / height_in,
        )
    )
    return figure, axes


def _time_axis(axes: "Axes", unit: str) -> None:
    axes.set_yticks([])
    axes.set_xlabel(f"time [{unit}]", fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=8, colors=FAINT_INK)
    axes.grid(axis="x", color=GRID_INK, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _heading(figure: "Figure", title: str, source: str) -> None:
    """Write title and source at the top left, smaller if they would not fit."""
    width_in, height_in = figure.get_size_inches()
    # 0.85: bold letters are wider than those that were measured
    room_pt = (width_in - 2 * EDGE) * 72 * 0.85
    for text, down_in, size_pt, weight, color in (
        (title, 0.28, 12.0, "bold", INK),
        (source, 0.50, 8.5, "normal", FAINT_INK),
    ):
        fitting_pt = min(size_pt, room_pt / max(_text_width_pt(text, 1.0), 1e-9))
        figure.text(
            EDGE / width_in, 1 - down_in / height_in, text,
            fontsize=fitting_pt, fontweight=weight, color=color, parse_math=False,
        )  # fmt: skip


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
        _legend(figure, compute, left_in=left_in, bottom_in=0.29, name="compute")
    idle = Patch(facecolor=IDLE, edgecolor="#CFCFCF", label="idle")
    right_in = float(figure.get_size_inches()[0]) - SUMMARY_WIDTH + 0.11
    _legend(figure, [idle, *patches(["other"])], left_in=right_in, bottom_in=0.29)
    if kinds.intersection(COMMUNICATION_KINDS):
        exposed = Patch(color=EXPOSED, label="not hidden by compute")
        communication = [*patches(COMMUNICATION_KINDS), exposed]
        _legend(figure, communication, left_in=left_in, bottom_in=0.08, name="communication")


def _legend(
    figure: "Figure", patches: "list[Patch]", *, left_in: float, bottom_in: float, name: str = ""
) -> None:
    """Write one line of legend whose first patch is at `left_in`, and `name` before it."""
    width_in, height_in = figure.get_size_inches()
    figure.legend(
        handles=patches, loc="lower left", ncols=len(patches), frameon=False, fontsize=8,
        bbox_to_anchor=(left_in / width_in, bottom_in / height_in), labelcolor=INK,
        handlelength=1.3, handleheight=0.9, columnspacing=1.4, borderpad=0.0, borderaxespad=0.0,
    )  # fmt: skip
    if name:
        figure.text(
            (left_in - 0.08) / width_in, (bottom_in + 0.055) / height_in, name,
            ha="right", va="center", fontsize=8, fontweight="bold", color=INK,
        )  # fmt: skip


def _summary(timeline: Timeline, rank: int) -> str:
    communication_s = timeline.communication_s(rank)
    if communication_s == 0:
        return "no communication"
    exposed_s = timeline.exposed_s(rank)
    share = f"{1 - exposed_s / communication_s:.0%} hidden, {_duration(exposed_s)} exposed"
    return f"communication {_duration(communication_s)}\n{share if exposed_s else 'all hidden'}"


def _unit(longest_s: float) -> tuple[float, str]:
    """Units per second and name, so that the longest time reads between 1 and 1000."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if longest_s * scale >= 1:
            return scale, unit
    return 1e6, "us"


def _duration(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{_digits(seconds * scale)} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, trailing zeros kept, and no fraction from 100 up."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def _ink_on(fill: str) -> str:
    """Black or white, whichever contrasts more.

    Source: relative luminance, WCAG 2.1 (gamma taken as 2.2).
    """
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#FFFFFF" if luminance < 0.25 else "#111111"


def _checked(op: str, path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        want = f"a file name that ends in {', '.join(SUFFIXES)}"
        raise InputError(op, "path", want=want, got=str(path))
    return path


def _save(figure: "Figure", path: Path) -> Path:
    import matplotlib

    # no date and fixed ids: the same timeline gives the same file
    date = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[path.suffix]
    with matplotlib.rc_context({"svg.hashsalt": "counterpoint"}):
        figure.savefig(path, dpi=DPI, metadata=date)
    return path
