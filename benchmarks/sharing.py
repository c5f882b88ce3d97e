"""What docs/results/sharing.md says of the rows of resources.py. Ratios that miss their bar stand
beside others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from benchmarks.declare import Section
from benchmarks.pictures import FASTER, Axis, curves, dots, place, shown, speedups
from benchmarks.rows import Row, Timed, gpus_of, taken
from benchmarks.tables import measured

PLAIN, TUNED, TUNED_SM = "plain overlap", "tuned", "tuned, SM collectives"
ARMS = ("sequential", PLAIN, "priority", "order", "granularity", "carve-out only", "shaping",
        "shaping, priority", "transport", TUNED)  # fmt: skip
ENERGY_ARMS = ("sequential", PLAIN, "transport", TUNED)


class Bar(NamedTuple):
    """What a pair has to reach on 8 GPUs: at most so many times its parts alone."""

    pair: str
    arm: str
    at_most: float


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


def pairs_of(rows: Sequence[Row]) -> list[Timed]:
    """The pairs of rows, each with its arms by mode."""
    own = [row for row in rows if row["table"] == "resources" and row.get("arm") != "shapes"]
    return taken(own, "pair")


def sweep_of(rows: Sequence[Row]) -> list[Row]:
    """Times by the number of resident blocks."""
    return [row for row in rows if row.get("arm") == "shapes"]


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.2f}"


def bold(text: str, wanted: bool) -> str:
    """What stands out."""
    return f"**{text}**" if wanted else text


def speedup(case: Timed, name: str) -> float:
    """Of an arm over plain overlap, in a graph."""
    return case.s(PLAIN) / case.s(name)


def was_taken(row: Row) -> str:
    """A setting in short."""
    return row["controls"].removeprefix("overlap ")


def registered(rows: Iterable[Row]) -> str:
    """Whether NCCL registered memory in graphs."""
    found = {row["nccl_graph_register"] for row in rows if "nccl_graph_register" in row}
    return f"Graph registration {' and '.join('on' if each else 'off' for each in sorted(found))}."


def in_graph(rows: Sequence[Row]) -> list[Timed]:
    """Pairs that were captured and tuned."""
    return [case for case in pairs_of(rows) if TUNED in case.graph]


def bars(rows: Sequence[Row]) -> str:
    """How near to the estimate of their parts the pairs come that have a bar."""
    found = {c.head["pair"]: c for c in in_graph(rows)}
    lines: list[tuple[list[str], list[Row]]] = []
    for bar in BARS:
        case = found.get(bar.pair)
        if case is None or bar.arm not in case:
            continue
        row = case.graph[bar.arm]
        alone_s = row["ideal_sm_s" if bar.arm == TUNED_SM else "ideal_s"]
        _, low, high = row["baseline_over_arm"]
        lines.append(([
            bar.pair + (", SM collectives kept" if bar.arm == TUNED_SM else ""), ms(alone_s),
            bold(f"{row['median_s'] / alone_s:.3f}", row["median_s"] <= bar.at_most * alone_s),
            f"{bar.at_most:.2f}", was_taken(row), f"{case.s(PLAIN) / alone_s:.3f}",
            f"{speedup(case, bar.arm):.2f} ({low:.2f} to {high:.2f})",
            f"{row['p20_s'] / alone_s:.3f}..{row['p80_s'] / alone_s:.3f}",
        ], case.rows))  # fmt: skip
    head = [
        "pair",
        "parts alone, ms",
        "tuned / parts",
        "bar on 8 GPUs",
        "what was taken",
        "plain overlap / parts",
        "plain overlap / tuned",
        "p20..p80 of tuned / parts",
    ]
    return measured(head, lines, registered(rows))


def by_mode(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Arms in both modes."""
    parts: list[str] = []
    for mode in ("graph", "eager"):
        lines: list[tuple[list[str], list[Row]]] = []
        for case in pairs_of(rows):
            arms = case.modes.get(mode, {})
            times = {name: arms[name]["median_s"] for name in names if name in arms}
            if times:
                fastest, alone_s = min(times.values()), next(iter(arms.values()))["ideal_s"]
                cells = [
                    bold(ms(times[n]), times[n] == fastest) if n in times else "-" for n in names
                ]
                lines.append(([case.head["pair"], *cells, ms(alone_s)], [*arms.values()]))
        parts.append(measured([f"{mode}: pair", *names, "parts alone"], lines, registered(rows)))
    return "\n\n".join(filter(None, parts))


