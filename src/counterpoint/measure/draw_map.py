"""A map of what fusing saves of a DLRM's step, with steps on it, as a picture.

Shades of green say how much; the saving that the paper reports is a line of ink.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.measure import canvas
from counterpoint.measure.canvas import DARK, LIGHT, Look, Theme
from counterpoint.scale.recommenders.map import (
    PAPER_SAVING,
    RATES,
    Map,
    Place,
    ratios_of_training,
    saving,
    share_for,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 8.4, 5.6  # inches
LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.21, 0.3, 0.5)
RATIOS, SHARES = (0.1, 10.0), (0.01, 1.0)  # of the axes
STEPS = 120


def draw_map(found: Map, path: str | Path, *, dark: bool = False) -> Path:
    """Draw a map into a .png, .svg or .pdf.

    Args:
        found: of `scale.dlrm_map.map_of`.
        path: of the picture.
        dark: for dark pages.

    Raises:
        InputError: the file name ends in something else.
    """
    path = canvas.checked("draw_map", path)
    with canvas.themed(DARK if dark else LIGHT) as theme:
        figure, axes = canvas.new_figure(
            WIDTH, HEIGHT, left_in=0.75, right_in=0.3, top_in=canvas.TITLE_HEIGHT, foot_in=1.0
        )
        title = f"What fusing pooling with its all-to-all saves of a step: {found.title}"
        canvas.heading(figure, title, found.source, theme)
        _shades(axes, theme)
        _limits(axes, theme)
        if found.at_rates:
            _rates(axes, found, theme)
        for i, place in enumerate(found.places):
            _point(axes, place, theme, va="center" if i else "bottom")
        _axes(axes)
        for line, text in enumerate(_wrapped(found.verdict(), 142)):
            figure.text(canvas.EDGE / WIDTH, (0.40 - 0.14 * line) / HEIGHT, text,
                        fontsize=canvas.SMALL_PT, color=theme.faint, parse_math=False)  # fmt: skip
        return canvas.save(figure, path)


def _shades(axes: "Axes", theme: Theme) -> None:
    """Savings at each point, a shade for each range."""
    from matplotlib.colors import to_rgb

    ratios, shares = _steps(*RATIOS), _steps(*SHARES)
    values = [[saving(share, ratio) for ratio in ratios] for share in shares]
    page, green = to_rgb(theme.page), to_rgb(canvas.GREEN)
    depths = [0.75 * i / (len(LEVELS) - 2) for i in range(len(LEVELS) - 1)]
    colors = [tuple(p + d * (g - p) for p, g in zip(page, green, strict=True)) for d in depths]
    axes.contourf(ratios, shares, values, levels=LEVELS, colors=colors)


def _limits(axes: "Axes", theme: Theme) -> None:
    """Where steps end, and the line of the paper's saving."""
    ratios = _steps(*RATIOS)
    axes.fill_between(ratios, [1 / (1 + r) for r in ratios], SHARES[1], color=theme.idle,
                      linewidth=0)  # fmt: skip
    axes.plot(ratios, [1 / (2 + 2 * r) for r in ratios], color=theme.faint, linewidth=1,
              linestyle=(0, (4, 3)))  # fmt: skip
    low, high = PAPER_SAVING / (1 - PAPER_SAVING), 1 / PAPER_SAVING - 1  # where e (1 + r) = 1
    line = [r for r in ratios if low <= r <= high]
    axes.plot(line, [share_for(PAPER_SAVING, r) for r in line], color=theme.ink, linewidth=1.6)
    inner = _steps(*ratios_of_training(PAPER_SAVING))
    axes.plot(inner, [share_for(PAPER_SAVING, r) for r in inner], color=theme.ink, linewidth=4)
    small = Look(canvas.SMALL_PT, theme.faint)
    ink = Look(canvas.SMALL_PT, theme.ink, "bold")
    canvas.note(axes, high, PAPER_SAVING, f"{PAPER_SAVING:.0%}, as the paper", ink, shift_pt=4)
    canvas.note(axes, 0.11, 0.32, "training steps end here: as much goes back", small, va="top")
    canvas.note(axes, 9.5, 0.55, "no step: pooling and all-to-all are more than all of it", small,
                ha="right")  # fmt: skip
    for level in LEVELS[1:5]:
        canvas.note(axes, 1.02, level * 1.03, f"saves {level:.0%}", small, va="bottom")


def _rates(axes: "Axes", found: Map, theme: Theme) -> None:
    """One step at other link rates: a line, with what some of them are."""
    places = found.at_rates
    axes.plot([p.ratio for p in places], [p.share for p in places], color=canvas.ORANGE,
              linewidth=1.4)  # fmt: skip
    look = Look(canvas.SMALL_PT, theme.faint)
    for rate, place in zip(RATES, places, strict=True):
        gbit = rate * 8 / 1e9
        here = any(abs(each.ratio / place.ratio - 1) < 0.1 for each in found.places)
        if gbit in (100, 400, 1600) and RATIOS[0] < place.ratio < RATIOS[1] and not here:
            axes.plot([place.ratio], [place.share], marker="|", color=canvas.ORANGE, markersize=7)
            canvas.note(axes, place.ratio, place.share, f"{gbit:.0f} Gb/s", look, shift_pt=-3,
                        ha="right", va="top")  # fmt: skip


def _point(axes: "Axes", place: "Place", theme: Theme, *, va: str) -> None:
    """A step, and what fusing saves of it at most; what lies outside is at the edge."""
    x = min(max(place.ratio, RATIOS[0]), RATIOS[1])
    y = min(max(place.share, SHARES[0]), SHARES[1])
    axes.plot([x], [y], marker="o", color=canvas.GREEN, markeredgecolor=theme.page, markersize=7,
              clip_on=False)  # fmt: skip
    right = x < 0.45 * RATIOS[1]  # there is room
    canvas.note(axes, x, y, f"{place.label}: {place.bound:.1%}",
                Look(canvas.SMALL_PT, theme.ink), shift_pt=6 if right else -6,
                ha="left" if right else "right", va=va)  # fmt: skip


def _axes(axes: "Axes") -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*RATIOS)
    axes.set_ylim(*SHARES)
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axes.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1],
                    ["1%", "2%", "5%", "10%", "20%", "50%", "100%"])  # fmt: skip
    axes.minorticks_off()
    axes.set_xlabel("exposed all-to-all over pooling; slower links are to the right")
    axes.set_ylabel("pooling, share of the step")
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)


def _steps(low: float, high: float) -> list[float]:
    """Evenly spaced on a logarithmic axis, both ends among them."""
    return [low * (high / low) ** (i / (STEPS - 1)) for i in range(STEPS)]


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
