"""From measurements of CPU ranks to a machine, and from exchanges to its NIC."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

from counterpoint.machine import LinkSpec, Machine
from counterpoint.model.calibrate import Row, beside, rows_of


def nic_of(rows: Sequence[Row]) -> LinkSpec | None:
    """What reaches other islands, of rows of "exchange" and "far gather"; None: there are none."""
    found = [row for row in rows if row["question"] == "exchange"]
    gathers = [row for row in rows if row["question"] == "far gather"]
    if not found:
        return None
    latency_s, rate = steady(found)
    return LinkSpec(name="between islands", bytes_per_s=rate, latency_s=latency_s,
                    source="measured by exchanges of all ranks at once",
                    collective_bytes_per_s=steady(gathers)[1] if gathers else None)  # fmt: skip


def steady(rows: Sequence[Row]) -> tuple[float, float]:
    """(seconds, bytes per second), as `calibrate.line`, by medians: busy cores have late moments.

    Of times that do not grow with the bytes, all is rate.
    """
    pairs = combinations([(row["num_bytes"], row["seconds"]) for row in rows], 2)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if a[0] != b[0]]
    if not slopes or (slope := median(slopes)) <= 0:
        return 0.0, median(row["num_bytes"] / row["seconds"] for row in rows)
    return max(median(r["seconds"] - r["num_bytes"] * slope for r in rows), 0.0), 1 / slope


def fit_cpu(rows: Sequence[Row], machine: Machine) -> Machine:
    """The machine with costs that fit `rows` best: lines of time against bytes, and products.

    Args:
        rows: as of `calibrate.fit`, but that matmuls are of fp32 and that what runs beside them is
            an exchange; questions of the host and of collectives of ours are not asked.
        machine: of CPU ranks.
    """
    matmuls = rows_of(rows, "matmul")
    flops = [{**row, "num_bytes": 2 * row["rows"] * row["n"] * row["k"]} for row in matmuls]
    start_s, fp32_flop_per_s = steady(flops)
    copy_s, copy_rate = steady(rows_of(rows, "copy"))
    memory_s, memory_rate = steady(rows_of(rows, "memory"))
    gather_s, gather_rate = steady(rows_of(rows, "collective", kind="all_gather"))
    scatters = rows_of(rows, "collective", kind="reduce_scatter")
    shares = [row for row in rows if row["question"] == "beside"]

    def factor(which: str) -> float:
        found = [row for row in shares if row["which"] == which]
        return beside(found) if found else 1.0

    costs = replace(
        machine.costs,
        gemm_flop_per_s=2 * fp32_flop_per_s,  # fp32 counts as half of it
        gemm_settled=1.0,
        gemm_settling_s=0.0,
        kernel_s=max(start_s / 2, memory_s, median(r["seconds"] for r in rows_of(rows, "kernel"))),
        hbm_bytes_per_s=memory_rate,
        copy_bytes_per_s=copy_rate,
        copy_overhead_s=copy_s,
        barrier_s=median(row["seconds"] for row in rows_of(rows, "barrier")),
        matmul_beside_copy=factor("matmul"),
        copy_beside_matmul=factor("copy"),
        collective_bytes_per_s=gather_rate,
        all_gather_s=gather_s,
        # gloo's takes longer by a factor, of which this is right at the middle of the sizes
        reduce_scatter_s=median(
            max(r["seconds"] - r["num_bytes"] / gather_rate, 0.0) for r in scatters
        ),
        collective_small_s=gather_s,
        # the library stands in for collectives of ours
        direct_s=gather_s,
        direct_bytes_per_s=gather_rate,
        host_call_s=0.0,
        host_step_s=0.0,
    )
    return replace(machine, measured=costs, nic=nic_of(rows))
