"""The tables and the picture of README.md and docs/hardware.md, from the committed rows.

Nothing in them is written by hand: `make readme` makes them again from benchmarks/results/.
"""

import json
import re
from pathlib import Path
from typing import Any

from counterpoint.measure import record
from counterpoint.measure.bars import BarRow, draw_bars
from counterpoint.measure.compare import FIXED
from counterpoint.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
Row = dict[str, Any]


class Shape:
    """The rows of one op at one shape."""

    def __init__(self, rows: list[Row]) -> None:
        self.head = rows[0]
        self.graph = {r["arm"]: r for r in rows if r["mode"] == "graph"}
        self.eager = {r["arm"]: r for r in rows if r["mode"] == "eager"}
        ours = [arm for arm in self.graph if arm not in FIXED]
        self.best = min(ours, key=self.seconds)
        self.worst = max(ours, key=self.seconds)

    def seconds(self, arm: str) -> float:
        """Median of an arm as a graph."""
        return self.graph[arm]["median_s"]

    @property
    def ideal_s(self) -> float:
        """The longer of compute and the faster of both transports, each alone."""
        transport_s = min(self.seconds("communication"), self.seconds("copy_engine"))
        return max(self.seconds("compute"), transport_s)

    @property
    def ratio(self) -> float:
        """serial / best."""
        return self.seconds("serial") / self.seconds(self.best)

    @property
    def hidden(self) -> float:
        """The share of what could be hidden that is."""
        serial_s = self.seconds("serial")
        return (serial_s - self.seconds(self.best)) / (serial_s - self.ideal_s)


