"""Predicted against measured times, one marker for each point: how good a model is, at a glance.

Both axes are logarithmic and equal, so that an error in percent is the same distance from the
diagonal everywhere. The error of a point is predicted / measured - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log, log10, sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.labels import LABEL_HEIGHT, LABEL_PAD, Box, Line, free_box

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito hues, without the yellow that white paper swallows; one marker more than hues, so that
# 56 groups differ
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", ">")
# widest first, for the narrow one lies on it
BANDS = ((0.25, "#EEEEEE"), (0.10, "#D8D8D8"))
CORNERS = ("predicted too long", "predicted too short")  # top left, bottom right
MARKER_PT, LABEL_PT = 5.5, 7.5
MIN_RANGE = 6.0  # longest time / shortest time of an axis, at least
LABEL_SHARE = 0.6  # of the width of the axes, at most

# inches
LEFT, SIDE, FOOT = 0.85, 2.70, 0.60
GROUP_HEIGHT = 0.38
TICK_APART = 0.5  # the room that a tick's text needs


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that was predicted and measured.

    Args:
        label: Its name; stands in the picture if the point is one of the worst.
        group: What shares a marker and a colour: a family of plans, or an op.
        predicted_s: What the model says.
        measured_s: What the machine took.

    Raises:
        InputError: A time is not a positive number.
    """

    label: str
    group: str
    predicted_s: float
    measured_s: float

    def __post_init__(self) -> None:
        for field in ("predicted_s", "measured_s"):
            value_s = getattr(self, field)
            if not 0 < value_s < inf:
                want = f"above 0 and finite ({self.label!r})"
                raise InputError("Point", field, want=want, got=value_s)

    @property
    def error(self) -> float:
        """predicted / measured - 1: above 0 where the model predicts too long."""
        return self.predicted_s / self.measured_s - 1


def draw_scatter(
    points: Sequence[Point],
    path: str | Path,
    *,
    title: str = "",
    source: str = "",
    limits_s: tuple[float, float] | None = None,
    num_labels: int = 3,
    width_in: float = 9.0,
) -> Path:
    """Draw predicted (y) over measured time (x), the diagonal, and bands of 10 % and 25 % error.

    At the side stand the median and the worst error, over all points and for each group, and
    how many points each band holds.

    Args:
        points: At least one; groups get their looks in the order in which they appear.
        path: Ends in .png, .svg or .pdf.
        title: Heading of the picture.
        source: What predicted, what measured, and when; stands under the title.
        limits_s: Shortest and longest time of both axes, in seconds, so that pictures can be
            compared; from the points if None.
        num_labels: Points with the largest errors that are labelled with their names.
        width_in: Width of the picture in inches; the axes are square.

    Returns:
        The path written.

    Raises:
        InputError: There is no point, one is outside `limits_s`, `num_labels` is negative or
            more than there is room for, or the suffix is none of these.
    """
    path = canvas.checked("draw_scatter", path)
    if not points:
        raise InputError("draw_scatter", "points", want="at least one point", got="none")
    if num_labels < 0:
        raise InputError("draw_scatter", "num_labels", want="0 or more", got=num_labels)
    field = _Field(*(limits_s or _limits_s(points)), width_in - LEFT - SIDE)
    if not field.holds(points):
        times_s = _times_s(points)
        want = f"(low, high) around {min(times_s):g} to {max(times_s):g}"
        raise InputError("draw_scatter", "limits_s", want=want, got=limits_s)
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)

    side_in = 1.87 + len(groups) * GROUP_HEIGHT
    height_in = canvas.TITLE_HEIGHT + max(field.edge_in + FOOT, side_in + 0.1)
    figure, axes = canvas.new_figure(
        width_in, height_in, left_in=LEFT, right_in=SIDE, top_in=canvas.TITLE_HEIGHT,
        foot_in=height_in - canvas.TITLE_HEIGHT - field.edge_in,
    )  # fmt: skip
    _draw_field(axes, field)
    # small groups last, so that large ones do not hide them
    for index, members in sorted(enumerate(groups.values()), key=lambda item: -len(item[1])):
        _draw_markers(
            axes, [p.measured_s for p in members], [p.predicted_s for p in members], index
        )
    _draw_labels(axes, field, points, num_labels)
    _draw_side(figure, groups, side_in)
    canvas.heading(figure, title, source)
    return canvas.save(figure, path)


