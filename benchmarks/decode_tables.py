"""The tables and the picture of docs/fused.md, from the committed rows of benchmarks/decode.py.

`make readme` writes them, by tables.py.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from counterpoint.measure import record
from counterpoint.measure.bars import BarRow, draw_bars

Row = dict[str, Any]
TORCH = ("torch one_shot", "torch two_shot")
COUNTED = (1, 8, 32, 64)  # rows that the means are of


def sections(results: Path) -> dict[str, str]:
    """Text for each pair of markers in docs/fused.md; nothing without rows."""
    made: dict[str, list[str]] = {"decode": [], "ablation": [], "decode-eager": [], "soak": []}
    measured = _measured(results)
    for num, rows in measured.items():
        text = f"**{num} GPUs**\n\n{{}}\n\n{_source(rows)}"
        made["decode"].append(text.format(f"{table(rows)}\n\n{summary(rows)}"))
        if lines := ablation(rows):
            made["ablation"].append(text.format(lines))
        source = _source(rows).partition(" Microseconds")[0]
        how = "Microseconds of one eager call at a time, medians; the host's of calls in a row."
        made["decode-eager"].append(f"**{num} GPUs**\n\n{eager(rows)}\n\n{source} {how}")
        made["soak"] += soaks(results, num)
    if measured:
        largest = next(iter(measured))
        made["decode-picture"] = [f"![time at each shape](images/decode-{largest}x.png)"]
    return {name: "\n\n".join(parts) for name, parts in made.items() if parts}


def short_table(results: Path) -> str:
    """The layers with one row and with 32, on the most GPUs, for the README; "" without rows."""
    measured = _measured(results)
    if not measured:
        return ""
    rows = next(iter(measured.values()))
    few = [shape for shape in _shapes(rows) if shape[0]["m"] in (1, 32)]
    return f"{_lines(few)}\n\n{_source(rows)} {summary(rows)}"


def draw(results: Path, images: Path) -> None:
    """Serial and ours at every shape, of the most GPUs there are."""
    measured = _measured(results)
    if not measured:
        return
    num, rows = next(iter(measured.items()))
    bars: list[BarRow] = []
    for shape in _shapes(rows):
        t, head = _seconds(shape), shape[0]
        if head["m"] in COUNTED:
            label = f"{head['n']}, {head['k']}\n{head['m']} row{'s' if head['m'] > 1 else ''}"
            bars.append(BarRow(label=label, serial_s=t["serial"], ours_s=t["auto"],
                               ideal_s=t["our matmul"]))  # fmt: skip
    for old in images.glob("decode-*x.png"):
        old.unlink()
    source = f"{num}x {rows[0]['gpu']}, bf16, {rows[0]['date']}; serial is cuBLAS + NCCL"
    draw_bars(bars, images / f"decode-{num}x.png", title="Matmul and all-reduce of few rows",
              source=source, relative_to_serial=True,
              ideal="our matmul without communication")  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Every layer and number of rows."""
    return _lines(_shapes(rows))


def summary(rows: Sequence[Row]) -> str:
    """The means over layers and rows."""
    times = [_seconds(shape) for shape in _shapes(rows) if shape[0]["m"] in COUNTED]
    serial = [t["auto"] / t["serial"] for t in times]
    torch = [t["auto"] / min(t[arm] for arm in TORCH) for t in times]
    return (
        f"Geometric mean of {len(times)} shapes of 1 to 64 rows: *auto* takes "
        f"{geometric_mean(serial):.2f} of the time of serial ({min(serial):.2f} to "
        f"{max(serial):.2f}) and {geometric_mean(torch):.2f} of the better of torch's "
        f"({min(torch):.2f} to {max(torch):.2f})."
    )


