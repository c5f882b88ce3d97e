"""The tables and the picture of docs/losses.md, from benchmarks/losses.py's rows."""

from pathlib import Path
from typing import Any

from counterpoint.measure import record
from counterpoint.measure.curves import Curves, draw_curves
from counterpoint.plan.finer import FINER

Row = dict[str, Any]
MIB = 1 << 20


def sections(results: Path, images: Path) -> dict[str, str]:
    """The text of each marker, of the most GPUs measured; {} without rows. Draws the picture."""
    paths = {int(p.name.split("-")[1][:-1]): p for p in results.glob("losses-*x-h200.jsonl")}
    if not paths:
        return {}
    rows = record.read(paths[max(paths)])
    asked = {row["question"]: [r for r in rows if r["question"] == row["question"]] for row in rows}
    h = rows[0]
    where = (
        f"{h['ranks']}x {h['gpu']}, bf16, driver {h['driver']}, torch {h['torch']}, NCCL "
        f"{h['nccl']}, NVLink multicast {'on' if h['multicast'] else 'off'}, {h['date']}, commit "
        f"{h['commit']}"
    )
    _draw(asked, images, where)
    return {
        "dil-matmul": _table(asked["matmul in pieces"], ("rows", "n", "k"), "along", "whole_s"),
        "dil-communication": _table(
            asked["communication in pieces"], ("num_bytes",), "transport", "whole_s"
        ),
        "cil": _beside(asked["beside"]) + f"\n\n{where}.",
    }


def finer(rows: list[Row]) -> str:
    """Times of the families finer than shards beside the best of the others, of overlap rows."""
    shapes: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for row in rows:
        if row["mode"] == "graph":
            key = (row["op"], row["m"], row["n"], row["k"])
            shapes.setdefault(key, {})[row["arm"]] = row["median_s"]
    arms = [f"{family} ring" for family in FINER]
    head = ["op", "M, N, K", "serial", "shard_p2p", "graded", *(f"`{family}`" for family in FINER)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (op, *shape), times in shapes.items():
        if not set(arms) <= set(times):
            continue
        best = [min(t for arm, t in times.items() if arm.startswith(kind))
                for kind in ("shard_p2p", "graded")]  # fmt: skip
        cells = [times["serial"], *best, *(times[arm] for arm in arms)]
        where = ", ".join(map(str, shape))
        lines.append(f"| {op} | {where} | " + " | ".join(f"{t * 1e3:.3f}" for t in cells) + " |")
    h = rows[0]
    return "\n".join([*lines, "", f"Milliseconds, {h['ranks']}x {h['gpu']}, bf16, in a graph, all "
                      f"in one rotation, {h['date']}, commit {h['commit']}."])  # fmt: skip


def _table(rows: list[Row], shape: tuple[str, ...], kind: str, compared: str) -> str:
    """A line for each shape and kind, a column for each number of pieces."""
    pieces = sorted({row["pieces"] for row in rows})
    lines = [
        f"| {'M, N, K' if len(shape) > 1 else 'gathered'} | {kind} | whole, us | "
        + " | ".join(f"{n} pieces" for n in pieces[1:]) + " |",
        "|---" * (len(pieces) + 2) + "|",
    ]  # fmt: skip
    keys = dict.fromkeys((tuple(r[s] for s in shape), r[kind]) for r in rows if r["pieces"] > 1)
    for key, which in keys:
        mine = {
            r["pieces"]: r for r in rows if tuple(r[s] for s in shape) == key and r[kind] == which
        }
        some = mine[pieces[1]]
        head = ", ".join(map(str, key)) if len(shape) > 1 else f"{key[0] // MIB} MiB"
        cells = [f"{mine[n]['seconds'] / mine[n][compared]:.2f}" for n in pieces[1:]]
        lines.append(f"| {head} | {which} | {some[compared] * 1e6:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _beside(rows: list[Row]) -> str:
    lines = ["| matmul | beside | the matmul takes | one after the other | the transport takes | "
             "one after the other |", "|---|---|---|---|---|---|"]  # fmt: skip
    for kind, transport in dict.fromkeys((r["matmul"], r["transport"]) for r in rows):
        cells: dict[str, str] = {}
        for r in rows:
            if (r["matmul"], r["transport"]) == (kind, transport):
                longer_s, both_s = max(r["alone_s"], r["other_s"]), r["alone_s"] + r["other_s"]
                times = (r["seconds"] / longer_s, both_s / longer_s)
                cells[r["which"]] = " | ".join(f"{t:.2f} x" for t in times)
        lines.append(f"| {kind} | {transport} | {cells['matmul']} | {cells['transport']} |")
    return "\n".join(lines)


def _draw(asked: dict[str, list[Row]], images: Path, where: str) -> None:
    matmuls = asked["matmul in pieces"]
    panels: list[Curves] = []
    for along in ("rows", "columns", "K"):
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in matmuls:
            if row["along"] == along or row["pieces"] == 1:
                name = f"{row['rows']}, {row['n']}, {row['k']}"
                curves.setdefault(name, []).append((row["pieces"], row["seconds"] / row["whole_s"]))
        panels.append(Curves(f"pieces of {along}", curves))
    labels = {"source": where, "x_label": "pieces", "y_label": "pieces / whole", "y_most": 8.0}
    draw_curves(panels, images / "losses-matmul.png", title="A matmul in pieces", **labels)
    gathers, panels = asked["communication in pieces"], []
    for size in dict.fromkeys(row["num_bytes"] for row in gathers):
        curves = {}
        for row in gathers:
            if row["num_bytes"] == size:
                point = (row["pieces"], row["seconds"] / row["whole_s"])
                curves.setdefault(row["transport"], []).append(point)
        panels.append(Curves(f"{size // MIB} MiB", curves))
    draw_curves(panels, images / "losses-gather.png", title="An all-gather in pieces", **labels)