def others(rows: Sequence[Row]) -> str:
    """The arms that the main table has no room for."""
    every = (arm for case in pairs_of(rows) for arms in case.modes.values() for arm in arms)
    names = dict.fromkeys(arm for arm in every if arm not in ARMS)
    return by_mode(rows, (PLAIN, *names, TUNED)) if names else ""


def energy(rows: Sequence[Row]) -> str:
    """Joules, watts and clock of some arms, and what the copy engines save."""
    lines, ratios = list[tuple[list[str], list[Row]]](), dict[str, float]()
    for case in in_graph(rows):
        # 0 J: the counter did not move while the arm ran
        used = {n: case.graph[n] for n in ENERGY_ARMS if case.graph.get(n, {}).get("energy_j")}
        if used:
            cells = [
                f"{row['energy_j']:.3g} J, {row['power_w']:.0f} W, {row['arm_sm_clock_mhz']:.0f} "
                f"MHz"
                if (row := used.get(n))
                else "-"
                for n in ENERGY_ARMS
            ]
            lines.append(([case.head["pair"], *cells], [*used.values()]))
        if PLAIN in used and "transport" in used:
            ratios[case.head["pair"]] = used["transport"]["energy_j"] / used[PLAIN]["energy_j"]
    if not ratios:
        return ""
    least, most = (pick(ratios, key=ratios.__getitem__) for pick in (min, max))
    note = (
        f"Energy of a loop by copy engines / that of plain overlap: geometric mean "
        f"{geometric_mean(ratios.values()):.2f} of {len(ratios)} pairs, from {ratios[least]:.2f} "
        f"({least}) to {ratios[most]:.2f} ({most})."
    )
    return measured(["pair", *ENERGY_ARMS], lines, f"{registered(rows)} {note}")


def shaping(rows: Sequence[Row]) -> str:
    """Per Triton kernel and collective: shaped at best against unshaped, and the carve-out."""
    sweep, lines = sweep_of(rows), list[tuple[list[str], list[Row]]]()
    arms = {case.head["pair"]: case for case in in_graph(rows)}
    for label in dict.fromkeys(row["pair"] for row in sweep):
        case, cells = arms.get(label), list[tuple[float, str]]()
        for urgent, carve_out in ((False, "carve-out only"), (True, "carve-out, priority")):
            own = [row for row in sweep if row["pair"] == label and row["priority"] == urgent]
            cells += [
                (1 / row["time_ratio"], f"{1 / row['time_ratio']:.2f}")
                for row in own
                if row["unshaped"]
            ]
            best = min((r for r in own if not r["unshaped"]), key=lambda r: r["time_ratio"])
            ratio = 1 / best["time_ratio"]
            cells.append((ratio, f"{ratio:.2f} ({best['blocks_per_sm']})"))
            known = case is not None and carve_out in case
            ratio = case.s("sequential") / case.s(carve_out) if case and known else 0.0
            cells.append((ratio, f"{ratio:.2f}" if known else "-"))
        most = max(ratio for ratio, _ in cells)
        alone = f"{case.s('sequential') / case.graph[PLAIN]['ideal_sm_s']:.2f}" if case else "-"
        own = [row for row in sweep if row["pair"] == label] + (case.rows if case else [])
        texts = [label, *(bold(text, ratio == most) for ratio, text in cells), alone]
        lines.append((texts, own))
    head = ["pair", "unshaped", "shaped (blocks per SM)", "carve-out only", "unshaped, priority",
            "shaped, priority", "carve-out, priority", "parts alone"]  # fmt: skip
    return measured(head, lines, registered(rows))


def summary(found: Mapping[int, list[Row]]) -> str:
    """What tuning wins over all pairs, at best and at worst, a line for each number of GPUs."""
    lines: list[str] = []
    for rows in found.values():
        cases = in_graph(rows)
        mean = geometric_mean(speedup(case, TUNED) for case in cases)
        worst, best = (pick(cases, key=lambda c: speedup(c, TUNED)) for pick in (min, max))
        texts = [
            f"{speedup(c, TUNED):.2f} with {c.head['pair']} (its parts alone "
            f"{c.s(PLAIN) / c.graph[TUNED]['ideal_s']:.2f})"
            for c in (worst, best)
        ]
        text = f"from {texts[0]} to {texts[1]}" if len(cases) > 1 else texts[0]
        lines.append(
            f"- {gpus_of(rows)}: plain overlap / tuned, in a graph: geometric mean {mean:.2f} of "
            f"{len(cases)} pair{'s' * (len(cases) > 1)}, {text}."
        )
    return "\n".join(lines)


