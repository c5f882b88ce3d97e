"""Very many small calls of a fused operator, ranks late at random, each compared on the device.

Sets of operands take turns, so that what an earlier call has left behind is not what the next one
has to give. The bits of a first quiet call, compared with fp64, are those that all others have to
give."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks import embedding, expert_tensors
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.rows import Row, gpus
from benchmarks.soak_fsdp import MEMORY, overlap_sets
from benchmarks.soak_routes import ROUTED, Set, forgiven, routed_sets
from counterpoint.errors import CounterpointError
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import backlog, captured, relative_error

DELAYS_S = (1e-5, 5e-5, 2e-4)
CYCLES_PER_S = 1.9e9
OFTEN = 0.03  # how often a rank is late before a call, and after it
GRAPHS = 4  # captured, in turn: delays in them differ
EAGER = 0.2  # of the calls; all where outputs are in turn
QUEUED = 1000  # calls, until the host waits for the GPU
NOTES = 2000  # timed in a row
LIMIT = 4e-3  # error of bf16, rounded once
LAYER_LIMIT = 3 * LIMIT  # of a layer: both products are rounded, and the sums
LOCAL, MOST, TOP = 4, 24, 2  # experts of a rank, rows from a rank to an expert, rows of a sum
MODEL = expert_tensors.Model("small", LOCAL, 256, 256, TOP)
SUMMED = 2  # the table whose rows are summed where they come back
CALLS = {"matmul_all_reduce": 1_000_000, "all_to_all_matmul": 100_000, "matmul_all_to_all": 100_000,
         "embedding_bag_all_to_all": 100_000, **dict.fromkeys(ROUTED, 100_000),
         **dict.fromkeys(MEMORY, 10_000)}  # fmt: skip
PAGES = {"matmul_all_reduce": ("docs/results/decode.md", "soak"),
         "embedding_bag_all_to_all": ("docs/results/embeddings.md", "embedding-soak")}  # fmt: skip


class Soaked:
    """Sets whose quiet calls are right, with their bits.

    Args:
        op: its name, for an error.
        sets: of operands, equally many on all ranks.
        bench: this rank.

    Raises:
        CounterpointError: a quiet call is off on some rank.
    """

    def __init__(self, op: str, sets: Sequence[Set], bench: Bench) -> None:
        self.sets, self.bits = sets, list[Tensor]()
        for each in sets:
            if each.overflows:
                self.bits.append(torch.full_like(each.exact, torch.nan))
                continue
            got = each.call().clone()
            # a rank that gets nothing has nothing to compare
            error = relative_error(got, each.exact) if len(each.exact) else 0.0
            worst = max(bench.most([error]))
            if not worst <= each.limit:
                raise CounterpointError(f"soak of {op}: a quiet call is off by {worst:.1e}")
            self.bits.append(got)

    def differs(self, i: int) -> Tensor:
        """Whether call number i gives other bits, on the device; NaN is like any other NaN."""
        got, bits = self.sets[i % len(self.sets)].call(), self.bits[i % len(self.sets)]
        return ((got != bits) & ~(got.isnan() & bits.isnan())).any()


def matmul_sets(bench: Bench) -> list[Set]:
    """Few rows, by the fused kernel."""
    sets, plan = list[Set](), "fused" if bench.on_gpu else "auto"
    for m in (1, 4, 32) * 5:
        x, w = bench.normal(m, 512), bench.normal(1024, 512).t()
        exact = bench.summed(x.double() @ w.double())
        sets.append(Set(
            lambda x=x, w=w: cp.matmul_all_reduce(x, w, group=bench.group, plan=plan), exact, LIMIT
        ))  # fmt: skip
    return sets


def tables(ranks: int) -> list[Tensor]:
    """[ranks, E] each: uneven, with a rank or an expert that has none, even, a busy expert."""
    draw = torch.Generator().manual_seed(ranks)
    uneven, silent, idle, busy = (
        torch.randint(0, MOST, (ranks, ranks * LOCAL), generator=draw) for _ in range(4)
    )
    silent[-1] = 0
    idle[:, :LOCAL] = 0
    busy[:, 1] = 4 * MOST
    return [uneven, silent, torch.full_like(uneven, MOST // 2), idle, busy]


def expert_sets(op: str, bench: Bench) -> list[Set]:
    """Tables of counts in turn; rows that no count names are NaN."""
    run: Callable[..., Tensor] = getattr(cp, op)
    layers = [expert_tensors.Layer(expert_tensors.case_of(op, MODEL, 1, ""), bench, counts)
              for counts in tables(bench.ranks)]  # fmt: skip
    room = max(layer.limit for layer in layers)
    sets: list[Set] = []
    for i, layer in enumerate(layers):
        exact, sums = layer.exact(), dict[str, Any]()
        if op == "matmul_all_to_all" and i == SUMMED:
            sums, exact = {"sum_of": (layer.index, layer.weights)}, layer.summed(exact)
        layer.given[len(layer.x) :] = torch.nan
        x = layer.given if bench.on_gpu else layer.x  # CPU ranks know counts on the host

        def call(layer: expert_tensors.Layer = layer, x: Tensor = x, sums: Any = sums,
                 rows: int = len(exact)) -> Tensor:  # fmt: skip
            return run(
                x, layer.w, counts=layer.on_device, max_rows=room, group=bench.group, **sums
            )[:rows]

        sets.append(Set(call, exact, LIMIT))
    return sets


def embedding_sets(bench: Bench) -> list[Set]:
    """Outputs of their own and copies in turn, and serial between them."""
    b = embedding.made(embedding.case_of(8, 128, 5, 4096 if bench.on_gpu else 32), bench)
    out = cp.PooledOutputs(sum(map(sum, b.dims)), torch.bfloat16, b.batch, group=bench.group,
                           device=bench.device)  # fmt: skip
    if bench.on_gpu:
        ways = [("fused", None), ("fused", out), ("fused", out), ("serial", out), ("fused", out)]
    else:
        ways = [("auto", None), ("auto", out), ("serial", out)]

    def call(indices: Tensor, plan: str, into: Any) -> Tensor:
        return cp.embedding_bag_all_to_all(
            b.tables, indices, b.offsets, group=bench.group, out=into, plan=plan, dims=b.dims,
            include_last_offset=True, batch=[b.batch // bench.ranks] * bench.ranks,
        )  # fmt: skip

    # serial's bits, which the benchmark holds against fp64, are what all give
    exact = [call(indices, "serial", None).double() for indices in b.sets]
    return [Set(lambda i=i, plan=plan, into=into: call(b.sets[i], plan, into), exact[i],
                LIMIT)
            for i in range(len(b.sets)) for plan, into in ways]  # fmt: skip


def sets_of(op: str, bench: Bench, late: Callable[[], object] = lambda: None) -> list[Set]:
    """The operands of one operator; in an overlapped model ranks are `late` in a call, too."""
    if op in MEMORY:
        return overlap_sets(op, bench, late, LAYER_LIMIT)
    if op in ROUTED:
        return routed_sets(op, bench, LAYER_LIMIT)
    if op == "matmul_all_reduce":
        return matmul_sets(bench)
    return embedding_sets(bench) if op == "embedding_bag_all_to_all" else expert_sets(op, bench)


def rows_of(case: Case, bench: Bench) -> list[Row]:
    """One row: so many calls or somewhat more, some eager, the others replayed."""
    op, calls = case["op"], case["asked"] // (50 if bench.short else 1)
    draw, noisy = random.Random(bench.rank), False
    wrong = torch.zeros((), dtype=torch.int64, device=bench.device)

    def late() -> None:
        if noisy and draw.random() < OFTEN:
            backlog(int(draw.choice(DELAYS_S) * CYCLES_PER_S))

    soaked = Soaked(op, sets_of(op, bench, late), bench)
    noisy = True

    def once(i: int) -> None:
        late()
        different = soaked.differs(i)
        late()
        wrong.add_(different)

    overflows = any(each.overflows for each in soaked.sets)

    def settle() -> None:
        torch.cuda.synchronize(bench.device)  # the queue stays short
        if overflows and not forgiven(bench):
            raise CounterpointError(f"soak of {op}: no rank has said that rows were too many")

    in_turn = op == "embedding_bag_all_to_all"  # a graph would use one output at each replay
    each = 4 * len(soaked.sets)
    graphs = [] if in_turn else [captured(once, each)[0] for _ in range(GRAPHS)]
    bench.meet()
    start_s = time.monotonic()
    # an overflow stops the next eager call
    eager = calls if in_turn else 0 if overflows else round(calls * EAGER)
    for i in range(eager):
        once(i)
        if i % QUEUED == 0:
            settle()
    replays = -(-(calls - eager) // each)
    for i in range(replays):
        late()
        graphs[i % GRAPHS]()
        if i % max(1, QUEUED // each) == 0:
            settle()
    torch.cuda.synchronize(bench.device)
    if overflows:
        forgiven(bench)
    seconds = time.monotonic() - start_s
    cp.check(bench.group)
    found = int(bench.summed(wrong))
    if found:
        raise CounterpointError(f"soak of {op}: {found} of {eager + replays * each} calls differ")
    counts: Row = {"calls": eager + replays * each, "eager": eager, "wrong": found}
    return [{**counts, "seconds": seconds, "note_s": note_s(bench)}]


def note_s(bench: Bench) -> float:
    """Host seconds of one note of a call on the notice board, the slowest rank's; warm."""
    note = workspace_of(bench.group, bench.device).board.note
    taken: list[float] = []
    for _ in range(5):
        bench.meet()
        start_s = time.perf_counter()
        for i in range(NOTES):
            note(2 * (i % 5))
        taken.append((time.perf_counter() - start_s) / NOTES)
    return max(bench.most([min(taken)]))


