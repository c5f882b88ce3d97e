"""A report in words: what a terminal shows, and the words that its page shares."""

from collections.abc import Sequence
from typing import Protocol

from counterpoint.advice.losses import Collective, Losses
from counterpoint.advice.remedies import Remedy
from counterpoint.advice.trace import Trace

IDLE = {
    "launching": "GPU idle, as the host launched late",
    "data": "GPU idle, as the host waited for data",
    "synchronizing": "GPU idle, as the host had waited for it",
    "host copies": "GPU idle but for copies from and to the host",
    "dependencies": "GPU idle, though work had been launched",
    "unknown": "GPU idle, for a cause that the trace does not say",
}


class Said(Protocol):
    """What is said of a report."""

    @property
    def title(self) -> str: ...
    @property
    def losses(self) -> Sequence[Losses]: ...
    @property
    def remedies(self) -> Sequence[Remedy]: ...
    @property
    def link_bytes_per_s(self) -> float: ...
    @property
    def steps(self) -> Sequence[str]: ...
    @property
    def traces(self) -> Sequence[Trace]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def verdict(self) -> str: ...


def parts(losses: Losses) -> list[tuple[str, str, float]]:
    """Kind ("computation", "exposed", "packing" or "idle"), name and seconds of what a step is."""
    return [
        ("computation", "computation", losses.computation_s),
        ("exposed", "communication that nothing hides", losses.exposed_s),
        ("exposed", "waiting in a collective for a late rank", losses.late_s),
        ("packing", "copies that pack and unpack for collectives", losses.packing_s),
        *(("idle", words, losses.idle_s[cause]) for cause, words in IDLE.items()),
    ]


def largest(report: Said) -> str:
    """The largest loss, in a sentence."""
    first = report.losses[0]
    lost = [each for each in parts(first) if each[0] != "computation"]
    _, name, seconds = max(lost, key=lambda each: each[2])
    share = seconds / first.time_s
    return f"Largest loss: {name}, {ms(seconds)} of {ms(first.time_s)} ms ({share:.0%})"


def speedup(time_s: float, saves_s: float) -> str:
    """What a step gains that is so much shorter."""
    left_s = time_s - saves_s
    return f"{time_s / left_s:.2f}x" if left_s > 0.001 * time_s else "over 1000x"


def ms(seconds: float) -> str:
    """Milliseconds with three digits that count."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def collective_cells(each: Collective, link_bytes_per_s: float) -> list[str]:
    """A row of the table of collectives."""
    rate = f"{each.bus_bytes_per_s / 1e9:.0f}" if each.bus_bytes_per_s else "-"
    if each.bus_bytes_per_s and link_bytes_per_s:
        rate += f" of {link_bytes_per_s / 1e9:.0f}"
    between = " -> ".join(word or "-" for word in (each.before, each.after))
    return [
        each.kind, each.group or "-", str(each.ranks or "-"), f"{each.calls:.0f}",
        f"{each.num_bytes / 1e6:.2f}" if each.num_bytes else "-", ms(each.time_s),
        ms(each.exposed_s), "-" if each.late_s is None else ms(each.late_s), rate,
        str(each.blocks or "-"), between,
    ]  # fmt: skip


COLLECTIVE_HEAD = (
    "collective", "group", "ranks", "calls", "MB each", "ms", "exposed ms", "late ms", "GB/s",
    "blocks", "between",
)  # fmt: skip


def remedy_cells(each: Remedy, time_s: float) -> list[str]:
    """What to do, why, at most, by measured cases, the line."""

    def won(saves_s: float) -> str:
        return f"{ms(saves_s)} ms, {speedup(time_s, saves_s)}"

    if each.saves_s is None:
        likely = "not measured"
    elif each.gain is None:
        likely = f"{won(each.saves_s)} by the cost model"
    else:
        gain = each.gain
        where = f"{gain.case}, {gain.gpus} {gain.gpu}s, {gain.date}"
        likely = f"{won(each.saves_s)} as in cases like {where}"
    return [each.name, each.why, won(each.bound_s), likely, each.line]


def slowed(losses: Losses) -> str:
    """What computation lost beside communication, and how much of that is known."""
    known = losses.compared_s / losses.beside_s if losses.beside_s else 1.0
    part = "" if known > 0.99 else f", of the {known:.0%} that also ran alone"
    return f"kernels beside communication took {ms(losses.slowed_s)} ms longer{part}"


def text(report: Said) -> str:
    """All of it, for a terminal."""
    first = report.losses[0]
    lines = [report.title, *report.notes, "", f"{largest(report)}.", report.verdict, ""]
    for _, name, seconds in parts(first):
        if seconds >= 0.0005 * first.time_s or name == "computation":
            note = f"   {slowed(first)}" if name == "computation" and first.slowed_s else ""
            lines.append(f"  {name:44}{ms(seconds):>8} ms {seconds / first.time_s:>6.1%}{note}")
    if first.packed_s > first.packing_s:
        lines.append(f"  packing in all, hidden or not {ms(first.packed_s)} ms")
    if first.collectives:
        cells = [collective_cells(each, report.link_bytes_per_s) for each in first.collectives]
        lines += ["", *_aligned([list(COLLECTIVE_HEAD), *cells])]
    if len(report.losses) > 1:
        lines += ["", *_aligned(rank_cells(report))]
    for place, each in enumerate(report.remedies, 1):
        name, why, bound, measured, line = remedy_cells(each, first.time_s)
        lines += ["", f"{place}. {name}: at most {bound}; {measured}", f"   {why}", f"   {line}"]
    return "\n".join(lines)


def rank_cells(report: Said) -> list[list[str]]:
    """A head, and a row for each rank."""
    head = ["rank", "ms a step", "computation", "exposed", "late", "packing", "idle"]
    return [head] + [
        [str(each.rank), *map(ms, (each.time_s, each.computation_s, each.exposed_s, each.late_s,
                                   each.packing_s, sum(each.idle_s.values())))]
        for each in report.losses
    ]  # fmt: skip


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 or i == 10 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip
