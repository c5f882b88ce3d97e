"""The tables of docs/fused.md of the other two operators: few_rows.py."""

from pathlib import Path
from statistics import geometric_mean
from typing import Any

from counterpoint.measure import record
from counterpoint.measure.compare import FIXED

Row = dict[str, Any]


def section(results: Path) -> str:
    """For each number of GPUs measured, from the most down; "" without rows."""
    paths = {int(p.name.split("-")[2][:-1]): p for p in results.glob("few-rows-*x-h200.jsonl")}
    return "\n\n".join(_table(record.read(paths[num])) for num in sorted(paths, reverse=True))


def summary(results: Path) -> str:
    """One sentence for the README, of the most GPUs; "" without rows."""
    paths = {int(p.name.split("-")[2][:-1]): p for p in results.glob("few-rows-*x-h200.jsonl")}
    if not paths:
        return ""
    num = max(paths)
    graph, eager = _ratios(_shapes(record.read(paths[num])))
    return (
        f"At 64 to 1024 tokens ({num}x H200, Llama-3-70B layers) the other two operators take "
        f"{1 / geometric_mean(graph):.2f} of the time of serial in a graph, "
        f"{1 / geometric_mean(eager):.2f} eagerly with the host's time in it."
    )


def _table(rows: list[Row]) -> str:
    shapes = _shapes(rows)
    graph, eager = _ratios(shapes)
    lines = [
        "| op | M, N, K | matmul | NCCL | serial | torch symm_mem | **auto** | its plan | "
        "serial / auto | eager behind a backlog | plain eager | best measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        head, s, auto = shape[0], _graph(shape), _auto(shape)
        eager_s = {r["arm"]: r["median_s"] for r in shape if r["mode"] == "eager"}
        best = min((arm for arm in s if arm not in FIXED), key=s.__getitem__)
        arms = ("compute", "communication", "serial", "torch_symm_mem", "auto")
        cells = [head["op"], f"{head['m']}, {head['n']}, {head['k']}"]
        cells += [f"{s[arm] * 1e6:.1f}" for arm in arms] + [auto["graph"]["pick"]]
        cells += [f"**{auto['graph']['serial_over_auto'][0]:.2f}**"]
        cells += [f"{eager_s['serial'] / eager_s['auto']:.2f}"]
        cells += [f"{auto['eager']['serial_over_auto'][0]:.2f}", f"{s[best] * 1e6:.1f} {best}"]
        lines.append("| " + " | ".join(cells) + " |")
    h = rows[0]
    lines += ["", (
        f"serial / auto, geometric mean of {len(shapes)} shapes: {geometric_mean(graph):.2f} in a "
        f"graph (least {min(graph):.2f}), {geometric_mean(eager):.2f} plain eager (least "
        f"{min(eager):.2f}); medians of 200 pairs. {h['ranks']}x {h['gpu']}, bf16, driver "
        f"{h['driver']}, torch {h['torch']}, Triton {h['triton']}, NCCL {h['nccl']}, NVLink "
        f"multicast {'on' if h['multicast'] else 'off'}, {h['date']}, commit {h['commit']}. "
        "Microseconds a call, M over all ranks, N and K of one rank, weights in rotation."
    )]  # fmt: skip
    return f"**{h['ranks']} GPUs**\n\n" + "\n".join(lines)


def _shapes(rows: list[Row]) -> list[list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.get("op"), row["m"], row["n"], row["k"]), []).append(row)
    return list(found.values())


def _graph(shape: list[Row]) -> dict[str, float]:
    return {row["arm"]: row["median_s"] for row in shape if row["mode"] == "graph"}


def _auto(shape: list[Row]) -> dict[str, Row]:
    return {row["mode"]: row for row in shape if row["arm"] == "auto"}


def _ratios(shapes: list[list[Row]]) -> tuple[list[float], list[float]]:
    """serial / auto of each shape, in a graph and plain eager."""
    autos = [_auto(shape) for shape in shapes]
    return (
        [auto["graph"]["serial_over_auto"][0] for auto in autos],
        [auto["eager"]["serial_over_auto"][0] for auto in autos],
    )
