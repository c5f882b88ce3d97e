"""The tables and the picture of docs/experts.md, from benchmarks/experts.py's rows."""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from copies_tables import table
from counterpoint.model.experts import predict

from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import shipped
from counterpoint.measure import record
from counterpoint.measure.speedups import Speedups, draw_speedups
from counterpoint.problem import Problem

Row = dict[str, Any]
ABOVE = 1.02  # a pick is right up to this much above the faster of the two
NAMES = {"all_to_all_matmul": "to the experts", "matmul_all_to_all": "back"}
BARS = {4096: 1.25}  # speedup over the libraries' pair, the mean at so many tokens


class Measured:
    """One case: what its arms took."""

    def __init__(self, rows: Sequence[Row], busiest: int) -> None:
        self.head, self.busiest = rows[0], busiest
        self.seconds = {row["arm"]: row["median_s"] for row in rows}
        self.skews = {row["arm"]: row["skew_s"] for row in rows}
        self.back = self.head["op"] == "matmul_all_to_all"

    def fastest(self, start: str, end: str = "") -> float:
        """Seconds of the fastest arm of that name."""
        of = [t for arm, t in self.seconds.items() if arm.startswith(start) and arm.endswith(end)]
        return min(of)

    @property
    def matmul_s(self) -> float:
        """The faster of the libraries' grouped matmul and a loop."""
        return self.fastest("matmul ")

    @property
    def pair_s(self) -> float:
        """The faster pair of the libraries, whose rows are not in place."""
        return self.fastest("pair ")

    @property
    def in_place_s(self) -> float:
        """The same with the pass that puts them there; with one expert it does nothing."""
        if self.head["experts"] == 1:
            return self.pair_s
        return min(t for a, t in self.seconds.items() if a.startswith("in place") and "," not in a)

    @property
    def ideal_s(self) -> float:
        """The longer of the libraries' two sides: what is left where all of the other hides."""
        return max(self.matmul_s, self.seconds["communication"])

    @property
    def ours_s(self) -> float:
        """One kernel."""
        return self.seconds["one kernel"]

    @property
    def planned_s(self) -> float:
        """By a plan of copies, of the sizes that the library gives it; inf where there is none."""
        return self.seconds.get("plan grouped", math.inf)

    @property
    def better_s(self) -> float:
        """One kernel or a plan, whichever is faster."""
        return min(self.ours_s, self.planned_s)

    @cached_property
    def predicted(self) -> dict[str, float]:
        """Seconds of each way that auto weighs where counts are host-known."""
        h = self.head
        machine = shipped(h["gpu"], h["ranks"])
        assert machine is not None
        rows, experts = self.busiest, h["experts"]
        equal = h["routing"] == "uniform"
        guess = predict(rows, h["k"], h["n"], experts, "bfloat16", h["ranks"], machine,
                        back=self.back, equal=equal)  # fmt: skip
        found = {"serial": guess.serial_s, "one kernel": guess.fused_s}
        if equal:
            problem = Problem(h["op"], rows, h["n"], h["k"], h["ranks"], experts=experts)
            choice = by_model(problem, machine)
            found |= {"serial": choice.serial_s}
            found["grouped"] = next(c.seconds for c in choice.table if "grouped" in c.spec)
            self.spec = choice.spec
        else:
            self.spec = "serial fused" if guess.fused else "serial"
        return found

    @property
    def picked(self) -> str:
        """What auto takes where counts are host-known."""
        assert self.predicted
        return {"serial fused": "one kernel"}.get(self.spec, self.spec.split()[0])

    @property
    def picked_s(self) -> float:
        """And its time."""
        return self.ways[self.picked]

    @property
    def ways(self) -> dict[str, float]:
        """Seconds of each way that auto weighs."""
        found = {"serial": self.in_place_s, "one kernel": self.ours_s}
        return found | ({"grouped": self.planned_s} if "plan grouped" in self.seconds else {})