def cases(_: int) -> list[Case]:
    """An operator each."""
    return [Case(op, {"op": op, "asked": calls}) for op, calls in CALLS.items()]


def said(*ops: str) -> Callable[[Mapping[int, list[Row]]], str]:
    """A sentence for each number of GPUs."""

    def write(found: Mapping[int, list[Row]]) -> str:
        return "\n\n".join(
            f"{row['op']}: {row['calls']:,} calls on {gpus(ranks, row['gpu'])} in "
            f"{row['seconds']:.0f} s, {row['eager']:,} of them eager, the others replayed, with "
            "ranks late at random. Of their results, compared on the device with the expected "
            f"bits, {row['wrong']} differ."
            for ranks, rows in found.items()
            for row in rows
            if row["op"] in ops
        )

    return write


SOAK = Benchmark(
    "soak", cases, rows=rows_of, unit="ms",
    short=lambda case: case["op"] not in ("matmul_all_to_all", *list(ROUTED)[:-1], *MEMORY),
    sections=(
        *(Section(page, marker, said(op)) for op, (page, marker) in PAGES.items()),
        Section("docs/results/experts.md", "experts-soak",
                said("all_to_all_matmul", "matmul_all_to_all", *ROUTED)),
        Section("docs/fsdp.md", "fsdp-soak", said(*MEMORY)),
    ),
)  # fmt: skip
