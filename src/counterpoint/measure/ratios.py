"""What shaping a GEMM does to its overlap: TimeRatio over its resident blocks per SM.

TimeRatio = overlapped time / sequential time of the same loop of GEMMs and collectives. One panel
for each pair of them; in it a colour for each kernel, dashed without priority.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.scatter import HUES, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES = (0, (2.2, 1.2))  # on, off, in widths of the line
NUM_COLUMNS, LABEL_PT = 4, 7.5
Looks = dict[str, tuple[str, str]]  # label of a kernel -> colour, marker

# inches
WIDTH, PLOT_MAX, PLOT_MIN_HEIGHT = 13.0, 4.2, 2.0
LEFT, TOP, HEAD, FOOT = 0.62, canvas.TITLE_HEIGHT + 0.36, 0.46, 0.56  # of the sheet; of a panel
LEADER, LABEL_MAX, LABEL_STEP, TICK_STEP = 0.16, 1.25, 0.145, 0.17


@dataclass(frozen=True, slots=True)
class Curve:
    """TimeRatio of one kernel, unshaped and shaped.

    Args:
        label: Name of the kernel; the same name has the same colour in all panels.
        points: (resident blocks per SM, TimeRatio), the unshaped kernel having the most blocks.
        dashed: Measured without priority.

    Raises:
        InputError: There is no point, two have the same blocks, blocks are not an integer from 1
            to 64, or a TimeRatio is not a positive number.
    """

    label: str
    points: Sequence[tuple[int, float]]
    dashed: bool = False

    def __post_init__(self) -> None:
        blocks = [num_blocks for num_blocks, _ in self.points]
        if not blocks or len(set(blocks).intersection(range(1, 65))) < len(blocks):
            want = f"at least one, each of other blocks from 1 to 64 ({self.label!r})"
            raise InputError("Curve", "points", want=want, got=list(self.points) or "none")
        for _, ratio in self.points:
            canvas.check_positive("Curve", "TimeRatio", ratio, self.label)


@dataclass(frozen=True, slots=True)
class Panel:
    """The curves of one GEMM and collective.

    Args:
        title: Stands above.
        curves: At least one.
        ideal: TimeRatio of the ideal pipeline, if known.

    Raises:
        InputError: There is no curve, or `ideal` is not a positive number.
    """

    title: str
    curves: Sequence[Curve]
    ideal: float | None

    def __post_init__(self) -> None:
        if not self.curves:
            raise InputError("Panel", "curves", want=f"not empty ({self.title!r})", got="none")
        if self.ideal is not None:
            canvas.check_positive("Panel", "ideal", self.ideal, self.title)


def draw_ratios(
    panels: Sequence[Panel], path: str | Path, *, title: str = "", source: str = ""
) -> Path:
    """Draw TimeRatio over resident blocks per SM, small multiples with one scale of TimeRatio.

    The unshaped point of a curve is hollow; below its title a panel says what shaping won at best.

    Args:
        panels: Four side by side, then further ones below.
        path: Ends in .png, .svg or .pdf.
        title: Heading of the picture.
        source: Machine, dtype and date; stands under the title.

    Returns:
        The path written.

    Raises:
        InputError: There is no panel, or the suffix is none of these.
    """
    path = canvas.checked("draw_ratios", path)
    if not panels:
        raise InputError("draw_ratios", "panels", want="at least one panel", got="none")
    curves = [curve for panel in panels for curve in panel.curves]
    looks = {
        label: (HUES[i % len(HUES)], MARKERS[i % len(MARKERS)])
        for i, label in enumerate(dict.fromkeys(curve.label for curve in curves))
    }
    num_columns = min(NUM_COLUMNS, len(panels))
    side_in = LEADER + min(LABEL_MAX, canvas.widest_in([*looks, "sequential"], LABEL_PT))
    step_in = min((WIDTH - LEFT) / num_columns, PLOT_MAX + side_in + canvas.EDGE)
    plot_in = step_in - side_in - canvas.EDGE
    num_labels = max(len(panel.curves) for panel in panels) + 2
    height_in = max(0.62 * plot_in, PLOT_MIN_HEIGHT, num_labels * LABEL_STEP)
    row_in = HEAD + height_in + FOOT
    num_rows = ceil(len(panels) / num_columns)
    figure = canvas.sheet(LEFT + num_columns * step_in, TOP + num_rows * row_in)
    ratios = [1.0, *(panel.ideal or 1.0 for panel in panels)]
    ratios += [ratio for curve in curves for _, ratio in curve.points]
    air = max(0.06 * (max(ratios) - min(ratios)), 0.02)
    for i, panel in enumerate(panels):
        row, column = divmod(i, num_columns)
        axes = canvas.panel(
            figure, left_in=LEFT + column * step_in, top_in=TOP + row * row_in + HEAD,
            width_in=plot_in, height_in=height_in,
        )  # fmt: skip
        axes.set_ylim(min(ratios) - air, max(ratios) + air)
        _draw_panel(axes, panel, looks, is_first=column == 0)
        _draw_labels(axes, panel, looks)
        _draw_head(axes, panel, looks, step_in - canvas.EDGE)
    canvas.heading(figure, title, source)
    _draw_looks(figure, has_dashes=any(curve.dashed for curve in curves))
    return canvas.save(figure, path)


def _draw_panel(axes: "Axes", panel: Panel, looks: Looks, *, is_first: bool) -> None:
    """Draw axes, levels and curves; only the first panel of a row has numbers beside it."""
    from matplotlib.ticker import MaxNLocator

    # one step for each number of blocks: 14 and 16 would fall together on a scale of 1 to 16
    blocks = sorted({num_blocks for curve in panel.curves for num_blocks, _ in curve.points})
    axes.set_xlim(-0.4, len(blocks) - 0.6)
    every = ceil(len(blocks) * TICK_STEP * canvas.DPI / axes.bbox.width)
    axes.set_xticks(range(len(blocks))[::-every], [str(b) for b in blocks[::-every]])
    axes.set_xlabel("resident blocks per SM", fontsize=8, color=canvas.INK)
    low, high = axes.get_ylim()
    locator = MaxNLocator(6, steps=[1, 2, 5, 10])
    levels = [level for level in locator.tick_values(low, high) if low <= level <= high]
    axes.set_yticks(levels, [f"{level:.2f}" if is_first else "" for level in levels])
    axes.set_ylabel("TimeRatio (lower is better)" if is_first else "", fontsize=8, color=canvas.INK)
    axes.tick_params(labelsize=8, colors=canvas.FAINT_INK, length=0)
    axes.grid(color=canvas.GRID_INK, linewidth=0.6)
    axes.spines[:].set_visible(False)
    axes.axhline(1.0, color=canvas.INK, linewidth=1.0, zorder=2)
    if panel.ideal is not None:
        axes.axhline(panel.ideal, color=canvas.INK, linewidth=1.2, linestyle=":", zorder=2)
    for curve in panel.curves:
        colour, marker = looks[curve.label]
        x, y = zip(*sorted((blocks.index(b), ratio) for b, ratio in curve.points), strict=True)
        style = DASHES if curve.dashed else "-"
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.5, marker=marker, markersize=4)
        axes.plot(
            x[-1], y[-1], color=colour, linestyle="none", marker=marker, markersize=6.5,
            markerfacecolor="white", markeredgewidth=1.4, zorder=4,
        )  # fmt: skip


def _draw_labels(axes: "Axes", panel: Panel, looks: Looks) -> None:
    """Name levels and kernels at the right, each with a leader from the height where it ends."""
    low, high = axes.get_ylim()
    ends = [(1.0, canvas.INK, "sequential")]
    if panel.ideal is not None:
        ends.append((panel.ideal, canvas.INK, f"ideal {panel.ideal:.2f}"))
    kernels = {curve.label: max(curve.points)[1] for curve in panel.curves}
    ends = sorted(ends + [(ratio, looks[label][0], label) for label, ratio in kernels.items()])
    wanted = [(ratio - low) / (high - low) for ratio, _, _ in ends]
    places = canvas.set_apart(wanted, LABEL_STEP * canvas.DPI / axes.bbox.height, 1.0)
    leader = LEADER * canvas.DPI / axes.bbox.width
    for (_, colour, text), end, at in zip(ends, wanted, places, strict=True):
        x, y = (1, 1 + 0.75 * leader), (end, at)
        axes.plot(x, y, color=colour, linewidth=1.0, transform=axes.transAxes, clip_on=False)
        axes.text(
            1 + leader, at, text, transform=axes.transAxes, va="center", color=colour,
            fontsize=canvas.fitting_pt(text, LABEL_PT, LABEL_MAX), parse_math=False,
            fontweight="normal" if colour == canvas.INK else "bold",
        )  # fmt: skip


def _draw_head(axes: "Axes", panel: Panel, looks: Looks, room_in: float) -> None:
    """Write the title, and in the colour of its kernel what shaping won at best."""
    curve = min(panel.curves, key=lambda curve: min(ratio for _, ratio in curve.points))
    num_blocks, best = min(curve.points, key=lambda point: point[1])
    _, unshaped = max(curve.points)
    won = f"{unshaped:.2f} -> {best:.2f} at {num_blocks} per SM"
    finding = f"{curve.label}: {won if best < unshaped else f'{best:.2f} unshaped'}"
    for text, up_in, size_pt, weight, colour in (
        (panel.title, 0.32, 9.5, "bold", canvas.INK),
        (finding, 0.13, 8.0, "normal", looks[curve.label][0]),
    ):
        axes.text(
            0, 1 + up_in * canvas.DPI / axes.bbox.height, text, transform=axes.transAxes,
            fontsize=canvas.fitting_pt(text, size_pt, room_in), fontweight=weight, color=colour,
            va="center", parse_math=False,
        )  # fmt: skip


def _draw_looks(figure: "Figure", *, has_dashes: bool) -> None:
    """Explain markers and dashes, in one line above the panels."""
    from matplotlib.lines import Line2D

    ink = canvas.FAINT_INK
    looks = [
        Line2D([], [], color=ink, linestyle="none", marker="o", markersize=6.5,
               markerfacecolor="white", markeredgewidth=1.4, label="unshaped: as many as fit"),
        Line2D([], [], color=ink, linewidth=1.5, label="with priority"),
        Line2D([], [], color=ink, linewidth=1.5, linestyle=DASHES, label="without priority"),
    ][: 3 if has_dashes else 1]  # fmt: skip
    bottom_in = float(figure.get_size_inches()[1]) - canvas.TITLE_HEIGHT - 0.16
    canvas.legend(figure, looks, left_in=canvas.EDGE, bottom_in=bottom_in)
