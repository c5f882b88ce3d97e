"""The tables and pictures of docs/transports.md, from benchmarks/copies.py's rows."""

from pathlib import Path
from typing import Any

from counterpoint.measure import record
from counterpoint.measure.curves import Curves, draw_curves

Row = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
BARRED = (MIB, 56)  # size and number of the copies that a batch is judged by
BARS = {"torch copy_": 0.40, "graph": 0.80}  # of each way, what a batch may take at most
WAYS = {"torch copy_": "`copy_` of torch, one by one", "driver": "calls of the driver, one by one",
        "batch": "one batch", "graph": "a graph of single copies"}  # fmt: skip


def sections(results: Path, images: Path) -> dict[str, str]:
    """The text of each marker, of the most GPUs measured; {} without rows. Draws the pictures."""
    paths = {int(p.name.split("-")[1][:-1]): p for p in results.glob("copies-*x-h200.jsonl")}
    if not paths:
        return {}
    rows = record.read(paths[max(paths)])
    h = rows[0]
    where = (
        f"{h['ranks']}x {h['gpu']}, driver {h['driver']}, torch {h['torch']}, NCCL {h['nccl']}, "
        f"NVLink multicast {'on' if h['multicast'] else 'off'}, {h['date']}, commit {h['commit']}"
    )
    asked = {row["question"]: [r for r in rows if r["question"] == row["question"]] for row in rows}
    _draw(asked, images, where)
    submission = asked["submission"]
    found = {
        "submission": "![rates of copies](images/copies.png)\n\n"
        + _rates([r for r in submission if not r["ahead"]]) + f"\n\nGB/s. {where}.",
        "ahead": _rates([r for r in submission if r["ahead"]]) + "\n\nGB/s.",
        "batch": _bars(submission),
        "strided": _strided(asked["strided"]),
        "transports": "![rates of transports](images/transports.png)\n\n"
        + _transports(asked["transport"]) + f"\n\nMicroseconds. {where}.",
    }  # fmt: skip
    if "late rank" in asked:  # one peer meets nobody
        found["late"] = _late(asked["late rank"])
    return found


def rate(row: Row) -> float:
    """GB/s that a rank sends, and gets."""
    return row["num_bytes"] * row.get("count", 1) / row["seconds"] / 1e9


def size(num_bytes: int) -> str:
    """In MiB, or in KiB where it is less."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def table(head: list[str], lines: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)
    )


def _rates(rows: list[Row]) -> str:
    """A line for each way, direction and number of copies, a column for each size."""
    sizes = sorted({r["num_bytes"] for r in rows})
    found = {(r["way"], r["direction"], r["count"], r["num_bytes"]): rate(r) for r in rows}
    keys = dict.fromkeys(key[:3] for key in found)
    lines = [
        [WAYS[way], direction, str(count),
         *(f"{found[way, direction, count, n]:.0f}" for n in sizes)]
        for way in WAYS for key_way, direction, count in keys if key_way == way
    ]  # fmt: skip
    return table(["submitted by", "direction", "copies", *map(size, sizes)], lines)


def _bars(rows: list[Row]) -> str:
    """What a batch takes of the time of the other ways, and what it may."""
    lines: list[list[str]] = []
    for direction in dict.fromkeys(r["direction"] for r in rows):
        times = {
            r["way"]: r["seconds"] for r in rows
            if (r["num_bytes"], r["count"]) == BARRED and r["direction"] == direction
            and not r["ahead"]
        }  # fmt: skip
        if "batch" not in times:
            continue
        for way, seconds in times.items():
            if way != "batch":
                share, most = times["batch"] / seconds, BARS.get(way)
                bar = f"{most:.0%}: {'met' if share <= most else 'missed'}" if most else "-"
                lines.append([direction, WAYS[way], f"{seconds * 1e6:.0f}",
                              f"{times['batch'] * 1e6:.0f}", f"{share:.0%}", bar])  # fmt: skip
    head = ["direction", "beside", "us", "the batch, us", "of it", "at most"]
    return table(head, lines) if lines else "This machine has no batches."


def _strided(rows: list[Row]) -> str:
    lines = [
        [size(r["num_bytes"]), str(r["count"]), r["direction"],
         "one" if r["row_bytes"] == r["num_bytes"] else f"of {size(r['row_bytes'])}",
         f"{r['seconds'] * 1e6:.0f}", f"{rate(r):.0f}"]
        for r in rows
    ]  # fmt: skip
    return table(["each copy", "copies", "direction", "rows", "us", "GB/s"], lines)


def _late(rows: list[Row]) -> str:
    """A line for each order, a column for each lateness."""
    orders = dict.fromkeys(r["order"] for r in rows)
    found = {(r["order"], r["late_copies"]): r for r in rows}
    lateness = sorted({r["late_copies"] for r in rows})
    lines = [
        [order, *(f"{found[order, late]['seconds'] * 1e6:.0f} ({rate(found[order, late]):.0f})"
                  for late in lateness)]
        for order in orders
    ]  # fmt: skip
    head = ["order of the peers", *(f"late by {late:g} copies" for late in lateness)]
    h = rows[0]
    note = (f"Microseconds (GB/s) from the start of the late rank until all are done: "
            f"{h['count']} copies of {size(h['num_bytes'])} from each rank.")  # fmt: skip
    return table(head, lines) + "\n\n" + note


def _transports(rows: list[Row]) -> str:
    timed = [r for r in rows if "refused" not in r]
    sizes = sorted({r["num_bytes"] for r in timed})
    found = {(r["transport"], r["op"], r["num_bytes"]): r["seconds"] for r in timed}
    keys = dict.fromkeys(key[:2] for key in found)
    lines = [
        [op, label, *(f"{found[label, op, n] * 1e6:.0f}" for n in sizes)]
        for label, op in sorted(keys, key=lambda key: key[1])
    ]  # fmt: skip
    text = table(["op", "transport", *map(size, sizes)], lines)
    for r in rows:
        if "refused" in r:
            text += f"\n\n{r['transport']} was missing: {r['refused']}."
    return text


def _draw(asked: dict[str, list[Row]], images: Path, where: str) -> None:
    copies = [r for r in asked["submission"] if r["direction"] == "push" and not r["ahead"]]
    panels: list[Curves] = []
    for count in sorted({r["count"] for r in copies}):
        curves: dict[str, list[tuple[int, float]]] = {}
        for r in copies:
            if r["count"] == count:
                curves.setdefault(r["way"], []).append((r["num_bytes"] // KIB, rate(r)))
        panels.append(Curves(f"{count} copies" if count > 1 else "one copy", curves))
    labels: dict[str, Any] = {"source": where, "y_label": "GB/s", "ratios": False}
    draw_curves(panels, images / "copies.png", title="Pushes to all peers in turn, eager and in a "
                "graph", x_label="KiB of each copy", **labels)  # fmt: skip
    timed, panels = [r for r in asked["transport"] if "refused" not in r], []
    for op in dict.fromkeys(r["op"] for r in timed):
        curves = {}
        for r in timed:
            if r["op"] == op:
                received = r["num_bytes"] * (r["ranks"] - 1) / r["ranks"]
                point = (r["num_bytes"] // MIB, received / r["seconds"] / 1e9)
                curves.setdefault(r["transport"], []).append(point)
        panels.append(Curves(op, curves))
    draw_curves(panels, images / "transports.png", title="Transports side by side",
                x_label="MiB on each rank", **labels)  # fmt: skip
