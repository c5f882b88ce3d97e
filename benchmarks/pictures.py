"""Four kinds of picture of rows, each for light pages and for dark ones: bars, dots, curves, and
errors of predictions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.rows import Row
from counterpoint.measure import canvas
from counterpoint.measure.canvas import DARK, LIGHT, SMALL_PT, TEXT_PT, Theme, duration
from counterpoint.measure.shapes import SHAPES

WIDTH_IN = 8.5
KIND_IN = 0.095  # from a marker to the next one below it
FASTER = "speedup over {} (higher is better)"
# what a name begins with -> its hue in all pictures; others take the next of HUES
ROLES = {"counterpoint": canvas.GREEN, "torch": canvas.PURPLE}
HUES = (canvas.BLUE, canvas.ORANGE, canvas.SKY, canvas.VERMILLION)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", ">")
FULL_NAMES = {"70B": "Llama-3-70B", "405B": "Llama-3.1-405B", "qkv": "QKV", "o": "O"}
LAYERS = {(n, k): name.partition(",")[0] for shapes in SHAPES.values()
          for name, (_, n, k) in shapes.items()}  # fmt: skip

Draw = Callable[[Theme], Figure]


class Axis(NamedTuple):
    """How the numbers of curves are shown, and those of dots, which have no y."""

    x_label: str
    y_label: str = ""
    x_text: Callable[[float], str] = "{:g}".format
    y_text: Callable[[float], str] = "{:g}".format
    y_most: float | None = None  # top of the scale; what is above is cut off
    log_y: bool = True
    at_one: bool = False  # a line there


def speedups(over: str) -> Axis:
    """Of dots that are speedups over something."""
    return Axis(FASTER.format(over), x_text="{:g}x".format)


OVER_SERIAL = speedups("serial")


class Point(NamedTuple):
    """One thing that was predicted and measured, in seconds."""

    label: str
    group: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """predicted / measured - 1: above 0 where the model predicts too long."""
        return self.predicted_s / self.measured_s - 1


def layer_name(m: int, n: int, k: int) -> str:
    """Of a published layer at any number of tokens, e.g. "Llama-3-70B QKV, 8192 tokens"."""
    return f"{words(LAYERS[n, k])}, {m} tokens"


def in_both(path: Path, draw: Callable[[Path, Theme], object]) -> Path:
    """Draw for light pages and for dark ones: `path` with -light and -dark at the end of its name.

    Returns:
        The light one.
    """
    paths = [path.with_stem(f"{path.stem}-{theme.name}") for theme in (LIGHT, DARK)]
    for one, theme in zip(paths, (LIGHT, DARK), strict=True):
        draw(one, theme)
    return paths[0]


def shown(name: str, alt: str, folder: str = "../images") -> str:
    """The Markdown of a picture: GitHub and the documentation's site each show one of the two."""
    return "\n".join(
        f"![{alt}]({folder}/{name}-{theme}.svg#gh-{theme}-mode-only)" for theme in ("light", "dark")
    )


def place(rows: Sequence[Row]) -> str:
    """Where and when rows were measured."""
    return f"{rows[0]['ranks']}x {rows[0]['gpu']}, bf16, {max(row['date'] for row in rows)}"


def words(layer: str) -> str:
    """The name of a layer as it is said."""
    return " ".join(FULL_NAMES.get(word, word) for word in layer.split())


