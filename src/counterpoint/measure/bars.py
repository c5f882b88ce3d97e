"""Bars of serial, ours and ideal per shape, with ours' speedup over serial."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR_FILLS = ("#B8B8B8", "#0072B2", "#D9EDF8")
BAR_HEIGHT, BAR_GAP = 0.17, 0.19  # inches


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


def draw_bars(
    rows: Sequence[BarRow],
    path: str | Path,
    *,
    title: str = "",
    source: str = "",
    ours: str = "counterpoint",
    ideal: str = "ideal: the longer of compute and communication",
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
        ideal: Name of the third.
        relative_to_serial: Length of a bar is its share of the row's serial time. For shapes
            that differ so much in time that the small ones would vanish.
        width_in: Width of the picture in inches; the height follows from the number of rows.

    Returns:
        The path written.

    Raises:
        InputError: There is no row, or the suffix is none of these.
    """
    path = canvas.checked("draw_bars", path)
    if not rows:
        raise InputError("draw_bars", "rows", want="at least one row", got="none")
    from matplotlib.patches import Patch

    body_in = len(rows) * (3 * BAR_HEIGHT + BAR_GAP) + 0.05
    left_in = 0.45 + 0.082 * max(len(row.label) for row in rows)
    foot_in = 0.42 if relative_to_serial else 0.62
    figure, axes = canvas.new_figure(
        width_in, canvas.TITLE_HEIGHT + 0.28 + body_in + foot_in,
        left_in=left_in, right_in=0.3, top_in=canvas.TITLE_HEIGHT + 0.28, foot_in=foot_in,
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
    canvas.time_axis(axes, "ms")
    axes.axvline(0, color=canvas.INK, linewidth=0.8, zorder=3)
    if relative_to_serial:
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_xlabel("length of a bar: its share of the serial time of its row", fontsize=8)

    canvas.heading(figure, title, source)
    names = ("serial", ours, ideal)
    patches = [Patch(color=fill, label=name) for fill, name in zip(BAR_FILLS, names, strict=True)]
    _, height_in = figure.get_size_inches()
    canvas.legend(
        figure, patches, left_in=canvas.EDGE, bottom_in=height_in - canvas.TITLE_HEIGHT - 0.2
    )
    return canvas.save(figure, path)


def _draw_bar_row(axes: "Axes", row: BarRow, top_in: float, unit_s: float) -> None:
    """Draw the three bars of one shape, with their times, and the speedup beside ours."""
    middle_in = top_in + 1.5 * BAR_HEIGHT
    canvas.note(axes, 0, middle_in, row.label, shift_pt=-7, ha="right", fontsize=9)
    values_s = (row.serial_s, row.ours_s, row.ideal_s)
    for place, (value_s, fill) in enumerate(zip(values_s, BAR_FILLS, strict=True)):
        center_in = top_in + (place + 0.5) * BAR_HEIGHT
        axes.barh(center_in, value_s / unit_s, BAR_HEIGHT * 0.9, color=fill, zorder=2)
        text = f"{canvas.digits(value_s * 1e3)} ms"
        look: dict[str, str] = {"color": canvas.FAINT_INK}
        if place == 1:
            text += f"   {row.serial_s / row.ours_s:.2f}x"
            look = {"fontweight": "bold"}
        canvas.note(axes, value_s / unit_s, center_in, text, shift_pt=4, fontsize=7.5, **look)
