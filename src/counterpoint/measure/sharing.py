"""The rows of the experiment in loop.py, pair by pair: what its tables and pictures show."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.measure import arms, canvas, ratios

Row = dict[str, Any]
PLAIN = arms.BASELINE


@dataclass(frozen=True)
class Timed:
    """One pair in one mode.

    Args:
        label: of the pair.
        mode: "graph" or "eager".
        arms: the row of each arm, in the order of the experiment.
        refused: controls that could not be had, and why.
    """

    label: str
    mode: str
    arms: dict[str, Row] = field(default_factory=dict[str, Row])
    refused: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def head(self) -> Row:
        """Any row: for what they have in common."""
        return next(iter(self.arms.values()))

    @property
    def ideal_s(self) -> float:
        """Of the pipeline whose parts share nothing, by the faster of both transports."""
        return self.head["ideal_s"]

    @property
    def ideal_ratio(self) -> float:
        """TimeRatio of the ideal pipeline whose collectives are the library's, on SMs."""
        return self.head["ideal_sm_s"] / self.seconds("sequential")

    @property
    def fastest(self) -> str:
        """The arm with the lowest median."""
        return min(self.arms, key=self.seconds)

    def seconds(self, arm: str) -> float:
        """Median of an arm."""
        return self.arms[arm]["median_s"]

    def less(self, arm: str) -> float:
        """The share of plain overlap's time that an arm saves, by medians."""
        return 1 - self.seconds(arm) / self.seconds(PLAIN)


def timed(rows: Sequence[Row]) -> list[Timed]:
    """The pairs and modes of rows, in their order; of an arm measured twice, the last row.

    Args:
        rows: as `loop_arms.measure` returns them, of one number of GPUs.
    """
    found: dict[tuple[str, str], Timed] = {}
    for row in rows:
        if row["arm"] == "shapes":
            continue
        key = row["pair"], row["mode"]
        one = found.setdefault(key, Timed(*key))
        if "refused" in row:
            one.refused[row["arm"]] = row["refused"]
        else:
            one.arms[row["arm"]] = row
    return [one for one in found.values() if one.arms]


def energy_text(row: Row) -> str:
    """Energy of one GPU and its clock, as "62 J, 1755 MHz"; "" where they were not read."""
    # 0 J: the counter did not move while the arm ran
    if not row.get("energy_j"):
        return ""
    return f"{canvas.digits(row['energy_j'])} J, {row['arm_sm_clock_mhz']:.0f} MHz"


def machine_text(row: Row) -> str:
    """GPUs, driver, libraries, date and commit of a row: what stands under a table."""
    multicast = "on" if row["multicast"] else "off"
    registers = "on" if row["nccl_graph_register"] else "off"
    size = f", 1/{row['scale']} of the published size" if row["scale"] > 1 else ""
    return (
        f"{row['ranks']}x {row['gpu']}, bf16, driver {row['driver']}, torch {row['torch']}, Triton "
        f"{row['triton']}, NCCL {row['nccl']}, NVLink multicast {multicast}, graph registration "
        f"{registers}, {row['date']}, commit {row['commit']}{size}"
    )


def draw_timed(found: Sequence[Timed], path: Path, *, title: str) -> Path:
    """Draw the arms of pairs as bars above their ideal.

    Args:
        found: one panel each, in one mode.
        path: ends in .png, .svg or .pdf.
        title: of the picture.

    Returns:
        The path written.

    Raises:
        InputError: there is nothing to draw, or the suffix is none of these.
    """
    pairs = [
        arms.Pair(one.label, one.ideal_s, [
            arms.Arm(name, row["median_s"], row["p20_s"], row["p80_s"], energy_text(row))
            for name, row in one.arms.items()
        ])
        for one in found
    ]  # fmt: skip
    source = f"{machine_text(found[0].head)}; medians, low to high: p20 to p80" if found else ""
    return arms.draw_arms(pairs, path, title=title, source=source)


def draw_shapes(rows: Sequence[Row], path: Path, *, title: str) -> Path:
    """Draw TimeRatio over resident blocks per SM, a panel for each GEMM and collective.

    The ideal is that of the library's collectives on SMs: the sweep has no others.

    Args:
        rows: as `loop_arms.measure` returns them; those of the sweep are drawn.
        path: ends in .png, .svg or .pdf.
        title: of the picture.

    Returns:
        The path written.

    Raises:
        InputError: there is no sweep in the rows, or the suffix is none of these.
    """
    ideals = {one.label: one.ideal_ratio for one in timed(rows) if one.mode == "graph"}
    sweep = [row for row in rows if row["arm"] == "shapes"]
    panels: dict[tuple[str, str], dict[tuple[str, bool], dict[int, float]]] = {}
    bounds: dict[tuple[str, str], dict[str, float]] = {}
    for row in sweep:
        place = row["gemm"], row["collective"]
        curves = panels.setdefault(place, {})
        points = curves.setdefault((row["kernel"], not row["priority"]), {})
        points[row["blocks_per_sm"]] = row["time_ratio"]
        if row["pair"] in ideals:
            bounds.setdefault(place, {})[row["kernel"]] = ideals[row["pair"]]
    drawn: list[ratios.Panel] = []
    for place, curves in panels.items():
        own = [
            ratios.Curve(label, sorted(points.items()), dashed=dashed)
            for (label, dashed), points in curves.items()
        ]
        gemm, collective = place[0], place[1].replace("_", "-")
        # each kernel has an ideal of its own: one line for all only if it is the same
        levels = sorted({round(ideal, 2) for ideal in bounds.get(place, {}).values()})
        text = f", ideal {levels[0]:.2f} to {levels[-1]:.2f}" if len(levels) > 1 else ""
        ideal = levels[0] if len(levels) == 1 else None
        drawn.append(ratios.Panel(f"{gemm} + {collective}{text}", own, ideal))
    source = f"{machine_text(sweep[0])}; SM collectives, in the ideal too" if sweep else ""
    return ratios.draw_ratios(drawn, path, title=title, source=source)