def shapes_of(path: Path) -> list[Shape]:
    """The shapes of a results file, in its order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in record.read(path):
        groups.setdefault((row["op"], row["m"], row["n"], row["k"]), []).append(row)
    return [Shape(rows) for rows in groups.values()]


def overlap_table(shapes: list[Shape]) -> str:
    """The main table: graph replays."""
    lines = [
        "| op | M, N, K | matmul | NCCL | copies | serial | torch symm_mem | auto | ours | plan "
        "| serial / ours | hidden |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in shapes:
        h = s.head
        cells = [h["op"], f"{h['m']}, {h['n']}, {h['k']}"]
        cells += [ms(s.seconds(arm)) for arm in FIXED]
        hidden = f"{s.hidden:.0%}" if s.ratio > 1 else "loses"
        cells += [ms(s.seconds(s.best)), s.best, f"**{s.ratio:.2f}**", hidden]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def eager_table(shapes: list[Shape]) -> str:
    """Eager calls: GPU time behind a backlog, with the host's time in it, and the host's alone."""
    lines = [
        "| op | M, N, K | arm | behind a backlog | plain eager | host us a call |",
        "|---|---|---|---|---|---|",
    ]
    for s in shapes:
        for arm, row in s.eager.items():
            h = s.head
            name = f"best: {arm}" if arm == s.best else arm
            cells = [h["op"], f"{h['m']}, {h['n']}, {h['k']}", name, ms(row["median_s"])]
            cells += [ms(row["plain_eager_s"]), f"{row['host_s'] * 1e6:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def caption(shapes: list[Shape]) -> str:
    """Where and when, and what stands beside the promise for 8 GPUs."""
    h = shapes[0].head
    clocks = sorted(s.head["sm_clock_mhz"] for s in shapes)
    multicast = "on" if h["multicast"] else "off"
    return (
        f"{h['ranks']}x {h['gpu']}, bf16, driver {h['driver']}, torch {h['torch']}, Triton "
        f"{h['triton']}, NCCL {h['nccl']}, NVLink multicast {multicast}, SM clock "
        f"{clocks[0]} to {clocks[-1]} MHz, {h['date']}, commit {h['commit']}. M over all ranks, "
        "N and K of one rank. Milliseconds, medians of the slowest rank, graphs of several calls "
        "with weights in rotation, all arms in one randomised rotation."
    )


def hardware_tables(path: Path) -> str:
    """One table for each question that benchmarks/ask_hardware.py asked."""
    questions: dict[str, list[Row]] = {}
    for row in record.read(path):
        questions.setdefault(row["question"], []).append(row)
    parts: list[str] = []
    for question, rows in questions.items():
        if question == "B arrival":
            continue
        if question == "A copies":
            parts.append(_copies(rows))
            continue
        fields = [f for f in rows[0] if f.endswith(("us", "gb_per_s", "us_per_signal"))]
        lines = [f"**{question}**", "", "| arm | " + " | ".join(fields) + " |"]
        lines.append("|---|" + "---|" * len(fields))
        for row in rows:
            lines.append(f"| {row['arm']} | " + " | ".join(f"{row[f]:.1f}" for f in fields) + " |")
        parts.append("\n".join(lines))
    h = next(iter(questions.values()))[0]
    where = f"{h['ranks']}x {h['gpu']}, torch {h['torch']}, {h['date']}, commit {h['commit']}."
    return where + "\n\n" + "\n\n".join(parts)


def _copies(rows: list[Row]) -> str:
    sizes = sorted({row["mib"] for row in rows})
    lines = ["**A copies**, GB/s (host us a call), each peer once", ""]
    lines.append("| arm | " + " | ".join(f"{mib} MiB" for mib in sizes) + " |")
    lines.append("|---|" + "---|" * len(sizes))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for mib in sizes:
            row = next(r for r in rows if r["arm"] == arm and r["mib"] == mib)
            host = f" ({row['host_us']:.0f})" if row["host_us"] else ""
            cells.append(f"{row['gb_per_s']:.0f}{host}")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ms(seconds: float) -> str:
    """Milliseconds for a table."""
    return f"{seconds * 1e3:.3f}"


def replace(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers of `name`."""
    content = path.read_text()
    pattern = rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)"
    found, count = re.subn(pattern, lambda m: f"{m[1]}{text}\n{m[2]}", content, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{path}: no markers {name}:start and {name}:end")
    path.write_text(found)


def main() -> None:
    """Write all of them from the results of the largest machine measured."""
    paths = sorted(RESULTS.glob("overlap-*x-*.jsonl"), key=lambda p: int(p.name.split("-")[1][:-1]))
    largest = paths[-1]
    ranks = largest.name.split("-")[1]
    shapes = shapes_of(largest)
    IMAGES.mkdir(exist_ok=True)
    bars = [
        BarRow(label=f"{s.head['op']}\n{s.head['m']}, {s.head['n']}, {s.head['k']}",
               serial_s=s.seconds("serial"), ours_s=s.seconds(s.best), ideal_s=s.ideal_s)
        for s in shapes
    ]  # fmt: skip
    h = shapes[0].head
    source = f"{h['ranks']}x {h['gpu']}, bf16, {h['date']}; serial is NCCL + cuBLAS"
    draw_bars(bars, IMAGES / "overlap.png", title="Time of one call, serial against overlapped",
              source=source, relative_to_serial=True)  # fmt: skip
    where = caption(shapes)
    replace(ROOT / "README.md", "table", f"{overlap_table(shapes)}\n\n{where}")
    results = ROOT / "docs" / "results.md"
    sections = [
        f"## {p.name.split('-')[1][:-1]} GPUs\n\n{overlap_table(found)}\n\n{caption(found)}\n\n"
        f"Eager, milliseconds:\n\n{eager_table(found)}"
        for p in reversed(paths)
        for found in [shapes_of(p)]
    ]
    replace(results, "results", "\n\n".join(sections))
    hardware = RESULTS / f"hardware-{ranks}-h200.jsonl"
    replace(ROOT / "docs" / "hardware.md", "hardware", hardware_tables(hardware))
    for path in sorted(RESULTS.glob("timeline-*.json")):
        Timeline.from_json(json.dumps(json.loads(path.read_text()))).save(
            IMAGES / f"{path.stem}.png"
        )


if __name__ == "__main__":
    main()
