"""Four kinds of picture of rows: bars, dots, curves, and predicted against measured."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

# Okabe and Ito's palette, without the yellow that white paper swallows
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", ">")
GREY, INK, FAINT = "#B8B8B8", "#222222", "#666666"


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


def sheet(
    width_in: float, height_in: float, columns: int = 1, rows: int = 1, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure, and its panels row by row."""
    figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=FAINT)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def save(figure: Figure, path: Path, title: str, source: str) -> Path:
    """Write a figure under its title, and under that where its numbers are from."""
    figure.suptitle(f"{title}\n", fontsize=12, fontweight="bold", x=0.01, ha="left")
    width_in, height_in = figure.get_size_inches()
    size_pt = min(7.5, 140 * width_in / max(len(source), 1))  # what fits beside the edges
    figure.text(0.01, 1 - 0.42 / height_in, source, fontsize=size_pt, color=FAINT, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "counterpoint"}):
        figure.savefig(path)
    return path


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each name, equal in all panels."""
    return {
        name: {"color": HUES[i % len(HUES)], "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(dict.fromkeys(names))
    }


def bars(cases: Mapping[str, Mapping[str, float]], path: Path, *, title: str, source: str) -> Path:
    """Bars of a case's times, each as a share of the first; the second is ours.

    Args:
        cases: label -> name of a bar -> seconds; equal names in all.
        path: of the picture.
        title: above it.
        source: machine, dtype and date.
    """
    names = list(next(iter(cases.values())))
    fills = dict(zip(names, (GREY, HUES[0], "#D9EDF8"), strict=False))
    figure, (axes,) = sheet(9, 1.2 + 0.62 * len(cases))
    high = 0.8 / len(names)
    for i, times in enumerate(cases.values()):
        first = times[names[0]]
        for j, (name, seconds) in enumerate(times.items()):
            at = i + (j - (len(names) - 1) / 2) * high
            axes.barh(at, seconds / first, high * 0.9, color=fills[name], zorder=2,
                      label=name if i == 0 else None)  # fmt: skip
            ratio = f"   {first / seconds:.2f}x" if j == 1 else ""
            axes.text(seconds / first + 0.01, at, f"{seconds * 1e3:#.3g} ms{ratio}", va="center",
                      fontsize=7.5, fontweight="bold" if ratio else "normal")  # fmt: skip
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(cases)), list(cases), fontsize=8.5)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
    axes.set_xlabel(f"share of {names[0]}", fontsize=8.5)
    figure.legend(loc="outside lower left", ncols=len(names), frameon=False, fontsize=8)
    return save(figure, path, title, source)


def dots(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    marks: Mapping[str, Mapping[str, float]],
    path: Path,
    *,
    title: str,
    source: str,
    label: str = "serial / plan (higher is better)",
    mark: str = "the longer part alone",
) -> Path:
    """A dot for each kind at each case, in a panel for each machine, and a bar beside them.

    Args:
        panels: title -> label of a case -> kind -> speedup.
        marks: likewise, without kinds: what the dots are beside.
        path: of the picture.
        title: above it.
        source: machine, dtype and date.
        label: of the axis.
        mark: what the bars are.
    """
    rows = max(len(cases) for cases in panels.values())
    figure, found = sheet(
        max(9, 4.6 * len(panels) + 1.5), 1.7 + 0.24 * rows, len(panels), sharey=True, sharex=True
    )
    kinds = looks([k for cases in panels.values() for each in cases.values() for k in each])
    for axes, (name, cases) in zip(found, panels.items(), strict=True):
        axes.axvline(1, color=INK, linewidth=1, zorder=1)
        axes.set_title(name, fontsize=9.5, fontweight="bold", loc="left")
        at = {case: i for i, case in enumerate(cases)}
        for kind, look in kinds.items():
            points = [(each[kind], at[case]) for case, each in cases.items() if kind in each]
            axes.plot(*zip(*points, strict=True), linestyle="", markersize=6, label=kind, zorder=3,
                      **look) if points else None  # fmt: skip
        beside = [(speedup, at[case]) for case, speedup in marks[name].items() if case in at]
        if beside:
            axes.plot(*zip(*beside, strict=True), color=INK, marker="|", markersize=11,
                      linestyle="", markeredgewidth=2, label=mark, zorder=2)  # fmt: skip
        axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.set_xlabel(label, fontsize=8.5)
    found[0].set_xlim(0, 1.02 * found[0].get_xlim()[1])
    handles, names = found[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=6, frameon=False, fontsize=8)
    return save(figure, path, title, source)


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: Path,
    *,
    title: str,
    source: str,
    x_label: str,
    y_label: str,
    y_most: float | None = None,
    log_y: bool = True,
) -> Path:
    """Curves over a number that doubles, in small multiples of one scale.

    Args:
        panels: title -> name of a curve -> points; a name has one colour in all.
        path: of the picture.
        title: above it.
        source: machine, dtype and date.
        x_label: below each panel.
        y_label: beside the first of a row.
        y_most: top of the scale; what is above is cut off.
        log_y: the scale doubles too.
    """
    columns = min(4, len(panels))
    rows = ceil(len(panels) / columns)
    figure, found = sheet(1 + 2.9 * columns, 1.3 + 2.5 * rows, columns, rows, sharey=True)
    styles = looks([name for each in panels.values() for name in each])
    for axes in found[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, each) in zip(found, panels.items(), strict=False):
        for curve, points in each.items():
            axes.plot(*zip(*sorted(points), strict=True), label=curve, markersize=4.5,
                      linewidth=1.4, **styles[curve])  # fmt: skip
        axes.set_xscale("log", base=2)
        xs = sorted({x for points in each.values() for x, _ in points})
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        if log_y:
            axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(name, fontsize=9, fontweight="bold", loc="left")
        axes.set_xlabel(x_label, fontsize=8.5)
    found[0].set_ylabel(y_label, fontsize=8.5)
    if y_most:
        found[0].set_ylim(top=y_most)
    handles = {
        label: handle
        for axes in found[: len(panels)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=6,
                  frameon=False, fontsize=8)  # fmt: skip
    return save(figure, path, title, source)


def scatter(points: Sequence[Point], path: Path, *, title: str, source: str) -> Path:
    """Predicted over measured times, with the diagonal, bands of 10 % and 25 %, and the worst
    named.

    Args:
        points: one or more; groups get their looks in the order in which they appear.
        path: of the picture.
        title: above it.
        source: what predicted, what measured, and when.
    """
    figure, (axes,) = sheet(7, 7)
    times = [t * 1e6 for p in points for t in (p.predicted_s, p.measured_s)]
    ends = [min(times) / 1.3, max(times) * 1.3]
    for error, fill in ((0.25, "#EEEEEE"), (0.10, "#D8D8D8")):
        axes.fill_between(ends, [t * (1 - error) for t in ends], [t * (1 + error) for t in ends],
                          color=fill, linewidth=0, zorder=1)  # fmt: skip
    axes.plot(ends, ends, color=INK, linewidth=0.8, zorder=2)
    for group, look in looks([p.group for p in points]).items():
        own = [p for p in points if p.group == group]
        off = [abs(p.error) for p in own]
        text = f"{group}: {len(own)}, median {median(off):.1%}, worst {max(off):.0%}"
        axes.plot([p.measured_s * 1e6 for p in own], [p.predicted_s * 1e6 for p in own],
                  linestyle="", markersize=5.5, markeredgecolor="white", markeredgewidth=0.4,
                  label=text, zorder=4, **look)  # fmt: skip
    worst = max(points, key=lambda p: abs(p.error))
    axes.annotate(f"{worst.label}  {worst.error:+.0%}",
                  (worst.measured_s * 1e6, worst.predicted_s * 1e6), (0.03, 0.95),
                  textcoords="axes fraction", fontsize=7.5, parse_math=False,
                  arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6})  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal",
             xlabel="measured [us]", ylabel="predicted [us]")  # fmt: skip
    off = [abs(p.error) for p in points]
    within = ", ".join(
        f"{sum(e <= limit for e in off)} within {limit:.0%}" for limit in (0.1, 0.25)
    )
    axes.legend(
        loc="lower right",
        frameon=False,
        fontsize=7.5,
        alignment="left",
        title_fontsize=8.5,
        title=f"{len(points)} points, median error {median(off):.1%},\n{within}",
    )
    return save(figure, path, title, source)