def sheet(
    width_in: float, height_in: float, columns: int = 1, rows: int = 1, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure, and its panels row by row."""
    figure = Figure(figsize=(width_in, height_in), dpi=canvas.DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid()
        axes.set_axisbelow(True)
    return figure, panels


def save(draw: Draw, path: Path, title: str, source: str) -> Path:
    """Write what is drawn under its title, and under that where its numbers are from."""

    def write(path: Path, theme: Theme) -> None:
        with canvas.themed(theme):
            figure = draw(theme)
            # room for the heading, as wide as the axes or wider
            figure.suptitle("\n\n", fontsize=10)
            canvas.heading(figure, title, source, theme)
            canvas.save(figure, path)

    return in_both(path, write)


def looks(names: Iterable[str], theme: Theme) -> dict[str, dict[str, Any]]:
    """Colour and marker of each name, equal in all panels; the second of a role is hollow."""
    roles = ROLES | {"serial": theme.serial}
    hues, taken, found = cycle((*HUES, theme.ink)), set[str](), dict[str, dict[str, Any]]()
    for name, marker in zip(dict.fromkeys(names), cycle(MARKERS), strict=False):
        own = (hue for start, hue in roles.items() if name.startswith(start))
        hue = next(own, None) or next(hues)
        found[name] = {"color": hue, "marker": marker}
        if hue in taken:
            found[name] |= {"markerfacecolor": theme.page}
        taken.add(hue)
    return found


def _tint(hue: str) -> tuple[float, ...]:
    """Half of it."""
    return tuple(1 - (1 - part) / 2 for part in to_rgb(hue))


def _legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Below the panels, in as many columns as there is room for."""
    widths_pt = [canvas.text_width_pt(name, TEXT_PT) + 45 for name in handles]

    def needed_pt(columns: int) -> float:
        # matplotlib fills columns from the left, the first ones with what is over
        rows, more = divmod(len(widths_pt), columns)
        left = iter(widths_pt)
        return sum(max(islice(left, rows + (i < more))) for i in range(columns))

    room_pt = figure.get_size_inches()[0] * 72
    columns = next(n for n in range(len(handles), 0, -1) if n == 1 or needed_pt(n) <= room_pt)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower left", frameon=False,
        ncols=columns, fontsize=TEXT_PT,
    )  # fmt: skip


def _handles(panels: Iterable[Axes]) -> dict[str, Artist]:
    return {name: handle for axes in panels
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip


def _cases(axes: Axes, names: Sequence[str], theme: Theme) -> None:
    """A row for each case, every other one on a band, and a line at 1.0x."""
    for i in range(0, len(names), 2):
        axes.axhspan(i - 0.5, i + 0.5, color=theme.idle, linewidth=0, zorder=0)
    axes.axvline(1, color=theme.ink, linewidth=1, zorder=2.5)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(names)), list(names))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)


def bars(
    cases: Mapping[str, Mapping[str, float]], path: Path, *, title: str, source: str, mark: str = ""
) -> Path:
    """Bars of the speedups of a case over the first of its times, which stands beside its name.

    Args:
        cases: label -> name of a bar -> seconds; the first is what the others are compared with.
        path: of the picture.
        title: above it.
        source: machine, dtype and date.
        mark: the name that is no bar, but a line across the bars.
    """
    baseline = next(iter(next(iter(cases.values()))))
    source = f"{source}; in parentheses: {baseline}"
    return save(partial(_bars, cases, baseline, mark), path, title, source)


def _bars(
    cases: Mapping[str, Mapping[str, float]], baseline: str, mark: str, theme: Theme
) -> Figure:
    names = [name for times in cases.values() for name in times if name not in (baseline, mark)]
    styles = looks(names, theme)
    high = 0.8 / len(styles)
    figure, (axes,) = sheet(WIDTH_IN, 1.3 + (0.12 + 0.155 * len(styles)) * len(cases))
    rows = [f"{case} ({duration(times[baseline])})" for case, times in cases.items()]
    _cases(axes, rows, theme)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    most = 1.03 * max(s[baseline] / t for s in cases.values() for t in s.values())
    for i, times in enumerate(cases.values()):
        for j, name in enumerate(n for n in styles if n in times):
            at, speedup = i - 0.4 + (j + 0.5) * high, times[baseline] / times[name]
            look = styles[name]
            fill = _tint(look["color"]) if "markerfacecolor" in look else look["color"]
            axes.barh(at, speedup, high * 0.86, color=fill, zorder=2, label=name)
            inside = speedup > 0.2 * most  # no line crosses the text there
            text = f"{speedup:.2f}x, {duration(times[name])}"
            axes.annotate(text, (0 if inside else speedup, at), (5, 0),
                          textcoords="offset points", va="center_baseline",
                          fontsize=SMALL_PT, color="#111111" if inside else theme.ink,
                          fontweight="bold" if name.startswith("counterpoint") else "normal",
                          zorder=4)  # fmt: skip
        if mark in times:
            axes.plot([times[baseline] / times[mark]] * 2, [i - 0.42, i + 0.42], color=theme.ink,
                      linewidth=1.5, linestyle=(0, (2, 1)), zorder=3, label=mark)  # fmt: skip
    axes.set_xlim(0, most)
    axes.set_xlabel(FASTER.format(baseline), loc="right")
    handles = _handles([axes])
    _legend(figure, {name: handles[name] for name in (*styles, mark) if name in handles})
    return figure


