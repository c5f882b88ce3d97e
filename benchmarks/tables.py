"""Tables of committed rows: their columns, and what stands below them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.rows import Row, Timed, by_cut, gpus_of, held

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PAGES = ROOT / "docs" / "results"
MARK = "†"  # of a line by older code
INVARIANT = "auto invariant"  # the arm whose rows have the same bits in any batch


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table: its head, and what it says of a case."""

    head: str
    cell: Callable[[Timed], str]


def us(seconds: float, digits: int = 1) -> str:
    """Microseconds."""
    return f"{seconds * 1e6:.{digits}f}"


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.3f}"


def arm(
    name: str, unit: Callable[[float], str] = us, head: str = "", *, bold: bool = False
) -> Column:
    """The time of an arm; "-" where a case lacks it."""

    def cell(case: Timed) -> str:
        text = unit(case.s(name)) if name in case else "-"
        return f"**{text}**" if bold else text

    title = head or name
    return Column(f"**{title}**" if bold else title, cell)


def both_modes(
    name: str, unit: Callable[[float], str] = us, head: str = "", *, bold: bool = False
) -> Column:
    """The times of an arm in a graph and eagerly behind a backlog, where there are both."""

    def cell(case: Timed) -> str:
        times = [unit(arms[name]["median_s"]) for arms in (case.graph, case.eager) if name in arms]
        return f"**{times[0]}**{''.join(f', {t}' for t in times[1:])}" if bold else ", ".join(times)

    return Column(f"**{head or name}**" if bold else head or name, cell)


def price_note(cases: Sequence[Timed]) -> str:
    """What batch-invariance takes, where it was timed."""
    ratios = [case.s(INVARIANT) / case.s("auto") for case in cases if INVARIANT in case]
    if not ratios:
        return ""
    mean, least, most = geometric_mean(ratios), min(ratios), max(ratios)
    return f" Batch-invariant auto takes {mean:.2f}x the time of auto ({least:.2f} to {most:.2f})."


def torch_note(cases: Sequence[Timed], *peers: str, ours: str = "auto") -> str:
    """How torch's operators are compared: their better mode counts."""
    eager = [case for case in cases if any(peer in case.eager for peer in peers)]
    if not eager:
        return "torch's operators were timed in a graph only, not eagerly."
    some = "" if len(eager) == len(cases) else f" ({len(eager)} of {len(cases)} cases)"
    return (
        f"Of two times the first is in a graph, the second eager behind a backlog{some}. Each was "
        f"measured beside *{ours}* in one rotation. torch / {ours} is of the mode that suits torch "
        "better."
    )


def sizes(*names: str, head: str = "M, N, K") -> Column:
    """Facts of a case, with commas between."""
    return Column(head, lambda case: ", ".join(str(case.head[name]) for name in names))


def table(
    columns: Sequence[Column], cases: Iterable[Timed], note: str = "", *, also: Sequence[Row] = ()
) -> str:
    """A line for each case, as `measured` has it."""
    lines = (([column.cell(case) for column in columns], case.rows) for case in cases)
    return measured([column.head for column in columns], lines, note, also=also)


def measured(
    head: Sequence[str], lines: Iterable[tuple[Sequence[str], Sequence[Row]]], note: str = "", *,
    also: Sequence[Row] = (), older: Callable[[Sequence[Row]], object] | None = None,
    said_of: str = "",
) -> str:  # fmt: skip
    """A table of rows, and under it where they are from; "" without lines.

    A line that has rows of older code than the newest of the table is marked, and that is said: of
    another commit, and not of the same source. A column without a number is left out.

    Args:
        head: of the columns.
        lines: cells, and the rows that they are of.
        note: what else is said under it.
        also: rows that only the note is of, or all lines alike.
        older: whether a line's rows are of older code; None: than the newest of the table.
        said_of: what is said of such lines; "": the commit.
    """
    every = [(list(cells), rows) for cells, rows in lines]
    if not every:
        return ""
    full = [i for i in range(len(head)) if any(cells[i] != "-" for cells, _ in every)]
    head, every = [head[i] for i in full], [([cells[i] for i in full], r) for cells, r in every]
    rows = [row for _, some in every for row in some] + list(also)
    newest = max(rows, key=_age)["commit"]
    same = {row["source"] for row in rows if row["commit"] == newest and "source" in row}

    def is_older(some: Sequence[Row]) -> object:
        if older:
            return older(some)
        return any(row["commit"] != newest and row.get("source") not in same for row in some)

    marked = [cells for cells, some in every if is_older(some)]
    for cells in marked:
        cells[0] = f"{cells[0]} {MARK}"
    said = f" {said_of or f'{MARK} By older code than commit {newest}.'}" if marked else ""
    return f"{grid(head, [cells for cells, _ in every])}\n\n{source(rows, note)}{said}"


def _age(row: Row) -> tuple[str, int]:
    return row["date"], row.get("line", 0)


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown of cells."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def source(rows: Iterable[Row], note: str = "") -> str:
    """Where, when and by which commits rows were measured, the oldest first."""
    places: dict[tuple[str, str], dict[str, str]] = {}
    for row in sorted(rows, key=_age):
        commits = places.setdefault((f"{row['ranks']}x {row['gpu']}", _software(row)), {})
        commits[f"{row['commit']} ({row['date']})"] = row["commit"]
    software = {each for _, each in places}
    once = len(places) > len(software) == 1  # of several machines alike
    text = "; ".join(
        f"{gpus}, {'' if once else f'{each}, '}"
        f"commit{'s' * (len(set(commits.values())) > 1)} {', '.join(commits)}"
        for (gpus, each), commits in places.items()
    )
    text += f"; {software.pop()}" if once else ""
    return f"{text}. {note}" if note else f"{text}."


def _software(row: Row) -> str:
    multicast = "on" if row["multicast"] else "off"
    triton = f"Triton {row['triton']}, " if "triton" in row else ""
    return (
        f"bf16, driver {row['driver']}, torch {row['torch']}, {triton}NCCL {row['nccl']}, "
        f"NVLink multicast {multicast}"
    )


def by_machine(write: Callable[[list[Row]], str]) -> Callable[[Mapping[int, list[Row]]], str]:
    """A section of a part for each number of GPUs."""

    def section(found: Mapping[int, list[Row]]) -> str:
        parts = [(rows, write(rows)) for rows in by_cut(found)]
        return "\n\n".join(f"**{gpus_of(rows)}{held(rows)}**\n\n{text}"
                           for rows, text in parts if text)  # fmt: skip

    return section


def of_most(write: Callable[[list[Row]], str]) -> Callable[[Mapping[int, list[Row]]], str]:
    """A section of the most GPUs alone."""
    return lambda found: write(by_cut({max(found): found[max(found)]})[0])
