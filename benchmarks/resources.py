"""How a GEMM and a collective in a loop share the GPU: each control by itself, and all as tuned.

Every arm is checked, searched for and timed; loop.py has the loop. The bounds, the GEMM and the
collective alone, are of the same rotation. `counterpoint.resources.tune` is what users call. The
arm of NCCL's zero-CTA collectives needs NCCL_NVLS_ENABLE=0 in the environment.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import residency, sharing
from benchmarks.declare import Bench, Benchmark, Case
from benchmarks.energy import energy_of
from benchmarks.loop import (
    COLLECTIVE_BYTES,
    KERNELS,
    NUM_ITERATIONS,
    Loop,
    Pair,
    alone_s,
    build,
    pairs,
)
from benchmarks.rows import Row
from benchmarks.sharing import SECTIONS, TUNED, TUNED_SM
from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.gpu.device_limits import limits_here
from counterpoint.gpu.footprint import triton_footprint
from counterpoint.gpu.occupancy import occupancy
from counterpoint.measure import settings
from counterpoint.measure.timing import Times, rotate
from counterpoint.resources import Controls, Space, tune
from counterpoint.resources.controls import OFF, SEQUENTIAL, Mode
from counterpoint.resources.stages import Compute
from counterpoint.resources.transport import carriers

SHORT_SCALE = 8  # of M and of the collective
SWEEP_ROUNDS = 3
SEARCH_S, SHORT_SEARCH_S = 10.0, 5.0  # of each search
ZERO_CTA = Controls(transport="zero_cta")


def cases(_: int) -> list[Case]:
    """The paper's pairs in a graph, those of cuBLAS also call by call."""
    found: list[Case] = []
    for pair in pairs(KERNELS):
        modes: tuple[Mode, ...] = ("graph", "eager") if pair.kernel == "cuBLAS" else ("graph",)
        found += [Case(f"{pair.label}, {mode}", {
            "pair": pair.label, "gemm": pair.gemm, "kernel": pair.kernel,
            "collective": pair.collective, "mode": mode}) for mode in modes]  # fmt: skip
    return found


def rows_of(case: Case, bench: Bench) -> list[Row]:
    """Every arm of a pair in one mode; seconds are for all iterations."""
    scale = SHORT_SCALE if bench.short else 1
    pair, mode = Pair(case["gemm"], case["kernel"], case["collective"], scale), case["mode"]
    bench.say("setting up")
    loops, without = loops_of(pair, bench)
    loop = loops[0]
    heavy = pair.gemm == "mb" and pair.kernel != "cuBLAS"  # 100 ms and more
    rounds = bench.rounds or (5 if heavy or bench.short else 15)
    space = settings.space_of(loop.pipeline, mode)
    arms, search_s = searched(loop, mode, space, SHORT_SEARCH_S if bench.short else SEARCH_S, bench)
    rows: list[Row] = []
    with Homes(loops, mode) as homes:
        shaped: dict[str, Controls] = {}
        if mode == "graph" and space.blocks_per_sm and not bench.short:
            bench.say("shapes")
            rows, shaped = sweep(homes.benches[0], space.blocks_per_sm, unshaped(loop))
        arms = fixed_arms(pair, mode, space.blocks_per_sm) | shaped | arms
        bench.say(f"{len(arms)} arms")
        rows += timed(pair.label, homes, arms, rounds, bench)
        if mode == "graph" and pair.kernel == "cuBLAS":
            add_energy(homes, rows, bench)
        rows += [{"arm": s, "refused": why} for s, why in (homes.refused | without).items()]
    facts = {"iterations": NUM_ITERATIONS, "scale": scale, "search_s": search_s,
             "collective_bytes": COLLECTIVE_BYTES // scale,
             "nccl_graph_register": os.environ.get("NCCL_GRAPH_REGISTER") != "0"}  # fmt: skip
    return [row | facts for row in rows]


def loops_of(pair: Pair, bench: Bench) -> tuple[list[Loop], dict[str, str]]:
    """The loop, and where there is such memory the same in memory that is registered with NCCL.

    Zero-CTA collectives need the latter, our copies need memory that peers write to.

    Returns:
        The loops, and the setting that cannot be had, with the reason.
    """
    loops, without = [build(pair, bench)], dict[str, str]()
    if pair.collective == "all_to_all":
        try:
            loops.append(build(pair, bench, memory="library"))
        except UnsupportedError as error:
            without[ZERO_CTA.spec] = str(error)
    return loops, without


