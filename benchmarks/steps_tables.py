"""Tables and picture of whole steps in docs/training.md, from benchmarks/steps.py's rows."""

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from copies_tables import table

from counterpoint.measure import record
from counterpoint.measure.speedups import Speedups, draw_speedups

Row = dict[str, Any]
DLRM = "DLRM-DCNv2"
BOTH = "forward + backward"
# in the order of columns; those that are not ours
UNFUSED = {DLRM: ("torch", "lookup"), "experts": ("torch", "torch, counts", "serial")}
OURS = {DLRM: ("fused",), "experts": ("fused, host", "fused")}


class Step:
    """One step of one model at one size: what its ways take, and its two sides alone."""

    def __init__(self, head: Row, what: str, seconds: dict[tuple[str, str], float]) -> None:
        self.head, self.what = head, what
        self.kind = DLRM if head["model"] == DLRM else "experts"
        self.seconds = {way: t for (w, way), t in seconds.items() if w == what}
        if self.kind == DLRM:
            # the backward's all-to-all is not hidden: the bound is that of the forward
            sides = (min(t for (w, _), t in seconds.items() if w == "pooling"),
                     seconds["exchange", ""])  # fmt: skip
        else:
            sides = seconds["matmuls", what], seconds["exchanges", what]
        self.compute_s, self.communication_s = sides

    @property
    def label(self) -> str:
        """Of a line."""
        return f"{self.head['model']}, {self.head['size']}, {self.what}"

    @property
    def bound_s(self) -> float:
        """What hiding saves at most: the shorter side."""
        return min(self.compute_s, self.communication_s)

    @property
    def unfused_s(self) -> float:
        """The fastest of those that are not ours."""
        return min(self.seconds[way] for way in UNFUSED[self.kind])

    @property
    def fused_s(self) -> float:
        """Ours."""
        return self.seconds["fused"]

    @property
    def saved_s(self) -> float:
        """Against the fastest."""
        return self.unfused_s - self.fused_s

    def over(self, way: str) -> float:
        """Time of ours / time of that way."""
        return self.fused_s / self.seconds[way]


def read(path: Path) -> list[Step]:
    """Its steps, in the order of the file."""
    cases: dict[tuple[str, int], list[Row]] = {}
    for row in record.read(path):
        cases.setdefault((row["model"], row["size"]), []).append(row)
    steps: list[Step] = []
    for rows in cases.values():
        seconds = {(r["what"], r["way"]): r["median_s"] for r in rows}
        whats = dict.fromkeys(r["what"] for r in rows if r["way"] == "fused")
        steps += [Step(rows[0], what, seconds) for what in sorted(whats, key=_order)]
    return steps


def sections(results: Path) -> dict[str, str]:
    """The text of each marker of docs/training.md."""
    measured = _measured(results)
    if not measured:
        return {"steps": "Not measured yet."}
    parts = ["![whole steps](images/steps.png)"]
    for num, steps in measured.items():
        parts.append(f"**{num} GPUs**")
        for kind in UNFUSED:
            if some := [s for s in steps if s.kind == kind]:
                parts += [_table(some, kind), _means(some)]
        parts.append(_source(steps[0].head))
    return {"steps": "\n\n".join(parts)}


def readme(results: Path) -> str:
    """A line for the README, of the most GPUs there are; "" without rows."""
    for num, steps in _measured(results).items():
        texts: list[str] = []
        for kind, name in ((DLRM, "a DLRM"), ("experts", "a layer of experts with `max_rows=`")):
            some = [s for s in steps if s.kind == kind and s.what == BOTH]
            if some:
                torch, fastest = _less(some, "torch"), _less(some)
                texts.append(
                    f"{name} {_than(torch)} time than with torch's own operators, {_than(fastest)} "
                    f"than the fastest way that is not fused ({len(some)} sizes)"
                )
        return (
            f"[Whole steps](docs/training.md#whole-steps), forward and backward, on {num}x "
            f"{steps[0].head['gpu']}, in the mean: {'; '.join(texts)}."
        )
    return ""


