"""The one writer: marked sections of README.md and docs/results, and pictures, from committed rows.

    make readme

Each benchmark declares its sections, and columns of their tables. A section whose rows are not
there is left as it is."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.declare import Section
from benchmarks.rows import RESULTS, Row, Timed, gpus_of, results
from counterpoint.choose.by_rule import RULE
from counterpoint.costs import Costs
from counterpoint.machine import Machine
from counterpoint.machine_of import SHIPPED
from counterpoint.resources.controls import WAYS_IN, Controls

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
    also: Sequence[Row] = (),
) -> str:  # fmt: skip
    """A table of rows, and under it where they are from; "" without lines.

    A line that has rows of older code than the newest of the table is marked, and that is said. A
    column without a number is left out.

    Args:
        head: of the columns.
        lines: cells, and the rows that they are of.
        note: what else is said under it.
        also: rows that only the note is of, or all lines alike.
    """
    every = [(list(cells), rows) for cells, rows in lines]
    if not every:
        return ""
    full = [i for i in range(len(head)) if any(cells[i] != "-" for cells, _ in every)]
    head, every = [head[i] for i in full], [([cells[i] for i in full], r) for cells, r in every]
    rows = [row for _, some in every for row in some] + list(also)
    newest = max(rows, key=_age)["commit"]
    older = False
    for cells, some in every:
        if any(row["commit"] != newest for row in some):
            cells[0], older = f"{cells[0]} {MARK}", True
    said = f" {MARK} By older code than commit {newest}." if older else ""
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
        parts = [(rows, write(rows)) for rows in found.values()]
        return "\n\n".join(f"**{gpus_of(rows)}**\n\n{text}" for rows, text in parts if text)

    return section


def of_most(write: Callable[[list[Row]], str]) -> Callable[[Mapping[int, list[Row]]], str]:
    """A section of the most GPUs alone."""
    return lambda found: write(next(iter(found.values())))


def replace(page: Path, marker: str, text: str) -> None:
    """Put `text` between the markers of a page.

    Raises:
        ValueError: the page does not have both of them, once.
    """
    content = page.read_text()
    pattern = rf"(<!-- {marker}:start -->\n).*?(<!-- {marker}:end -->)"
    found, count = re.subn(pattern, lambda m: f"{m[1]}{text}\n{m[2]}", content, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page}: no markers {marker}:start and {marker}:end")
    page.write_text(found)


def write(sections: Iterable[Section], found: Mapping[int, list[Row]], root: Path = ROOT) -> None:
    """Fill the sections of one benchmark."""
    for section in sections:
        text = section.write(found) if found else ""
        if text:
            replace(root / section.page, section.marker, text)


def constants(path: Path) -> str:
    """The measured costs of a machine."""
    machine = Machine.from_json(json.dumps(json.loads(path.read_text())["machine"]))
    lines: list[list[str]] = []
    for field in dataclasses.fields(Costs):
        value = getattr(machine.costs, field.name)
        if field.name.endswith("flop_per_s"):
            text = f"{value / 1e12:.0f} Tflop/s"
        elif field.name.endswith("_per_s"):
            text = f"{value / 1e9:.0f} GB/s"
        else:
            text = f"{value * 1e6:.1f} us" if field.name.endswith("_s") else f"{value:.2f}"
        lines.append([f"`{field.name}`", text])
    kind = machine.name.partition("-")[0]
    rows = results("characterize", gpu=kind)[machine.num_devices]
    cells = [(line, ()) for line in lines]
    return f"{machine.source}:\n\n{measured(['constant', 'value'], cells, also=rows)}"


def controls() -> str:
    """Every control in the words of `Controls`, and how it reaches the kernels."""
    text = (inspect.getdoc(Controls) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    told = {name: " ".join(meaning.split()) for name, meaning in found} | {
        # values of `transport`
        "copy_engine": "Collectives are copies and signals of ours; of an all-reduce, its second "
                       "half.",
        "zero_cta": "The library's own copy-engine collectives.",
    }  # fmt: skip
    lines = [[f"`{name}`", told[name], *(ways.get(mode, "-") for mode in ("graph", "eager"))]
             for name, ways in WAYS_IN.items()]  # fmt: skip
    return grid(["control", "what it does", "in a graph", "eager"], lines)


def commands() -> str:
    """Every command, in the first sentence of its help."""
    from typer.main import get_group

    from counterpoint.cli.main import app

    found = sorted(get_group(app).commands.items())
    lines = [[f"`counterpoint {name}`", command.get_short_help_str(200)] for name, command in found]
    return grid(["command", "what it does"], lines)


def variables() -> str:
    """The environment, in the words of `counterpoint doctor`."""
    from counterpoint.cli.doctor import VARIABLES

    return grid(["variable", "meaning"], [[f"`{name}`", said] for name, said in VARIABLES.items()])


def main() -> None:
    """Write all of them."""
    from benchmarks import front, islands, islands_predicted, papers, scale_steps, support
    from benchmarks.options import NAMES, PAPER
    from benchmarks.runner import declared

    IMAGES.mkdir(exist_ok=True)
    for name in (*NAMES, *PAPER.values()):
        benchmark, found = declared(name), results(name, RESULTS)
        write(benchmark.sections, found)
        if benchmark.pictures is not None and found:
            benchmark.pictures(found, IMAGES)
    files = sorted(SHIPPED.glob("*.json"), reverse=True)
    replace(PAGES / "choosing.md", "constants", "\n\n".join(map(constants, files)))
    replace(PAGES / "sharing.md", "controls", controls())
    replace(PAGES / "choosing.md", "rule", f"```\n{RULE.strip()}\n```")
    for marker, text in (("commands", commands()), ("variables", variables())):
        replace(ROOT / "docs" / "api" / "cli.md", marker, text)
    for marker, text in support.sections(support.committed()).items():
        replace(ROOT / "docs" / "support.md", marker, text)
    scale_steps.picture(IMAGES)
    islands_predicted.picture(IMAGES)
    between = islands.sections() | islands_predicted.sections()
    for page, found in (("scale.md", scale_steps.sections()), ("islands.md", between),
                        ("results/papers.md", papers.sections())):  # fmt: skip
        for marker, text in found.items():
            replace(ROOT / "docs" / page, marker, text)
    replace(ROOT / "README.md", "bullets", front.bullets())
    replace(ROOT / "README.md", "front", front.table())


if __name__ == "__main__":
    main()