def ablation(rows: Sequence[Row]) -> str:
    """Ways to send and widths of tiles, and our kernels one after the other: what is fusion."""
    ways = list(dict.fromkeys(r["arm"] for r in rows if r["arm"].startswith("fused ")))
    short = {way: " ".join(way.split()[1:4]) for way in ways} | {"unfused": "unfused"}
    ways = list(short)
    lines = ["| M, N, K | " + " | ".join(short.values()) + " | our matmul alone |",
             "|---|" + "---|" * (len(ways) + 1)]  # fmt: skip
    for shape in _shapes(rows):
        t, head = _seconds(shape), shape[0]
        if any(way in t for way in ways[:-1]):
            cells = [f"{t[way] * 1e6:.1f}" if way in t else "-" for way in ways]
            lines.append(f"| {head['m']}, {head['n']}, {head['k']} | " + " | ".join(cells)
                         + f" | {t['our matmul'] * 1e6:.1f} |")  # fmt: skip
    return "\n".join(lines) if len(lines) > 2 else ""


def eager(rows: Sequence[Row]) -> str:
    """Plain eager calls: time with the host in it, and the host's own."""
    lines = ["| M, N, K | serial | auto | serial / auto | host of serial | host of auto |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for shape in _shapes(rows):
        head = shape[0]
        plain = {r["arm"]: r["median_s"] * 1e6 for r in shape if r["mode"] == "plain eager"}
        host = {r["arm"]: r["host_s"] * 1e6 for r in shape if r.get("host_s")}
        if {"serial", "auto"} <= set(plain):
            lines.append(
                f"| {head['m']}, {head['n']}, {head['k']} | {plain['serial']:.0f} | "
                f"{plain['auto']:.0f} | {plain['serial'] / plain['auto']:.2f} | "
                f"{host['serial']:.0f} | {host['auto']:.0f} |"
            )
    return "\n".join(lines)


def soaks(results: Path, num: int) -> list[str]:
    """What calls under random delays gave."""
    rows = record.read(results / f"decode-{num}x-h200.jsonl")
    return [
        f"{r['calls']:,} calls on {r['ranks']} GPUs, ranks late at random, each compared on the "
        f"device with its expected bits: {r['wrong']} differ ({r['seconds']:.0f} s)."
        for r in rows if r["table"] == "decode soak"
    ]  # fmt: skip


def _lines(shapes: Sequence[list[Row]]) -> str:
    lines = [
        "| layer | M, N, K | matmul | + NCCL (serial) | + torch one-shot | + torch two-shot | "
        "direct | fused | **auto** | / serial | / torch's better | its way |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        t, head = _seconds(shape), shape[0]
        best = min(t[arm] for arm in TORCH)
        way = " ".join(head["pick"].split()[:3])
        arms = ("matmul", "serial", *TORCH, "direct", "fused")
        cells = [f"{t[arm] * 1e6:.1f}" if arm in t else "-" for arm in arms]
        lines.append(
            f"| {head['layer']} | {head['m']}, {head['n']}, {head['k']} | " + " | ".join(cells)
            + f" | **{t['auto'] * 1e6:.1f}** | {t['auto'] / t['serial']:.2f} | "
            f"{t['auto'] / best:.2f} | {way} |"
        )  # fmt: skip
    return "\n".join(lines)


def _measured(results: Path) -> dict[int, list[Row]]:
    """Number of GPUs -> rows, from the most GPUs down."""
    paths = {int(p.name.split("-")[1][:-1]): p for p in results.glob("decode-*x-h200.jsonl")}
    found = {num: [r for r in record.read(paths[num]) if r["table"] == "decode"]
             for num in sorted(paths, reverse=True)}  # fmt: skip
    return {num: rows for num, rows in found.items() if rows}


def _shapes(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["m"], row["n"], row["k"]), []).append(row)
    return list(found.values())


def _seconds(shape: Sequence[Row]) -> dict[str, float]:
    return {row["arm"]: row["median_s"] for row in shape if row["mode"] == "graph"}


def _source(rows: Sequence[Row]) -> str:
    r = rows[0]
    return (
        f"{r['ranks']}x {r['gpu']}, bf16, driver {r['driver']}, torch {r['torch']}, Triton "
        f"{r['triton']}, NCCL {r['nccl']}, NVLink multicast {'on' if r['multicast'] else 'off'}, "
        f"{r['date']}, commit {r['commit']}. Microseconds a call, N and K of one rank, in a graph "
        "with weights in rotation, all arms in one randomised rotation."
    )
