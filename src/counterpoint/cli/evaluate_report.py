"""What `counterpoint evaluate` prints and draws of scenarios that were measured."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from counterpoint.choose.by_rule import RULE
from counterpoint.choose.known import shipped
from counterpoint.choose.score import RIGHT
from counterpoint.machine import Machine
from counterpoint.measure.evaluated import (
    MANY_TOKENS,
    Found,
    parts_of,
    points_of,
    speedups_of,
    ways_of,
)
from counterpoint.measure.scatter import draw_scatter
from counterpoint.measure.speedups import Speedups, draw_speedups

MISSES = 8  # that are listed, the worst first
OFF = 0.2  # a prediction that is off by more is counted
HEAD = ("chosen by", "scenarios", "right", "regret", "worst", "least", "serial /", "shard_p2p /",
        "torch /", "worst at")  # fmt: skip
LEFT = ("chosen by", "worst at")
# whose pick is drawn: the first of these that there is
WAYS = ("the model now", "the model now, tiles not known", "auto, as it was measured")


def report(found: Sequence[Found], machine: Machine | None) -> str:
    """Scores of all scenarios and of parts of them, how far predictions are off, and misses."""
    ranks = found[0].measured.problem.ranks
    lines = [f"{ranks} GPUs: right is within {RIGHT - 1:.0%} of the fastest candidate"]
    for name, part in parts_of(found).items():
        lines += ["", f"{name}: {len(part)}", *aligned([HEAD, *cells_of(part, machine)])]
        many = [HEAD[:1] + HEAD[6:9], *cells_of(part, machine, MANY_TOKENS)]
        if len(many) > 1:
            lines += ["", f"{name}, {MANY_TOKENS} tokens or more", *aligned(many)]
        if machine is not None:
            lines += ["", errors_of(part, machine)]
    return "\n".join([*lines, "", misses_of(found), ""])


def rule_text() -> str:
    """The static rule as it stands."""
    return f"the static rule:{RULE.rstrip()}"


def cells_of(
    part: Sequence[Found], machine: Machine | None, least_m: int = 0
) -> list[tuple[str, ...]]:
    """A row for each way to choose; with `least_m` its speedups at so many tokens alone."""
    rows: list[tuple[str, ...]] = []
    for way in ways_of(part, machine):
        means = speedups_of(way, part, least_m)
        ratios = tuple(f"{means[k]:.2f}" if k in means else "-"
                       for k in ("serial", "shard_p2p", "torch"))  # fmt: skip
        if least_m:
            if means:
                rows.append((way.name, *ratios))
            continue
        s = way.score
        if s is None:
            rows.append((way.name, f"{len(part)}", "-", "-", "-", "-", *ratios, ""))
            continue
        of = f"{s.scenarios}" if s.scenarios == s.asked else f"{s.scenarios} of {s.asked}"
        serial = (f"{s.speedup:.2f}", *ratios[1:])  # of luck too, whose time is none
        rows.append((s.way, of, f"{s.right:.0%}", f"{s.mean_regret:.1%}", f"{s.worst_regret:.1%}",
                     f"{s.least_speedup:.2f}", *serial, s.worst))  # fmt: skip
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their widest cell: longer than a narrow terminal, never cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = [name in LEFT for name in rows[0]]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]


def errors_of(part: Sequence[Found], machine: Machine) -> str:
    """How far predictions of all candidates are off."""
    points = points_of(part, machine)
    worst = max(points, key=lambda point: abs(point.error))
    off = sum(abs(point.error) > OFF for point in points)
    return (
        f"predictions of {len(points)} times: off by {median(abs(p.error) for p in points):.1%} in "
        f"the median, {off} by more than {OFF:.0%}, at worst {worst.error:+.0%} ({worst.label})"
    )


def misses_of(found: Sequence[Found]) -> str:
    """The picks of auto that were not right, the worst first."""
    lines: list[tuple[float, str]] = []
    for each in found:
        m = each.measured
        if each.picked in m.times and m.times[each.picked] > RIGHT * m.best_s:
            best = min(m.times, key=m.times.__getitem__)
            loss = m.times[each.picked] / m.best_s - 1
            lines.append((loss, f"{m.name}: {each.picked}, {loss:.1%} behind {best}"))
    text = "\n".join(line for _, line in sorted(lines, reverse=True)[:MISSES])
    return f"what auto missed, as it was measured:\n{text}" if text else "auto was right everywhere"


def draw(parts: Sequence[Sequence[Found]], path: Path) -> Path:
    """Serial over the model's pick, the fastest candidate and torch's fused operator, by scenario.

    Args:
        parts: scenarios by number of GPUs: a panel for each, of the scenarios that all have.
        path: of the picture.
    """
    panels: list[Speedups] = []
    names = [{each.measured.name for each in part} for part in parts]
    for part in parts:
        machine = shipped(part[0].gpu, part[0].measured.problem.ranks)
        ways = {way.name: way.seconds for way in ways_of(part, machine)}
        picks = next((ways[name] for name in WAYS if name in ways), {})
        rows: dict[str, dict[str, float]] = {}
        ideals: dict[str, float] = {}
        for each in sorted(part, key=_place):
            m = each.measured
            if not all(m.name in some for some in names):
                continue
            times = {"fastest candidate": m.best_s, "the model's pick": picks.get(m.problem, 0.0),
                     "torch symm_mem": each.torch_s}  # fmt: skip
            serial_s = m.times["serial"]
            rows[m.name] = {kind: serial_s / t for kind, t in times.items() if t}
            ideals[m.name] = serial_s / each.ideal_s
        panels.append(Speedups(f"{part[0].measured.problem.ranks} GPUs", rows, ideals))
    source = "NCCL + cuBLAS is serial; CUDA graphs, one rotation a scenario"
    return draw_speedups(panels, path, title="Speedup over serial by scenario", source=source)


def draw_errors(found: Sequence[Found], machine: Machine, path: Path) -> Path:
    """Predicted against measured times, of the models not fitted to where there are any."""
    parts = parts_of(found)
    name, part = list(parts.items())[-1]
    ranks, gpu = part[0].measured.problem.ranks, part[0].gpu
    source = f"{ranks}x {gpu}, CUDA graphs; {name}, {len(part)} scenarios"
    return draw_scatter(points_of(part, machine), path, title="Predicted against measured",
                        source=source, num_labels=2)  # fmt: skip


def _place(each: Found) -> tuple[str, int]:
    return each.measured.name.partition(",")[0], each.measured.problem.m
