"""Each control by itself, and all as tuned, on the loop of loop.py: checked, searched, timed."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError
from counterpoint.measure import record
from counterpoint.measure.energy import energy_of
from counterpoint.measure.loop import COLLECTIVE_BYTES, NUM_ITERATIONS, Loop, Pair, build, ideal_s
from counterpoint.measure.settings import Bench, space_of
from counterpoint.measure.timing import Times, rotate
from counterpoint.measure.tune_resources import tune
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls, Mode, Transport
from counterpoint.resources.search import Space
from counterpoint.resources.stages import Compute
from counterpoint.resources.transport import carriers
from counterpoint.runtime.device_limits import limits_here
from counterpoint.runtime.footprint import triton_footprint
from counterpoint.runtime.occupancy import occupancy

SWEEP_ROUNDS = 3
TUNED, TUNED_SM = "tuned", "tuned, SM collectives"


def measure(
    pair: Pair,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int = 7,
    budget_s: float = 60.0,
    soak_s: float = 5.0,
    sweep: bool = True,
    modes: Sequence[Mode] = ("graph", "eager"),
    energy: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], str]:
    """Every arm of a pair, checked, tuned and timed. All ranks call this.

    Args:
        pair: which.
        group: NCCL group.
        device: this rank's GPU.
        rounds: of the rotation of the arms.
        budget_s: of each search: in a graph there are two, one without copy engines.
        soak_s: load before the rotation.
        sweep: time the GEMM's shapes, if it has any.
        modes: each is tuned by itself; the shapes are those that were best in the graph.
        energy: read NVML for the arms of the graph.
        progress: is told what comes next.

    Returns:
        Rows for `record.append`, equal on all ranks, seconds for all iterations; and the
        explanation of what was tuned.

    Raises:
        CounterpointError: an arm computed something else than fp64 says; nothing was timed.
    """
    progress("setting up")
    loop = build(pair, group, device)
    facts = {
        "table": "resources", "pair": pair.label, "gemm": pair.gemm, "kernel": pair.kernel,
        "collective": pair.collective, "scale": pair.scale, "iterations": NUM_ITERATIONS,
        "ranks": group.size(), "collective_bytes": COLLECTIVE_BYTES // pair.scale,
        "nccl_graph_register": os.environ.get("NCCL_GRAPH_REGISTER") != "0",
    } | record.environment()  # fmt: skip
    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    shaped: dict[str, Controls] = {}
    for mode in modes:
        space = space_of(loop.pipeline, mode)
        found = _tuned(loop, mode, space, budget_s, progress)
        texts.append(found.text)
        with Bench(loop.pipeline, mode) as bench:
            if mode == "graph" and sweep and space.blocks_per_sm:
                progress(f"{mode}: shapes")
                swept, shaped = _sweep(loop, bench, space.blocks_per_sm)
                rows += [row | facts for row in swept]
            arms = fixed_arms(pair, space.blocks_per_sm) | shaped | found.arms
            progress(f"{mode}: {len(arms)} arms")
            timed = _timed(pair, loop, bench, arms, rounds, soak_s)
            if energy and mode == "graph":
                used: dict[str, dict[str, float]] = {}  # arms may have the same setting
                for row in timed:
                    if row["controls"] not in used:
                        progress(f"{mode}: energy of {row['arm']}")
                        used[row["controls"]] = _energy(bench, row, group, device)
                    row |= used[row["controls"]]
            rows += [row | {"mode": mode, "search_s": found.search_s} | facts for row in timed]
            rows += [
                {"arm": spec, "mode": mode, "refused": why} | facts
                for spec, why in bench.refused.items()
            ]
    return rows, "\n".join([pair.label, *texts])


@dataclass(frozen=True)
class _Searched:
    """What a search has found: arms, its explanation, and how long it took."""

    arms: dict[str, Controls]
    text: str
    search_s: float


def _tuned(
    loop: Loop, mode: Mode, space: Space, budget_s: float, progress: Callable[[str], None]
) -> _Searched:
    def find(name: str, some: Space) -> tuple[Controls, str]:
        with tune(
            loop.pipeline, mode=mode, budget_s=budget_s, space=some, remember=False,
            progress=lambda text: progress(f"{mode}, {name}: {text}"),
        ) as tuned:  # fmt: skip
            return tuned.controls, tuned.explain()

    start_s = time.monotonic()
    best, text = find(TUNED, space)
    search_s = time.monotonic() - start_s
    if mode == "eager":
        return _Searched({TUNED: best}, text, search_s)
    kept = best
    if best.transport != "sm":
        kept, more = find(TUNED_SM, replace(space, transports=()))
        text = f"{text}\n{more}"
    return _Searched({TUNED: best, TUNED_SM: kept}, text, search_s)


def _timed(
    pair: Pair, loop: Loop, bench: Bench, arms: dict[str, Controls], rounds: int, soak_s: float
) -> list[dict[str, Any]]:
    """Arms and parts in one rotation, each arm with its error and the bounds of the same rounds."""
    pipeline = loop.pipeline
    able = {name: controls for name, controls in arms.items() if bench.able(controls)}
    settings = {controls.spec: controls for controls in able.values()}
    errors: dict[str, float] = {}
    for spec, controls in settings.items():
        with bench.holding(spec):
            errors[spec] = loop.check(bench.call(controls))
    _refuse_wrong(pair, bench.mode, errors)
    parts: dict[str, Callable[[], object]] = {"gemm": loop.gemm}
    by: tuple[Transport, ...] = ("sm", "copy_engine")
    parts |= {transport: carriers(pipeline, transport)[0] for transport in by}

    def around(name: str) -> AbstractContextManager[object]:
        return bench.holding(name) if name in settings else nullcontext()

    times = rotate(
        {spec: bench.call(controls) for spec, controls in settings.items()} | parts,
        group=pipeline.group, device=pipeline.device, rounds=rounds, soak_s=soak_s, around=around,
    )  # fmt: skip
    gemm_s, sm_s, copies_s = (times[name].median_s for name in parts)
    bounds = {
        "gemm_s": gemm_s, "comm_sm_s": sm_s, "comm_copy_engine_s": copies_s,
        "ideal_s": ideal_s(gemm_s, min(sm_s, copies_s)), "ideal_sm_s": ideal_s(gemm_s, sm_s),
        "sm_clock_mhz": record.sm_clock_mhz(),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, controls in able.items():
        t = times[controls.spec]
        row = {
            "arm": name, "controls": controls.spec, "median_s": t.median_s,
            "p20_s": t.quantile_s(2), "p80_s": t.quantile_s(8), "skew_s": t.skew_s,
            "rounds": rounds, "plain_over_arm": t.ratio_of(times[OFF.spec]),
            "error": errors[controls.spec],
        }  # fmt: skip
        rows.append(row | bounds)
    return rows


def _energy(
    bench: Bench, row: dict[str, Any], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    controls = Controls.parse(row["controls"])
    with bench.holding(controls.spec):
        used = energy_of(bench.call(controls), row["median_s"], group=group, device=device)
    return {"energy_j": used.joules, "power_w": used.watts, "arm_sm_clock_mhz": used.sm_clock_mhz,
            "back_to_back_s": used.seconds}  # fmt: skip


def fixed_arms(pair: Pair, blocks_per_sm: Sequence[int]) -> dict[str, Controls]:
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
        arms["granularity"] = Controls(pieces=14 if wide else 4, along="n" if wide else "m")
        arms["budget"] = Controls(max_ctas=16)
        arms["budget of the matmul"] = Controls(num_sms=112)
    if blocks_per_sm:
        arms["carve-out only"] = Controls(carve_out=True)
        arms["carve-out, priority"] = Controls(carve_out=True, priority=True)
    return arms


def _sweep(
    loop: Loop, bench: Bench, blocks_per_sm: Sequence[int]
) -> tuple[list[dict[str, Any]], dict[str, Controls]]:
    """Times at every number of blocks per SM, and the best of them as arms."""
    (kernel,) = {k for s in loop.pipeline.stages if isinstance(s, Compute) for k in s.kernels}
    limits = limits_here(loop.pipeline.device)
    unshaped = occupancy(triton_footprint(kernel), limits).blocks
    settings = {
        (blocks, urgent): Controls(blocks_per_sm=blocks or None, priority=urgent)
        for urgent in (False, True)
        for blocks in (0, *blocks_per_sm)
    }
    rounds = bench.rounds([SEQUENTIAL, *settings.values()], SWEEP_ROUNDS, soak_s=1.0)
    sequential = Times(rounds[SEQUENTIAL], 0.0)
    rows: list[dict[str, Any]] = []
    for (blocks, urgent), controls in settings.items():
        times = Times(rounds[controls], 0.0)
        rows.append(
            {
                "arm": "shapes", "mode": "graph", "controls": controls.spec, "priority": urgent,
                "blocks_per_sm": blocks or unshaped, "unshaped": not blocks,
                "median_s": times.median_s, "time_ratio": 1 / times.ratio_of(sequential)[0],
                "rounds": SWEEP_ROUNDS,
            }
        )  # fmt: skip
    arms: dict[str, Controls] = {}
    for name, urgent in (("shaping", False), ("shaping, priority", True)):
        shaped = [c for (blocks, p), c in settings.items() if blocks and p == urgent]
        arms[name] = min(shaped, key=lambda c: Times(rounds[c], 0.0).median_s)
    return rows, arms


def _refuse_wrong(pair: Pair, mode: Mode, errors: dict[str, float]) -> None:
    for spec, error in errors.items():
        if not error <= 2 * errors[SEQUENTIAL.spec]:
            raise CounterpointError(
                f"{pair.label}, {spec} ({mode}): error {error:.2e} against fp64, the sequential "
                f"arm has {errors['sequential']:.2e}"
            )
