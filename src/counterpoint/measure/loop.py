"""The loop of the resource-aware overlap paper: a GEMM, a collective on its result, again.

Four iterations with the output double-buffered: collective i runs beside GEMM i + 1 and has ended
before GEMM i + 2 writes where it reads. Two GEMMs, two collectives of 896 MiB, several kernels;
each pair runs under every control by itself and as tuned, in a graph and eagerly.

Source: arXiv 2606.09200 (workload, priority, shaping); the other arms are ours.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.kernels.matmul import matmul_kernel
from counterpoint.measure import record
from counterpoint.measure.energy import energy_of
from counterpoint.measure.timing import Times, relative_error, rotate
from counterpoint.measure.tune_resources import Bench, space_of, tune
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls, Mode, Transport
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.search import Space
from counterpoint.resources.transport import carriers

SHAPES = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}  # compute-bound, memory-bound
COLLECTIVE_BYTES = 896 << 20
NUM_ITERATIONS = 4
SWEEP_ROUNDS = 3
# tile and launch of the Triton kernels: BLOCK_M, BLOCK_N, BLOCK_K, warps, stages
TRITON: dict[str, tuple[int, int, int, int, int]] = {
    "64x64x32": (64, 64, 32, 4, 3),
    "64x64x64": (64, 64, 64, 4, 3),
    "128x128x64": (128, 128, 64, 8, 3),
    "128x256x64": (128, 256, 64, 8, 3),
}
KERNELS = ("cuBLAS", *TRITON)


@dataclass(frozen=True)
class Pair:
    """One GEMM and one collective.

    Args:
        gemm: "cb" or "mb".
        kernel: "cuBLAS", or the tile of a Triton kernel.
        collective: of the GEMM's result.
        scale: divides M and the collective: 1 as published, more for a quick look.
    """

    gemm: Literal["cb", "mb"]
    kernel: str
    collective: Literal["all_reduce", "all_to_all"]
    scale: int = 1

    @property
    def label(self) -> str:
        """As tables call it."""
        kernel = self.kernel if self.kernel == "cuBLAS" else f"Triton {self.kernel}"
        return f"{self.gemm} {kernel} + {self.collective.replace('_', '-')}"


@dataclass
class Loop:
    """A pair as a pipeline, with its parts."""

    pipeline: Pipeline
    gemm: Callable[[], object]
    check: Callable[[Callable[[], object]], float]


def pairs(
    kernels: Sequence[str] = KERNELS, gemms: Sequence[Literal["cb", "mb"]] = ("cb", "mb")
) -> list[Pair]:
    """The paper's pairs: cuBLAS first."""
    collectives: tuple[Literal["all_to_all", "all_reduce"], ...] = ("all_to_all", "all_reduce")
    return [Pair(g, k, c) for k in kernels for g in gemms for c in collectives]


