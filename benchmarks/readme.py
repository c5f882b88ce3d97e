"""The one writer: marked sections of README.md and docs/results, and pictures, from committed rows.

    make readme

Each benchmark declares its sections, and columns of their tables. A section whose rows are not
there is left as it is."""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import front, gains, islands, islands_predicted, papers, scale_steps, support
from benchmarks.declare import Section
from benchmarks.options import NAMES, PAPER
from benchmarks.rows import RESULTS, Row, results
from benchmarks.runner import declared
from benchmarks.scale_ahead import ahead_table
from benchmarks.tables import IMAGES, PAGES, ROOT, grid, measured
from counterpoint.choose.by_rule import RULE
from counterpoint.costs import Costs
from counterpoint.machine import Machine
from counterpoint.machine_of import SHIPPED
from counterpoint.resources.controls import WAYS_IN, Controls


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
    gains.write()
    scale_steps.picture(IMAGES)
    islands_predicted.picture(IMAGES)
    between = islands.sections() | islands_predicted.sections()
    scale = scale_steps.sections() | {"scale-ahead": ahead_table()}
    for page, found in (("scale.md", scale), ("islands.md", between),
                        ("results/papers.md", papers.sections())):  # fmt: skip
        for marker, text in found.items():
            replace(ROOT / "docs" / page, marker, text)
    replace(ROOT / "README.md", "bullets", front.bullets())
    replace(ROOT / "README.md", "front", front.table())


if __name__ == "__main__":
    main()