@dataclass(frozen=True)
class _Field:
    """The square between two times, the same on both axes."""

    low_s: float
    high_s: float
    edge_in: float

    def holds(self, points: Sequence[Point]) -> bool:
        times_s = _times_s(points)
        return 0 < self.low_s <= min(times_s) and max(times_s) <= self.high_s > self.low_s

    def place(self, point: Point) -> tuple[float, float]:
        """Return x and y of a point, in inches."""
        return self.inches(point.measured_s), self.inches(point.predicted_s)

    def inches(self, time_s: float) -> float:
        return self.edge_in * log(time_s / self.low_s) / log(self.high_s / self.low_s)

    def time_s(self, at_in: float) -> float:
        """Return the time at a distance from the lower left corner: the inverse of `inches`."""
        return self.low_s * (self.high_s / self.low_s) ** (at_in / self.edge_in)


def _times_s(points: Sequence[Point]) -> list[float]:
    return [time_s for point in points for time_s in (point.predicted_s, point.measured_s)]


def _limits_s(points: Sequence[Point]) -> tuple[float, float]:
    times_s = _times_s(points)
    middle_s = sqrt(min(times_s)) * sqrt(max(times_s))
    # air around the outermost markers
    half = sqrt(max(max(times_s) / min(times_s), MIN_RANGE)) ** 1.12
    return middle_s / half, middle_s * half


def _ticks_s(field: _Field) -> list[float]:
    doubling_in = field.inches(2 * field.low_s)
    digits = (1, 2, 5) if doubling_in > TICK_APART else (1,)
    decades = range(floor(log10(field.low_s)), ceil(log10(field.high_s)) + 1)
    ticks_s = [digit * 10.0**decade for decade in decades for digit in digits]
    return [tick_s for tick_s in ticks_s if field.low_s <= tick_s <= field.high_s]


def _tick_text(tick_s: float) -> str:
    scale, unit = canvas.time_unit(tick_s)
    return f"{tick_s * scale:.3g} {unit}"


