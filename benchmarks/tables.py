"""The tables and pictures of README.md and of pages under docs/, from the committed rows.

Nothing in them is written by hand: `make readme` makes them again from benchmarks/results/.
"""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import copies_tables
import decode_tables
import embedding_tables
import experts_tables
import few_rows_tables
import losses_tables
import mesh_prediction
import sharing_tables
import steps_tables
from counterpoint.choose.rule import RULE

from counterpoint.choose.known import SHIPPED, shipped
from counterpoint.cli.evaluate_report import HEAD, cells_of, draw, draw_errors, errors_of
from counterpoint.costs import Costs
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.bars import BarRow, draw_bars
from counterpoint.measure.compare import FIXED
from counterpoint.measure.draw import draw_timeline
from counterpoint.measure.evaluated import (
    MANY_TOKENS,
    Found,
    parts_of,
    scenarios_of,
    speedups_of,
    tiles_of,
    ways_of,
)
from counterpoint.measure.scatter import Point, draw_scatter
from counterpoint.model.estimate import estimate, predicted_s
from counterpoint.plan.families import build
from counterpoint.problem import Problem
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
        """serial / auto."""
        return self.seconds("serial") / self.seconds("auto")

    @property
    def hidden(self) -> float:
        """The share of what could be hidden that is, by auto."""
        serial_s = self.seconds("serial")
        return (serial_s - self.seconds("auto")) / (serial_s - self.ideal_s)

    @property
    def points(self) -> list[Point]:
        """Predicted by the constants as they are against measured, of serial and every plan."""
        h, machine = self.head, shipped(self.head["gpu"], self.head["ranks"])
        assert machine is not None, "the library has measured costs of H200s"
        problem = Problem(h["op"], h["m"], h["n"], h["k"], h["ranks"], h["dtype"])
        return [
            Point(f"{arm}, {h['m']},{h['n']},{h['k']}", h["op"],
                  predicted_s(build(problem, arm, machine), machine), row["median_s"])
            for arm, row in self.graph.items() if arm == "serial" or arm not in FIXED
        ]  # fmt: skip


