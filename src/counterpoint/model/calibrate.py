"""From measurements to the sixteen constants of `Costs`.

Each constant follows from its own measurements by a fit that can be redone by hand: straight lines
of time against bytes, a search over the four constants of matmuls, ratios for contention.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any

from counterpoint.costs import Costs, Tile
from counterpoint.errors import InputError
from counterpoint.machine import Machine

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Matmul:
    """A measured matmul: y[rows, n] = x[rows, k] w[k, n] of 16-bit numbers."""

    rows: int
    n: int
    k: int
    seconds: float
    tile: Tile | None


def fit(rows: Sequence[Row], machine: Machine) -> Costs:
    """The costs that fit `rows` best.

    Args:
        rows: what `counterpoint characterize` measured: "question", "seconds", and of
            matmul: rows, n, k, tile;  copy, memory, collective: num_bytes;
            barrier, kernel: nothing;  beside: which of "matmul" and "copy", alone_s, other_s;
            host: num_steps.
        machine: what was measured; its number of SMs is what counts.

    Raises:
        InputError: a question has no rows.
    """

    def of(question: str) -> list[Row]:
        found = [row for row in rows if row["question"] == question]
        if not found:
            raise InputError("fit", "rows", want=f"some of question {question!r}", got="none")
        return found

    copy_s, copy_rate = _line(of("copy"))
    collective_s, collective_rate = _line(of("collective"))
    memory = max(of("memory"), key=lambda row: row["num_bytes"])
    kernel_s = _median(row["seconds"] for row in of("kernel"))
    host = sorted(of("host"), key=lambda row: row["num_steps"])
    first, last = host[0], host[-1]
    step_s = (last["seconds"] - first["seconds"]) / max(last["num_steps"] - first["num_steps"], 1)
    costs = replace(
        machine.costs,
        hbm_bytes_per_s=memory["num_bytes"] / max(memory["seconds"] - kernel_s, 1e-9),
        kernel_s=kernel_s,
        copy_bytes_per_s=copy_rate,
        copy_overhead_s=copy_s,
        barrier_s=_median(row["seconds"] for row in of("barrier")),
        collective_bytes_per_s=collective_rate,
        collective_latency_s=collective_s,
        matmul_beside_copy=_beside(of("beside"), "matmul"),
        copy_beside_matmul=_beside(of("beside"), "copy"),
        host_step_s=max(step_s, 0.0),
        host_call_s=max(first["seconds"] - first["num_steps"] * step_s, 0.0),
    )
    matmuls = [
        Matmul(row["rows"], row["n"], row["k"], row["seconds"],
               (row["tile"][0], row["tile"][1]) if row.get("tile") else None)
        for row in of("matmul")
    ]  # fmt: skip
    return fit_matmuls(matmuls, costs, machine)


def fit_matmuls(matmuls: Sequence[Matmul], costs: Costs, machine: Machine) -> Costs:
    """`costs` with the five constants of matmuls that fit best, by coordinate search."""
    peak = machine.device.bf16_flop_per_s
    grid: dict[str, list[float]] = {
        "gemm_flop_per_s": [peak * part / 100 for part in range(40, 101)],
        "gemm_settled": [1 + part / 50 for part in range(16)],
        "gemm_wave_s": [part * 0.25e-6 for part in range(13)],
        "gemm_launch_s": [part * 0.5e-6 for part in range(17)],
        "gemm_partial_wave": [part / 10 for part in range(11)],
    }
    # a coarse start, then one constant at a time until none helps
    starts = product((0.7, 0.8), (1.0, 1.12))
    best = min(
        (
            replace(costs, gemm_flop_per_s=peak * rate, gemm_settled=settled)
            for rate, settled in starts
        ),
        key=lambda c: error(matmuls, c, machine),
    )
    smallest = error(matmuls, best, machine)
    for _ in range(8):
        before = smallest
        for name, values in grid.items():
            for value in values:
                tried = replace(best, **{name: value})
                found = error(matmuls, tried, machine)
                if found < smallest - 1e-9:
                    best, smallest = tried, found
        if before - smallest < 1e-6:
            break
    return best


def error(matmuls: Sequence[Matmul], costs: Costs, machine: Machine) -> float:
    """Mean squared log of predicted over measured."""
    total = 0.0
    for m in matmuls:
        seconds = costs.matmul_s(m.rows, m.n, m.k, 2, machine.sms, m.tile)
        total += log(seconds * costs.settling(seconds) / m.seconds) ** 2
    return total / len(matmuls)


def _line(rows: Sequence[Row]) -> tuple[float, float]:
    """(seconds, bytes per second) of seconds = a + bytes / rate, each row counted alike."""
    weights = [1 / row["seconds"] ** 2 for row in rows]
    x = [float(row["num_bytes"]) for row in rows]
    y = [float(row["seconds"]) for row in rows]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    across = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    along = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = across / along
    return max(mean_y - slope * mean_x, 0.0), 1 / slope


def _beside(rows: Sequence[Row], which: str) -> float:
    """How much longer one takes while the other is under way, from the whole of both."""
    factors: list[float] = []
    for row in rows:
        if row["which"] == which:
            # it ran beside the other for as long as the other took
            factors.append(1 + (row["seconds"] - row["alone_s"]) / row["other_s"])
    return max(_median(factors), 1.0)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2
