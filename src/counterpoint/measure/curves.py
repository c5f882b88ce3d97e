"""Curves over a number that doubles, such as pieces: small multiples with one scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.scatter import HUES, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# inches
PLOT_WIDTH, PLOT_HEIGHT, LEFT, GAP, FOOT, HEAD = 2.5, 2.1, 0.7, 0.3, 0.55, 0.34


@dataclass(frozen=True, slots=True)
class Curves:
    """One panel.

    Args:
        title: Stands above.
        curves: (x, y) by name, x and y above 0; a name has one colour in all panels.

    Raises:
        InputError: There is no curve, one has no point, or a number is not positive.
    """

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]

    def __post_init__(self) -> None:
        if not self.curves or not all(self.curves.values()):
            want = f"curves of one point or more ({self.title!r})"
            raise InputError("Curves", "curves", want=want, got="none")
        for name, points in self.curves.items():
            for x, y in points:
                canvas.check_positive("Curves", "x", x, name)
                canvas.check_positive("Curves", "y", y, name)


def draw_curves(
    panels: Sequence[Curves], path: str | Path, *, title: str = "", source: str = "",
    x_label: str = "", y_label: str = "", y_most: float = 0.0, ratios: bool = True,
) -> Path:  # fmt: skip
    """Draw the panels side by side, both axes logarithmic.

    Args:
        panels: One or more.
        path: Ends in .png, .svg or .pdf.
        title: Heading of the picture.
        source: Machine, dtype and date; stands under the title.
        x_label: Under each panel.
        y_label: Beside the first.
        y_most: Top of the scale; what is above is cut off. 0: the largest y.
        ratios: y is one: a line stands where it is 1.

    Returns:
        The path written.

    Raises:
        InputError: There is no panel, or the suffix is none of these.
    """
    path = canvas.checked("draw_curves", path)
    if not panels:
        raise InputError("draw_curves", "panels", want="at least one panel", got="none")
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for each in panels for name in each.curves))
    looks = {name: (HUES[i % len(HUES)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}
    top_in = canvas.TITLE_HEIGHT + 0.3 + HEAD
    figure = canvas.sheet(LEFT + len(panels) * (PLOT_WIDTH + GAP), top_in + PLOT_HEIGHT + FOOT)
    values = [y for each in panels for points in each.curves.values() for _, y in points]
    xs = sorted({x for each in panels for points in each.curves.values() for x, _ in points})
    for i, each in enumerate(panels):
        axes = canvas.panel(
            figure, left_in=LEFT + i * (PLOT_WIDTH + GAP), top_in=top_in, width_in=PLOT_WIDTH,
            height_in=PLOT_HEIGHT,
        )  # fmt: skip
        _draw_panel(axes, each, looks, xs)
        if ratios:
            axes.axhline(1, color=canvas.INK, linewidth=1.0, zorder=2)
        least = min(0.9, *values) if ratios else min(values)
        axes.set_ylim(least * 0.97, (y_most or max(values)) * 1.05)
        axes.set_xlabel(x_label, fontsize=8.5, color=canvas.INK)
        if i == 0:
            axes.set_ylabel(y_label, fontsize=8.5, color=canvas.INK)
        else:
            axes.tick_params(axis="y", which="both", labelleft=False)
    canvas.heading(figure, title, source)
    marks = [
        Line2D([], [], color=hue, marker=marker, markersize=5, label=name)
        for name, (hue, marker) in looks.items()
    ]
    _, height_in = figure.get_size_inches()
    bottom_in = height_in - canvas.TITLE_HEIGHT - 0.16
    canvas.legend(figure, marks, left_in=canvas.EDGE, bottom_in=bottom_in)
    return canvas.save(figure, path)


def _draw_panel(
    axes: "Axes", each: Curves, looks: Mapping[str, tuple[str, str]], xs: Sequence[int]
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8, colors=canvas.FAINT_INK)
    axes.grid(color=canvas.GRID_INK, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    axes.set_title(each.title, fontsize=9, fontweight="bold", loc="left", color=canvas.INK)
    for name, points in each.curves.items():
        hue, marker = looks[name]
        axes.plot(*zip(*sorted(points), strict=True), color=hue, marker=marker, markersize=4.5,
                  linewidth=1.4, zorder=3, clip_on=True)  # fmt: skip


def _plain(y: float, _: int) -> str:
    return f"{y:g}"