def dots(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path, *, title: str, source: str,
    marks: Mapping[str, Mapping[str, float]] | None = None, mark: str = "the longer part alone",
    axis: Axis = OVER_SERIAL,
) -> Path:  # fmt: skip
    """A dot for each kind at each case, below one another, in a panel for each machine.

    Args:
        panels: title -> label of a case -> kind -> its number.
        path: of the picture.
        title: above it.
        source: machine, dtype and date.
        marks: likewise, without kinds: lines across the dots.
        mark: what these are.
        axis: what the numbers are.
    """
    return save(partial(_dots, panels, marks or {}, mark, axis), path, title, source)


def _dots(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    marks: Mapping[str, Mapping[str, float]], mark: str, axis: Axis, theme: Theme,
) -> Figure:  # fmt: skip
    rows = max(len(cases) for cases in panels.values())
    kinds = looks((k for cases in panels.values() for each in cases.values() for k in each), theme)
    row_in = 0.09 + KIND_IN * max(2, len(kinds))
    figure, found = sheet(
        WIDTH_IN, 1.5 + row_in * rows, len(panels), sharey=True, sharex=True
    )  # fmt: skip
    for axes, (name, cases) in zip(found, panels.items(), strict=True):
        _cases(axes, list(cases), theme)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: axis.x_text(x)))
        axes.set_title(name, fontsize=canvas.HEAD_PT, fontweight="bold", loc="left")
        for j, (kind, look) in enumerate(kinds.items()):
            # none hides another of its row
            shift = (j - (len(kinds) - 1) / 2) * KIND_IN / row_in
            points = [(each[kind], i + shift) for i, each in enumerate(cases.values())
                      if kind in each]  # fmt: skip
            if points:
                axes.plot(*zip(*points, strict=True), linestyle="", markersize=5.5, label=kind,
                          zorder=3, **look)  # fmt: skip
        for i, case in enumerate(cases):
            if at := marks.get(name, {}).get(case):
                axes.plot([at] * 2, [i - 0.38, i + 0.38], color=theme.ink, linewidth=1.5,
                          linestyle=(0, (2, 1)), label=mark, zorder=2)  # fmt: skip
    for axes in found[1:]:
        axes.tick_params(axis="y", labelleft=False)
    found[0].set_xlabel(axis.x_label, loc="left")
    every = [s for cases in panels.values() for each in cases.values() for s in each.values()]
    every += [s for cases in marks.values() for s in cases.values()]
    found[0].set_xlim(0.9 * min(every) if min(every) > 0.5 else 0, 1.03 * max(every))
    _legend(figure, _handles(found))
    return figure


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path, axis: Axis,
    *, title: str, source: str, bands: Mapping[str, Sequence[tuple[float, float, float]]] = {},
) -> Path:  # fmt: skip
    """Curves over a number that doubles, in small multiples of one scale.

    Args:
        panels: title -> name of a curve -> points; a name has one colour in all. A name that ends
            in ", priority" is a dashed curve in the colour of the name without it.
        path: of the picture.
        axis: what is shown, and how.
        title: above it.
        source: machine, dtype and date.
        bands: name of a curve -> points with the lowest and the highest that may be, all panels'.
    """
    return save(partial(_curves, panels, axis, bands), path, title, source)


