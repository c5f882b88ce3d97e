"""The sheet that pictures are drawn on: figure, heading, legend, time axis, text, file.

matplotlib is imported on the first drawing; no pyplot, so no global figure and no window.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from counterpoint.errors import InputError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150
INK, FAINT_INK, GRID_INK = "#222222", "#666666", "#DDDDDD"
TITLE_HEIGHT, EDGE = 0.72, 0.2  # inches


def checked(op: str, path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        want = f"a file name that ends in {', '.join(SUFFIXES)}"
        raise InputError(op, "path", want=want, got=str(path))
    return path


def new_figure(
    width_in: float, height_in: float,
    *, left_in: float, right_in: float, top_in: float, foot_in: float,
) -> "tuple[Figure, Axes]":  # fmt: skip
    """Return a white figure of this size and its axes, inside these margins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=left_in / width_in, right=1 - right_in / width_in,
        top=1 - top_in / height_in, bottom=foot_in / height_in,
    )  # fmt: skip
    return figure, figure.add_subplot()


def heading(figure: "Figure", title: str, source: str) -> None:
    """Write title and source at the top left, smaller if they would not fit."""
    width_in, height_in = figure.get_size_inches()
    for text, down_in, size_pt, weight, color in (
        (title, 0.28, 12.0, "bold", INK),
        (source, 0.50, 8.5, "normal", FAINT_INK),
    ):
        figure.text(
            EDGE / width_in, 1 - down_in / height_in, text,
            fontsize=fitting_pt(text, size_pt, width_in - 2 * EDGE), fontweight=weight,
            color=color, parse_math=False,
        )  # fmt: skip


def legend(
    figure: "Figure", looks: "Sequence[Artist]", *, left_in: float, bottom_in: float, name: str = ""
) -> None:
    """Write one line of legend whose first look is at `left_in`, and `name` before it."""
    width_in, height_in = figure.get_size_inches()
    figure.legend(
        handles=looks, loc="lower left", ncols=len(looks), frameon=False, fontsize=8,
        bbox_to_anchor=(left_in / width_in, bottom_in / height_in), labelcolor=INK,
        handlelength=1.3, handleheight=0.9, columnspacing=1.4, borderpad=0.0, borderaxespad=0.0,
    )  # fmt: skip
    if name:
        figure.text(
            (left_in - 0.08) / width_in, (bottom_in + 0.055) / height_in, name,
            ha="right", va="center", fontsize=8, fontweight="bold", color=INK,
        )  # fmt: skip


def time_axis(axes: "Axes", unit: str) -> None:
    axes.set_yticks([])
    axes.set_xlabel(f"time [{unit}]", fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=8, colors=FAINT_INK)
    axes.grid(axis="x", color=GRID_INK, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


class Look(NamedTuple):
    """Of letters."""

    size_pt: float = 8
    color: str = INK
    weight: str = "normal"


def note(
    axes: "Axes", x: float, y: float, text: str, look: Look, *, shift_pt: float = 0.0,
    ha: str = "left", va: str = "center",
) -> None:  # fmt: skip
    """Write `text` at the data point (x, y), moved right by `shift_pt`; it may leave the axes."""
    axes.annotate(
        text, (x, y), xytext=(shift_pt, 0), textcoords="offset points", annotation_clip=False,
        ha=ha, va=va, fontsize=look.size_pt, color=look.color, fontweight=look.weight,
        parse_math=False,
    )  # fmt: skip


def fitting_pt(text: str, size_pt: float, room_in: float) -> float:
    """Return `size_pt`, or the largest size at which the text, were it bold, fits into the room."""
    # 0.85: bold letters are wider than those that were measured
    return min(size_pt, room_in * 72 * 0.85 / max(text_width_pt(text, 1.0), 1e-9))


def text_width_pt(text: str, size_pt: float) -> float:
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    # a dollar would start a formula
    path = TextPath((0, 0), text.replace("$", r"\$"), size=size_pt)
    return float(path.get_extents().width)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Units per second and name, so that the longest time reads between 1 and 1000."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if longest_s * scale >= 1:
            return scale, unit
    return 1e6, "us"


def duration(seconds: float) -> str:
    scale, unit = time_unit(seconds)
    return f"{digits(seconds * scale)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, trailing zeros kept, and no fraction from 100 up."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def save(figure: "Figure", path: Path) -> Path:
    import matplotlib

    # no date and fixed ids: the same timeline gives the same file
    date = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[path.suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "counterpoint"}):
        figure.savefig(path, dpi=DPI, metadata=date)
    return path
