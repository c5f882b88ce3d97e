"""How far each arm of an experiment is above the ideal pipeline: a group of bars for each pair.

A pair is a GEMM and a collective in a loop; an arm is one way to run it. A bar is the ideal
pipeline's time in a calm colour, and what the arm takes beyond it in a strong one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import InputError
from counterpoint.measure import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "plain overlap"
# Okabe-Ito: a light tint of its sky blue, vermilion, and blue for the text about the ideal
IDEAL, ABOVE, IDEAL_INK = "#BFE0F4", "#D55E00", "#0072B2"
NUM_COLUMNS = 2

# inches
PANEL_WIDTH, PANEL_GAP = 7.2, 0.35
TOP = canvas.TITLE_HEIGHT + 0.45  # of the sheet, above the first pair
HEAD, ROW, BAR = 0.46, 0.22, 0.15
APART = 0.14
# of the cells of an arm: size of the text, and most inches that it may take
CELLS = ((8.5, 1.5), (8.0, inf), (8.0, inf), (7.5, 2.4))


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a pair, in seconds.

    Args:
        name: "plain overlap" for the arm that the others are compared with.
        seconds: What it took.
        low_s: Lower end of its spread.
        high_s: Upper end of its spread.
        note: Stands behind the numbers: which controls, or energy and clock.

    Raises:
        InputError: A time is not a positive number, or `seconds` is not within low to high.
    """

    name: str
    seconds: float
    low_s: float
    high_s: float
    note: str = ""

    def __post_init__(self) -> None:
        for field in ("seconds", "low_s", "high_s"):
            canvas.check_positive("Arm", field, getattr(self, field), self.name)
        if not self.low_s <= self.seconds <= self.high_s:
            want = f"within low_s = {self.low_s} and high_s = {self.high_s} ({self.name!r})"
            raise InputError("Arm", "seconds", want=want, got=self.seconds)


@dataclass(frozen=True, slots=True)
class Pair:
    """A GEMM and a collective, run by several arms.

    Args:
        label: Name of the pair.
        ideal_s: What the ideal pipeline of the two takes, in seconds.
        arms: First at the top; one of them is called "plain overlap".

    Raises:
        InputError: `ideal_s` is not a positive number, or "plain overlap" is not one arm.
    """

    label: str
    ideal_s: float
    arms: Sequence[Arm]

    def __post_init__(self) -> None:
        canvas.check_positive("Pair", "ideal_s", self.ideal_s, self.label)
        names = [arm.name for arm in self.arms]
        if names.count(BASELINE) != 1:
            want = f"arms of which one is called {BASELINE!r} ({self.label!r})"
            raise InputError("Pair", "arms", want=want, got=names or "none")


def draw_arms(
    pairs: Sequence[Pair], path: str | Path, *, title: str = "", source: str = ""
) -> Path:
    """Draw a bar per arm for each pair, with its time and how much less it is than plain overlap.

    Each pair has a time axis of its own, from 0. The fastest arm stands out in bold.

    Args:
        pairs: Two side by side, then further ones below.
        path: Ends in .png, .svg or .pdf.
        title: Heading of the picture.
        source: Machine, dtype, date, and what low and high are; stands under the title.

    Returns:
        The path written.

    Raises:
        InputError: There is no pair, or the suffix is none of these.
    """
    path = canvas.checked("draw_arms", path)
    if not pairs:
        raise InputError("draw_arms", "pairs", want="at least one pair", got="none")

    rows = [pairs[start : start + NUM_COLUMNS] for start in range(0, len(pairs), NUM_COLUMNS)]
    heights_in = [HEAD + ROW * max(len(pair.arms) for pair in row) + PANEL_GAP for row in rows]
    step_in = PANEL_WIDTH + PANEL_GAP
    width_in = 2 * canvas.EDGE + len(rows[0]) * step_in - PANEL_GAP
    figure = canvas.sheet(width_in, TOP + sum(heights_in))
    columns = zip(*(_cells(pair, arm) for pair in pairs for arm in pair.arms), strict=True)
    # as wide as its widest text, in all pairs; the bars get the rest
    widths_in = [
        min(most_in, canvas.widest_in(column, size_pt)) + APART
        for column, (size_pt, most_in) in zip(columns, CELLS, strict=True)
    ]
    for i, row in enumerate(rows):
        for j, pair in enumerate(row):
            axes = canvas.panel(
                figure, left_in=canvas.EDGE + j * step_in, top_in=TOP + sum(heights_in[:i]),
                width_in=PANEL_WIDTH, height_in=heights_in[i],
            )  # fmt: skip
            axes.set(xlim=(0, PANEL_WIDTH), ylim=(heights_in[i], 0))
            axes.axis("off")
            _draw_pair(axes, pair, widths_in)
    canvas.heading(figure, title, source)
    _draw_looks(figure)
    return canvas.save(figure, path)


