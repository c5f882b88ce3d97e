"""The sheet that pictures are drawn on: themes, figure, heading, legend, time axis, text, file.

A hue has one meaning in all pictures: blue computes, orange communicates, green is counterpoint,
purple is torch's fused operator, grey is serial, red is exposed; what is predicted or estimated is
a line of ink. matplotlib is imported on the first drawing; no pyplot, so no global figure and no
window.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from counterpoint.errors import InputError
from counterpoint.lazy import need

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150
TITLE_HEIGHT, EDGE = 0.72, 0.2  # inches
SCREEN_IN = 9.3  # 900 pixels of a browser: no picture is taller
TITLE_PT, HEAD_PT, TEXT_PT, SMALL_PT = 12.0, 9.5, 8.5, 7.5

# Okabe and Ito's palette, safe for colour-blind readers
BLUE, SKY, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
GREEN, PURPLE, YELLOW = "#009E73", "#CC79A7", "#F0E442"


@dataclass(frozen=True)
class Theme:
    """The colours that differ between light pages and dark ones."""

    name: str
    page: str
    ink: str
    faint: str
    grid: str
    idle: str
    serial: str
    wait: str
    exposed: str


LIGHT = Theme(
    "light", page="#FFFFFF", ink="#222222", faint="#666666", grid="#DDDDDD", idle="#F1F1F1",
    serial="#B5B5B5", wait="#FBF3B0", exposed="#B3001B",
)  # fmt: skip
DARK = Theme(
    "dark", page="#0D1117", ink="#E6EDF3", faint="#9DA7B3", grid="#30363D", idle="#1C2129",
    serial="#B1BAC4", wait="#4A4218", exposed="#FF5C6C",
)  # fmt: skip


@contextmanager
def themed(theme: Theme) -> Generator[Theme]:
    """Draw and save figures in the colours of `theme`."""
    import matplotlib

    with matplotlib.rc_context({
        "figure.facecolor": theme.page,
        "axes.facecolor": theme.page,
        "savefig.facecolor": theme.page,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "font.sans-serif": ["DejaVu Sans", "Verdana"],  # equally wide
        "font.size": TEXT_PT,
        "axes.labelsize": TEXT_PT,
        "xtick.labelsize": TEXT_PT,
        "ytick.labelsize": TEXT_PT,
        "svg.fonttype": "none",  # letters, not outlines: a third of the size
        "svg.hashsalt": "counterpoint",  # the same figure gives the same file
    }):  # fmt: skip
        yield theme


def checked(op: str, path: str | Path) -> Path:
    """The path of a picture; refused with another suffix, or where nothing draws."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        want = f"a file name that ends in {', '.join(SUFFIXES)}"
        raise InputError(op, "path", want=want, got=str(path))
    need("matplotlib", op)
    return path


def new_figure(
    width_in: float, height_in: float,
    *, left_in: float, right_in: float, top_in: float, foot_in: float,
) -> "tuple[Figure, Axes]":  # fmt: skip
    """Return a figure of this size and its axes, inside these margins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=left_in / width_in, right=1 - right_in / width_in,
        top=1 - top_in / height_in, bottom=foot_in / height_in,
    )  # fmt: skip
    return figure, figure.add_subplot()


def heading(figure: "Figure", title: str, source: str, theme: Theme) -> None:
    """Write title and source at the top left, smaller if they would not fit."""
    width_in, height_in = figure.get_size_inches()
    for text, down_in, size_pt, weight, color in (
        (title, 0.28, TITLE_PT, "bold", theme.ink),
        (source, 0.50, TEXT_PT, "normal", theme.faint),
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
        handles=looks, loc="lower left", ncols=len(looks), frameon=False, fontsize=TEXT_PT,
        bbox_to_anchor=(left_in / width_in, bottom_in / height_in),
        handlelength=1.3, handleheight=0.9, columnspacing=1.4, borderpad=0.0, borderaxespad=0.0,
    )  # fmt: skip
    if name:
        figure.text(
            (left_in - 0.08) / width_in, (bottom_in + 0.055) / height_in, name,
            ha="right", va="center", fontsize=TEXT_PT, fontweight="bold",
        )  # fmt: skip


def time_axis(axes: "Axes", unit: str) -> None:
    axes.set_yticks([])
    axes.set_xlabel(f"time [{unit}]")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


class Look(NamedTuple):
    """Of letters; without a colour they are the theme's ink."""

    size_pt: float = TEXT_PT
    color: str | None = None
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
    """Width of one line: the sum of its letters, each of which is measured once."""
    return sum(map(_letter_width, text)) * size_pt


@cache
def _letter_width(letter: str) -> float:
    """At one point."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    size_pt = 100.0  # letters of one point would be rounded
    font = FontProperties(size=size_pt)
    width, _, _ = text_to_path.get_text_width_height_descent(letter, font, ismath=False)
    return width / size_pt


def time_unit(longest_s: float) -> tuple[float, str]:
    """Units per second and name, so that the longest time reads between 1 and 1000."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if longest_s * scale >= 1:
            return scale, unit
    return 1e6, "us"


def duration(seconds: float) -> str:
    """As people say it: 9.40 us, 561 us, 1.06 ms."""
    scale, unit = time_unit(seconds)
    return f"{digits(seconds * scale)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, trailing zeros kept, and no fraction from 100 up."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def save(figure: "Figure", path: Path) -> Path:
    # without a date and a version the same figure gives the same file
    about = {".png": {}, ".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata=about[path.suffix])
    return path
