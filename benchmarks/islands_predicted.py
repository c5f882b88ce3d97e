"""What operators gain on 2 to 128 nodes of 8 GPUs, as the model has it: a picture of predictions.

    python -m benchmarks.islands_predicted    # rows, in 3 minutes; then make readme

No such cluster has run this. An operator joins by an entry in OPERATORS."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import counterpoint as cp
from benchmarks.pictures import Axis, curves, shown
from benchmarks.rows import RESULTS, Row, rows_of
from counterpoint.machine_of import machine_of
from counterpoint.measure.record import environment

NAME = "islands-predicted"
FILE = RESULTS / f"{NAME}.jsonl"
NODES = (2, 4, 8, 16, 32, 64, 128)
SIZE = 8  # GPUs of a node
NIC_BYTES_PER_S = 50e9  # 400 Gb/s each
NIC_LATENCY_S = 5e-6
SHARES = (0.75, 0.9, 1.0)  # of that rate which exchanges reach: low, likely, high
MATMULS = (0.9, 1.0, 1.1)  # of the rate of matmuls on the machine that was measured
ROWS, COLUMNS = 512, 8192  # of a rank; of all that is gathered or scattered
PLAIN = (  # columns of a rank's weight, so that matmuls take about as long as exchanges
    ("all_gather_matmul", 2048), ("matmul_reduce_scatter", 2048), ("matmul_all_reduce", 4096),
)  # fmt: skip
# of DeepSeek-V3: tokens of a rank, experts of a token and of all, one a rank at least; columns
TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 4096, 8, 256, 7168, 2048
BAGS, TABLES, POOLED = 65536, (128,) * 4, 80  # of all ranks; columns, and indices of a bag

Builds = Callable[[int], cp.Problem]


def _of_rows(op: str, inner: int, nodes: int) -> cp.Problem:
    ranks = nodes * SIZE
    n, k = (inner, COLUMNS) if op == "all_gather_matmul" else (COLUMNS, inner)
    return cp.Problem(op, m=ROWS * ranks, n=n, k=k, ranks=ranks, islands=nodes)


def _of_bags(nodes: int) -> cp.Problem:
    """One global batch, whatever the nodes; pooling takes about as long as the exchange."""
    ranks = nodes * SIZE
    return cp.Problem(
        "embedding_bag_all_to_all", m=BAGS, ranks=ranks, tables=(TABLES,) * ranks, islands=nodes,
        indices=(BAGS * len(TABLES) * POOLED,) * ranks,
    )  # fmt: skip


def _of_experts(op: str, n: int, k: int, nodes: int) -> cp.Problem:
    """By routes: serial sends a token once to each rank, plans once to each island."""
    ranks = nodes * SIZE
    return cp.Problem(op, m=TOKENS * TOP_K, n=n, k=k, ranks=ranks, islands=nodes, counts="routed",
                      experts=max(EXPERTS // ranks, 1), top_k=TOP_K)  # fmt: skip


# the problem of so many nodes, by the name of its curve
OPERATORS: Mapping[str, Builds] = {
    **{op: partial(_of_rows, op, inner) for op, inner in PLAIN},
    "embedding_bag_all_to_all": _of_bags,
    "all_to_all_matmul": partial(_of_experts, "all_to_all_matmul", 2 * INNER, HIDDEN),
    "matmul_all_to_all": partial(_of_experts, "matmul_all_to_all", HIDDEN, INNER),
}


@cache
def machine(share: float, matmuls: float) -> cp.Machine:
    """Nodes of 8 H200 as measured inside, with NICs at that part of their rate."""
    inside = machine_of("islands_predicted", f"h200-{SIZE}")
    costs = inside.costs
    nic = cp.LinkSpec(
        name="400 Gb/s NIC", bytes_per_s=share * NIC_BYTES_PER_S, latency_s=NIC_LATENCY_S
    )
    costs = replace(costs, gemm_flop_per_s=matmuls * costs.gemm_flop_per_s)
    return replace(inside, measured=costs, nic=nic)


def gain(problem: cp.Problem) -> Row:
    """The speedup of what `choose` takes over serial, likely and at the corners of what may be."""

    def speedup(share: float, matmuls: float) -> float:
        choice = cp.choose(problem, machine(share, matmuls))
        return choice.serial_s / choice.seconds

    found = [speedup(*corner) for corner in product(SHARES, MATMULS)]
    likely = cp.choose(problem, machine(SHARES[1], MATMULS[1]))
    return {"spec": likely.spec, "speedup": likely.serial_s / likely.seconds,
            "low": min(found), "high": max(found)}  # fmt: skip


def rows() -> Iterator[Row]:
    """Of each operator on each number of nodes."""
    for op, builds in OPERATORS.items():
        for nodes in NODES:
            problem = builds(nodes)
            sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
            yield {"table": "islands predicted", "op": op, "nodes": nodes} | sizes | gain(problem)


def picture(images: Path) -> None:
    """Curves with their bands, where there are rows."""
    if not FILE.exists():
        return
    found = rows_of(FILE)
    points: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for row in found:
        points.setdefault(row["op"], []).append((row["nodes"], row["speedup"]))
        bands.setdefault(row["op"], []).append((row["nodes"], row["low"], row["high"]))
    gbit = NIC_BYTES_PER_S * 8 / 1e9
    low, likely, high = (f"{share:.0%}" for share in SHARES)
    source = (
        f"no measurement: nodes of {SIZE} H200, a NIC of {gbit:.0f} Gb/s each at {likely} of it; "
        f"bands: {low} to {high}, matmuls 10% slower to faster; matmuls about as long as "
        "exchanges, experts as DeepSeek-V3"
    )
    axis = Axis("nodes", "predicted speedup over serial", at_one=True, log_y=False,
                y_text="{:g}x".format)  # fmt: skip
    title = f"Predicted: what plans between nodes gain, {NODES[0]} to {NODES[-1]} nodes"
    curves({"one call of an operator on all GPUs": points}, images / f"{NAME}.svg", axis,
           title=title, source=source, bands=bands)  # fmt: skip


def sections() -> dict[str, str]:
    """The marked section of docs/islands.md, where there are rows."""
    if not FILE.exists():
        return {}
    found = rows_of(FILE)
    alt = f"predicted speedups over serial of {', '.join(OPERATORS)} on 2 to 128 nodes"
    last = {row["op"]: row for row in found}
    ends = "; ".join(
        f"`{op}` {row['speedup']:.2f}x ({row['low']:.2f}x to {row['high']:.2f}x)"
        for op, row in last.items()
    )
    text = f"On {NODES[-1]} nodes: {ends}. Predicted, commit {found[0]['commit']}."
    return {NAME: f"{shown(NAME, alt, 'images')}\n\n{text}"}


def main() -> None:
    """Write the rows."""
    facts = environment()
    about = {name: facts[name] for name in ("commit", "date")}
    with FILE.open("w") as out:
        out.writelines(json.dumps(row | about) + "\n" for row in rows())


if __name__ == "__main__":
    main()
