"""From measurements to the eighteen constants of `Costs`.

Each constant follows from its own measurements by a fit that can be redone by hand: straight lines
of time against bytes, a search over the three constants of matmuls, ratios for contention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from statistics import median
from typing import Any

from counterpoint.costs import Costs, Tile
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.ranges import RANGES, misfit, plain

Row = Mapping[str, Any]
SMALL_BYTES = 2 << 20  # of a collective, received by a rank: NCCL sends these with flags


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
            matmul: rows, n, k, tile;
            copy, direct, memory: num_bytes;  collective: num_bytes, kind;
            barrier, kernel: nothing;  beside: which of "matmul" and "copy", alone_s, other_s;
            host: num_steps.
        machine: what was measured; its number of SMs is what counts.

    Raises:
        InputError: a row is none or has a number out of its range, or a question has no rows, or
            times that do not grow with the bytes.
    """
    _check_rows(rows)
    costs = _of_collectives(rows, _of_kernels(rows, machine.costs))
    matmuls = [
        Matmul(row["rows"], row["n"], row["k"], row["seconds"],
               (row["tile"][0], row["tile"][1]) if row.get("tile") else None)
        for row in rows_of(rows, "matmul")
    ]  # fmt: skip
    costs = fit_matmuls(matmuls, costs, machine)
    # what long matmuls would show: see Costs.beside_copy
    full = replace(costs, matmul_beside_copy=2.0)
    shares = [
        {**row, "part": full.beside_copy(row["alone_s"]) - 1}
        for row in rows_of(rows, "beside", which="matmul")
    ]
    return replace(costs, matmul_beside_copy=beside(shares))


def _check_rows(rows: Sequence[Row]) -> None:
    """Refuse rows with a number that is none, or out of its range."""
    for i, row in enumerate(rows):
        where = f"rows[{i}]"
        if not isinstance(row, Mapping) or not isinstance(row.get("question"), str):
            raise InputError("fit", where, want="a measurement with its question", got=repr(row))
        for name in row.keys() & {key[4:] for key in RANGES if key.startswith("row.")}:
            kind = tuple[int, int] | None if name == "tile" else float
            found = misfit(plain(row[name]), kind, RANGES[f"row.{name}"], f"{where}.{name}")
            if found is not None:
                raise InputError("fit", found.where, want=found.want, got=found.got)


def rows_of(rows: Sequence[Row], question: str, **facts: str) -> list[Row]:
    """The rows of a question.

    Raises:
        InputError: there is none.
    """
    wanted = {"question": question, **facts}
    found = [row for row in rows if wanted.items() <= row.items()]
    if not found:
        want = f"some of {', '.join(f'{name} {value!r}' for name, value in wanted.items())}"
        raise InputError("fit", "rows", want=want, got="none")
    return found


def _of_kernels(rows: Sequence[Row], costs: Costs) -> Costs:
    """`costs` with what copies, memory, signals and the host take."""
    copy_s, copy_rate = line(rows_of(rows, "copy"))
    memory = max(rows_of(rows, "memory"), key=lambda row: row["num_bytes"])
    kernel_s = median(row["seconds"] for row in rows_of(rows, "kernel"))
    host = sorted(rows_of(rows, "host"), key=lambda row: row["num_steps"])
    first, last = host[0], host[-1]
    step_s = (last["seconds"] - first["seconds"]) / max(last["num_steps"] - first["num_steps"], 1)
    return replace(
        costs,
        hbm_bytes_per_s=memory["num_bytes"] / max(memory["seconds"] - kernel_s, 1e-9),
        kernel_s=kernel_s,
        copy_bytes_per_s=copy_rate,
        copy_overhead_s=copy_s,
        barrier_s=median(row["seconds"] for row in rows_of(rows, "barrier")),
        copy_beside_matmul=beside(rows_of(rows, "beside", which="copy")),
        host_step_s=max(step_s, 0.0),
        host_call_s=max(first["seconds"] - first["num_steps"] * step_s, 0.0),
    )


def _of_collectives(rows: Sequence[Row], costs: Costs) -> Costs:
    """`costs` with what the library's collectives take, and our own where they were measured.

    One rate for both of the library's, and each its own rest; what is little is sent in another
    way.
    """
    collectives = rows_of(rows, "collective")
    large = [row for row in collectives if row["num_bytes"] > SMALL_BYTES] or collectives
    _, rate = line(large)

    def rest_s(kind: str) -> float:
        own = (row for row in rows_of(rows, "collective", kind=kind) if row in large)
        return median(max(row["seconds"] - row["num_bytes"] / rate, 0.0) for row in own)

    costs = replace(
        costs, collective_bytes_per_s=rate, all_gather_s=rest_s("all_gather"),
        reduce_scatter_s=rest_s("reduce_scatter"),
    )  # fmt: skip
    if small := [row for row in collectives if row["num_bytes"] <= SMALL_BYTES]:
        rests = (max(row["seconds"] - costs.flagged_s(row["num_bytes"]), 0.0) for row in small)
        costs = replace(costs, collective_small_s=median(rests))
    # a number of ranks that is no power of two has none: then no plan asks for it
    if ours := [row for row in rows if row["question"] == "direct"]:
        direct_s, direct_rate = line(ours)
        costs = replace(costs, direct_s=direct_s, direct_bytes_per_s=direct_rate)
    return costs