def read(path: Path) -> list[Measured]:
    """Its cases, in the order of the file."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in record.read(path):
        if row["table"] != "experts":
            continue
        key = tuple(row[name] for name in ("op", "model", "tokens", "routing"))
        cases.setdefault(key, []).append(row)
    # what the busiest rank gets of the rows there it sends back: the same table of counts
    busiest = {key[1:]: rows[0]["rows"] for key, rows in cases.items()
               if key[0] == "all_to_all_matmul"}  # fmt: skip
    return [Measured(rows, busiest[key[1:]]) for key, rows in cases.items()]


def sections(results: Path, images: Path) -> dict[str, str]:
    """The text of each marker; {} without rows. Draws the picture."""
    paths = sorted(results.glob("experts-*x-h200.jsonl"), reverse=True)
    if not paths:
        return {}
    files = [read(path) for path in paths]
    panels: list[Speedups] = []
    parts: list[str] = []
    for cases in files:
        h = cases[0].head
        ranks = h["ranks"]
        for op, name in NAMES.items():
            some = [c for c in cases if c.head["op"] == op]
            parts.append(f"{ranks} GPUs, rows {name}:\n\n{_times(some)}\n\n{_means(some)}")
        panels += [
            Speedups(f"{ranks} GPUs, {name}", *_speedups([c for c in cases if c.head["op"] == op]))
            for op, name in NAMES.items()
        ]
    h = files[0][0].head
    where = (
        f"{h['gpu']}, driver {h['driver']}, torch {h['torch']}, NCCL {h['nccl']}, NVLink multicast "
        f"{'on' if h['multicast'] else 'off'}"
    )
    commits = ", ".join(
        f"{c[0].head['ranks']} GPUs {c[0].head['date']} at commit {c[0].head['commit']}"
        for c in files
    )
    draw_speedups(panels[:2], images / "experts.png",
                  source=f"{where}, {h['date']}, commit {h['commit']}",
                  title="Experts: speedup over the libraries with rows in place")  # fmt: skip
    return {
        "experts": "![experts in one kernel](images/experts.png)\n\n" + "\n\n".join(parts)
        + f"\n\nMicroseconds, CUDA graphs, one rotation a case. {where}; {commits}.",
        "experts-choice": "\n".join(_choice(cases) for cases in files),
        "experts-ablation": _ablation([case for cases in files for case in cases]),
        "experts-soak": "\n".join(_soaks(paths)),
    }  # fmt: skip


def readme(results: Path) -> str:
    """The uniform cases of the most GPUs, for the README; "" without rows."""
    paths = sorted(results.glob("experts-*x-h200.jsonl"), reverse=True)
    if not paths:
        return ""
    cases = read(paths[0])
    h = cases[0].head
    shown = [c for c in cases if c.head["routing"] == "uniform" and c.head["tokens"] != 1024]
    lines: list[list[str]] = []
    for c in shown:
        least = c.in_place_s / c.picked_s
        lines.append([
            NAMES[c.head["op"]], f"{c.head['model']}, {c.head['tokens']}", _us(c.matmul_s),
            _us(c.seconds["communication"]), _us(c.pair_s), _us(c.in_place_s), _us(c.ours_s),
            _us(c.planned_s), f"**{_us(c.picked_s)}**", f"{least:.2f}", c.picked,
        ])  # fmt: skip
    head = ["rows", "model, tokens of a rank", "matmul", "all-to-all", "libraries",
            "libraries, rows in place", "one kernel", "plan of copies", "**auto**",
            "in place / auto", "its way"]  # fmt: skip
    backs = [c for c in cases if c.back]
    sums = [c.fastest("in place", ", sum") / c.seconds["one kernel, sum"] for c in backs]
    less = [1 - min(c.better_s, c.pair_s) / c.pair_s for c in cases]
    return (
        f"{table(head, lines)}\n\n{h['ranks']}x {h['gpu']}, bf16, driver {h['driver']}, torch "
        f"{h['torch']}, NCCL {h['nccl']}, NVLink multicast {'on' if h['multicast'] else 'off'}, "
        f"{h['date']}, commit {h['commit']}. Microseconds, CUDA graphs, one rotation a case. Over "
        f"all {len(cases)} cases, half of them skewed: {fmean(less):.0%} less time than the "
        f"libraries' grouped matmul and all-to-all alone, {max(less):.0%} at most; back with the "
        f"weighted sum of a token's rows ({len(backs)} cases) {geometric_mean(sums):.2f}x. *Auto* "
        "where counts are host-known, by the predictions of this version."
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _times(cases: Sequence[Measured]) -> str:
    back = cases[0].back
    head = ["model, tokens of a rank", "matmul", "all-to-all", "weights once", "pair", "in place",
            "ideal, less", "one kernel", "less than pair", "than in place", "hidden", "plan",
            "auto"]  # fmt: skip
    if back:
        head += ["in place, sum", "one kernel, sum", "less"]
    lines: list[list[str]] = []
    for c in cases:
        h = c.head
        hidden = (c.in_place_s - c.ours_s) / (c.in_place_s - c.ideal_s)
        line = [f"{h['model']}, {h['tokens']}, {h['routing']}", _us(c.matmul_s),
                _us(c.seconds["communication"]), _us(h["weight_bytes"] / 4.3e12), _us(c.pair_s),
                _us(c.in_place_s), f"{_us(c.ideal_s)}, {1 - c.ideal_s / c.pair_s:.0%}",
                _us(c.ours_s), f"{1 - c.ours_s / c.pair_s:.0%}",
                f"{1 - c.ours_s / c.in_place_s:.0%}", f"{hidden:.0%}",
                _us(c.planned_s) if c.planned_s < math.inf else "-", c.picked]  # fmt: skip
        if back:
            theirs, ours = c.fastest("in place", ", sum"), c.seconds["one kernel, sum"]
            line += [_us(theirs), _us(ours), f"{1 - ours / theirs:.0%}"]
        lines.append(line)
    return table(head, lines)


def _means(cases: Sequence[Measured]) -> str:
    """What the bars ask for."""
    texts: list[str] = []
    for tokens in dict.fromkeys(c.head["tokens"] for c in cases):
        some = [c for c in cases if c.head["tokens"] == tokens]
        pair = geometric_mean(c.pair_s / min(c.better_s, c.pair_s) for c in some)
        place = geometric_mean(c.in_place_s / c.picked_s for c in some)
        bar = f" (aim, of 8 GPUs: {BARS[tokens]})" if tokens in BARS else ""
        texts.append(f"{tokens} tokens: pair / the fastest {pair:.2f}{bar}, in place / auto "
                     f"{place:.2f}")  # fmt: skip
    less = [1 - min(c.better_s, c.pair_s) / c.pair_s for c in cases]
    ideal = [1 - c.ideal_s / c.pair_s for c in cases]
    texts.append(
        f"less time than the pair, {len(cases)} cases: mean {fmean(less):.0%}, most "
        f"{max(less):.0%}; the ideal has {fmean(ideal):.0%} and {max(ideal):.0%}"
    )
    return "; ".join(texts) + "."


def _speedups(cases: Sequence[Measured]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    ideals: dict[str, float] = {}
    for c in cases:
        h = c.head
        label = f"{h['model']}, {h['tokens']}, {h['routing']}"
        rows[label] = {"one kernel": c.in_place_s / c.ours_s,
                       "libraries, rows not in place": c.in_place_s / c.pair_s}  # fmt: skip
        if c.planned_s < math.inf:
            rows[label]["plan of copies"] = c.in_place_s / c.planned_s
        rows[label]["auto"] = c.in_place_s / c.picked_s  # above the way that it takes
        ideals[label] = c.in_place_s / c.ideal_s
    return rows, ideals


def _choice(cases: Sequence[Measured]) -> str:
    """How often auto is right, host-known, and how far predictions are off."""
    best = [min(c.ways.values()) for c in cases]
    regrets = [c.picked_s / b - 1 for c, b in zip(cases, best, strict=True)]
    right = fmean(r <= ABOVE - 1 for r in regrets)
    always = fmean(c.ours_s <= ABOVE * b for c, b in zip(cases, best, strict=True))
    least = min(c.in_place_s / c.picked_s for c in cases)
    errors = sorted(abs(c.predicted[way] / t - 1) for c in cases for way, t in c.ways.items())
    return (
        f"- {cases[0].head['ranks']} GPUs, {len(cases)} cases: auto right in {right:.0%} "
        f"(always one kernel {always:.0%}), mean regret {fmean(regrets):.1%}, worst "
        f"{max(regrets):.1%}, least serial / auto {least:.2f}; predictions off by "
        f"{errors[len(errors) // 2]:.0%} in the median, {errors[-1]:.0%} at worst."
    )


def _soaks(paths: Sequence[Path]) -> list[str]:
    """What came of calls under random delays; that there are none yet, where there are no rows."""
    rows = [row for path in paths for row in record.read(path) if row["table"] == "experts soak"]
    lines = [
        f"- {row['op']}: {row['calls']:,} calls on {row['ranks']} GPUs in {row['seconds']:.0f} s, "
        f"{row['eager']:,} of them eager, the others replayed: {row['wrong']:,} wrong."
        for row in rows
    ]
    return lines or ["- Not yet run at this commit."]


def _ablation(cases: Sequence[Measured]) -> str:
    """Microseconds of each other way, beside the one that is taken."""
    known = ("matmul", "pair", "in place", "communication", "one kernel", "own rank first",
             "rank 0 first on all")  # fmt: skip
    lines: list[list[str]] = []
    for c in cases:
        others = {a: t for a, t in c.seconds.items() if not a.startswith(known)}
        if all(a.startswith("plan") for a in others):
            continue
        if others:
            text = ", ".join(f"{arm} {_us(t)}" for arm, t in others.items())
            h = c.head
            label = f"{NAMES[h['op']]}, {h['model']}, {h['tokens']}, {h['routing']}"
            lines.append([f"{h['ranks']} GPUs, {label}", _us(c.ours_s), text])
    return table(["case", "as taken", "else, without the operator around it"], lines)
