"""The tables and the picture of docs/embedding.md, from the rows of benchmarks/embedding.py.

`make readme` writes them, by tables.py.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from counterpoint.measure import record
from counterpoint.measure.bars import BarRow, draw_bars

Row = dict[str, Any]
HOST_ARMS = ("bags cat", "lookup cat", "ours serial", "fused", "fused copy")
LARGE = 16384  # bags of a batch from which on the share of the floor is meant


def sections(results: Path) -> dict[str, str]:
    """Text for each pair of markers in docs/embedding.md; nothing without rows."""
    made: dict[str, list[str]] = {"embedding": [], "embedding-host": [], "embedding-soak": []}
    measured = _measured(results)
    for num, rows in measured.items():
        cases = cases_of(rows)
        made["embedding"].append(
            f"**{num} GPUs**\n\n{summary(cases)}\n\n{by_pooling(cases)}\n\n{table(cases)}\n\n"
            f"{_source(rows)}"
        )
        if lines := host(cases):
            made["embedding-host"].append(
                f"**{num} GPUs**, microseconds of the host for an eager call:\n\n{lines}"
            )
        made["embedding-soak"] += [
            f"{r['calls']:,} calls on {r['ranks']} GPUs, ranks late at random, each compared on "
            f"the device with its expected bits: {r['wrong']} differ ({r['seconds']:.0f} s)."
            for r in record.read(results / f"embedding-{num}x-h200.jsonl")
            if r["table"] == "embedding soak"
        ]
    if measured:
        largest = next(iter(measured))
        made["embedding-picture"] = [f"![time of each case](images/embedding-{largest}x.png)"]
    return {name: "\n\n".join(parts) for name, parts in made.items() if parts}


def readme(results: Path) -> str:
    """One paragraph for the README, of the most GPUs there are; "" without rows."""
    for num, rows in _measured(results).items():
        cases = cases_of(rows)
        ratios = [seconds(case)["fused"] / seconds(case)["serial"] for case in cases]
        copied = [seconds(case)["fused copy"] / seconds(case)["serial"] for case in cases]
        means = [1 - geometric_mean(each) for each in (ratios, copied)]
        slower, most = sum(each > 1 for each in ratios), max(ratios)
        worst = f"slower in {slower} (by {most - 1:.0%})" if slower else f"{1 - most:.0%} at least"
        return (
            f"[Embedding bags](docs/embedding.md) and their all-to-all in one kernel, rows stored "
            f"where they belong on their owners: with outputs of their own (`out=`) {means[0]:.0%} "
            f"less time than the fastest of lookup, all-to-all and concat in the mean of "
            f"{len(cases)} cases on {num}x {rows[0]['gpu']}, {1 - min(ratios):.0%} at best, "
            f"{worst}; by default, with a copy of the result, {means[1]:.0%}."
        )
    return ""


def draw(results: Path, images: Path) -> None:
    """Serial, ours and the floor of each case, of the most GPUs there are."""
    measured = _measured(results)
    if not measured:
        return
    num, rows = next(iter(measured.items()))
    bars: list[BarRow] = []
    for case in cases_of(rows):
        s = seconds(case)
        if case[0]["batch"] >= LARGE:
            label = case[0]["case"].replace(", batch", "\nbatch")
            bars.append(BarRow(label=label, serial_s=s["serial"], ours_s=s["fused"],
                               ideal_s=s["floor"]))  # fmt: skip
    for old in images.glob("embedding-*x.png"):
        old.unlink()
    source = (
        f"{num}x {rows[0]['gpu']}, bf16, {rows[0]['date']}; serial is the best of 4; cases of "
        f"{LARGE} bags or more, the others are in the table"
    )
    draw_bars(bars, images / f"embedding-{num}x.png", source=source, relative_to_serial=True,
              title="Embedding bags and their all-to-all",
              ideal="floor: only reading rows, or only storing them")  # fmt: skip


def cases_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each case, one for each arm."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return list(found.values())


def seconds(case: Sequence[Row]) -> dict[str, float]:
    """Of each arm; "serial" is the fastest baseline, "floor" the longer of the two floors."""
    s = {row["arm"]: row["median_s"] for row in case}
    serial = {arm: t for arm, t in s.items() if arm.endswith((" cat", " permute"))}
    # what a lookup reads it also writes: where it takes less, only reading does too
    gather = min(t for arm, t in s.items() if arm.startswith("gather") or arm == "lookup")
    store = min(t for arm, t in s.items() if arm.startswith("store"))
    bags = min(t for arm, t in serial.items() if arm.startswith("bags"))
    return s | {"serial": min(serial.values()), "bags": bags, "gather": gather, "store": store,
                "floor": max(gather, store)}  # fmt: skip


def summary(cases: Sequence[list[Row]]) -> str:
    """Means over all cases, and where the floor is meant."""
    times = [seconds(case) for case in cases]
    ours = [t["fused"] / t["serial"] for t in times]
    copy = [t["fused copy"] / t["serial"] for t in times]
    large = [t["floor"] / t["fused"] for case, t in zip(cases, times, strict=True)
             if case[0]["batch"] >= LARGE]  # fmt: skip
    lookup = [t["gather"] / t["lookup"] for t in times]
    floor = f", and is at {sum(large) / len(large):.0%} of the floor from {LARGE} bags on" * (
        len(large) > 0
    )
    return (
        f"Geometric mean of {len(cases)} cases: without a copy the kernel takes "
        f"{1 - geometric_mean(ours):.1%} less time than the fastest baseline (at best "
        f"{1 - min(ours):.1%}, at worst {1 - max(ours):.1%}){floor}. With a copy "
        f"{1 - geometric_mean(copy):.1%} less ({1 - max(copy):.1%} at worst). Our lookup alone is "
        f"at {sum(lookup) / len(lookup):.2f} of the rate of only reading rows "
        f"({min(lookup):.2f} at least)."
    )


def by_pooling(cases: Sequence[list[Row]]) -> str:
    """The mean of each pooling: what of the time is communication differs with it."""
    found: dict[int, list[float]] = {}
    for case in cases:
        t = seconds(case)
        found.setdefault(case[0]["pooling"], []).append(t["fused"] / t["serial"])
    lines = ["| pooling | cases | less time, mean | at worst | at best |", "|---" * 5 + "|"]
    for pooling, ratios in sorted(found.items(), key=lambda item: item[0] or 1 << 30):
        lines.append(
            f"| {pooling or 'MLPerf'} | {len(ratios)} | {1 - geometric_mean(ratios):.0%} | "
            f"{1 - max(ratios):.0%} | {1 - min(ratios):.0%} |"
        )
    return "\n".join(lines)


def table(cases: Sequence[list[Row]]) -> str:
    """Every case, milliseconds."""
    lines = ["| case | torch bags | best baseline | which | fused | less | with a copy | lookup | "
             "only reading | only storing | of the floor | way, registers, spills |",
             "|---" * 12 + "|"]  # fmt: skip
    for case in cases:
        t = seconds(case)
        cells = [f"{t[arm] * 1e3:.3f}" for arm in ("fused copy", "lookup", "gather", "store")]
        (ours,) = (row for row in case if row["arm"] == "fused")
        lines.append(
            f"| {case[0]['case']} | {t['bags'] * 1e3:.3f} | {t['serial'] * 1e3:.3f} | "
            f"{case[0]['best_serial']} | **{t['fused'] * 1e3:.3f}** | "
            f"{1 - t['fused'] / t['serial']:.0%} | {' | '.join(cells)} | "
            f"{t['floor'] / t['fused']:.0%} | {ours['way']}, {ours['registers']}, "
            f"{ours['spills']} |"
        )
    return "\n".join(lines)


def host(cases: Sequence[list[Row]]) -> str:
    """Microseconds of the host for a call."""
    timed = {r["arm"] for case in cases for r in case if r.get("host_s")}
    arms = [arm for arm in HOST_ARMS if arm in timed]
    lines = ["| case | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for case in cases:
        times = {r["arm"]: r["host_s"] * 1e6 for r in case if r.get("host_s")}
        if times and set(arms) <= set(times):
            cells = " | ".join(f"{times[arm]:.0f}" for arm in arms)
            lines.append(f"| {case[0]['case']} | {cells} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _measured(results: Path) -> dict[int, list[Row]]:
    """Number of GPUs -> rows, from the most GPUs down."""
    paths = {int(p.name.split("-")[1][:-1]): p for p in results.glob("embedding-*x-h200.jsonl")}
    found = {num: [r for r in record.read(paths[num]) if r["table"] == "embedding"]
             for num in sorted(paths, reverse=True)}  # fmt: skip
    return {num: rows for num, rows in found.items() if rows}


def _source(rows: Sequence[Row]) -> str:
    r = rows[0]
    return (
        f"{r['ranks']}x {r['gpu']}, bf16, int64 indices, driver {r['driver']}, torch {r['torch']}, "
        f"Triton {r['triton']}, NCCL {r['nccl']}, NVLink multicast "
        f"{'on' if r['multicast'] else 'off'}, {r['date']}, commit {r['commit']}. Milliseconds of "
        "the slowest rank, tables of a GPU, indices in rotation, all arms in one randomised "
        "rotation."
    )
