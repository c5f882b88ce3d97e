"""fp8 tensor parallelism of bf16 activations, at the published shapes.

Serial casts x row by row, gathers fp8 and its scales by the library and calls torch._scaled_mm, or
multiplies and scatters bf16. torch_symm_mem is torch's fused operator of scaled operands behind the
same cast. Ours are "fp8", plan "auto" behind the same cast, and "bf16", plan "auto" without one.
Weights are cast before. Errors are against fp64 of what was bf16.
"""

from collections.abc import Callable, Sequence
from statistics import geometric_mean

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section, all_gather
from benchmarks.overlap import HEAD, moved, published, shapes_of
from benchmarks.rows import Row, Timed
from benchmarks.tables import Column, arm, both_modes, by_machine, ms, table, torch_note
from counterpoint.measure.timing import relative_error
from counterpoint.nn.rowwise import by_columns, quantised

scaled_mm: Callable[..., Tensor] = torch._scaled_mm  # pyright: ignore
PEER = "torch_symm_mem"
PARTS = ("cast", "compute")
LIMIT = 0.06  # of e4m3 operands: 3 bits of mantissa each
NAMES = ("serial", PEER, "bf16", "fp8")


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one shape."""
    m, n, k, gathers = case["m"], case["n"], case["k"], case["op"] == "all_gather_matmul"
    plain = [bench.normal(n, k) for _ in range(bench.sets(n * k))]
    weights, shard = [by_columns(w) for w in plain], m // bench.ranks
    x = bench.normal(shard if gathers else m, k)
    cast: Callable[[Tensor], cp.Scaled] = quantised
    if bench.on_gpu:
        torch.compiler.reset()  # a compiled function is for one shape
        cast = torch.compile(quantised, dynamic=False)
    rows, scales = quantised(x)
    if gathers:
        rows, scales = rows.new_zeros(m, k), scales.new_zeros(m, 1)
    partial, y = bench.empty(m, n), bench.empty(m if gathers else shard, n)

    def multiply(left: cp.Scaled, i: int, target: Tensor) -> None:
        w, w_scale = weights[i % len(weights)]
        scaled_mm(left.data, w, left.scale, w_scale, out_dtype=target.dtype, out=target)

    def serial(i: int) -> Tensor:
        given = cast(x)
        if gathers:
            all_gather(rows.view(torch.uint8), given.data.view(torch.uint8), group=bench.group)
            all_gather(scales, given.scale, group=bench.group)
            multiply(cp.Scaled(rows, scales), i, y)
        else:
            multiply(given, i, partial)
            bench.reduce_scatter(y, partial)
        return y

    op: Callable[..., Tensor] = getattr(cp, case["op"])
    calls: dict[str, Call | str] = {
        "cast": lambda _: cast(x),
        "compute": lambda i: multiply(cp.Scaled(rows, scales), i, y if gathers else partial),
        "serial": serial,
        PEER: _torch_fused(gathers, cast, x, weights, bench),
        "bf16": lambda i: op(x, plain[i % len(plain)].t(), group=bench.group),
        "fp8": lambda i: op(cast(x), weights[i % len(weights)], group=bench.group),
    }
    serial(0)  # what is gathered is there, for the part that multiplies it
    sample = bench.sample(m)
    want = (bench.whole(x) if gathers else x)[sample].double() @ plain[0].t().double()
    if not gathers:
        bench.summed(want)
        mine = (sample // shard) == bench.rank
        want, sample = want[mine], sample[mine] - bench.rank * shard

    def check(_: str, got: Tensor) -> list[float]:
        return [relative_error(got[sample], want) if len(want) else 0.0]

    return Arms(calls, check, parts=PARTS, peers=(PEER,), limit=LIMIT, outputs=(y,),
                sets=len(weights), nan_bytes=4 * y.numel())  # fmt: skip


def _torch_fused(
    gathers: bool, cast: Callable[[Tensor], cp.Scaled], x: Tensor, weights: Sequence[cp.Scaled],
    bench: Bench,
) -> Call | str:  # fmt: skip
    if not bench.on_gpu:
        return "torch's fused operators need GPUs"
    ops, name = torch.ops.symm_mem, bench.group.group_name

    def gather(i: int) -> Tensor:
        (x8, scale), (w, w_scale) = cast(x), weights[i % len(weights)]
        return ops.fused_all_gather_scaled_matmul(
            x8, [w], scale, [w_scale], 0, name, [None], [None], [x.dtype], [False]
        )[1][0]

    def scatter(i: int) -> Tensor:
        (x8, scale), (w, w_scale) = cast(x), weights[i % len(weights)]
        shape = [x.shape[0], w.shape[1]]
        return ops.fused_scaled_matmul_reduce_scatter(
            x8, w, scale, w_scale, "sum", 0, 0, name, shape, None, None, x.dtype, False
        )

    return gather if gathers else scatter


# ---- what is said of the rows


RATIOS: dict[str, Callable[[Timed], float]] = {
    "serial / fp8": lambda c: c.s("serial") / c.s("fp8"),
    "torch / fp8": lambda c: c.fair(PEER, "fp8"),
    "bf16 / fp8": lambda c: c.s("bf16") / c.s("fp8"),
}
COLUMNS = (
    *HEAD, arm("cast", ms), arm("compute", ms, "matmul"), arm("serial", ms),
    both_modes(PEER, ms, "torch symm_mem"), arm("bf16", ms), both_modes("fp8", ms, bold=True),
    *(Column(name, lambda c, of=of: f"**{of(c):.2f}**") for name, of in RATIOS.items()),
)  # fmt: skip


def fp8_table(rows: list[Row]) -> str:
    """Every shape, and the means."""
    found = shapes_of(rows)
    means: list[str] = []
    for name, of in RATIOS.items():
        each = [of(case) for case in found]
        means.append(f"{name} {geometric_mean(each):.2f} (least {min(each):.2f})")
    note = (
        "Milliseconds a call, in a graph with weights in rotation; serial, torch and fp8 cast x by "
        "rows in each call, and bf16 is *auto* without a cast. M over all ranks, N and K of one "
        f"rank. Geometric means of {len(found)} shapes: {', '.join(means)}. "
        f"{torch_note(found, PEER, ours='fp8')}"
    )
    return table(COLUMNS, found, note)


FP8 = Benchmark(
    "fp8", published, arms, unit="ms", soak_s=0.7, moved=moved, eager=NAMES,
    short=lambda case: case["layer"] == "70B gate+up, 2048 tokens", cut=True,
    sections=(Section("docs/results/tensor_parallel.md", "fp8", by_machine(fp8_table)),),
)  # fmt: skip