def build(pair: Pair, group: dist.ProcessGroup, device: torch.device) -> Loop:
    """The pipeline of a pair. Random inputs, different on each rank; all ranks call this."""
    m, n, k = SHAPES[pair.gemm]
    m //= pair.scale
    numel = COLLECTIVE_BYTES // 2 // pair.scale
    generator = torch.Generator(device).manual_seed(1 + group.rank())

    def normal(*shape: int) -> Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return out.normal_(generator=generator)

    pipeline = Pipeline(group, device)
    a, b = normal(m, k), normal(k, n).mul_(k**-0.5)
    reduces = pair.collective == "all_reduce"
    dtype = torch.bfloat16
    if reduces:  # in place; its average stays finite, however often
        sources = [pipeline.empty(numel, dtype=dtype) for _ in range(2)]
        targets = sources
    else:
        sources = [normal(numel) for _ in range(2)]
        targets = [pipeline.empty(numel, dtype=dtype) for _ in range(2)]
    outputs = [source[: m * n].view(m, n) for source in sources]
    gemms = [_gemm(pair.kernel, a, b, c) for c in outputs]
    compiled = [gemm() for gemm in gemms] if pair.kernel != "cuBLAS" else []
    for i in range(NUM_ITERATIONS):
        c, half = outputs[i % 2], i % 2
        pipeline.compute(
            gemms[half], reads=[a, b], writes=[c], kernels=compiled[:1], name=f"gemm {i}"
        )
        op = pair.collective
        name = f"{op} {i}"
        pipeline.collective(
            op, targets[half], sources[half], reduction="avg" if reduces else "sum", name=name
        )
    return Loop(pipeline, gemms[0], _checker(pair, a, b, sources, targets, group))


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
        budget_s: of each search.
        soak_s: load before the rotation.
        sweep: time the GEMM's shapes, if it has any.
        modes: graph first: what is tuned in it is what eager runs, as far as it has a way in.
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
    space = space_of(loop.pipeline, modes[0])
    found = _tuned(loop, modes[0], space, budget_s, progress)
    rows: list[dict[str, Any]] = []
    for mode in modes:
        arms = fixed_arms(pair, space.blocks_per_sm) | found.arms
        with Bench(loop.pipeline, mode) as bench:
            if mode == "graph" and sweep and space.blocks_per_sm:
                progress(f"{mode}: shapes")
                rows += [row | facts for row in _sweep(bench, arms, space.blocks_per_sm)]
            progress(f"{mode}: {len(arms)} arms")
            timed = _timed(loop, bench, arms, rounds, soak_s)
            _refuse_wrong(pair, mode, timed)
            if energy and mode == "graph":
                for row in timed:
                    progress(f"{mode}: energy of {row['arm']}")
                    row |= _energy(bench, row, group, device)
            rows += [row | {"mode": mode, "search_s": found.search_s} | facts for row in timed]
            rows += [
                {"arm": spec, "mode": mode, "refused": why} | facts
                for spec, why in bench.refused.items()
            ]
    return rows, f"{pair.label}\n{found.text}"


@dataclass(frozen=True)
class _Searched:
    """What a search has found: arms, its explanation, and how long it took."""

    arms: dict[str, Controls]
    text: str
    search_s: float


def _tuned(
    loop: Loop, mode: Mode, space: Space, budget_s: float, progress: Callable[[str], None]
) -> _Searched:
    start_s = time.monotonic()
    with tune(
        loop.pipeline, mode=mode, budget_s=budget_s, space=space, remember=False,
        progress=lambda text: progress(f"{mode}: {text}"),
    ) as tuned:  # fmt: skip
        assert tuned.found is not None, "nothing was to be remembered"
        by_library = [arm for arm in tuned.found.arms if arm.controls.transport == "sm"]
        kept = min(by_library, key=lambda arm: arm.seconds).controls
        arms = {"tuned": tuned.controls, "tuned, SM collectives": kept}
        return _Searched(arms, tuned.explain(), time.monotonic() - start_s)


