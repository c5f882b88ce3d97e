"""Gradients of an embedding table, and its update in place, on one GPU: against torch's backward.

A million rows, named uniformly, by Zipf's law ("zipf"), or 1% of them by 80% of the indices
("hot"). "gradient" and "sparse" are ours, "torch" and "torch sparse" those of embedding_bag, the
sparse one coalesced as an optimizer asks for it. "sgd" and "adagrad" are fused optimizers, which
make no gradient; "torch, sgd" makes a dense one and applies it. Learning rates are 0, so that all
calls see one table.

"sort" is what a backward does beside the exchange of gradients, as it needs none; the rest of "sgd"
comes when they have. "tables" are cases of TABLES tables that share the rows and the indices: their
rows are summed by a launch for each of some slices, to the same bits. What the exchange itself
takes needs two GPUs.
"""

from collections.abc import Callable, Sequence
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional

import counterpoint.nn as cnn
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.rows import Row, taken
from benchmarks.tables import measured, ms, of_most
from counterpoint.embedding.exchange import Slice, at_once, in_one
from counterpoint.embedding.gradients import (
    Lookups,
    first_rows,
    sorted_by_row,
    table_gradients,
)
from counterpoint.embedding.launch_gradient import tables_of
from counterpoint.embedding.plan_slices import tables_by_slice
from counterpoint.embedding.updates import Steps, Update, apply_update
from counterpoint.measure.timing import relative_error

ROWS, D = 1_000_000, 128
EXPONENT, HOT_ROWS, HOT_INDICES = 1.05, 0.01, 0.8
CHECKED = 512  # rows that are compared with fp64, the most frequent one among them
SETS = 4  # of indices, in rotation
ROUNDING = 4e-3  # of bf16, rounded once
BATCHES = ((4096, 1), (4096, 20), (65536, 1), (16384, 20), (65536, 10), (65536, 100))
OURS = ("gradient", "sparse", "sgd", "adagrad")
TABLES, SLICES = 8, (1, 2, 4)


def case_of(
    named: str, batch: int, pooling: int, dtype: str = "bfloat16", rows: int = ROWS
) -> Case:
    """One table; "named" says how rows are drawn."""
    name = f"{named}, batch {batch}, pooling {pooling}, {dtype}"
    facts = {"named": named, "batch": batch, "pooling": pooling, "dtype": dtype, "rows": rows}
    return Case(name, facts)


