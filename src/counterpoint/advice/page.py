"""A report as one page of HTML that fetches nothing: the step in bands, losses, remedies."""

from collections.abc import Iterable, Sequence
from html import escape

from counterpoint.advice.cover import Cover
from counterpoint.advice.kinds import COMMUNICATION, COMPUTATION, PACKING
from counterpoint.advice.picture import middle
from counterpoint.advice.trace import Activity, Range
from counterpoint.advice.words import (
    COLLECTIVE_HEAD,
    Said,
    collective_cells,
    largest,
    ms,
    parts,
    rank_cells,
    remedy_cells,
    slowed,
)
from counterpoint.measure import canvas
from counterpoint.measure.canvas import DARK, LIGHT, Theme

WIDTH = 1000.0  # of the picture, in its own units
THIN = 0.7  # what is thinner joins its neighbours
HUES = (
    ("computation", canvas.BLUE), ("packing", canvas.ORANGE), ("exposed", "var(--exposed)"),
    ("communication", canvas.VERMILLION), ("idle", "var(--serial)"),
)  # fmt: skip
BANDS = (
    (COMPUTATION, "computation"), (PACKING, "packing"), (COMMUNICATION, "communication"),
)  # fmt: skip

_STYLE = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
body { background: var(--page); color: var(--ink); margin: 0 auto; max-width: 1120px; padding: 1rem;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .3rem 0; } .faint { color: var(--faint); font-size: .9rem; }
.row { display: flex; align-items: center; margin: 3px 0; font-size: .9rem; }
.row span { flex: 0 0 8rem; color: var(--faint); } .row svg { width: 100%; height: 26px; }
.bar { display: flex; height: 34px; margin: .6rem 0; } .bar span { min-width: 1px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .4rem 0;
  list-style: none; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
KINDS
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0;
  border-bottom: 1px solid var(--grid); }