def _curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], axis: Axis,
    bands: Mapping[str, Sequence[tuple[float, float, float]]], theme: Theme,
) -> Figure:  # fmt: skip
    columns = 3 if len(panels) == 3 else min(2, len(panels))
    rows = ceil(len(panels) / columns)
    figure, found = sheet(WIDTH_IN, 1.3 + 2.3 * rows, columns, rows, sharey=True)
    styles = looks(
        (name.removesuffix(", priority") for each in panels.values() for name in each), theme
    )
    for axes in found[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, each) in zip(found, panels.items(), strict=False):
        for curve, points in each.items():
            style = styles[curve.removesuffix(", priority")]
            dashed = "--" if curve not in styles else "-"
            axes.plot(*zip(*sorted(points), strict=True), label=curve, markersize=4.5,
                      linewidth=1.4, linestyle=dashed, **style)  # fmt: skip
            if curve in bands:
                axes.fill_between(*zip(*sorted(bands[curve]), strict=True), alpha=0.2,
                                  color=style["color"], linewidth=0)  # fmt: skip
        axes.set_xscale("log", base=2)
        xs = sorted({x for points in each.values() for x, _ in points})
        axes.set_xticks(xs, [axis.x_text(x) for x in xs])
        axes.xaxis.set_minor_formatter(NullFormatter())
        if axis.log_y:
            axes.set_yscale("log", base=2)
        if axis.at_one:
            axes.axhline(1, color=theme.ink, linewidth=1, zorder=1.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: axis.y_text(y)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(name, fontsize=canvas.HEAD_PT, fontweight="bold", loc="left")
    found[columns * (rows - 1)].set_xlabel(axis.x_label, loc="left")
    figure.supylabel(axis.y_label, fontsize=TEXT_PT)
    if axis.y_most:
        found[0].set_ylim(top=axis.y_most)
    _legend(figure, _handles(found[: len(panels)]))
    return figure


def _round_time(seconds: float) -> str:
    scale, unit = canvas.time_unit(seconds)
    return f"{seconds * scale:g} {unit}"


def errors(panels: Mapping[str, Sequence[Point]], path: Path, *, title: str, source: str) -> Path:
    """How far predictions are off, over the measured time: a band of 10 %, lines at 25 %, the worst
    named.

    Args:
        panels: title -> points, one or more; groups have one look in all.
        path: of the picture.
        title: above it.
        source: what predicted, what measured, and when.
    """
    return save(partial(_errors, panels), path, title, source)


def _errors(panels: Mapping[str, Sequence[Point]], theme: Theme) -> Figure:
    figure, found = sheet(WIDTH_IN, 1.4 + 2.6 * len(panels), 1, len(panels), sharex=True)
    styles = looks(sorted({p.group for points in panels.values() for p in points}), theme)
    most = 1.25 * max(0.3, *(abs(p.error) for points in panels.values() for p in points))
    for axes, (name, points) in zip(found, panels.items(), strict=True):
        off = [abs(p.error) for p in points]
        within = ", ".join(f"{sum(e <= b for e in off)} within {b:.0%}" for b in (0.1, 0.25))
        text = f"{name}: {len(points)} predictions, median error {median(off):.1%}, {within}"
        axes.set_title(text, fontsize=canvas.HEAD_PT, fontweight="bold", loc="left")
        axes.axhspan(-0.1, 0.1, color=theme.idle, linewidth=0, zorder=1)
        for error, width_pt in ((0.0, 1.0), (-0.25, 0.6), (0.25, 0.6)):
            axes.axhline(error, color=theme.ink, linewidth=width_pt, zorder=2,
                         linestyle="--" if error else "-")  # fmt: skip
        axes.grid(axis="y", visible=False)
        for group, look in styles.items():
            own = [p for p in points if p.group == group]
            if own:
                axes.plot([p.measured_s for p in own], [p.error for p in own], linestyle="",
                          markersize=4, markeredgewidth=0,
                          label=group, zorder=4, **look)  # fmt: skip
        worst = max(points, key=lambda p: abs(p.error))
        late = worst.measured_s > median(p.measured_s for p in points)
        axes.annotate(f"{worst.label}: {worst.error:+.0%}", (worst.measured_s, worst.error),
                      (-6 if late else 6, 0), textcoords="offset points", fontsize=SMALL_PT,
                      ha="right" if late else "left", va="center_baseline",
                      parse_math=False)  # fmt: skip
        axes.set(xscale="log", ylim=(-most, most))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _round_time(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+.0%}" if y else "0"))
    found[-1].set_xlabel("measured time")
    figure.supylabel("predicted / measured - 1", fontsize=TEXT_PT)
    _legend(figure, _handles(found))
    return figure