def _timed(
    loop: Loop, bench: Bench, arms: dict[str, Controls], rounds: int, soak_s: float
) -> list[dict[str, Any]]:
    """Arms and parts in one rotation, each arm with its error and the bounds of the same rounds."""
    pipeline = loop.pipeline
    able = {name: controls for name, controls in arms.items() if bench.able(controls)}
    errors: dict[str, float] = {}
    for name, controls in able.items():
        with bench.holding(controls.spec):
            errors[name] = loop.check(bench.call(controls))
    parts: dict[str, Callable[[], object]] = {"gemm": loop.gemm}
    by: tuple[Transport, ...] = ("sm", "copy_engine")
    parts |= {transport: carriers(pipeline, transport)[0] for transport in by}

    def around(name: str) -> AbstractContextManager[object]:
        return bench.holding(able[name].spec) if name in able else nullcontext()

    times = rotate(
        {name: bench.call(controls) for name, controls in able.items()} | parts,
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
        t = times[name]
        row = {
            "arm": name, "controls": controls.spec, "median_s": t.median_s,
            "p20_s": t.quantile_s(2), "p80_s": t.quantile_s(8), "skew_s": t.skew_s,
            "rounds": rounds, "plain_over_arm": t.ratio_of(times["plain overlap"]),
            "error": errors[name],
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


def ideal_s(gemm_s: float, comm_s: float, iterations: int = NUM_ITERATIONS) -> float:
    """Seconds of the loop if nothing shared anything: GEMM, then the longer ones, then the rest."""
    return gemm_s + (iterations - 1) * max(gemm_s, comm_s) + comm_s


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
    bench: Bench, arms: dict[str, Controls], blocks_per_sm: Sequence[int]
) -> list[dict[str, Any]]:
    """Times at every number of blocks per SM; the best of them become arms."""
    own = max(blocks_per_sm) + 1
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
                "blocks_per_sm": blocks or own, "unshaped": not blocks,
                "median_s": times.median_s, "time_ratio": 1 / times.ratio_of(sequential)[0],
                "rounds": SWEEP_ROUNDS,
            }
        )  # fmt: skip
    for name, urgent in (("shaping", False), ("shaping, priority", True)):
        shaped = [c for (blocks, p), c in settings.items() if blocks and p == urgent]
        arms[name] = min(shaped, key=lambda c: Times(rounds[c], 0.0).median_s)
    return rows


def _gemm(kernel: str, a: Tensor, b: Tensor, c: Tensor) -> Callable[[], object]:
    if kernel == "cuBLAS":
        return lambda: torch.mm(a, b, out=c)
    block_m, block_n, block_k, num_warps, num_stages = TRITON[kernel]
    (m, k), n = a.shape, b.shape[1]
    launch: Any = matmul_kernel
    grid = (m // block_m * (n // block_n),)
    return lambda: launch[grid](
        a, b, c, m, n, k, block_m, block_n, block_k, 8,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _checker(
    pair: Pair, a: Tensor, b: Tensor, sources: list[Tensor], targets: list[Tensor],
    group: dist.ProcessGroup,
) -> Callable[[Callable[[], object]], float]:  # fmt: skip
    """The error of both buffers against fp64, on sampled rows; of the worst rank."""
    ranks = group.size()
    (m, _), n = a.shape, b.shape[1]
    chosen = torch.Generator().manual_seed(7)
    rows = torch.randint(0, m, (16,), generator=chosen).to(a.device)
    product = a[rows].double() @ b.double() if n <= 8192 else _in_parts(a[rows], b)
    if pair.collective == "all_reduce":
        want = product.clone()
        dist.all_reduce(want, group=group)
        want /= ranks
    else:
        want = product

    def check(call: Callable[[], object]) -> float:
        for source in sources:
            source[: m * n].fill_(torch.nan)
        for target in targets:
            target[: m * n].fill_(torch.nan)
        dist.barrier(group)
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        worst = 0.0
        for source, target in zip(sources, targets, strict=True):
            if pair.collective == "all_reduce":
                got = target[: m * n].view(m, n)[rows]
            else:  # back to where it came from
                back = torch.empty_like(source)
                dist.all_to_all_single(back, target, group=group)
                got = back[: m * n].view(m, n)[rows]
            worst = max(worst, relative_error(got, want))
            if worst != worst:
                break
        error = torch.tensor(worst if worst == worst else torch.inf, device=a.device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX, group=group)
        return error.item()

    return check


def _in_parts(x: Tensor, w: Tensor) -> Tensor:
    """x w in fp64, columns of w at a time: a wide w is 4 GB in fp64."""
    return torch.cat([x.double() @ part.double() for part in w.split(4096, dim=1)], dim=1)


def _refuse_wrong(pair: Pair, mode: Mode, rows: Sequence[dict[str, Any]]) -> None:
    errors = {row["arm"]: row["error"] for row in rows}
    for name, error in errors.items():
        if not error <= 2 * errors["sequential"]:
            raise CounterpointError(
                f"{pair.label}, {name} ({mode}): error {error:.2e} against fp64, the sequential "
                f"arm has {errors['sequential']:.2e}"
            )