def fit_matmuls(matmuls: Sequence[Matmul], costs: Costs, machine: Machine) -> Costs:
    """`costs` with the three constants of matmuls that fit best, on a grid."""
    peak = machine.device.bf16_flop_per_s
    grid: dict[str, list[float]] = {
        "gemm_flop_per_s": [peak * part / 200 for part in range(20, 201)],
        "gemm_settled": [1 + part / 100 for part in range(51)],
        "gemm_settling_s": [1e-3 * part for part in (0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5)],
    }
    tried = (
        _near(matmuls, replace(costs, gemm_settling_s=settling_s), grid, machine)
        for settling_s in grid["gemm_settling_s"]
    )
    return min(tried, key=lambda found: error(matmuls, found, machine))


def _near(
    matmuls: Sequence[Matmul], costs: Costs, grid: Mapping[str, list[float]], machine: Machine
) -> Costs:
    """From a coarse start one constant at a time until none helps, then steps of all at once."""
    peak = machine.device.bf16_flop_per_s
    best = min(
        (
            replace(costs, gemm_flop_per_s=peak * rate, gemm_settled=settled)
            for rate, settled in product((0.7, 0.8, 0.9), (1.0, 1.12, 1.25))
        ),
        key=lambda c: error(matmuls, c, machine),
    )
    smallest = error(matmuls, best, machine)
    for _ in range(8):
        before = smallest
        for name, values in grid.items():
            for value in values if name != "gemm_settling_s" else ():
                tried = replace(best, **{name: value})
                found = error(matmuls, tried, machine)
                if found < smallest - 1e-9:
                    best, smallest = tried, found
        if before - smallest < 1e-6:
            break
    return _stepped(matmuls, best, grid, machine)


def _stepped(
    matmuls: Sequence[Matmul], costs: Costs, grid: Mapping[str, list[float]], machine: Machine
) -> Costs:
    """Steps on the grid, of all constants at once, until none helps.

    A higher rate, say, is made up for by more loss of clock: one constant at a time then stays
    where it is, on the slope of a narrow valley.
    """

    def at(place: Sequence[int]) -> Costs:
        values = {name: grid[name][i] for name, i in zip(grid, place, strict=True)}
        return replace(costs, **values)

    place = tuple(
        min(range(len(values)), key=lambda i: abs(values[i] - getattr(costs, name)))
        for name, values in grid.items()
    )
    smallest = error(matmuls, at(place), machine)
    while True:
        around = product(*(
            range(max(i - 1, 0), min(i + 2, len(values)))
            for i, values in zip(place, grid.values(), strict=True)
        ))  # fmt: skip
        found, nearby = min((error(matmuls, at(each), machine), each) for each in around)
        if found >= smallest - 1e-9:
            return at(place)
        place, smallest = nearby, found


def error(matmuls: Sequence[Matmul], costs: Costs, machine: Machine) -> float:
    """Mean squared log of predicted over measured."""
    total = 0.0
    for m in matmuls:
        seconds = costs.matmul_s(m.rows, m.n, m.k, 2, machine.sms, m.tile)
        total += log(seconds * costs.settling(seconds) / m.seconds) ** 2
    return total / len(matmuls)


def line(rows: Sequence[Row]) -> tuple[float, float]:
    """(seconds, bytes per second) of seconds = a + bytes / rate, each row counted alike."""
    weights = [1 / row["seconds"] ** 2 for row in rows]
    x = [float(row["num_bytes"]) for row in rows]
    y = [float(row["seconds"]) for row in rows]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    across = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    along = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    if across <= 0:
        question, sizes = rows[0]["question"], sorted({row["num_bytes"] for row in rows})
        want = f"times of question {question!r} that grow with the bytes, of two sizes or more"
        raise InputError("fit", "rows", want=want, got=f"sizes {sizes}, seconds {y}")
    slope = across / along
    return max(mean_y - slope * mean_x, 0.0), 1 / slope


def beside(rows: Sequence[Row]) -> float:
    """How much longer one takes while the other is under way, from the whole of both."""
    # it ran beside the other for as long as the other took, and where that was longer after all, of
    # both together more than the longer is loss
    factors = (
        1
        + (row["seconds"] - max(row["alone_s"], row["other_s"]))
        / row["other_s"]
        / row.get("part", 1.0)
        for row in rows
    )
    return max(median(factors), 1.0)