class Homes:
    """Where each setting runs: in the first of a pair's loops that can have it.

    A context: left, all graphs are gone.

    Args:
        loops: of one pair.
        mode: "graph" or "eager".
    """

    def __init__(self, loops: Sequence[Loop], mode: Mode) -> None:
        self.mode, self.loops = mode, loops
        self.benches = [settings.Bench(loop.pipeline, mode) for loop in loops]
        self.refused: dict[str, str] = {}
        self._found: dict[str, int] = {}

    def __enter__(self) -> "Homes":
        """Nothing is captured yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the graphs."""
        for bench in self.benches:
            bench.__exit__()

    def able(self, controls: Controls) -> bool:
        """Whether a loop can have a setting; all ranks call this."""
        spec = controls.spec
        if spec not in self._found and spec not in self.refused:
            able = (i for i, bench in enumerate(self.benches) if bench.able(controls))
            if (first := next(able, None)) is not None:
                self._found[spec] = first
            else:
                why = dict.fromkeys(bench.refused[spec] for bench in self.benches)
                self.refused[spec] = "; ".join(why)
        return spec in self._found

    def holding(self, spec: str) -> AbstractContextManager[object]:
        """Have a setting hold in its loop."""
        return self.benches[self._found[spec]].holding(spec)

    def call(self, controls: Controls) -> Callable[[], object]:
        """What runs a setting, inside `holding`."""
        return self.benches[self._found[controls.spec]].call(controls)

    def error(self, controls: Controls) -> float:
        """How far off a setting is against fp64."""
        with self.holding(controls.spec):
            return self.loops[self._found[controls.spec]].check(self.call(controls))


def fixed_arms(pair: Pair, mode: Mode, blocks_per_sm: Sequence[int]) -> dict[str, Controls]:
    """Each control by itself; those of shaping need a kernel that can be shaped."""
    wide = pair.gemm == "mb"
    arms = {
        "sequential": SEQUENTIAL,
        "plain overlap": OFF,
        "priority": Controls(priority=True),
        "order": Controls(delay_s=5e-6),
        "transport": Controls(transport="copy_engine"),
    }
    if pair.kernel == "cuBLAS":
        arms["granularity"] = Controls(chunks=14 if wide else 4, along="n" if wide else "m")
        arms["budget"] = Controls(max_ctas=16)
        arms["budget of the matmul"] = Controls(num_sms=112)
    if pair.collective == "all_to_all":
        arms["zero CTA"] = ZERO_CTA
    if mode == "eager":
        arms["green context"] = Controls(green_sms=112)
    if blocks_per_sm:
        arms["carve-out only"] = Controls(carve_out=True)
        arms["carve-out, priority"] = Controls(carve_out=True, priority=True)
    return arms


def searched(
    loop: Loop, mode: Mode, space: Space, budget_s: float, bench: Bench
) -> tuple[dict[str, Controls], float]:
    """What a search finds, and another one that keeps the library's collectives; its seconds."""

    def find(name: str, some: Space) -> Controls:
        with tune(loop.pipeline, mode=mode, budget_s=budget_s, space=some, remember=False) as tuned:
            bench.say(f"{name}: {tuned.explain()}")
            return tuned.controls

    start_s = time.monotonic()
    best = find(TUNED, space)
    search_s = time.monotonic() - start_s
    if mode == "eager":
        return {TUNED: best}, search_s
    kept = best if best.transport == "sm" else find(TUNED_SM, replace(space, transports=()))
    return {TUNED: best, TUNED_SM: kept}, search_s