th { color: var(--faint); font-weight: 600; }
code { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; }
@media (max-width: 760px) {
  thead { display: none; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--grid); }
  td { display: flex; gap: .8rem; border: 0; padding: .1rem 0; }
  .row { display: block; }
  td::before { content: attr(data-head); color: var(--faint); flex: 0 0 7.5rem; }
}
"""


_NOTE = (
    "<p class=faint>Times are those of all calls. Exposed: nothing computes meanwhile. Late: it "
    "waits for the last rank, which the traces of other ranks tell. GB/s: bus bandwidth, of what "
    "the links carry. Blocks: so many SMs, where each takes one. Between: what computes last "
    "before it, and first after it.</p>"
)


def page(report: Said) -> str:
    """The page."""
    first = report.losses[0]
    kinds = "\n".join(f".{kind} {{ background: {hue}; fill: {hue}; }}" for kind, hue in HUES)
    style = _STYLE.replace("LIGHT", _colours(LIGHT)).replace("DARK", _colours(DARK))
    style = style.replace("KINDS", kinds)
    remedies = [
        [*map(escape, (name, bound, measured)), f"{escape(why)}<br><code>{escape(line)}</code>"]
        for name, why, bound, measured, line in (
            remedy_cells(each, first.time_s) for each in report.remedies)
    ]  # fmt: skip
    collectives = [
        [*map(escape, collective_cells(each, report.link_bytes_per_s))]
        for each in first.collectives
    ]
    sections = [
        f"<p class=faint>counterpoint advise: {escape(report.title)}</p>",
        *(f"<p><b>{escape(note)}</b></p>" for note in report.notes),
        f"<h1>{escape(largest(report))}</h1><p>{escape(report.verdict)}</p>",
        _bar(report),
        f"<p class=faint>Computation: {escape(slowed(first))}.</p>" if first.slowed_s else "",
        "<h2>A step on the GPU</h2>" + _picture(report) if report.traces else "",
        "<h2>What wins it back</h2>" + _table(
            ("remedy", "at most", "counterpoint measured", "why, and the line to write"), remedies)
        if remedies else "",
        "<h2>Collectives of a step</h2>" + _table(COLLECTIVE_HEAD, collectives) + _NOTE
        if collectives else "",
        "<h2>Ranks</h2>" + _ranks(report) if len(report.losses) > 1 else "",
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>counterpoint advise</title>'
        f"<style>{style}</style><body>{''.join(sections)}</body></html>\n"
    )


def _colours(theme: Theme) -> str:
    names = ("page", "ink", "faint", "grid", "serial", "exposed")
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)


def _bar(report: Said) -> str:
    """The step as one bar, and what its parts are."""
    first = report.losses[0]
    found = [each for each in parts(first) if each[2] >= 0.001 * first.time_s]
    kinds = [kind for kind, *_ in found]
    shades = [f"opacity: {1 / (1 + kinds[:i].count(kind)):.2f}" for i, kind in enumerate(kinds)]
    pieces = "".join(
        f'<span class={kind} style="flex: {seconds / first.time_s:.4f}; {shade}" '
        f'title="{escape(name)}: {ms(seconds)} ms"></span>'
        for (kind, name, seconds), shade in zip(found, shades, strict=True)
    )
    names = "".join(
        f'<li><i class={kind} style="{shade}"></i>{escape(name)} <b>{ms(seconds)} ms</b>, '
        f"{seconds / first.time_s:.1%}</li>"
        for (kind, name, seconds), shade in zip(found, shades, strict=True)
    )
    return f"<div class=bar>{pieces}</div><ul class=legend>{names}</ul>"


def _picture(report: Said) -> str:
    """One step of the first rank: bands of what ran, and in red what nothing hid."""
    trace = report.traces[0]
    step = middle(report, trace)
    inside = [each for _, each in trace.within(step)]
    computes = Cover((each.start_s, each.end_s) for each in inside if each.kind == COMPUTATION)
    exposed = Cover(
        gap for each in inside if each.kind == COMMUNICATION
        for gap in computes.gaps(max(each.start_s, step.start_s), min(each.end_s, step.end_s))
    )  # fmt: skip
    bands = [
        (name, _band(name, step, [each for each in inside if each.kind == kind]))
        for kind, name in BANDS
    ]
    red = (_rect("exposed", step, a, b, f"exposed {ms(b - a)} ms") for a, b in exposed.spans())
    rows = "".join(
        f'<div class=row><span>{name}</span><svg viewBox="0 0 {WIDTH:.0f} 10" '
        f'preserveAspectRatio="none">{shapes}</svg></div>'
        for name, shapes in (*bands, ("exposed", "".join(red))) if shapes
    )  # fmt: skip
    return (
        f"{rows}<p class=faint>{escape(step.name)} of rank {trace.rank}, from left to right "
        f"{ms(step.end_s - step.start_s)} ms. Exposed: communication while nothing computes. "
        "Names show under the pointer.</p>"
    )


def _band(kind: str, step: Range, activities: Sequence[Activity]) -> str:
    """Rectangles; neighbours that would be thinner than can be seen are one."""
    thin_s = THIN * (step.end_s - step.start_s) / WIDTH
    groups: list[list[Activity]] = []
    reach = -1.0
    for each in activities:
        begins = groups[-1][0].start_s if groups else 0.0
        if groups and each.start_s - reach < thin_s and each.end_s - begins < 4 * thin_s:
            groups[-1].append(each)
        else:
            groups.append([each])
        reach = max(reach, each.end_s)
    return "".join(
        _rect(kind, step, group[0].start_s, max(each.end_s for each in group), _hover(group),
              sum(each.end_s - each.start_s for each in group))
        for group in groups
    )  # fmt: skip


def _hover(group: Sequence[Activity]) -> str:
    longest = max(group, key=lambda each: each.end_s - each.start_s)
    beside = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{longest.name[:90]} {(longest.end_s - longest.start_s) * 1e6:.0f} us{beside}"


def _rect(
    kind: str, step: Range, start_s: float, end_s: float, hover: str, busy_s: float = 0.0
) -> str:  # fmt: skip
    """A rectangle; fainter where less than its width is busy."""
    scale = WIDTH / (step.end_s - step.start_s)
    share = min(1.0, busy_s / (end_s - start_s)) if busy_s and end_s > start_s else 1.0
    faint = f' fill-opacity="{max(0.15, share):.2f}"' if share < 0.95 else ""
    start_s, end_s = max(start_s, step.start_s), min(end_s, step.end_s)
    return (
        f'<rect class={kind} x="{(start_s - step.start_s) * scale:.1f}" '
        f'width="{max(0.4, (end_s - start_s) * scale):.1f}" height="10"{faint}>'
        f"<title>{escape(hover)}</title></rect>"
    )


def _ranks(report: Said) -> str:
    head, *rows = rank_cells(report)
    return _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, whose rows become cards on a narrow screen. Cells are HTML."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(
            f'<td data-head="{escape(name)}"><span>{cell}</span></td>'
            for name, cell in zip(head, row, strict=True)
        ) + "</tr>"
        for row in rows
    )  # fmt: skip
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