def _cells(pair: Pair, arm: Arm) -> tuple[str, str, str, str]:
    """Return the texts of one arm: name, time, change and note."""
    baseline_s = next(other.seconds for other in pair.arms if other.name == BASELINE)
    change = "" if arm.name == BASELINE else f"{arm.seconds / baseline_s - 1:+z.1%}"
    return arm.name, f"{canvas.digits(arm.seconds * 1e3)} ms", change, arm.note


def _draw_pair(axes: "Axes", pair: Pair, widths_in: Sequence[float]) -> None:
    """Draw one pair on axes in inches, from the top left: names, bars, times, changes, notes."""
    names_end_in, *others_in = widths_in
    bars_end_in = PANEL_WIDTH - sum(others_in)
    times_end_in, changes_end_in, _ = (bars_end_in + width_in for width_in in accumulate(others_in))
    places = ((names_end_in - 0.08, "right"), (times_end_in, "right"), (changes_end_in, "right"),
              (changes_end_in + APART, "left"))  # fmt: skip
    longest_s = max(pair.ideal_s, *(arm.high_s for arm in pair.arms))
    in_per_s = (bars_end_in - names_end_in) / longest_s
    fastest = min(pair.arms, key=lambda arm: arm.seconds)
    for row, arm in enumerate(pair.arms):
        at_in = HEAD + (row + 0.5) * ROW
        _draw_bar(axes, arm, pair.ideal_s, at_in, names_end_in, in_per_s)
        for text, (x_in, ha), (size_pt, most_in) in zip(
            _cells(pair, arm), places, CELLS, strict=True
        ):
            is_note = ha == "left"
            canvas.note(
                axes, x_in, at_in, text, ha=ha, va="center_baseline",
                fontsize=canvas.fitting_pt(text, size_pt, most_in),
                color=canvas.FAINT_INK if is_note else canvas.INK,
                fontweight="bold" if arm is fastest and not is_note else "normal",
            )  # fmt: skip

    ideal_in = names_end_in + pair.ideal_s * in_per_s
    ends_in = (HEAD - 0.02, HEAD + len(pair.arms) * ROW)
    axes.plot([names_end_in] * 2, ends_in, color=canvas.INK, linewidth=0.8, zorder=4)
    axes.plot([ideal_in] * 2, ends_in, color=IDEAL_INK, linewidth=1.2, linestyle=":", zorder=4)
    text = f"ideal {canvas.digits(pair.ideal_s * 1e3)} ms"
    # to the left of its line, unless it would leave the pair
    ha = "right" if ideal_in > canvas.widest_in([text], 8) else "left"
    canvas.note(axes, ideal_in, HEAD - 0.1, text, ha=ha, color=IDEAL_INK)
    canvas.note(
        axes, changes_end_in, HEAD - 0.1, f"vs {BASELINE}", ha="right", fontsize=7,
        color=canvas.FAINT_INK,
    )  # fmt: skip
    size_pt = canvas.fitting_pt(pair.label, 10, PANEL_WIDTH)
    canvas.note(axes, 0, 0.1, pair.label, fontsize=size_pt, fontweight="bold")


def _draw_bar(
    axes: "Axes", arm: Arm, ideal_s: float, at_in: float, left_in: float, in_per_s: float
) -> None:
    """Draw one stacked bar and its whisker."""
    calm_s = min(arm.seconds, ideal_s)
    axes.barh(at_in, calm_s * in_per_s, BAR, left=left_in, color=IDEAL, zorder=2)
    if arm.seconds > ideal_s:
        above_in = (arm.seconds - ideal_s) * in_per_s
        axes.barh(at_in, above_in, BAR, left=left_in + calm_s * in_per_s, color=ABOVE, zorder=2)
    ends_in = [left_in + end_s * in_per_s for end_s in (arm.low_s, arm.high_s)]
    axes.plot(
        ends_in, [at_in] * 2, color=canvas.INK, linewidth=0.9, marker="|", markersize=4, zorder=3
    )


def _draw_looks(figure: "Figure") -> None:
    """Explain the two colours and the whisker, in one line above the pairs."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    looks = (
        Patch(color=IDEAL, label="ideal pipeline"),
        Patch(color=ABOVE, label="above ideal"),
        Line2D([], [], color=canvas.INK, linewidth=0.9, marker="|", markersize=4,
               label="low to high"),
    )  # fmt: skip
    bottom_in = float(figure.get_size_inches()[1]) - canvas.TITLE_HEIGHT - 0.16
    canvas.legend(figure, looks, left_in=canvas.EDGE, bottom_in=bottom_in)
