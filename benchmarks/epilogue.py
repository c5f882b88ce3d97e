"""Gate and up with SiLU behind one gather, in one call, against the same in several.

    serial           NCCL's all-gather, two matmuls, then silu(gate) * up by torch's two kernels
    serial compiled  the same with silu(gate) * up compiled by torch.compile, one kernel
    apart            ours: one gather and both matmuls, then silu(gate) * up compiled
    auto             ours with activation="silu_mul"
    compute          the two matmuls alone

On one GPU nothing is gathered, and it is the compute alone that is compared: "ranks" is 1 there.
"""

from collections.abc import Callable
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional

import counterpoint as cp
from benchmarks.choice import choice_of
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section, all_gather
from benchmarks.rows import Row, taken
from benchmarks.tables import Column, arm, of_most, table
from counterpoint.measure.timing import relative_error
from counterpoint.problem import Problem

ROWS = (64, 256, 512, 2048, 8192)
MODELS = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}  # of Llama 3: K, F
SHARES = (2, 8)  # of F, on a rank


def case_of(m: int, n: int, k: int, layer: str = "") -> Case:
    """M over all ranks; N of gate and of up, each, and K of one rank."""
    return Case(f"{m},{n},{k}", {"m": m, "n": n, "k": k, "layer": layer})


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [case_of(m, f // tp, k, f"{name} TP{tp}") for name, (k, f) in MODELS.items()
            for tp in SHARES for m in ROWS]  # fmt: skip


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """What stands between the matmuls of a model."""
    return functional.silu(gate) * up


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one shape."""
    m, n, k, group = case["m"], case["n"], case["k"], bench.group
    x = bench.normal(m // bench.ranks, k)
    scale = k**-0.5
    sets = [[bench.normal(n, k, scale=scale).t() for _ in range(2)]
            for _ in range(bench.sets(4 * n * k))]  # fmt: skip
    full = x if bench.ranks == 1 else bench.empty(m, k)
    gate, up = bench.empty(m, n), bench.empty(m, n)
    behind: Callable[[Tensor, Tensor], Tensor] = gated
    if bench.on_gpu:
        torch.compiler.reset()  # a compiled function is for one shape
        behind = torch.compile(gated, dynamic=False)

    def multiply(i: int) -> None:
        for w, product in zip(sets[i % len(sets)], (gate, up), strict=True):
            torch.mm(full, w, out=product)

    def serial(with_it: Callable[[Tensor, Tensor], Tensor]) -> Call:
        def run(i: int) -> Tensor:
            if bench.ranks > 1:
                all_gather(full, x, group=group)
            multiply(i)
            return with_it(gate, up)

        return run

    def ours(i: int) -> Tensor:
        return cp.all_gather_matmul(x, sets[i % len(sets)], group=group, activation="silu_mul")

    def apart(i: int) -> Tensor:
        return behind(*cp.all_gather_matmul(x, sets[i % len(sets)], group=group))

    calls: dict[str, Call | str] = {
        "compute": multiply, "serial": serial(gated), "serial compiled": serial(behind),
        "apart": apart, "auto": ours,
    }  # fmt: skip
    sample = bench.sample(m)
    left = (bench.whole(x) if bench.ranks > 1 else x)[sample].double()
    want = gated(*(left @ w.double() for w in sets[0]))
    problem = Problem("all_gather_matmul", m, 2 * n, k, bench.ranks, activation="silu_mul")
    choice = choice_of(problem, bench)
    return Arms(
        calls, lambda _, got: [relative_error(got[sample], want)], parts=("compute",),
        outputs=(gate, up), sets=len(sets), nan_bytes=4 * gate.numel(),
        about={"auto": {"pick": choice.spec if choice else "-"}},
    )  # fmt: skip


def moved(case: Case, ranks: int) -> int:
    """Bytes that a rank gets."""
    return 2 * case["m"] * case["k"] * (ranks - 1) // ranks


# ---- what is said of the rows

COLUMNS = (
    Column("layer", lambda c: c.head["layer"]), Column("M, N, K", lambda c: c.head["case"]),
    *(arm(name) for name in ("compute", "serial", "serial compiled", "apart")),
    arm("auto", bold=True),
    Column("serial compiled / auto", lambda c: f"**{c.s('serial compiled') / c.s('auto'):.2f}**"),
    Column("apart / auto", lambda c: f"**{c.s('apart') / c.s('auto'):.2f}**"),
)  # fmt: skip


def epilogue_table(rows: list[Row]) -> str:
    """Every case."""
    found = taken(rows, "case")
    gains = [c.s("apart") / c.s("auto") for c in found]
    alone = "; on one GPU nothing is gathered" if rows[0]["ranks"] == 1 else ""
    note = (f"Microseconds in a graph, N of gate and of up, each{alone}. "
            f"apart / auto, geometric mean of {len(found)}: {geometric_mean(gains):.2f}, least "
            f"{min(gains):.2f}.")  # fmt: skip
    return table(COLUMNS, found, note)


EPILOGUE = Benchmark(
    "epilogue", cases, arms, rounds=9, moved=moved, least=1,
    sections=(Section("docs/results/tensor_parallel.md", "epilogue", of_most(epilogue_table)),),
    short=lambda case: case["layer"] == "70B TP8" and case["m"] in (512, 8192),
    own=lambda shape, _: [case_of(*shape)],
)  # fmt: skip
