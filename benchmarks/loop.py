"""The loop of the resource-aware overlap paper: a GEMM, a collective on its result, again.

Four iterations with the output double-buffered: collective i runs beside GEMM i + 1 and has ended
before GEMM i + 2 writes where it reads. Two GEMMs, two collectives of 896 MiB, several kernels;
each pair runs under every control by itself and as tuned, in a graph and eagerly.

Source: arXiv 2606.09200 (workload, priority, shaping); the other arms are ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.declare import Bench
from benchmarks.kernel_matmul import matmul_kernel
from benchmarks.persistent import free_grid_matmul_kernel
from counterpoint.measure.timing import relative_error
from counterpoint.resources.pipeline import Pipeline

SHAPES = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}  # compute-bound, memory-bound
COLLECTIVE_BYTES = 896 << 20
DTYPE = torch.bfloat16
NUM_ITERATIONS = 4
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
        grid: blocks along M and N of a Triton kernel that takes any number; None: one a tile.
    """

    gemm: Literal["cb", "mb"]
    kernel: str
    collective: Literal["all_reduce", "all_to_all"]
    scale: int = 1
    grid: tuple[int, int] | None = None

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


def build(pair: Pair, bench: Bench, memory: Literal["peers", "library"] = "peers") -> Loop:
    """The pipeline of a pair. All ranks call this.

    Args:
        pair: that it is of.
        bench: this rank.
        memory: of what collectives write to, and for "library" of what they read too.

    Raises:
        UnsupportedError: there is no such memory here.
    """
    m, n, k = SHAPES[pair.gemm]
    m //= pair.scale
    numel = COLLECTIVE_BYTES // DTYPE.itemsize // pair.scale
    pipeline = Pipeline(bench.group, bench.device)
    a, b = bench.normal(m, k, dtype=DTYPE), bench.normal(k, n, scale=k**-0.5, dtype=DTYPE)
    reduces = pair.collective == "all_reduce"
    targets = [pipeline.empty(numel, dtype=DTYPE, memory=memory) for _ in range(2)]
    if reduces:  # in place; its average stays finite, however often
        sources = targets
    else:
        sources = [bench.normal(numel, dtype=DTYPE) for _ in range(2)]
        if memory == "library":
            sources = [pipeline.empty(numel, dtype=DTYPE, memory=memory).copy_(s) for s in sources]
    outputs = [source[: m * n].view(m, n) for source in sources]
    gemms = [_gemm(pair, a, b, c) for c in outputs]
    # cuBLAS has none that can be told, nor has an interpreter
    compiled = [
        made for made in [gemm() for gemm in gemms] if pair.kernel != "cuBLAS" and made is not None
    ]
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
    return Loop(pipeline, gemms[0], _checker(pair, a, b, sources, targets, bench))


def alone_s(gemm_s: float, comm_s: float, iterations: int = NUM_ITERATIONS) -> float:
    """Seconds of the loop if nothing shared anything: GEMM, then the longer ones, then the rest."""
    return gemm_s + (iterations - 1) * max(gemm_s, comm_s) + comm_s


def _gemm(pair: Pair, a: Tensor, b: Tensor, c: Tensor) -> Callable[[], Any]:
    if pair.kernel == "cuBLAS":
        return lambda: torch.mm(a, b, out=c)
    block_m, block_n, block_k, num_warps, num_stages = TRITON[pair.kernel]
    (m, k), n = a.shape, b.shape[1]
    if pair.grid is not None:
        free: Any = free_grid_matmul_kernel
        return lambda: free[pair.grid](
            a, b, c, m, n, k, block_m, block_n, block_k, num_warps=num_warps, num_stages=num_stages
        )
    launch: Any = matmul_kernel
    grid = (m // block_m * (n // block_n),)
    return lambda: launch[grid](
        a, b, c, m, n, k, block_m, block_n, block_k, 8,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _checker(
    pair: Pair, a: Tensor, b: Tensor, sources: list[Tensor], targets: list[Tensor],
    bench: Bench,
) -> Callable[[Callable[[], object]], float]:  # fmt: skip
    """The error of both buffers against fp64, on sampled rows; of the worst rank."""
    (m, _), n = a.shape, b.shape[1]
    rows = bench.sample(m, 16)
    # columns of b at a time: a wide b is 4 GB in fp64
    want = torch.cat([a[rows].double() @ part.double() for part in b.split(4096, dim=1)], dim=1)
    if pair.collective == "all_reduce":
        want = bench.summed(want) / bench.ranks

    def check(call: Callable[[], object]) -> float:
        for each in (*sources, *targets):
            each[: m * n].fill_(torch.nan)
        bench.meet()
        call()
        bench.meet()
        errors: list[float] = []
        for source, target in zip(sources, targets, strict=True):
            got = target
            if pair.collective == "all_to_all":  # back to where it came from
                got = torch.empty_like(source)
                dist.all_to_all_single(got, target, group=bench.group)
            errors.append(relative_error(got[: m * n].view(m, n)[rows], want))
        return max(bench.most(errors))

    return check
