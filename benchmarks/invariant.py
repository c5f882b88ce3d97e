"""What it costs that a row's bits do not depend on how many rows are beside it.

    compute    cuBLAS's matmul alone
    auto       ours, without that promise
    invariant  ours with it: plan="auto invariant"

On one GPU nothing is sent, and it is the matmuls alone that are compared: "ranks" is 1 there.
"""

from collections.abc import Callable
from itertools import product
from statistics import geometric_mean

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.rows import Row, taken
from benchmarks.tables import Column, arm, of_most, table
from counterpoint.measure.timing import relative_error

ROWS = (16, 64, 128, 256, 512, 2048, 8192)
MODELS = {"8B": (4096, 14336), "70B": (8192, 28672)}  # of Llama 3: hidden size, F
SHARES = (2, 8)  # of F, on a rank
OPS: dict[str, Callable[..., Tensor]] = {
    "all_gather_matmul": cp.all_gather_matmul, "matmul_all_reduce": cp.matmul_all_reduce,
}  # fmt: skip


def case_of(op: str, m: int, n: int, k: int, layer: str = "") -> Case:
    """M over all ranks; N and K of one."""
    return Case(f"{op} {m},{n},{k}", {"op": op, "m": m, "n": n, "k": k, "layer": layer})


def cases(_: int) -> list[Case]:
    """Gate and up in one weight, and down."""
    found: list[Case] = []
    for (name, (hidden, f)), tp, m in product(MODELS.items(), SHARES, ROWS):
        sizes = (2 * f // tp, hidden), (hidden, f // tp)
        layers = f"{name} TP{tp}, gate and up", f"{name} TP{tp}, down"
        found += [case_of(op, m, *size, layer)
                  for op, size, layer in zip(OPS, sizes, layers, strict=True)]  # fmt: skip
    return found


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one shape."""
    op, m, n, k, group = OPS[case["op"]], case["m"], case["n"], case["k"], bench.group
    gathers = case["op"] == "all_gather_matmul"
    x = bench.normal(m // bench.ranks if gathers else m, k)
    sets = [bench.normal(n, k, scale=k**-0.5).t() for _ in range(bench.sets(2 * n * k))]
    full = bench.whole(x) if gathers and bench.ranks > 1 else x
    y = bench.empty(m, n)

    def multiply(i: int) -> None:
        torch.mm(full, sets[i % len(sets)], out=y)

    def by(plan: str) -> Call:
        return lambda i: op(x, sets[i % len(sets)], group=group, plan=plan)

    calls: dict[str, Call | str] = {
        "compute": multiply, "auto": by("auto"), "invariant": by("auto invariant"),
    }  # fmt: skip
    sample = bench.sample(m)
    want = full[sample].double() @ sets[0].double()
    if not gathers and bench.ranks > 1:
        torch.distributed.all_reduce(want, group=group)
    return Arms(
        calls, lambda _, got: [relative_error(got[sample], want)], parts=("compute",),
        baseline="auto", outputs=(y,), sets=len(sets), nan_bytes=4 * m * n,
    )  # fmt: skip


COLUMNS = (
    Column("layer", lambda c: c.head["layer"]), Column("M, N, K", lambda c: c.head["case"]),
    arm("compute"), arm("auto"), arm("invariant", bold=True),
    Column("invariant / auto", lambda c: f"**{c.s('invariant') / c.s('auto'):.2f}**"),
)  # fmt: skip


def invariant_table(rows: list[Row]) -> str:
    """Every case, and the price by rows."""
    found = taken(rows, "case")

    def price(m: int) -> str:
        each = [c.s("invariant") / c.s("auto") for c in found if c.head["m"] == m]
        return f"{m} rows {geometric_mean(each):.2f} (most {max(each):.2f})"

    rows_of = sorted({c.head["m"] for c in found})
    alone = "; on one GPU matmuls alone" if rows[0]["ranks"] == 1 else ""
    note = (f"Microseconds in a graph{alone}. invariant / auto, geometric means: "
            f"{', '.join(map(price, rows_of))}.")  # fmt: skip
    return table(COLUMNS, found, note)


INVARIANT = Benchmark(
    "invariant", cases, arms, least=1,
    sections=(Section("docs/results/tensor_parallel.md", "invariant", of_most(invariant_table)),),
    short=lambda case: case["layer"] == "8B TP8, down" and case["m"] in (64, 256),
    own=lambda shape, _: [case_of(op, *shape[:3]) for op in OPS],
)  # fmt: skip