def timed(
    label: str, homes: Homes, arms: dict[str, Controls], rounds: int, bench: Bench
) -> list[Row]:
    """Arms and parts in one rotation, each arm with its error and the bounds of the same rounds.

    Raises:
        CounterpointError: an arm is off by more than twice what the sequential one is.
    """
    had = {name: controls for name, controls in arms.items() if homes.able(controls)}
    some = {controls.spec: controls for controls in had.values()}
    errors: dict[str, float] = {}
    for spec, controls in sorted(some.items(), key=lambda item: item[0] != SEQUENTIAL.spec):
        errors[spec] = homes.error(controls)
        if not errors[spec] <= min(2 * errors[SEQUENTIAL.spec], 1e-2):
            raise CounterpointError(
                f"{label}, {spec} ({homes.mode}): off by {errors[spec]:.2e} against fp64"
            )
    loop = homes.loops[0]
    parts: dict[str, Callable[[], object]] = {"gemm": loop.gemm}
    parts |= {by: carriers(loop.pipeline, by)[0] for by in ("sm", "copy_engine")}

    def around(name: str) -> AbstractContextManager[object]:
        return homes.holding(name) if name in some else nullcontext()

    times = rotate({spec: homes.call(controls) for spec, controls in some.items()} | parts,
                   group=bench.group, device=bench.device, rounds=rounds,
                   soak_s=0.2 if bench.short else 1.0, around=around)  # fmt: skip
    gemm_s, sm_s, copies_s = (times[name].median_s for name in parts)
    bounds = {
        "gemm_s": gemm_s, "comm_sm_s": sm_s, "comm_copy_engine_s": copies_s,
        "ideal_s": alone_s(gemm_s, min(sm_s, copies_s)), "ideal_sm_s": alone_s(gemm_s, sm_s),
    }  # fmt: skip
    return [
        _row(name, controls, times, errors[controls.spec]) | bounds
        for name, controls in had.items()
    ]


def _row(name: str, controls: Controls, times: dict[str, Times], error: float) -> Row:
    t = times[controls.spec]
    return {
        "arm": name, "controls": controls.spec, "median_s": t.median_s, "p20_s": t.quantile_s(2),
        "p80_s": t.quantile_s(8), "skew_s": t.skew_s, "rounds": len(t.rounds_s), "error": error,
        "sm_clock_mhz": t.clock_mhz, "baseline_over_arm": t.ratio_of(times[OFF.spec]),
    }  # fmt: skip


def add_energy(homes: Homes, rows: list[Row], bench: Bench) -> None:
    """Energy and clock of each arm, where NVML is there; arms may have the same setting."""
    used: dict[str, Row] = {}
    for row in (row for row in rows if "controls" in row and row["arm"] != "shapes"):
        spec = row["controls"]
        try:
            with homes.holding(spec):
                call = homes.call(Controls.parse(spec))
                found = used.get(spec) or energy_of(call, row["median_s"], bench)
        except UnsupportedError as error:
            bench.say(f"without energy: {error}")
            return
        row |= used.setdefault(spec, found)


def unshaped(loop: Loop) -> int:
    """Resident blocks per SM of the loop's kernel as it is."""
    (kernel,) = {k for s in loop.pipeline.stages if isinstance(s, Compute) for k in s.kernels}
    return occupancy(triton_footprint(kernel), limits_here(loop.pipeline.device)).blocks


def sweep(
    able: settings.Bench, blocks_per_sm: Sequence[int], most: int
) -> tuple[list[Row], dict[str, Controls]]:
    """Times at every number of blocks per SM, and the best of them as arms; 0: as many as fit."""
    some = {(blocks, urgent): Controls(blocks_per_sm=blocks or None, priority=urgent)
            for urgent in (False, True) for blocks in (0, *blocks_per_sm)}  # fmt: skip
    rounds = able.rounds([SEQUENTIAL, *some.values()], SWEEP_ROUNDS, soak_s=1.0)
    found = {key: Times(rounds[controls], 0.0) for key, controls in some.items()}
    sequential, rows = Times(rounds[SEQUENTIAL], 0.0), list[dict[str, Any]]()
    for (blocks, urgent), times in found.items():
        rows.append({
            "arm": "shapes", "controls": some[blocks, urgent].spec, "priority": urgent,
            "blocks_per_sm": blocks or most, "unshaped": not blocks,
            "median_s": times.median_s, "time_ratio": 1 / times.ratio_of(sequential)[0],
            "rounds": SWEEP_ROUNDS,
        })  # fmt: skip
    arms: dict[str, Controls] = {}
    for name, urgent in (("shaping", False), ("shaping, priority", True)):
        best = min(
            (key for key in some if key[0] and key[1] == urgent), key=lambda k: found[k].median_s
        )
        arms[name] = some[best]
    return rows, arms


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Of the arms, of shaping, and of GPUs that are not here."""
    sharing.pictures(found, images)
    residency.picture(residency.fitted_on(), images)


RESOURCES = Benchmark(
    "resources", cases, rows=rows_of, unit="ms", sections=(*SECTIONS, *residency.SECTIONS),
    pictures=pictures,
    short=lambda case: case.name == "cb cuBLAS + all-to-all, graph",
    moved=lambda *_: COLLECTIVE_BYTES,
)  # fmt: skip
