"""The first paper's experiment: its pairs, full size, its arms, what its metrics say.

    counterpoint bench resources --paper --out folder               # 2 GPUs
    NCCL_NTHREADS=256 counterpoint bench resources --paper --out folder

A GEMM bound by compute and one with a wide result, each with an all-reduce or an all-to-all, by
cuBLAS and by Triton tiles of the paper; sequential, plain overlap, priority, shaping, both, tuned.
TimeRatio is overlapped / sequential; the overlap rate is the share of the time in which both run.
With NCCL_NTHREADS=256 a block of NCCL's leaves room for blocks of the GEMM on its SM.

All pairs are one command. A pair captures each graph once, and `tuned` searches only among the
shapes that the sweep has found to be best. `--part 1/2` and `--part 2/2` are half of it each.

Source: arXiv 2606.09200; tuned and cuBLAS are ours.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.declare import Bench, Benchmark, Case, WrongResultError
from benchmarks.loop import COLLECTIVE_BYTES, NUM_ITERATIONS, Loop, Pair, alone_s, build, pairs
from benchmarks.pictures import Axis, dots, place
from benchmarks.resources import sweep, unshaped
from benchmarks.rows import Row
from counterpoint.errors import CounterpointError
from counterpoint.gpu.device_limits import limits_here
from counterpoint.gpu.footprint import Footprint, node_footprint
from counterpoint.gpu.occupancy import beside
from counterpoint.measure import settings
from counterpoint.measure.profile import traced
from counterpoint.measure.timing import Times, rotate
from counterpoint.measure.trace import Activity, activities
from counterpoint.resources import Controls, tune
from counterpoint.resources.controls import OFF, SEQUENTIAL
from counterpoint.resources.run import Captured, Eager
from counterpoint.resources.shape import SPINNING
from counterpoint.resources.transport import carriers

KERNELS = ("cuBLAS", "64x64x32", "64x64x64")
ROUNDS = 5
SEARCH_S = 5.0
PRIORITY = Controls(priority=True)
ERROR = 1e-2  # the most, of any setting, against fp64
RATIO = "TimeRatio: overlapped / sequential (lower is better)"
SPELT = {"tuned": "counterpoint, tuned"}


def cases(_: int) -> list[Case]:
    """Twelve pairs."""
    return [case_of(pair) for pair in pairs(KERNELS)]


def case_of(pair: Pair) -> Case:
    """A pair, and how many threads NCCL's blocks have at most; 0: as it likes."""
    threads = int(os.environ.get("NCCL_NTHREADS", "0"))
    return Case(pair.label + (f", {threads} threads of NCCL" if threads else ""), {
        "pair": pair.label, "gemm": pair.gemm, "kernel": pair.kernel,
        "collective": pair.collective, "scale": pair.scale, "nccl_threads": threads})  # fmt: skip


class Way:
    """How a loop runs here: by graphs, each captured once, or call by call on CPU ranks.

    A context: left, the graphs are gone.

    Args:
        loop: that runs.
        bench: this rank.
    """

    def __init__(self, loop: Loop, bench: Bench) -> None:
        self.loop, self.bench = loop, bench
        self.graphs = settings.Bench(loop.pipeline, "graph") if bench.on_gpu else None
        self.refused: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self.most_error = ERROR

    def __enter__(self) -> "Way":
        """Nothing is captured yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the graphs."""
        if self.graphs is not None:
            self.graphs.__exit__()

    def timed(self, some: Sequence[Controls], rounds: int) -> dict[str, Times]:
        """Checks each setting against fp64, then times those that are right in one rotation.

        Args:
            some: the sequential one first: others may be off by twice as much.
            rounds: of the rotation.

        Raises:
            WrongResultError: the sequential one is off.
        """
        if self.graphs is None:
            return self._by_call(some, rounds)
        return self._by_graph(self.graphs, some, rounds)

    def _by_graph(
        self, graphs: settings.Bench, some: Sequence[Controls], rounds: int
    ) -> dict[str, Times]:
        calls: dict[str, Callable[[], object]] = {}
        for each in some:
            if graphs.able(each):
                with graphs.holding(each.spec):
                    if self._right(each, graphs.call(each)):
                        calls[each.spec] = graphs.call(each)
        self.refused.update(graphs.refused)
        return rotate(calls, group=self.bench.group, device=self.bench.device, rounds=rounds,
                      soak_s=0.5, around=graphs.holding)  # fmt: skip

    def _by_call(self, some: Sequence[Controls], rounds: int) -> dict[str, Times]:
        plain = [each for each in some if each in (OFF, SEQUENTIAL)]
        self.refused.update({c.spec: "this control needs a GPU" for c in some if c not in plain})
        made = {each: Eager(self.loop.pipeline, each) for each in plain}
        calls = {each.spec: call for each, call in made.items() if self._right(each, call)}
        return rotate(calls, group=self.bench.group, device=self.bench.device, rounds=rounds,
                      soak_s=0.0)  # fmt: skip

    def _right(self, controls: Controls, call: Any) -> bool:
        """Whether its result is, on all ranks; else it is among those that are `wrong`."""
        error = self.loop.check(call)
        if controls == SEQUENTIAL:
            self.most_error = min(2 * error, ERROR)
        if error <= self.most_error:
            return True
        text = f"off by {error:.2e} against fp64, at most {self.most_error:.2e}"
        if controls == SEQUENTIAL:
            raise WrongResultError(f"{controls.spec}: {text}", [])
        self.bench.say(f"without {controls.spec}: {text}")
        self.wrong[controls.spec] = text
        return False

    def why_not(self, controls: Controls) -> Row:
        """Why a setting has no times."""
        if controls.spec in self.wrong:
            return {"refused": self.wrong[controls.spec], "wrong": True}
        return {"refused": self.refused[controls.spec]}


