"""The tables and pictures of docs/sharing.md, from the committed rows of benchmarks/resources.py.

`make readme` writes them, by tables.py. Ratios that miss their bar stand beside those that meet it.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from counterpoint.measure import record
from counterpoint.measure.loop_arms import TUNED, TUNED_SM
from counterpoint.measure.sharing import (
    PLAIN,
    Row,
    Timed,
    draw_shapes,
    draw_timed,
    energy_text,
    machine_text,
    timed,
)
from counterpoint.resources.controls import WAYS_IN, Controls

ARMS = ("sequential", PLAIN, "priority", "order", "granularity", "carve-out only", "shaping",
        "shaping, priority", "transport", TUNED)  # fmt: skip
ENERGY_ARMS = ("sequential", PLAIN, "transport", TUNED)
MODES = ("graph", "eager")
# controls that have no field of their own: values of `transport`
TRANSPORTS = {
    "copy_engine": "Collectives are copies and signals of ours; of an all-reduce, its second half.",
    "zero_cta": "The library's own copy-engine collectives.",
}


class Bar(NamedTuple):
    """What a pair has to reach on 8 GPUs: at most so many times the ideal."""

    pair: str
    arm: str
    at_most: float

    @property
    def ideal(self) -> str:
        """The field of the ideal that it is held against."""
        return "ideal_sm_s" if self.arm == TUNED_SM else "ideal_s"


BARS = (
    Bar("cb cuBLAS + all-to-all", TUNED, 1.06),
    Bar("cb cuBLAS + all-to-all", TUNED_SM, 1.08),
    Bar("cb cuBLAS + all-reduce", TUNED, 1.03),
    Bar("mb cuBLAS + all-reduce", TUNED, 1.04),
    Bar("mb cuBLAS + all-to-all", TUNED, 1.02),
    Bar("cb Triton 64x64x32 + all-reduce", TUNED, 1.06),
    Bar("cb Triton 64x64x32 + all-to-all", TUNED, 1.04),
    Bar("cb Triton 64x64x32 + all-to-all", TUNED_SM, 1.08),
)


def sections(results: Path) -> dict[str, str]:
    """Text for each pair of markers in docs/sharing.md.

    Args:
        results: folder of resources-{n}x-h200.jsonl; without any, only the controls are told.
    """
    made = {"controls": controls_table()}
    measured = _measured(results)
    if not measured:
        return made
    for name, (table, note) in TABLES.items():
        parts = [
            f"**{num} GPUs**\n\n{text}\n\n{machine_text(rows[0])}."
            for num, rows in measured.items()
            if (text := table(rows))
        ]
        made[name] = "\n\n".join([note, *parts] if parts else [])
    made["questions"] = questions(results)
    made["decisions"] = decisions(results)
    made["summary"] = "\n".join(f"- {num} GPUs: {summary(r)}" for num, r in measured.items())
    largest = next(iter(measured))
    made["arms-picture"] = f"![the arms of each pair](images/sharing-arms-{largest}x.png)"
    picture = f"![what shaping does, by blocks per SM](images/sharing-ratios-{largest}x.png)"
    made["shaping-picture"] = picture if _sweep(measured[largest]) else ""
    return made


def draw(results: Path, images: Path) -> list[Path]:
    """Draw the pictures of the largest number of GPUs there is.

    Args:
        results: folder of resources-{n}x-h200.jsonl.
        images: folder of the pictures; those of fewer GPUs are removed.

    Returns:
        The files written.
    """
    measured = _measured(results)
    if not measured:
        return []
    for old in images.glob("sharing-*x.png"):
        old.unlink()
    num, rows = next(iter(measured.items()))
    cublas = [one for one in _graph(rows) if one.head["kernel"] == "cuBLAS"]
    path = images / f"sharing-arms-{num}x.png"
    drawn = [draw_timed(cublas, path, title="Each control by itself, and tuned, in a CUDA graph")]
    if _sweep(rows):
        path = images / f"sharing-ratios-{num}x.png"
        drawn.append(draw_shapes(rows, path, title="What shaping a GEMM does to its overlap"))
    return drawn


def controls_table() -> str:
    """Every control in the words of `Controls`, and how it reaches the kernels."""
    text = (inspect.getdoc(Controls) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    told = {name: " ".join(meaning.split()) for name, meaning in found} | TRANSPORTS
    lines = _header("control", "what it does", "in a graph", "eager")
    for name, ways in WAYS_IN.items():
        lines.append(_line(f"`{name}`", told[name], *(ways.get(mode, "-") for mode in MODES)))
    return "\n".join(lines)


def bars_table(rows: Sequence[Row]) -> str:
    """How near to the ideal the pairs come that have a bar."""
    found = {one.label: one for one in _graph(rows)}
    lines = _header(
        "pair", "ideal ms", "tuned / ideal", "bar on 8 GPUs", "what was taken",
        "plain overlap / ideal", "less time than plain overlap", "p20..p80 of tuned / ideal",
    )  # fmt: skip
    for bar in BARS:
        one = found.get(bar.pair)
        if one is None or bar.arm not in one.arms:
            continue
        row = one.arms[bar.arm]
        ideal_s = row[bar.ideal]
        ratio = row["median_s"] / ideal_s
        _, low, high = row["plain_over_arm"]
        lines.append(_line(
            bar.pair + (", SM collectives kept" if bar.arm == TUNED_SM else ""),
            _ms(ideal_s), _bold(f"{ratio:.3f}", ratio <= bar.at_most), f"{bar.at_most:.2f}",
            row["controls"].removeprefix("overlap "), f"{one.seconds(PLAIN) / ideal_s:.3f}",
            f"{_percent(one.less(bar.arm))} ({_percent(1 - 1 / low)} to {_percent(1 - 1 / high)})",
            f"{row['p20_s'] / ideal_s:.3f}..{row['p80_s'] / ideal_s:.3f}",
        ))  # fmt: skip
    return _rows_or_nothing(lines)


def arms_table(rows: Sequence[Row]) -> str:
    """Each control by itself and all of them as tuned, in both modes."""
    return _by_mode(rows, ARMS)


def others_table(rows: Sequence[Row]) -> str:
    """The arms that the main table has no room for."""
    names = dict.fromkeys(arm for one in timed(rows) for arm in one.arms if arm not in ARMS)
    return _by_mode(rows, (PLAIN, *names, TUNED)) if names else ""


def energy_table(rows: Sequence[Row]) -> str:
    """Joules, watts and clock of some arms, and what the copy engines save."""
    lines = _header("pair", *ENERGY_ARMS)
    ratios: dict[str, float] = {}
    for one in _graph(rows):
        used = {arm: one.arms[arm] for arm in ENERGY_ARMS if energy_text(one.arms.get(arm, {}))}
        if not used:
            continue
        lines.append(_line(one.label, *(_energy(used.get(arm)) for arm in ENERGY_ARMS)))
        if PLAIN in used and "transport" in used:
            ratios[one.label] = used["transport"]["energy_j"] / used[PLAIN]["energy_j"]
    if not ratios:
        return _rows_or_nothing(lines)
    least, most = (pick(ratios, key=ratios.__getitem__) for pick in (min, max))
    saved = (
        f"Energy of a loop by copy engines / that of plain overlap: geometric mean "
        f"{geometric_mean(ratios.values()):.2f} of {_pairs(len(ratios))}, from "
        f"{ratios[least]:.2f} ({least}) to {ratios[most]:.2f} ({most})."
    )
    return "\n".join([*lines, "", saved])


def shaping_table(rows: Sequence[Row]) -> str:
    """Per Triton kernel and collective: shaped at best against unshaped, and the carve-out."""
    lines = _header(
        "pair", "unshaped", "shaped (blocks per SM)", "carve-out only", "unshaped, priority",
        "shaped, priority", "carve-out, priority", "ideal",
    )  # fmt: skip
    arms = {one.label: one for one in _graph(rows)}
    sweep = _sweep(rows)
    for label in dict.fromkeys(row["pair"] for row in sweep):
        one, cells = arms.get(label), list[tuple[float, str]]()
        for urgent, carve_out in ((False, "carve-out only"), (True, "carve-out, priority")):
            own = [row for row in sweep if row["pair"] == label and row["priority"] == urgent]
            whole = [row for row in own if row["unshaped"]]
            shaped = sorted((r for r in own if not r["unshaped"]), key=lambda r: r["time_ratio"])
            cells += [(row["time_ratio"], f"{row['time_ratio']:.3f}") for row in whole]
            cells += [
                (row["time_ratio"], f"{row['time_ratio']:.3f} ({row['blocks_per_sm']})")
                for row in shaped[:1]
            ]
            ratio = float("inf")
            if one is not None and carve_out in one.arms:
                ratio = one.seconds(carve_out) / one.seconds("sequential")
            cells.append(
                (ratio, "-" if one is None or carve_out not in one.arms else f"{ratio:.3f}")
            )
        best = min(ratio for ratio, _ in cells)
        ideal = f"{one.ideal_ratio:.3f}" if one else "-"
        lines.append(_line(label, *(_bold(t, ratio == best) for ratio, t in cells), ideal))
    return _rows_or_nothing(lines)


def summary(rows: Sequence[Row]) -> str:
    """What tuning wins over all pairs, at best and at worst, in one line."""
    found = [one for one in _graph(rows) if TUNED in one.arms]
    if not found:
        return "no pair was tuned in a graph."
    mean = 1 - geometric_mean([1 - one.less(TUNED) for one in found])
    best, worst = (pick(found, key=lambda one: one.less(TUNED)) for pick in (max, min))
    best_text, worst_text = (
        f"{_percent(one.less(TUNED))} with {one.label} (the ideal pipeline "
        f"{_percent(1 - one.ideal_s / one.seconds(PLAIN))})"
        for one in (best, worst)
    )
    return (
        f"tuned takes {_percent(mean)} less time than plain overlap, geometric mean of "
        f"{_pairs(len(found))} in a graph; at best {best_text}, at worst {worst_text}."
    )


def short_table(results: Path) -> str:
    """The pairs of cuBLAS on the most GPUs, for the README; "" without rows."""
    measured = _measured(results)
    if not measured:
        return ""
    _, rows = next(iter(measured.items()))
    lines = _header("GEMM + collective", "one after the other", "plain overlap", "**tuned**",
                    "ideal", "less than plain", "what was taken")  # fmt: skip
    for one in _graph(rows):
        if one.head["kernel"] == "cuBLAS" and TUNED in one.arms:
            lines.append(_line(
                one.label.replace("cuBLAS ", ""), _ms(one.seconds("sequential")),
                _ms(one.seconds(PLAIN)), _bold(_ms(one.seconds(TUNED)), True), _ms(one.ideal_s),
                _percent(one.less(TUNED)), one.arms[TUNED]["controls"].removeprefix("overlap "),
            ))  # fmt: skip
    text = (
        "Four iterations of a cuBLAS GEMM (cb: 8192 x 8192 x 8192, mb: 8192 x 57344 x 8192) and a "
        "collective of 896 MiB, ms, in one CUDA graph. "
    )
    return "\n".join([*lines, "", f"{text}{machine_text(rows[0])}."])


def questions(results: Path) -> str:
    """What ask_sharing.py has found, by the most GPUs that were asked."""
    asked = {n: _of_table("sharing", path) for n, path in _paths(results, "sharing").items()}
    rows = next((rows for rows in asked.values() if rows), [])
    by = {q: [row for row in rows if row["question"] == q] for q in "EFG"}
    if not all(by.values()):
        return ""
    lines = _header("behind", "clusters of", "starts after", "what follows it starts after",
                    "the kernel before ends after")  # fmt: skip
    lines += [
        _line(row["behind"], str(row["cluster"][0]),
              *(f"{row[name] * 1e6:.1f} us" for name in ("starts_s", "next_starts_s", "ends_s")))
        for row in by["E"]
    ]  # fmt: skip
    (cut,) = by["F"]
    missing = f"{cut['missing']:.2%} of the result is missing"
    seen = f"A cuBLAS matmul with {cut['blocks_left']} of its {cut['blocks']} blocks: {missing}."
    timed_arms = {row["arm"]: row["median_s"] for row in by["G"] if "median_s" in row}
    exchange = _header("896 MiB all-to-all by", "alone", "together with a matmul")
    exchange += [
        _line(name, f"{_ms(timed_arms[name])} ms", f"{_ms(timed_arms[f'{name} beside'])} ms")
        for name in ("sm", "copy_engine", "zero_cta") if name in timed_arms
    ]  # fmt: skip
    alone = f"The matmul alone: {_ms(timed_arms['matmul'])} ms."
    source = f"{rows[0]['ranks']}x {rows[0]['gpu']}, {rows[0]['date']}, commit {rows[0]['commit']}."
    return "\n".join([*lines, "", seen, "", *exchange, "", alone, "", source])


def decisions(results: Path) -> str:
    """What searches of one pair decide, again and again."""
    lines: list[str] = []
    for num, path in _paths(results).items():
        rows = _of_table("decisions", path)
        if rows:
            found = Counter(row["controls"].removeprefix("overlap ") for row in rows)
            times = ", ".join(f"{spec} ({count})" for spec, count in found.most_common())
            slowest, fastest = (pick(row["median_s"] for row in rows) for pick in (max, min))
            spread, longest = slowest / fastest - 1, max(row["search_s"] for row in rows)
            lines.append(
                f"{num} GPUs, {len(rows)} searches of {rows[0]['pair']}, the longest {longest:.1f} "
                f"s: {times}. Their times differ by {spread:.1%}. Commit {rows[0]['commit']}."
            )
    return "\n".join(lines)


TABLES: dict[str, tuple[Callable[[Sequence[Row]], str], str]] = {
    "bars": (
        bars_table,
        "CUDA graphs, medians of the slowest rank in one randomised rotation; the bar is what "
        "we set out to reach on 8 GPUs, which have not been measured; bold meets it. Ideal: by the "
        "faster transport, with SM collectives kept by the library's kernels. In parentheses the "
        "95 % interval of the rounds' own ratios.",
    ),
    "arms": (
        arms_table,
        "Milliseconds, medians of the slowest rank in one randomised rotation; bold is the "
        "fastest of these; -: no such arm.",
    ),
    "others": (
        others_table,
        "Milliseconds, of the same rotation as the other arms; bold is the fastest of these.",
    ),
    "energy": (
        energy_table,
        "CUDA graphs, back to back: joules of one GPU per loop, its mean power and SM clock.",
    ),
    "shaping": (
        shaping_table,
        "TimeRatio: overlapped / sequential, CUDA graphs; bold is the lowest. Shaped and unshaped "
        "are of the sweep, of which the best is shown; the carve-out is of the rotation of arms. "
        "All with SM collectives, the ideal too.",
    ),
}


def _measured(results: Path) -> dict[int, list[Row]]:
    """Number of GPUs -> rows, from the most GPUs down."""
    return {num: _of_table("resources", path) for num, path in _paths(results).items()}


def _paths(results: Path, name: str = "resources") -> dict[int, Path]:
    """Number of GPUs -> file, from the most GPUs down."""
    found = results.glob(f"{name}-*x-h200.jsonl")
    paths = {int(path.name.split("-")[1][:-1]): path for path in found}
    return {num: paths[num] for num in sorted(paths, reverse=True)}


def _of_table(table: str, path: Path) -> list[Row]:
    """The rows of one table: a file may have decisions too."""
    return [row for row in record.read(path) if row["table"] == table]


def _graph(rows: Sequence[Row]) -> list[Timed]:
    return [one for one in timed(rows) if one.mode == "graph"]


def _sweep(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["arm"] == "shapes"]


def _by_mode(rows: Sequence[Row], names: Sequence[str]) -> str:
    parts: list[str] = []
    for mode in MODES:
        lines = _header(f"{mode}: pair", *names, "ideal")
        for one in timed(rows):
            if one.mode != mode:
                continue
            fastest = min((arm for arm in names if arm in one.arms), key=one.seconds)
            cells = [
                _bold(_ms(one.seconds(arm)), arm == fastest) if arm in one.arms else "-"
                for arm in names
            ]
            lines.append(_line(one.label, *cells, _ms(one.ideal_s)))
        if text := _rows_or_nothing(lines):
            parts.append(text)
    return "\n\n".join(parts)


def _energy(row: Row | None) -> str:
    if row is None:
        return "-"
    joules, clock = energy_text(row).split(", ")
    return f"{joules}, {row['power_w']:.0f} W, {clock}"


def _header(*names: str) -> list[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rows_or_nothing(lines: list[str]) -> str:
    return "\n".join(lines) if len(lines) > 2 else ""


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text


def _pairs(num: int) -> str:
    return "1 pair" if num == 1 else f"{num} pairs"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
