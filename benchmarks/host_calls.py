"""What a known eager call of a matmul operator takes the host, while the GPU is busy.

    torch.mm         of the same sizes, which stands for what any launch costs
    ours             the operator as programs call it
    by dispatcher    the operator of torch.ops.counterpoint, as a compiled graph calls it

Each without a gradient, with one, and with the backward of it. Ranks may share a GPU: nothing here
is a time of a GPU.
"""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.expert_calls import PRODUCT, enqueued_s
from benchmarks.rows import Row, taken
from benchmarks.tables import by_machine, measured

SIZES = {"all_gather_matmul": (256, 1024, 1024), "matmul_reduce_scatter": (256, 1024, 1024),
         "matmul_all_reduce": (16, 1024, 1024)}  # fmt: skip
OURS, DISPATCHER = "ours", "by dispatcher"
CLOCKS = ("plain", "gradient", "both")
ROUNDS, SHORT_ROUNDS, WARM = 25, 5, 4


def case_of(op: str, m: int, k: int, n: int) -> Case:
    """One operator; M rows of this rank, or of all ranks where they are summed."""
    return Case(f"{op} {m},{k},{n}", {"op": op, "m": m, "k": k, "n": n})


def cases(ranks: int) -> list[Case]:
    """Small ones: the host's time does not depend on sizes."""
    return [case_of(op, *sizes) for op, sizes in SIZES.items()]


def rows(case: Case, bench: Bench) -> list[Row]:
    """One for each way."""
    x, w = bench.normal(case["m"], case["k"]), bench.normal(case["k"], case["n"])
    calls = ways_of(case["op"], bench)
    errors = {name: float((call(x, w) - calls[OURS](x, w)).abs().max())
              for name, call in calls.items() if name != PRODUCT}  # fmt: skip
    leaves = [x.requires_grad_(), w.requires_grad_()]
    clocks = {(name, clock): clock_of(call, leaves, clock)
              for name, call in calls.items() for clock in CLOCKS}  # fmt: skip
    for call in clocks.values():
        for _ in range(WARM):
            call()
    rounds = bench.rounds or (SHORT_ROUNDS if bench.short else ROUNDS)
    found: dict[tuple[str, str], list[float]] = {key: [] for key in clocks}
    for i in range(rounds):
        turn = i % len(clocks)
        for key in [*clocks][turn:] + [*clocks][:turn]:
            found[key].append(enqueued_s(clocks[key], bench))
    most = dict(zip(found, bench.most([median(each) for each in found.values()]), strict=True))
    of_gpus = {"gpus": torch.cuda.device_count(), "rounds": rounds, "mode": "calls"}
    return [
        {"arm": name, "median_s": most[name, "plain"], "error": errors.get(name, 0.0), **of_gpus,
         **{f"{clock}_s": most[name, clock] for clock in CLOCKS}}
        for name in calls
    ]  # fmt: skip


def ways_of(op: str, bench: Bench) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The arms, as functions of x and w."""
    name, ranks = bench.group.group_name, bench.ranks
    where: tuple[Any, ...] = {
        "all_gather_matmul": ("auto", [], name, ranks, None, None, 0),
        "matmul_reduce_scatter": ("auto", [], name, ranks, bench.rank, None, None, 0),
        "matmul_all_reduce": ("auto", name, ranks, None, None),
    }[op]
    ours, theirs = getattr(cp, op), getattr(torch.ops.counterpoint, op)

    def asked(x: Tensor, w: Tensor) -> tuple[str, ...]:
        watched = torch.is_grad_enabled() and x.requires_grad
        return ("",) if op == "matmul_all_reduce" else ("x w" * watched,)

    return {
        PRODUCT: torch.mm,
        OURS: lambda x, w: ours(x, w, group=bench.group),
        DISPATCHER: lambda x, w: theirs(x, w, None, *where, *asked(x, w)),
    }


def clock_of(
    call: Callable[[Tensor, Tensor], Tensor], leaves: list[Tensor], clock: str
) -> Callable[[], object]:
    """What is timed."""
    if clock == "plain":
        x, w = (t.detach() for t in leaves)
        return lambda: call(x, w)
    if clock == "gradient":
        return lambda: call(*leaves)
    dy = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, dy)


def table(rows: list[Row]) -> str:
    """Microseconds of the host, and in launches of torch.mm."""
    head = ["operator", "arm", "no gradient", "with one", "its backward, too"]
    lines: list[tuple[list[str], list[Row]]] = []
    for case in taken(rows, "op", "m", "k", "n"):
        of: Any = case.head
        product = next(row for row in case.rows if row["arm"] == PRODUCT)
        for row in case.rows:
            cells = [f"{row[f'{c}_s'] * 1e6:.0f} ({row[f'{c}_s'] / product[f'{c}_s']:.1f})"
                     for c in CLOCKS]  # fmt: skip
            lines.append(([of["op"], row["arm"], *cells], [row, product]))
    note = "Microseconds of the host while the GPU is busy, and how many times torch.mm's."
    if any(row["gpus"] < row["ranks"] for row in rows):
        note += " Ranks shared one GPU, which the host's time does not depend on."
    return measured(head, lines, note)


write: Callable[[Mapping[int, list[Row]]], str] = by_machine(table)
HOST_CALLS = Benchmark(
    "host_calls", cases, rows=rows, unit="us", host=False,
    short=lambda case: case["op"] == "all_gather_matmul",
    sections=(Section("docs/results/tensor_parallel.md", "host-calls", write),),
)  # fmt: skip
