"""Speedup over serial of several kinds of plan: a row for each shape, a panel for each machine."""

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
PANEL_WIDTH, ROW_HEIGHT, GAP, HEAD, FOOT = 3.6, 0.3, 0.25, 0.34, 0.5


@dataclass(frozen=True, slots=True)
class Speedups:
    """One panel.

    Args:
        title: Name of the machine; stands above.
        rows: For each shape's label, top down: serial time / time, by kind of plan.
        ideals: For each label serial / the longer of compute and communication.

    Raises:
        InputError: There is no row, a row has no kind, or a speedup is not positive.
    """

    title: str
    rows: Mapping[str, Mapping[str, float]]
    ideals: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.rows or not all(self.rows.values()):
            want = f"rows of one kind of plan or more ({self.title!r})"
            raise InputError("Speedups", "rows", want=want, got="none")
        for label, row in self.rows.items():
            for kind, value in row.items():
                canvas.check_positive("Speedups", kind, value, label)


def draw_speedups(
    panels: Sequence[Speedups], path: str | Path, *, title: str = "", source: str = ""
) -> Path:
    """Draw a dot for each kind of plan, on one scale, with serial at 1 and the ideal as a bar.

    Args:
        panels: Side by side, of equal labels.
        path: Ends in .png, .svg or .pdf.
        title: Heading of the picture.
        source: What the numbers are; stands under the title.

    Returns:
        The path written.

    Raises:
        InputError: There is no panel, labels differ, or the suffix is none of these.
    """
    path = canvas.checked("draw_speedups", path)
    labels = list(panels[0].rows) if panels else []
    if not panels or any(list(panel.rows) != labels for panel in panels):
        raise InputError("draw_speedups", "panels", want="one or more, of equal rows", got="others")
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys(k for p in panels for row in p.rows.values() for k in row))
    looks = {kind: (HUES[i % len(HUES)], MARKERS[i % len(MARKERS)]) for i, kind in enumerate(kinds)}
    left_in = 0.3 + canvas.widest_in(labels, 8.5)
    top_in = canvas.TITLE_HEIGHT + 0.3 + HEAD
    body_in = ROW_HEIGHT * len(labels)
    figure = canvas.sheet(
        left_in + len(panels) * (PANEL_WIDTH + GAP) + 0.1, top_in + body_in + FOOT
    )
    values = [v for p in panels for row in (*p.rows.values(), p.ideals) for v in row.values()]
    for i, each in enumerate(panels):
        axes = canvas.panel(
            figure, left_in=left_in + i * (PANEL_WIDTH + GAP), top_in=top_in,
            width_in=PANEL_WIDTH, height_in=body_in,
        )  # fmt: skip
        axes.set_xlim(0, max(values) * 1.06)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        _draw_panel(axes, each, looks)
        for j, label in enumerate(labels if i == 0 else ()):
            canvas.note(axes, 0, j, label, shift_pt=-7, ha="right", fontsize=8.5)
    canvas.heading(figure, title, source)
    marks = [
        Line2D([], [], color=hue, marker=marker, linestyle="", label=kind)
        for kind, (hue, marker) in looks.items()
    ]
    marks.append(Line2D([], [], color=canvas.INK, marker="|", markersize=10, markeredgewidth=2,
                        linestyle="", label="ideal"))  # fmt: skip
    _, height_in = figure.get_size_inches()
    bottom_in = height_in - canvas.TITLE_HEIGHT - 0.16
    canvas.legend(figure, marks, left_in=canvas.EDGE, bottom_in=bottom_in)
    return canvas.save(figure, path)


def _draw_panel(axes: "Axes", each: Speedups, looks: Mapping[str, tuple[str, str]]) -> None:
    canvas.time_axis(axes, "")
    axes.set_xlabel("serial / plan (higher is better)", fontsize=8.5, color=canvas.INK)
    axes.set_title(each.title, fontsize=9.5, fontweight="bold", loc="left", color=canvas.INK)
    axes.axvline(1, color=canvas.INK, linewidth=1.0, zorder=2)
    for j, (label, row) in enumerate(each.rows.items()):
        axes.axhline(j, color=canvas.GRID_INK, linewidth=0.6, zorder=1)
        if label in each.ideals:
            axes.plot([each.ideals[label]], [j], color=canvas.INK, marker="|", markersize=13,
                      markeredgewidth=2, zorder=3)  # fmt: skip
        for kind, value in row.items():
            hue, marker = looks[kind]
            axes.plot([value], [j], color=hue, marker=marker, markersize=7, linestyle="", zorder=4)