def rows_of(case: Case, bench: Bench) -> list[Row]:
    """Every arm of a pair, then its sweep of shapes; seconds are for all iterations."""
    pair = Pair(case["gemm"], case["kernel"], case["collective"], case["scale"])
    bench.say("setting up")
    with Way(build(pair, bench), bench) as way:
        return _rows_of(way, pair, bench)


def _rows_of(way: Way, pair: Pair, bench: Bench) -> list[Row]:
    arms = {"sequential": SEQUENTIAL, "plain overlap": OFF, "priority": PRIORITY}
    rows: list[Row] = []
    if way.graphs is not None:
        more, rows = _searched(way.loop, way.graphs, bench)
        arms |= more
    rounds = bench.rounds or ROUNDS
    times = way.timed([*dict.fromkeys(arms.values())], rounds)
    parts = _alone(way.loop, bench, rounds)
    rates = {} if way.graphs is None else _rates(way.graphs, arms, bench)
    sequential = times[SEQUENTIAL.spec]
    for name, controls in arms.items():
        if controls.spec not in times:
            rows.append({"arm": name} | way.why_not(controls))
            continue
        t = times[controls.spec]
        rows.append({
            "arm": name, "controls": controls.spec, "median_s": t.median_s,
            "p20_s": t.quantile_s(2), "p80_s": t.quantile_s(8), "skew_s": t.skew_s,
            "rounds": len(t.rounds_s), "sm_clock_mhz": t.clock_mhz,
            "time_ratio": 1 / t.ratio_of(sequential)[0],
            **({"overlap_rate": rates[controls.spec]} if controls.spec in rates else {}), **parts,
        })  # fmt: skip
    facts: Row = {"iterations": NUM_ITERATIONS, "mode": "graph" if bench.on_gpu else "eager",
             "collective_bytes": COLLECTIVE_BYTES // pair.scale}  # fmt: skip
    facts |= resident(way.loop) if bench.on_gpu else {}
    return [row | facts for row in rows]


def _searched(
    loop: Loop, graphs: settings.Bench, bench: Bench
) -> tuple[dict[str, Controls], list[Row]]:
    """The best shapes with and without priority, and what `tune` takes; the rows of all shapes."""
    pipeline = loop.pipeline
    space = settings.space_of(pipeline, "graph")
    arms: dict[str, Controls] = {}
    rows: list[Row] = []
    if space.blocks_per_sm:
        bench.say("shapes")
        rows, arms = sweep(graphs, space.blocks_per_sm, unshaped(loop))
        best = {controls.blocks_per_sm for controls in arms.values()}
        space = replace(space, blocks_per_sm=tuple(k for k in space.blocks_per_sm if k in best))
    bench.say("search")
    with tune(pipeline, budget_s=SEARCH_S, space=space, remember=False) as tuned:
        arms["tuned"] = tuned.controls
    return arms, rows


def resident(loop: Loop) -> Row:
    """What NCCL's kernel takes here, and how many blocks of the GEMM an SM has room for beside."""
    captured = Captured(loop.pipeline)
    first = next(k for k in kernels_of(captured.collective_nodes) if SPINNING.search(k.name))
    gemm = next(iter(kernels_of(captured.compute_nodes)))
    limits = limits_here(loop.pipeline.device)
    return {
        "comm_threads": first.threads, "comm_blocks": first.num_blocks,
        "comm_registers": first.registers_per_thread,
        "comm_shared_bytes": first.static_shared_bytes + first.dynamic_shared_bytes,
        "beside_blocks": beside(gemm, first, limits).blocks,
    }  # fmt: skip


def kernels_of(nodes: Iterable[int]) -> list[Footprint]:
    """What the kernels of nodes of a graph take."""
    return [found for found in map(node_footprint, nodes) if found.kind == "kernel"]


def _alone(loop: Loop, bench: Bench, rounds: int) -> Row:
    """Seconds of the GEMM and of the collective, each alone."""
    parts: dict[str, Callable[[], object]] = {
        "gemm_s": loop.gemm, "comm_sm_s": carriers(loop.pipeline, "sm")[0]
    }  # fmt: skip
    times = rotate(parts, group=bench.group, device=bench.device, rounds=rounds,
                   soak_s=0.1 if bench.on_gpu else 0.0)  # fmt: skip
    return {name: t.median_s for name, t in times.items()}


def _rates(graphs: settings.Bench, arms: dict[str, Controls], bench: Bench) -> dict[str, float]:
    """The overlap rate of each setting, of the rank with the least; one run under the profiler."""
    found: dict[str, float] = {}
    for controls in dict.fromkeys(arms.values()):
        if not graphs.able(controls):
            continue
        bench.meet()
        try:
            with graphs.holding(controls.spec):
                _, content = traced(graphs.call(controls))
            rate = overlap_rate(activities(content))
        except (CounterpointError, RuntimeError, ValueError) as error:  # times are there already
            bench.say(f"no trace of {controls.spec}: {error}")
            rate = float("inf")
        (lost,) = bench.most([-rate])
        if -lost <= 1:
            found[controls.spec] = -lost
    return found


def overlap_rate(found: Sequence[Activity]) -> float:
    """The share of the time from the first kernel to the last in which a kernel or copy of a
    collective and a kernel of compute both run."""
    marks: list[tuple[float, int, int]] = []
    for each in found:
        kind = int(each.category != "kernel" or SPINNING.search(each.name) is not None)
        marks += [(each.start_us, 1, kind), (each.end_us, -1, kind)]
    running, both_us, last_us = [0, 0], 0.0, 0.0
    marks.sort()
    for at_us, change, kind in marks:
        if all(running):
            both_us += at_us - last_us
        running[kind] += change
        last_us = at_us
    whole_us = marks[-1][0] - marks[0][0]
    return both_us / whole_us if whole_us else 0.0


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """TimeRatio of each arm of each pair, of the most GPUs; a panel for each setting of NCCL."""
    rows = [r for r in next(iter(found.values())) if "time_ratio" in r and r["arm"] != "shapes"]
    pairs = dict.fromkeys(row["pair"] for row in rows)
    panels: dict[str, dict[str, dict[str, float]]] = {}
    marks: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["nccl_threads"]):
        threads, pair = row["nccl_threads"], row["pair"]
        panel = f"NCCL with {threads} threads a block" if threads else "NCCL as it is"
        dots_of = panels.setdefault(panel, {pair: {} for pair in pairs})[pair]
        if row["arm"] == "sequential":
            alone = alone_s(row["gemm_s"], row["comm_sm_s"], row["iterations"])
            marks.setdefault(panel, {})[pair] = alone / row["median_s"]
        else:
            dots_of[SPELT.get(row["arm"], row["arm"])] = row["time_ratio"]
    first, means = next(iter(panels.values())).values(), list[str]()
    for arm in ("plain overlap", "priority", SPELT["tuned"]):
        mean = geometric_mean(pair[arm] for pair in first if arm in pair)
        means.append(f"{arm} {mean:.2f}")
    dots(panels, images / "sharing-paper.svg", marks=marks, source=place(rows),
         mark="parts alone (an estimate)", axis=Axis(RATIO, x_text="{:.2f}".format),
         title=f"TimeRatio, means: {'; '.join(means)}")  # fmt: skip


PAPER_RESOURCES = Benchmark(
    "paper_resources", cases, rows=rows_of, unit="ms", pictures=pictures,
    short=lambda case: case.name == "cb Triton 64x64x32 + all-to-all",
)  # fmt: skip