def sliced_case_of(named: str, batch: int, pooling: int, rows: int = ROWS) -> Case:
    """Several tables, summed by slices."""
    case = case_of(named, batch, pooling, rows=rows // TABLES)
    return Case(f"tables, {case.name}", {**case.facts, "tables": TABLES})


def cases(_: int) -> list[Case]:
    """All sizes in bf16, the largest in fp32 as well."""
    kinds = ("uniform", "zipf", "hot")
    found = [case_of(kind, *size) for size in BATCHES for kind in kinds]
    found += [case_of(kind, *BATCHES[-1], "float32") for kind in kinds]
    return found + [sliced_case_of(kind, 65536, n) for n in (1, 10) for kind in ("uniform", "hot")]


def zipf(n: int, rows: int, draw: torch.Generator) -> Tensor:
    """Rows of a table by Zipf's law, int64 [n] where `draw` is; frequent ones anywhere."""
    device = draw.device
    anywhere = torch.randperm(rows, device=device, generator=draw)
    at = torch.rand(n, device=device, generator=draw, dtype=torch.float64)
    share = torch.arange(1, rows + 1, device=device, dtype=torch.float64) ** -EXPONENT
    share = share.cumsum(0)
    return anywhere[torch.searchsorted(share / share[-1], at).clamp(max=rows - 1)]


def drawn(case: Case, bench: Bench) -> Tensor:
    """Rows that the indices of a batch name, frequent ones anywhere in the table."""
    n, rows, draw = case["batch"] * case["pooling"], case["rows"], bench.draw
    if case["named"] == "uniform":
        return torch.randint(rows, (n,), device=bench.device, generator=draw)
    if case["named"] == "zipf":
        return zipf(n, rows, draw)
    anywhere = torch.randperm(rows, device=bench.device, generator=draw)
    at = torch.rand(n, device=bench.device, generator=draw, dtype=torch.float64)
    hot = max(1, int(HOT_ROWS * rows))
    few = torch.randint(hot, (n,), device=bench.device, generator=draw)
    others = torch.randint(hot, rows, (n,), device=bench.device, generator=draw)
    return anywhere[torch.where(at < HOT_INDICES, few, others)]


def by_torch(
    table: Tensor, sets: Sequence[Tensor], offsets: Tensor, dy: Tensor, *, sparse: bool
) -> Call:
    """The backward of embedding_bag alone."""
    leaf = table.detach().requires_grad_()
    pooled = [functional.embedding_bag(i, leaf, offsets, mode="sum", sparse=sparse) for i in sets]

    def call(i: int) -> Tensor:
        (grad,) = torch.autograd.grad(pooled[i % len(sets)], leaf, dy, retain_graph=True)
        return grad.coalesce() if sparse else grad

    return call


def updates(
    pooled: Sequence[Lookups], slices: Sequence[Slice], optimizer: cnn.SGD | cnn.RowWiseAdagrad
) -> Call:
    """Both kinds change nothing but Adagrad's state."""
    tables, adagrad = pooled[0].tables, isinstance(optimizer, cnn.RowWiseAdagrad)
    device = tables[0].device
    rates = torch.tensor(optimizer.rates, device=device)
    sums = [torch.zeros(len(table), device=device) for table in tables if adagrad]
    update = Update("rowwise_adagrad" if adagrad else "sgd", rates, sums, Steps())
    return lambda i: apply_update(update, slices, pooled[i % len(pooled)])


def sorting(pooled: Sequence[Lookups], batch: int) -> Call | str:
    """What needs no gradient."""
    tables = pooled[0].tables
    if not tables[0].is_cuda:
        return "sorted by kernels of a GPU"
    written = tables_of(tables, first_rows(tables)[:-1], tables[0])
    return lambda i: sorted_by_row(pooled[i % len(pooled)], written, batch)


def sliced_arms(case: Case, bench: Bench) -> Arms:
    """Sums of several tables in one launch, and by slices."""
    dtype, batch, pooling = getattr(torch, case["dtype"]), case["batch"], case["pooling"]
    dims = [D] * case["tables"]
    tables = [bench.normal(case["rows"], D, dtype=dtype) for _ in dims]
    dy = bench.normal(batch, sum(dims), dtype=dtype)
    sets = [torch.cat([drawn(case, bench) for _ in dims]) for _ in range(SETS)]
    offsets = torch.arange(0, len(sets[0]), pooling, device=bench.device)
    pooled = [Lookups(tables, i, offsets, None, False, False) for i in sets]
    calls: dict[str, Call | str] = {"sort": sorting(pooled, batch)}
    for count in SLICES:
        cut = tables_by_slice(dims, count)
        parts = dy.split([D * len(some) for some in cut], 1)
        slices = [Slice(some, part.contiguous(), at_once)
                  for some, part in zip(cut, parts, strict=True)]  # fmt: skip

        def gradient(i: int, slices: Sequence[Slice] = slices) -> list[Tensor]:
            return table_gradients(slices, pooled[i % SETS], sparse=False)

        calls[f"gradient, {count}"] = gradient
        calls[f"sgd, {count}"] = updates(pooled, slices, cnn.SGD(0.0))
    own = sets[0].split(batch * pooling)
    wants = [wanted(i, part, pooling) for i, part in zip(own, dy.split(D, 1), strict=True)]

    def check(_: str, grads: list[Tensor]) -> list[float]:
        return [relative_error(g[some], want) for g, (some, want) in zip(grads, wants, strict=True)]

    parts = ["sort", *(f"sgd, {count}" for count in SLICES)]
    return Arms(calls, check, baseline="gradient, 1", parts=parts, floor=ROUNDING, sets=SETS)


def arms(case: Case, bench: Bench) -> Arms:
    """Gradients by torch and by us, and updates."""
    if "tables" in case.facts:
        return sliced_arms(case, bench)
    dtype, batch, pooling = getattr(torch, case["dtype"]), case["batch"], case["pooling"]
    table = bench.normal(case["rows"], D, dtype=dtype)
    dy = bench.normal(batch, D, dtype=dtype)
    sets = [drawn(case, bench) for _ in range(SETS)]
    offsets = torch.arange(0, batch * pooling, pooling, device=bench.device)
    pooled = [Lookups((table,), i, offsets, None, False, False) for i in sets]
    slices = in_one(dy, (table,))

    def ours(*, sparse: bool) -> Call:
        return lambda i: table_gradients(slices, pooled[i % SETS], sparse=sparse)[0]

    dense = by_torch(table, sets, offsets, dy, sparse=False)

    def applied(i: int) -> None:
        table.add_(dense(i), alpha=0.0)

    calls: dict[str, Call | str] = {
        "torch": dense,
        "torch sparse": by_torch(table, sets, offsets, dy, sparse=True),
        "gradient": ours(sparse=False),
        "sparse": ours(sparse=True),
        "torch, sgd": applied,
        "sgd": updates(pooled, slices, cnn.SGD(0.0)),
        "adagrad": updates(pooled, slices, cnn.RowWiseAdagrad(0.0)),
        "sort": sorting(pooled, batch),
    }
    some, want = wanted(sets[0], dy, pooling)

    def check(_: str, grad: Tensor) -> list[float]:
        return [relative_error(grad.to_dense()[some], want)]

    return Arms(calls, check, baseline="torch", parts=("torch, sgd", "sgd", "adagrad", "sort"),
                floor=ROUNDING, sets=SETS)  # fmt: skip


def wanted(indices: Tensor, dy: Tensor, pooling: int) -> tuple[Tensor, Tensor]:
    """Some rows that are named, and their gradients in fp64."""
    rows, counts = indices.unique(return_counts=True)
    some = rows[counts.argsort(descending=True)[torch.linspace(0, len(rows) - 1, CHECKED).long()]]
    some = some.unique()
    place = torch.searchsorted(some, indices).clamp(max=len(some) - 1)
    found = (some[place] == indices).nonzero().flatten()
    want = torch.zeros(len(some), D, dtype=torch.float64, device=dy.device)
    return some, want.index_add_(0, place[found], dy[found // pooling].double())


# ---- what is said of the rows


def section(rows: list[Row]) -> str:
    """Milliseconds of each case."""
    own = [row for row in rows if row["table"] == "embedding_gradient"]
    found = taken([row for row in own if "tables" not in row], "case")
    names = ("torch", "torch sparse", *OURS[:2], "torch, sgd", *OURS[2:])
    lines = [
        (
            [
                c.head["case"],
                *(ms(c.s(name)) for name in names),
                f"{c.s('torch') / c.s('gradient'):.2f}",
                f"{c.s('torch, sgd') / c.s('sgd'):.2f}",
            ],
            c.rows,
        )
        for c in found
    ]

    def mean(share: Callable[[str], bool], above: str, below: str) -> str:
        each = [c.s(above) / c.s(below) for c in found if share(c.head["named"])]
        return f"{geometric_mean(each):.2f} ({min(each):.2f} to {max(each):.2f})"

    said = [
        f"{name}: torch / gradient {mean(kind.__eq__, 'torch', 'gradient')}, "
        f"torch, sgd / sgd {mean(kind.__eq__, 'torch, sgd', 'sgd')}"
        for kind, name in (("uniform", "uniform"), ("zipf", "Zipf"), ("hot", "1% of rows hot"))
        if any(c.head["named"] == kind for c in found)
    ]
    note = (
        f"One table of {ROWS} rows of {D} columns. Rows are named uniformly, by Zipf's law with "
        f"exponent {EXPONENT}, or 1% of them by 80% of the indices. *Torch* is the backward of "
        "embedding_bag, dense, and sparse with coalesce; *sgd* and *adagrad* are fused optimizers, "
        "*torch, sgd* applies the dense gradient. Milliseconds, single calls, indices in rotation. "
        f"Geometric means: {'; '.join(said)}."
    )
    head = ["case", *names, "torch / gradient", "torch, sgd / sgd"]
    return measured(head, lines, note)


EMBEDDING_GRADIENT = Benchmark(
    "embedding_gradient", cases, arms, ranks=1, unit="ms", calls=0, rounds=11, every_eager=True,
    soak_s=0.1, backlog_cycles=4_000_000,
    short=lambda case: case.name in ("hot, batch 65536, pooling 10, bfloat16",
                                     "zipf, batch 65536, pooling 10, bfloat16"),
    sections=(Section("docs/results/embeddings.md", "embedding-gradient", of_most(section)),),
)  # fmt: skip
