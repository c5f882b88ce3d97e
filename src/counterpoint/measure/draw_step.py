"""A predicted step as a picture: its pipeline stages over time, and where the time goes.

Above, a row for each stage, cool colours for what computes, and the bubble between; below, on the
same time axis, a bar for each prediction, cut into parts, and all of its numbers.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.canvas import DARK, HEAD_PT, LIGHT, SMALL_PT, TEXT_PT, Look, Theme
from counterpoint.measure.draw import ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from counterpoint.scale.prediction import Prediction

NAVY, SLATE, PALE, GREY = "#1F4E79", "#5A6B7B", "#A6D5F2", "#9A9A9A"
EVENTS = {
    "forward": canvas.BLUE, "backward": canvas.SKY, "weight gradients": NAVY,
    "data parallel": canvas.ORANGE, "optimizer": GREY,
}  # fmt: skip
PARTS = {
    "embedding": "#3D5A80", "table update": "#7FB3A6", "matmuls": canvas.BLUE,
    "experts": "#6C8EBF", "attention": NAVY, "memory": PALE, "loss": SLATE,
    "tensor parallel": canvas.VERMILLION, "all-to-all": "#9A3B00", "context parallel": "#F2C879",
    "sends": canvas.YELLOW, "data parallel": canvas.ORANGE, "optimizer": GREY,
    "small kernels": "#C9D3DC", "stragglers": "#7A6A53", "imbalance": "#B58B5B",
    "FSDP copies": "#D9C2A3", "routing": "#7FB3A6", "host": "#3D5A80",
}  # fmt: skip
# of parts that have no colour of their own
OTHERS = ("#B58B5B", "#D9C2A3", "#7A6A53")
MODES = {
    "none": "none: serial", "ours": "ours: this library's plans",
    "ideal": "ideal: the longer side alone",
}  # fmt: skip
MOST_STAGES, MOST_BATCHES = 40, 64  # with more, boxes have no numbers
MOST_SHAPES = 4096  # with more, rows are images
COLUMNS = 3000  # of an image: two for each point of the page
MOST_BARS = 8
AFTER = ("data parallel", "optimizer")
NUMBER_PT, SHARE_PT = 6.5, 38

# inches
WIDTH, RIGHT, ROWS_HEIGHT, ROW_HEIGHT = 12.0, 1.15, 4.2, 0.36
HEAD, BAR_HEIGHT, AXIS_HEIGHT, LINE_HEIGHT, NAME_WIDTH = 0.34, 0.30, 0.62, 0.185, 1.5
MOST_LEFT = 3.4


class _Sheet(NamedTuple):
    """Axes whose y is in inches from the top; both halves are drawn on them."""

    axes: "Axes"
    theme: Theme
    scale: float  # units of the time axis per second
    right: float  # end of the time axis, in its unit
    left_in: float  # from the picture's edge to the axes

    @property
    def unit_pt(self) -> float:
        """Points of the page for one unit of the time axis."""
        return (WIDTH - self.left_in - RIGHT) * 72 / self.right


class _Row(NamedTuple):
    """Where a stage is drawn."""

    stage: int
    top_in: float
    bottom_in: float

    @property
    def middle_in(self) -> float:
        return (self.top_in + self.bottom_in) / 2


_Shades = dict[tuple[str, int], str]  # of a kind of event, of a part of the model


def draw_step(
    shown: "Prediction", beside: "Sequence[Prediction]", path: str | Path, *, dark: bool = False
) -> Path:
    """Draw the stages of one prediction, and a bar of parts for it and each of the others.

    Args:
        shown: whose stages are drawn.
        beside: others that have a bar; the slowest bar is the highest.
        path: ends in .png, .svg or .pdf.
        dark: draw for a dark page.

    Returns:
        The path written.

    Raises:
        InputError: the suffix is none of these, or there are more than 8 predictions.
    """
    path = canvas.checked("Prediction.save", path)
    if len(beside) >= MOST_BARS:
        want = f"at most {MOST_BARS - 1} predictions"
        raise InputError("Prediction.save", "beside", want=want, got=len(beside))
    bars = sorted((shown, *beside), key=lambda each: -each.seconds)
    with canvas.themed(DARK if dark else LIGHT) as theme:
        return canvas.save(_draw(shown, bars, theme), path)


def _draw(shown: "Prediction", bars: "list[Prediction]", theme: Theme) -> "Figure":
    """Draw all but the file."""
    names, num_stages = _names(bars), shown.layout.pp
    parts = dict.fromkeys(name for each in bars for name, s in each.parts.items() if s > 0)
    fills = _fills(parts, theme)
    heads = max(name.count(", ") for name in names) + 1
    foot_in = AXIS_HEIGHT + LINE_HEIGHT * (ceil(len(fills) / _blocks(bars)) + heads + 0.5)
    around_in = 2 * HEAD + BAR_HEIGHT * len(bars) + 0.06
    most_in = canvas.SCREEN_IN - canvas.TITLE_HEIGHT - around_in - foot_in
    row_in = min(ROW_HEIGHT, min(ROWS_HEIGHT, most_in) / num_stages)
    body_in = around_in + row_in * num_stages

    widest_pt = max(canvas.text_width_pt(name, TEXT_PT) for name in (*names, "stage 000"))
    left_in = min(canvas.EDGE + widest_pt / 72 + 0.15, MOST_LEFT)
    figure, axes = canvas.new_figure(
        WIDTH, canvas.TITLE_HEIGHT + body_in + foot_in, left_in=left_in, right_in=RIGHT,
        top_in=canvas.TITLE_HEIGHT, foot_in=foot_in,
    )  # fmt: skip
    scale, unit = canvas.time_unit(bars[0].seconds)
    sheet = _Sheet(axes, theme, scale, bars[0].seconds * scale, left_in)
    axes.set_xlim(0, sheet.right)
    axes.set_ylim(body_in, 0)
    canvas.time_axis(axes, unit)
    top_in = HEAD + row_in * num_stages + HEAD
    ends_in = _head(sheet, f"pipeline stages, overlap {shown.overlap}", 0.0)
    modes = ", ".join(MODES[mode] for mode in MODES if mode in {each.overlap for each in bars})
    beside = f"communication: what is exposed; {modes}"
    beside += "; 1.5x: speedup over the slowest" * (len(bars) > 1)
    _head(sheet, "parts of the busiest stage", top_in - HEAD, beside)
    _legend(figure, sheet, shown, ends_in)
    _draw_stages(sheet, shown, HEAD, row_in)
    for name, each in zip(names, bars, strict=True):
        _draw_bar(sheet, name, each, bars[0], fills, top_in)
        top_in += BAR_HEIGHT
    _draw_table(sheet, names, bars, fills, body_in + AXIS_HEIGHT)
    source = f"predicted, not measured: {canvas.duration(shown.seconds)}"
    low, high = map(canvas.duration, shown.band_s)
    why = "the widest band" if shown.widest else "by the residuals of published steps"
    source += f", {low} to {high}, {why}"
    source += "; one rank of each stage stands for all"
    canvas.heading(figure, shown.title, source, theme)
    return figure


def _names(bars: "list[Prediction]") -> list[str]:
    """What tells predictions apart: how overlap was priced, and other facts where they differ."""
    facts = [
        (bar.overlap, bar.machine, bar.model.name,
         *(f"{each.name} {getattr(bar.layout, each.name)}" for each in fields(bar.layout)))
        for bar in bars
    ]  # fmt: skip
    columns = enumerate(zip(*facts, strict=True))
    differ = [i for i, column in columns if len(set(column)) > 1] or [0]
    return [", ".join(own[i] for i in differ) for own in facts]


def _fills(parts: "dict[str, None]", theme: Theme) -> dict[str, str]:
    """The colour of each part; the bubble is as pale as idle stages are."""
    others = iter(OTHERS * len(parts))
    known = PARTS | {"bubble": theme.idle}
    return {name: known.get(name) or next(others) for name in parts}


def _head(sheet: _Sheet, text: str, top_in: float, beside: str = "") -> float:
    """Write what comes below, on the page, where no grid lines are; return where `text` ends."""
    from matplotlib.patches import Rectangle

    page = Rectangle((0, top_in), sheet.right, HEAD, color=sheet.theme.page, linewidth=0, zorder=1)
    sheet.axes.add_patch(page)
    look = Look(HEAD_PT, weight="bold")
    shift_pt = (canvas.EDGE - sheet.left_in) * 72
    canvas.note(sheet.axes, 0, top_in + HEAD / 2, text, look, shift_pt=shift_pt)
    wide_pt = canvas.text_width_pt(text, HEAD_PT) * 1.15 + 20  # its letters are bold
    ends_in = canvas.EDGE + wide_pt / 72
    size_pt = canvas.fitting_pt(beside, SMALL_PT, WIDTH - canvas.EDGE - ends_in)
    look = Look(size_pt, sheet.theme.faint)
    canvas.note(sheet.axes, 0, top_in + HEAD / 2, beside, look, shift_pt=shift_pt + wide_pt)
    return ends_in


def _shades(parts: int, theme: Theme) -> _Shades:
    """Of all events; later parts of the model are lighter."""
    from matplotlib.colors import to_hex, to_rgb

    def mixed(hue: str, share: float, other: float) -> str:
        red, green, blue = (channel * (1 - share) + other * share for channel in to_rgb(hue))
        return to_hex((red, green, blue))

    found = {(kind, part): hue for kind, hue in EVENTS.items() for part in range(parts)}
    for part in range(parts if parts > 1 else 0):
        later = part / (parts - 1)
        # from dark to the hue, and from the hue to light: no forward looks like a backward
        darkest = 0.55 if theme is LIGHT else 0.35
        found["forward", part] = mixed(EVENTS["forward"], darkest * (1 - later), 0.0)
        found["backward", part] = mixed(EVENTS["backward"], 0.6 * later, 1.0)
    return found


def _draw_stages(sheet: _Sheet, shown: "Prediction", top_in: float, row_in: float) -> None:
    """Draw a row for each stage, on what is its bubble where nothing is drawn."""
    from matplotlib.patches import Rectangle

    layout = shown.layout
    gap_in = 0.02 if row_in > 0.1 else 0.0
    tops_in = [top_in + i * row_in for i in range(layout.pp)]
    rows = [_Row(i, top + gap_in, top + row_in - gap_in) for i, top in enumerate(tops_in)]
    shades = _shades(layout.virtual_stages, sheet.theme)
    number_pt = _number_pt(sheet, shown)
    many = sum(map(len, shown.stages.pipeline.starts_s)) > MOST_SHAPES
    for row in rows:
        size = shown.seconds * sheet.scale, row.bottom_in - row.top_in
        idle = Rectangle((0, row.top_in), *size, color=sheet.theme.idle, linewidth=0, zorder=1.5)
        sheet.axes.add_patch(idle)
        if many:
            _draw_image(sheet, shown, row, shades)
        else:
            _draw_boxes(sheet, shown, row, shades, number_pt)
        if row.stage % ceil(0.16 / row_in) == 0:
            text = f"stage {row.stage}"
            canvas.note(sheet.axes, 0, row.middle_in, text, Look(), shift_pt=-6, ha="right")
    sheet.axes.set_xlim(0, sheet.right)  # an image sets its own


def _number_pt(sheet: _Sheet, shown: "Prediction") -> float:
    """Room that the number of a micro-batch takes, of any one; infinite where there are none."""
    layout, stages = shown.layout, shown.stages.pipeline.stages
    number_pt = canvas.text_width_pt(str(layout.micro_batches - 1), NUMBER_PT) + 2
    longest_s = max(max(*each.forward_s, *each.backward_s, *each.weights_s) for each in stages)
    few = layout.pp <= MOST_STAGES and layout.micro_batches <= MOST_BATCHES
    return number_pt if few and number_pt < longest_s * sheet.scale * sheet.unit_pt else inf


def _inside(sheet: _Sheet, x: float, y: float, text: str, size_pt: float, fill: str) -> None:
    """Write in the middle of a box."""
    sheet.axes.text(x, y, text, ha="center", va="center_baseline", fontsize=size_pt,
                    color=ink_on(fill), zorder=5, parse_math=False)  # fmt: skip


def _draw_boxes(
    sheet: _Sheet, shown: "Prediction", row: _Row, shades: _Shades, number_pt: float
) -> None:
    """Draw the boxes of a row at once; the number of a micro-batch where a box has room."""
    from matplotlib.collections import PolyCollection

    corners: list[tuple[tuple[float, float], ...]] = []
    colors: list[str] = []
    edges: list[float] = []
    for event, start_s, end_s in shown.stages.events(row.stage):
        left, right = start_s * sheet.scale, end_s * sheet.scale
        low, high, color = row.top_in, row.bottom_in, shades[event.kind, event.part]
        corners.append(((left, low), (right, low), (right, high), (left, high)))
        colors.append(color)
        room_pt = (right - left) * sheet.unit_pt
        edges.append(0.5 if room_pt > 3 else 0.0)  # an edge would cover a short one
        if number_pt < room_pt and event.kind not in AFTER:
            _inside(sheet, (left + right) / 2, row.middle_in, str(event.batch), NUMBER_PT, color)
    boxes = PolyCollection(corners, facecolors=colors, edgecolors=sheet.theme.page,
                           linewidths=edges, zorder=2)  # fmt: skip
    sheet.axes.add_collection(boxes, autolim=False)


def _draw_image(sheet: _Sheet, shown: "Prediction", row: _Row, shades: _Shades) -> None:
    """Draw a row of more boxes than the page has points: a column has the mean of its colours."""
    import numpy as np
    from matplotlib.colors import to_rgb

    times: dict[tuple[str, int], list[float]] = {}
    for event, start_s, end_s in shown.stages.events(row.stage):
        times.setdefault((event.kind, event.part), []).extend((start_s, end_s))
    edges_s = np.linspace(0, shown.seconds, COLUMNS + 1)
    idle = np.array(to_rgb(sheet.theme.idle))
    image = np.tile(idle, (1, COLUMNS, 1))
    for key, bounds_s in times.items():
        # seconds of it up to each of its starts and ends
        done_s = np.cumsum(np.diff(bounds_s, prepend=0.0) * (np.arange(len(bounds_s)) % 2))
        share = np.diff(np.interp(edges_s, bounds_s, done_s)) / np.diff(edges_s)
        image += share[:, None] * (np.array(to_rgb(shades[key])) - idle)
    place = (0, shown.seconds * sheet.scale, row.bottom_in, row.top_in)
    sheet.axes.imshow(image.clip(0, 1), aspect="auto", extent=place, zorder=2)


def _legend(figure: "Figure", sheet: _Sheet, shown: "Prediction", left_in: float) -> None:
    """Explain the colours of the boxes, beside the words above them."""
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(event.kind for event, _, _ in shown.stages.events(0))
    shades = _shades(shown.layout.virtual_stages, sheet.theme)
    looks = [Patch(color=shades[kind, 0], label=kind) for kind in kinds]
    if shown.layout.pp > 1:
        looks.append(Patch(facecolor=sheet.theme.idle, edgecolor=sheet.theme.faint, label="bubble"))
    notes = ["lighter: later parts of the model"] * (shown.layout.virtual_stages > 1)
    notes += ["numbers: micro-batches"] * (_number_pt(sheet, shown) < inf)
    if notes:
        looks.append(Patch(alpha=0, label="; ".join(notes)))
    height_in = figure.get_size_inches()[1]
    canvas.legend(figure, looks, left_in=left_in,
                  bottom_in=height_in - canvas.TITLE_HEIGHT - HEAD + 0.1)  # fmt: skip


def _draw_bar(
    sheet: _Sheet, name: str, each: "Prediction", first: "Prediction", fills: dict[str, str],
    top_in: float,
) -> None:  # fmt: skip
    """Draw the parts of a prediction one behind the other, with their names where they fit."""
    theme, at = sheet.theme, 0.0
    middle_in = top_in + BAR_HEIGHT / 2
    look = Look(canvas.fitting_pt(name, TEXT_PT, sheet.left_in - canvas.EDGE))
    canvas.note(sheet.axes, 0, middle_in, name, look, shift_pt=-6, ha="right")
    for part, fill in fills.items():
        wide = each.parts.get(part, 0.0) * sheet.scale
        if wide <= 0:
            continue
        place = (top_in + 0.03, BAR_HEIGHT - 0.06)
        edge_pt = 0.5 if wide * sheet.unit_pt > 3 else 0.0
        sheet.axes.broken_barh([(at, wide)], place, facecolor=fill, edgecolor=theme.page,
                               linewidth=edge_pt, zorder=3)  # fmt: skip
        share = f"{each.parts[part] / each.seconds:.0%}"
        for text in (f"{part} {share}", part, share):
            if canvas.text_width_pt(text, SMALL_PT) <= wide * sheet.unit_pt - 4:
                _inside(sheet, at + wide / 2, middle_in, text, SMALL_PT, fill)
                break
        at += wide
    text = canvas.duration(each.seconds)
    if each is not first:
        text += f", {first.seconds / each.seconds:.2f}x"
    canvas.note(sheet.axes, at, middle_in, text, Look(weight="bold"), shift_pt=5)


def _draw_table(
    sheet: _Sheet, names: list[str], bars: "list[Prediction]", fills: dict[str, str],
    top_in: float,
) -> None:  # fmt: skip
    """Write seconds and shares of every part below the time axis."""
    from matplotlib.patches import Rectangle

    axes, scale, blocks = sheet.axes, sheet.scale, _blocks(bars)
    unit = canvas.time_unit(bars[0].seconds)[1]
    lines, heads = ceil(len(fills) / blocks), max(name.count(", ") for name in names) + 1
    block_in = (WIDTH - 2 * canvas.EDGE) / blocks
    column_in = (block_in - NAME_WIDTH) / max(len(bars), 3)
    edge_in = canvas.EDGE - sheet.left_in  # of the page, from the axes
    for i, (part, fill) in enumerate(fills.items()):
        block, line = divmod(i, lines)
        from_in, middle_in = edge_in + block * block_in, top_in + (line + heads + 0.5) * LINE_HEIGHT
        box = (from_in * 72 / sheet.unit_pt, middle_in - 0.055), 0.13 * 72 / sheet.unit_pt, 0.11
        axes.add_patch(Rectangle(*box, facecolor=fill, edgecolor=sheet.theme.faint,
                                 linewidth=0.3, clip_on=False))  # fmt: skip
        canvas.note(axes, 0, middle_in, part, Look(), shift_pt=(from_in + 0.2) * 72)
        for column, (name, each) in enumerate(zip(names, bars, strict=True), 1):
            right_pt = (from_in + NAME_WIDTH + column * column_in) * 72 - 24
            for i, word in enumerate([] if line else name.split(", ")[::-1]):
                size_pt = canvas.fitting_pt(word, TEXT_PT, column_in - 0.1)
                look = Look(size_pt, weight="bold")
                head_in = top_in + (heads - i - 0.5) * LINE_HEIGHT
                canvas.note(axes, 0, head_in, word, look, shift_pt=right_pt, ha="right")
            seconds = each.parts.get(part, 0.0)
            texts = f"{seconds * scale:.3f} {unit}", f"{seconds / each.seconds:.1%}"
            for text, shift_pt in zip(texts, (right_pt - SHARE_PT, right_pt), strict=True):
                canvas.note(axes, 0, middle_in, text, Look(), shift_pt=shift_pt, ha="right")


def _blocks(bars: "list[Prediction]") -> int:
    """How many lines of the table stand beside each other."""
    return 2 if len(bars) <= 3 else 1