def shapes_of(path: Path) -> list[Shape]:
    """The shapes of a results file, in its order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in record.read(path):
        groups.setdefault((row["op"], row["m"], row["n"], row["k"]), []).append(row)
    return [Shape(rows) for rows in groups.values()]


def overlap_table(shapes: list[Shape]) -> str:
    """The main table: graph replays."""
    lines = [
        "| op | M, N, K | matmul | NCCL | serial | torch symm_mem | **auto** | its plan "
        "| serial / auto | hidden | best plan measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    arms = ("compute", "communication", "serial", "torch_symm_mem", "auto")
    for s in shapes:
        h = s.head
        cells = [h["op"], f"{h['m']}, {h['n']}, {h['k']}"]
        cells += [ms(s.seconds(arm)) for arm in arms]
        hidden = f"{s.hidden:.0%}" if s.ratio > 1 else "loses"
        hidden = "-" if s.graph["auto"]["pick"] == "serial" else hidden
        cells += [s.graph["auto"]["pick"], f"**{s.ratio:.2f}**", hidden]
        cells += [f"{ms(s.seconds(s.best))} {s.best}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(shapes: list[Shape]) -> str:
    """What the rows say together: against the peer, against the best, of the model."""
    peer = [s.seconds("torch_symm_mem") / s.seconds("auto") for s in shapes]
    large = [r for r, s in zip(peer, shapes, strict=True) if s.head["m"] >= 2048]
    serial = [s.ratio for s in shapes]
    regret = [s.seconds("auto") / s.seconds(s.best) - 1 for s in shapes]
    eager = [s.eager["serial"]["plain_eager_s"] / s.eager["auto"]["plain_eager_s"] for s in shapes]
    peer_eager = [
        s.eager["torch_symm_mem"]["plain_eager_s"] / s.eager["auto"]["plain_eager_s"]
        for s in shapes
    ]
    off = sorted(abs(p.error) for s in shapes for p in s.points)
    worst = max((p for s in shapes for p in s.points), key=lambda p: abs(p.error))
    lines = [
        f"- serial / auto: geometric mean {geometric(serial):.2f}, least {min(serial):.2f}; plain "
        f"eager {geometric(eager):.2f}, least {min(eager):.2f}",
        f"- torch symm_mem / auto: geometric mean {geometric(peer):.2f} ({geometric(large):.2f} of "
        f"those with M >= 2048), least {min(peer):.2f}; plain eager {geometric(peer_eager):.2f}, "
        f"least {min(peer_eager):.2f}",
        f"- auto against the best plan measured beside it: {max(regret):.1%} slower at worst, "
        f"{sum(regret) / len(regret):.1%} in the mean",
        f"- {len(off)} predictions: median error {statistics.median(off):.1%}, worst "
        f"{worst.error:+.1%} ({worst.label})",
    ]
    for s in shapes:
        for mode, row in (("graph", s.graph["auto"]), ("plain eager", s.eager["auto"])):
            if pair := row.get("serial_over_auto"):
                h = s.head
                lines.append(
                    f"- {h['op']} {h['m']}, {h['n']}, {h['k']}, {mode}, 200 pairs: serial / auto "
                    f"{pair[0]:.3f}, 95 % interval {pair[1]:.3f} to {pair[2]:.3f}"
                )
    return "\n".join(lines)


def geometric(values: list[float]) -> float:
    """Their geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def training_table(path: Path) -> str:
    """Forward and backward of an MLP, three ways."""
    cases: dict[str, dict[str, Row]] = {}
    for row in record.read(path):
        cases.setdefault(row["layer"], {})[row["arm"]] = row
    lines = [
        "| tokens, hidden, ffn | serial | usual async | ours | serial / ours | async / ours "
        "| eager serial, async, ours | saved MiB, each arm | ours: symmetric + scratch MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layer, arms in cases.items():
        h, s = arms["ours"], {name: row["median_s"] for name, row in arms.items()}
        eager = [ms(arms[name]["plain_eager_s"]) for name in ("serial", "async", "ours")]
        saved = [f"{arms[name]['saved_bytes'] / 2**20:.0f}" for name in arms]
        memory = " + ".join(f"{n / 2**20:.0f}" for n in h["workspace_bytes"])
        cells = [f"{h['m']}, {h['hidden']}, {h['ffn']} ({layer})", ms(s["serial"]), ms(s["async"])]
        cells += [ms(s["ours"]), f"**{s['serial'] / s['ours']:.2f}**"]
        cells += [f"**{s['async'] / s['ours']:.2f}**", ", ".join(eager), ", ".join(saved), memory]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def constants_table(path: Path) -> str:
    """The measured costs of a machine."""
    machine = Machine.from_json(json.dumps(json.loads(path.read_text())["machine"]))
    assert machine.measured is not None
    lines = [f"{machine.source}:", "", "| constant | value |", "|---|---|"]
    for field in dataclasses.fields(Costs):
        value = getattr(machine.measured, field.name)
        if field.name.endswith("flop_per_s"):
            text = f"{value / 1e12:.0f} Tflop/s"
        elif field.name.endswith("_per_s"):
            text = f"{value / 1e9:.0f} GB/s"
        else:
            text = f"{value * 1e6:.1f} us" if field.name.endswith("_s") else f"{value:.2f}"
        lines.append(f"| `{field.name}` | {text} |")
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


def draw_pair(path: Path, machine: Machine) -> None:
    """A measured timeline under the one that the model predicts for the same plan."""
    measured = Timeline.from_json(path.read_text())
    op, sizes, spec = re.fullmatch(r"(\w+) ([\d, ]+): (.+)", measured.title).groups()  # type: ignore[union-attr]
    m, n, k = map(int, sizes.split(","))
    problem = Problem(op, m, n, k, machine.num_devices)  # type: ignore[arg-type]
    predicted = estimate(build(problem, spec, machine), machine)
    draw_timeline(measured, IMAGES / f"{path.stem}.png", beside=predicted, width_in=9)


def scores_tables() -> str:
    """How often the chooser is right in the committed scenarios; draws them too."""
    tiles = tiles_of(record.read(RESULTS / "tiles-h200.jsonl"))
    parts: list[list[Found]] = []
    text: list[str] = []
    for ranks in (4, 2):
        rows = record.read(RESULTS / f"evaluate-{ranks}x-h200.jsonl")
        found = [each._replace(tiles={**tiles, **each.tiles}) for each in scenarios_of(rows)]
        machine = shipped(found[0].gpu, ranks)
        assert machine is not None, "the library has measured costs of H200s"
        parts.append(found)
        for name, part in parts_of([*found, *experts_of(ranks)]).items():
            if name.startswith("all "):
                continue
            text += [f"**{ranks} GPUs, {name}: {len(part)} scenarios**",
                     markdown([HEAD, *cells_of(part, machine)])]  # fmt: skip
        unseen = list(parts_of(found).values())[-1]
        many = [HEAD[:1] + HEAD[6:9], *cells_of(unseen, machine, MANY_TOKENS)]
        text += [f"**{ranks} GPUs, models not fitted to, {MANY_TOKENS} tokens or more**",
                 markdown(many), sentence(errors_of(unseen, machine))]  # fmt: skip
        draw_errors(found, machine, IMAGES / f"evaluate-errors-{ranks}x.png")
    draw(parts, IMAGES / "evaluate-speedups.png")
    replace(ROOT / "README.md", "chooser", short_scores(parts))
    return "\n\n".join(text)


def experts_of(ranks: int) -> list[Found]:
    """The scenarios with experts; none where they were not measured."""
    path = RESULTS / f"evaluate-experts-{ranks}x-h200.jsonl"
    return scenarios_of(record.read(path)) if path.exists() else []


def short_scores(parts: list[list[Found]]) -> str:
    """The model at what it was not made with, in a sentence for each number of GPUs."""
    lines: list[str] = []
    for found in parts:
        gpu, ranks = found[0].gpu, found[0].measured.problem.ranks
        unseen = parts_of(found)["models not fitted to"]
        way = next(w for w in ways_of(unseen, shipped(gpu, ranks)) if w.name == "the model now")
        means = speedups_of(way, unseen, MANY_TOKENS)
        assert way.score is not None, "a way to choose has a score"
        lines.append(
            f"{ranks} GPUs, {len(unseen)} scenarios of models it was not made with: within 2 % of "
            f"the fastest candidate in {way.score.right:.0%}, {way.score.mean_regret:.1%} slower "
            f"in the mean, {way.score.worst_regret:.1%} at worst; from {MANY_TOKENS} tokens on "
            f"{means['serial']:.2f}x serial, {means['torch']:.2f}x torch's fused operators."
        )
    return "\n".join(f"  {line}" for line in lines)


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its first row the head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def main() -> None:
    """Write all of them from the results of the largest machine measured."""
    paths = sorted(RESULTS.glob("overlap-*x-*.jsonl"), key=lambda p: int(p.name.split("-")[1][:-1]))
    largest = paths[-1]
    ranks = largest.name.split("-")[1]
    shapes = shapes_of(largest)
    IMAGES.mkdir(exist_ok=True)
    bars = [
        BarRow(label=f"{s.head['op']}\n{s.head['m']}, {s.head['n']}, {s.head['k']}",
               serial_s=s.seconds("serial"), ours_s=s.seconds("auto"), ideal_s=s.ideal_s)
        for s in shapes
    ]  # fmt: skip
    h = shapes[0].head
    source = f"{h['ranks']}x {h['gpu']}, bf16, {h['date']}; serial is NCCL + cuBLAS"
    draw_bars(bars, IMAGES / "overlap.png", title='Time of one call, serial against plan="auto"',
              source=source, relative_to_serial=True)  # fmt: skip
    where = caption(shapes)
    replace(ROOT / "README.md", "table", f"{overlap_table(shapes)}\n\n{where}")
    results = ROOT / "docs" / "results.md"
    sections = [
        f"## {p.name.split('-')[1][:-1]} GPUs\n\n{overlap_table(found)}\n\n{caption(found)}\n\n"
        f"{summary(found)}\n\nEager, milliseconds:\n\n{eager_table(found)}"
        for p in reversed(paths)
        for found in [shapes_of(p)]
    ]
    replace(results, "results", "\n\n".join(sections))
    training = [
        f"**{path.name.split('-')[1][:-1]} GPUs**\n\n{training_table(path)}"
        for path in sorted(RESULTS.glob("training-*.jsonl"), reverse=True)
    ]
    replace(results, "training", "\n\n".join(training))
    points = [point for s in shapes for point in s.points]
    draw_scatter(points, IMAGES / "model.png", title="Predicted against measured",
                 source=f"{h['ranks']}x {h['gpu']}, bf16, graphs, {h['date']}; constants fitted to "
                 "other shapes")  # fmt: skip
    constants = sorted(SHIPPED.glob("*.json"), reverse=True)
    replace(results, "constants", "\n\n".join(map(constants_table, constants)))
    hardware = RESULTS / f"hardware-{ranks}-h200.jsonl"
    replace(ROOT / "docs" / "hardware.md", "hardware", hardware_tables(hardware))
    machine = Machine.from_json(json.dumps(json.loads(constants[0].read_text())["machine"]))
    for path in sorted(RESULTS.glob("timeline-*.json")):
        draw_pair(path, machine)
    for name, text in sharing_tables.sections(RESULTS).items():
        replace(ROOT / "docs" / "sharing.md", name, text)
    if short := sharing_tables.short_table(RESULTS):
        replace(ROOT / "README.md", "sharing", short)
    sharing_tables.draw(RESULTS, IMAGES)
    replace(ROOT / "docs" / "losses.md", "finer", losses_tables.finer(record.read(largest)))
    for name, text in losses_tables.sections(RESULTS, IMAGES).items():
        replace(ROOT / "docs" / "losses.md", name, text)
    replace(ROOT / "README.md", "experts", experts_tables.readme(RESULTS))
    replace(ROOT / "README.md", "embedding", embedding_tables.readme(RESULTS))
    for name, text in experts_tables.sections(RESULTS, IMAGES).items():
        replace(ROOT / "docs" / "experts.md", name, text)
    for name, text in copies_tables.sections(RESULTS, IMAGES).items():
        replace(ROOT / "docs" / "transports.md", name, text)
    replace(ROOT / "docs" / "choosing.md", "scores", scores_tables())
    replace(ROOT / "docs" / "choosing.md", "rule", f"```\n{RULE.strip()}\n```")
    replace(ROOT / "docs" / "plans.md", "mesh", mesh_prediction.table(IMAGES))
    for name, text in decode_tables.sections(RESULTS).items():
        replace(ROOT / "docs" / "fused.md", name, text)
    if short := decode_tables.short_table(RESULTS):
        replace(ROOT / "README.md", "decode", short)
    decode_tables.draw(RESULTS, IMAGES)
    for name, text in embedding_tables.sections(RESULTS).items():
        replace(ROOT / "docs" / "embedding.md", name, text)
    embedding_tables.draw(RESULTS, IMAGES)
    if short := steps_tables.readme(RESULTS):
        replace(ROOT / "README.md", "steps", short)
    for name, text in steps_tables.sections(RESULTS).items():
        replace(ROOT / "docs" / "training.md", name, text)
    steps_tables.draw(RESULTS, IMAGES)
    if few := few_rows_tables.section(RESULTS):
        replace(ROOT / "docs" / "fused.md", "few-rows", few)
        replace(ROOT / "README.md", "few-rows", few_rows_tables.summary(RESULTS))


if __name__ == "__main__":
    main()