def section(marker: str, write: Callable[[Sequence[Row]], str], note: str) -> Section:
    """A part of docs/results/sharing.md: the note, and a table for each number of GPUs."""

    def text(found: Mapping[int, list[Row]]) -> str:
        parts = [(rows, write(rows)) for rows in found.values()]
        made = [f"**{gpus_of(rows)}**\n\n{part}" for rows, part in parts if part]
        return "\n\n".join([note, *made]) if made else ""

    return Section("docs/results/sharing.md", marker, text)


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Each control by itself, and what shaping does, of the most GPUs."""
    rows = next(iter(found.values()))
    timed = [row for row in rows if "median_s" in row]
    where = f"{place(timed)}. {registered(timed)}"
    some = [c for c in in_graph(rows) if c.head["kernel"] == "cuBLAS"]
    names = {n: n for n in ARMS if n != PLAIN} | {
        "sequential": "serial, one after the other", TUNED: "counterpoint, tuned"
    }  # fmt: skip
    panel = {_spelt(c.head["pair"]): {name: c.s(PLAIN) / c.s(n) for n, name in names.items()
                                      if n in c} for c in some}  # fmt: skip
    marks = {_spelt(c.head["pair"]): c.s(PLAIN) / c.graph[PLAIN]["ideal_s"] for c in some}
    mean = geometric_mean(speedup(c, TUNED) for c in some)
    dots({"": panel}, images / "sharing-arms.svg", marks={"": marks}, source=where,
         title=f"Tuned controls: {mean:.2f}x over plain overlap in the mean",
         mark="parts alone (an estimate)",
         axis=speedups("plain overlap of two streams"))  # fmt: skip
    shapes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in sweep_of(rows):
        pair = f"{row['gemm']} matmul + {row['collective'].replace('_', '-')}"
        name = f"tile {row['kernel']}" + (", priority" if row["priority"] else "")
        own = shapes.setdefault(_spelt(pair), {}).setdefault(name, [])
        own.append((row["blocks_per_sm"], 1 / row["time_ratio"]))
    if shapes:
        axis = Axis("resident blocks per SM", FASTER.format("sequential"), y_text="{:.1f}x".format,
                    log_y=False, at_one=True)  # fmt: skip
        title = "Matmuls shaped to leave room: priority for the collective helps at any shape"
        curves(shapes, images / "sharing-ratios.svg", axis, source=f"{where} SM collectives.",
               title=title)  # fmt: skip


def _spelt(pair: str) -> str:
    kind, _, rest = pair.partition(" ")
    return f"{ {'cb': 'compute-bound', 'mb': 'memory-bound'}[kind] } {rest}"


SECTIONS = (
    Section("docs/results/sharing.md", "summary", summary),
    Section(
        "docs/results/sharing.md",
        "arms-picture",
        lambda _: shown("sharing-arms", "Speedup of each control over plain overlap"),
    ),
    Section(
        "docs/results/sharing.md",
        "shaping-picture",
        lambda _: shown("sharing-ratios", "Speedup over sequential, by resident blocks per SM"),
    ),
    section(
        "bars",
        bars,
        "Times are medians of the slowest rank in CUDA graphs, in one randomised rotation. The bar "
        "is what we set out to reach on 8 GPUs, which have not been measured; bold meets it. Parts "
        "alone are by the faster transport, or by the library's kernels where SM collectives are "
        "kept. Parentheses have the 95 % interval of the rounds' own ratios.",
    ),
    section(
        "arms",
        lambda rows: by_mode(rows, ARMS),
        "Times are milliseconds, medians of the slowest rank in one randomised rotation. Bold is "
        "the fastest of these. A dash says that there is no such arm.",
    ),
    section(
        "others",
        others,
        "Times are milliseconds, of the same rotation as the other arms. Bold is the fastest of "
        "these.",
    ),
    section(
        "energy",
        energy,
        "Joules of one GPU for a loop, its mean power and its SM clock, in CUDA graphs that run "
        "back to back.",
    ),
    section(
        "shaping",
        shaping,
        "Speedups are sequential / overlapped, in CUDA graphs. Bold is the highest. Shaped and "
        "unshaped are the best of a sweep, the carve-out is from the rotation of arms. All "
        "collectives, those of the parts too, run on SMs.",
    ),
)
