"""The first paper's figure: TimeRatio over thread blocks of the GEMM, with and without priority.

    counterpoint bench thread_blocks --paper --part 1/4 --out folder        # 2 GPUs

The GEMM's grid is free, X x Y blocks that share out all tiles. From FULL blocks on a loop has the
published size, with fewer an eighth of it: one would take seconds. A part has all grids of two
pairs, the smallest grid of both first.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from benchmarks.declare import Bench, Benchmark, Case
from benchmarks.loop import NUM_ITERATIONS, Pair, build, pairs
from benchmarks.paper_resources import PRIORITY, Way
from benchmarks.pictures import Axis, curves, place
from benchmarks.rows import Row
from counterpoint.resources.controls import OFF, SEQUENTIAL

KERNELS = ("64x64x32", "64x64x64")
FULL = 66  # half of an H200's SMs
SMALLER = 8  # of M and of the collective, below that
GRIDS = ((2, 2), (4, 4), (4, 8), (6, 11), (11, 12), (16, 16), (23, 23), (32, 32), (64, 64),
         (128, 128), (128, 896))  # fmt: skip
ARMS = {"sequential": SEQUENTIAL, "overlap": OFF, "overlap, priority": PRIORITY}
ROUNDS = 3


def cases(_: int) -> list[Case]:
    """All pairs at each grid: rows of a grid are written before the next one runs."""
    return [case_of(pair, grid) for grid, pair in product(GRIDS, pairs(KERNELS))]


def case_of(pair: Pair, grid: tuple[int, int]) -> Case:
    """A pair at a grid."""
    x, y = grid
    return Case(f"{pair.label}, {x} x {y} blocks", {
        "pair": pair.label, "gemm": pair.gemm, "kernel": pair.kernel,
        "collective": pair.collective, "grid": [x, y], "blocks": x * y,
        "scale": 1 if x * y >= FULL else SMALLER, "iterations": NUM_ITERATIONS})  # fmt: skip


def rows_of(case: Case, bench: Bench) -> list[Row]:
    """A row for each arm; seconds are for all iterations."""
    x, y = case["grid"]
    pair = Pair(case["gemm"], case["kernel"], case["collective"], case["scale"], (x, y))
    with Way(build(pair, bench), bench) as way:
        times = way.timed([*ARMS.values()], bench.rounds or ROUNDS)
    mode, rows = "graph" if bench.on_gpu else "eager", list[Row]()
    for name, controls in ARMS.items():
        found: Row = {"arm": name, "mode": mode}
        if controls.spec in times:
            t = times[controls.spec]
            found |= {
                "controls": controls.spec, "median_s": t.median_s, "p20_s": t.quantile_s(2),
                "p80_s": t.quantile_s(8), "rounds": len(t.rounds_s),
                "time_ratio": 1 / t.ratio_of(times[SEQUENTIAL.spec])[0],
            }  # fmt: skip
        else:
            found |= way.why_not(controls)
        rows.append(found)
    return rows


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """The figure, of the most GPUs."""
    rows = [r for r in next(iter(found.values())) if "time_ratio" in r and r["arm"] != "sequential"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['gemm']} + {row['collective'].replace('_', '-')}", {})
        name = f"tile {row['kernel']}" + row["arm"].removeprefix("overlap")
        panel.setdefault(name, []).append((row["blocks"], row["time_ratio"]))
    axis = Axis("thread blocks of the matmul", "TimeRatio: overlapped / sequential", x_text=_label,
                y_text="{:.2f}".format, log_y=False, at_one=True)  # fmt: skip
    curves(panels, images / "sharing-blocks.svg", axis,
           title="Overlap over the thread blocks of the matmul",
           source=f"{place(rows)}; below {FULL} blocks an eighth of the size")  # fmt: skip


def _label(blocks: float) -> str:
    """Every second grid: their numbers would lie over each other."""
    known = [x * y for x, y in GRIDS]
    return f"{blocks:.0f}" if blocks in known[::2] else ""


PAPER_THREAD_BLOCKS = Benchmark(
    "paper_thread_blocks", cases, rows=rows_of, unit="ms", pictures=pictures,
    short=lambda case: case["pair"] == "cb Triton 64x64x32 + all-to-all",
)  # fmt: skip