def draw(results: Path, images: Path) -> None:
    """How much faster than the fastest that is not fused; nothing without rows."""
    measured = _measured(results)
    if not measured:
        return
    first = next(iter(measured.values()))
    labels = [s.label for s in first if s.what != "tables"]
    panels: list[Speedups] = []
    for num, steps in measured.items():
        found = {s.label: s for s in steps if s.what != "tables"}
        if list(found) == labels:
            rows = {label: {"fused": s.unfused_s / s.fused_s,
                            "torch": s.unfused_s / s.seconds["torch"]}
                    for label, s in found.items()}  # fmt: skip
            ideals = {label: s.unfused_s / (s.unfused_s - s.bound_s) for label, s in found.items()}
            panels.append(Speedups(f"{num} GPUs", rows, ideals))
    h = first[0].head
    source = (
        f"{h['gpu']}, bf16, {h['date']}; serial is the fastest that is not fused, ideal hides the "
        "shorter side"
    )
    draw_speedups(panels[:2], images / "steps.png", title="Whole steps", source=source)


def _measured(results: Path) -> dict[int, list[Step]]:
    """Number of GPUs -> steps, from the most GPUs down."""
    paths = {int(p.name.split("-")[1][:-1]): p for p in results.glob("steps-*x-h200.jsonl")}
    found = {num: read(paths[num]) for num in sorted(paths, reverse=True)}
    return {num: steps for num, steps in found.items() if steps}


def _order(what: str) -> int:
    return ("tables", "forward", BOTH).index(what)


def _less(steps: Sequence[Step], way: str = "") -> float:
    """The share of time that ours takes less, in the geometric mean."""
    return 1 - geometric_mean(s.over(way) if way else s.fused_s / s.unfused_s for s in steps)


def _than(less: float) -> str:
    return f"{abs(less):.0%} {'less' if less >= 0 else 'more'}"


def _table(steps: Sequence[Step], kind: str) -> str:
    """Milliseconds of every step."""
    sides = ("pooling", "all-to-all, concat") if kind == DLRM else ("matmuls", "all-to-alls")
    size = "samples" if kind == DLRM else "tokens of a rank"
    head = [f"model, {size}, step", *UNFUSED[kind], *OURS[kind][:-1], "**fused**",
            "less than torch", "than the fastest", "saved", *sides, "saved / shorter"]  # fmt: skip
    lines: list[list[str]] = []
    for s in steps:
        cells = [_ms(s.seconds[way]) for way in (*UNFUSED[kind], *OURS[kind][:-1])]
        lines.append([
            s.label, *cells, f"**{_ms(s.fused_s)}**", f"{1 - s.over('torch'):.0%}",
            f"{1 - s.fused_s / s.unfused_s:.0%}", _ms(s.saved_s), _ms(s.compute_s),
            _ms(s.communication_s), f"{s.saved_s / s.bound_s:.0%}",
        ])  # fmt: skip
    return table(head, lines)


def _means(steps: Sequence[Step]) -> str:
    """One sentence a step."""
    texts: list[str] = []
    for what in dict.fromkeys(s.what for s in steps):
        some = [s for s in steps if s.what == what]
        worst = 1 - max(s.fused_s / s.unfused_s for s in some)
        texts.append(
            f"{what} {_than(_less(some, 'torch'))} time than torch, {_than(_less(some))} than the "
            f"fastest that is not fused ({_than(worst)} at worst)"
        )
    return f"Geometric means: {'; '.join(texts)}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _source(h: Row) -> str:
    return (
        f"{h['ranks']}x {h['gpu']}, bf16, driver {h['driver']}, torch {h['torch']}, Triton "
        f"{h['triton']}, NCCL {h['nccl']}, NVLink multicast {'on' if h['multicast'] else 'off'}, "
        f"{h['date']}, commit {h['commit']}. Milliseconds of the slowest rank, eager calls, all "
        "ways of a size in one randomised rotation."
    )