def _draw_field(axes: "Axes", field: _Field) -> None:
    """Draw bands, diagonal and both axes."""
    ends_s = (field.low_s, field.high_s)
    axes.set(xscale="log", yscale="log", xlim=ends_s, ylim=ends_s)
    for error, fill in BANDS:
        upper_s, lower_s = ([t * (1 + e) for t in ends_s] for e in (error, -error))
        there_and_back_s = (*ends_s, *reversed(ends_s))
        axes.fill(
            there_and_back_s, [*upper_s, *reversed(lower_s)], facecolor=fill, linewidth=0, zorder=1
        )
    axes.plot(ends_s, ends_s, color=canvas.INK, linewidth=0.8, zorder=2)
    ticks_s = _ticks_s(field)
    for axis, name in ((axes.xaxis, "measured time"), (axes.yaxis, "predicted time")):
        axis.set_ticks(ticks_s, [_tick_text(tick_s) for tick_s in ticks_s])
        axis.set_ticks([], minor=True)
        axis.set_label_text(name, fontsize=9, color=canvas.INK)
    axes.tick_params(labelsize=8, colors=canvas.FAINT_INK)
    axes.grid(color=canvas.GRID_INK, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(canvas.GRID_INK)
    for box, text in zip(_corner_boxes(field), CORNERS, strict=True):
        _write(axes, field, box, text, color=canvas.FAINT_INK, size_pt=LABEL_PT)


def _corner_boxes(field: _Field) -> list[Box]:
    widths_in = [canvas.text_width_pt(text, LABEL_PT) / 72 + 2 * LABEL_PAD for text in CORNERS]
    near_in, far_in = 0.08, field.edge_in - 0.08
    return [
        Box(near_in, far_in - LABEL_HEIGHT, near_in + widths_in[0], far_in),
        Box(far_in - widths_in[1], near_in, far_in, near_in + LABEL_HEIGHT),
    ]


def _write(axes: "Axes", field: _Field, box: Box, text: str, *, color: str, size_pt: float) -> None:
    """Write a text into the box that was measured for it."""
    x_s, y_s = field.time_s(box.left + LABEL_PAD), field.time_s((box.bottom + box.top) / 2)
    canvas.note(axes, x_s, y_s, text, va="center_baseline", fontsize=size_pt, color=color)


def _draw_markers(axes: "Axes", x: Sequence[float], y: Sequence[float], index: int) -> None:
    """Draw markers in the look of a group, those at the edge of the axes whole."""
    axes.plot(
        x, y, linestyle="none", marker=MARKERS[index % len(MARKERS)], markersize=MARKER_PT,
        color=HUES[index % len(HUES)], markeredgecolor="white", markeredgewidth=0.4, zorder=4,
        clip_on=False,
    )  # fmt: skip


def _draw_labels(axes: "Axes", field: _Field, points: Sequence[Point], num_labels: int) -> None:
    """Name the points with the largest errors, each with a line to it, none over another."""
    boxes, lines = _corner_boxes(field), list[Line]()
    markers = [field.place(p) for p in points]
    for point in sorted(points, key=lambda p: -abs(p.error))[:num_labels]:
        # several lines would need more room than is measured
        text = f"{' '.join(point.label.split())}  {_percent(point.error, sign='+')}"
        width_pt = canvas.text_width_pt(text, 1.0)
        size_pt = min(LABEL_PT, LABEL_SHARE * field.edge_in * 72 / width_pt)
        width_in = width_pt * size_pt / 72 + 2 * LABEL_PAD
        box = free_box(
            field.place(point), width_in, field.edge_in, above=point.error > 0, markers=markers,
            boxes=boxes, lines=lines,
        )  # fmt: skip
        if box is None:
            want = f"{len(lines)} or fewer, the names that there is room for"
            raise InputError("draw_scatter", "num_labels", want=want, got=num_labels)
        boxes.append(box)
        lines.append(box.docked(*field.place(point)))
        x, y, end_x, end_y = (field.time_s(at_in) for at_in in lines[-1])
        axes.plot([x, end_x], [y, end_y], color=canvas.FAINT_INK, linewidth=0.6, zorder=3)
        _write(axes, field, box, text, color=canvas.INK, size_pt=size_pt)


def _draw_side(figure: "Figure", groups: dict[str, list[Point]], side_in: float) -> None:
    """Write the errors, over all points and for each group, and explain the looks."""
    from matplotlib.patches import Rectangle

    width_in, height_in = (float(inches) for inches in figure.get_size_inches())
    bottom_in = height_in - canvas.TITLE_HEIGHT - side_in
    # a unit of these axes is an inch, from the top left
    side = figure.add_axes(
        ((width_in - SIDE) / width_in, bottom_in / height_in, SIDE / width_in, side_in / height_in)
    )
    side.set(xlim=(0, SIDE), ylim=(side_in, 0))
    side.axis("off")

    points = [point for members in groups.values() for point in members]
    canvas.note(side, 0.2, 0.08, _count(points), fontsize=10, fontweight="bold")
    canvas.note(side, 0.2, 0.32, f"median error {_median(points)}", fontsize=9)
    canvas.note(side, 0.2, 0.52, f"worst error {_worst(points)}", fontsize=9)

    meaning = "error: predicted / measured - 1"
    canvas.note(side, 0.2, 0.71, meaning, fontsize=7.5, color=canvas.FAINT_INK)

    at_in = 1.02
    side.plot([0.2, 0.44], [at_in, at_in], color=canvas.INK, linewidth=0.8)
    canvas.note(side, 0.54, at_in, "predicted = measured")
    for limit, fill in reversed(BANDS):
        at_in += 0.21
        side.add_patch(Rectangle((0.2, at_in - 0.06), 0.24, 0.12, color=fill, linewidth=0))
        # 1.1 / 1 - 1 is a little more than 0.1
        held = sum(round(abs(point.error), 9) <= limit for point in points)
        canvas.note(side, 0.54, at_in, f"within {limit:.0%}: {held} of {len(points)}")

    at_in += 0.38
    for index, (name, members) in enumerate(groups.items()):
        _draw_markers(side, [0.32], [at_in], index)
        size_pt = canvas.fitting_pt(name, 8.5, SIDE - 0.54)
        canvas.note(side, 0.54, at_in, name, fontsize=size_pt)
        errors = f"{_count(members)}, median {_median(members)}, worst {_worst(members)}"
        size_pt = canvas.fitting_pt(errors, 7.5, SIDE - 0.54)
        canvas.note(side, 0.54, at_in + 0.16, errors, fontsize=size_pt, color=canvas.FAINT_INK)
        at_in += GROUP_HEIGHT


def _count(points: Sequence[Point]) -> str:
    return f"{len(points)} point{'s' * (len(points) > 1)}"


def _median(points: Sequence[Point]) -> str:
    return _percent(median(abs(point.error) for point in points))


def _worst(points: Sequence[Point]) -> str:
    return _percent(max((point.error for point in points), key=abs), sign="+")


def _percent(value: float, *, sign: str = "") -> str:
    """One decimal below 10 %, none from there."""
    decimals = 1 if abs(value) < 0.0995 else 0
    return f"{value:{sign}.{decimals}%}"
