"""The third paper's experiments: its three operators, and what its kernels vary.

    counterpoint bench fused --paper --out folder        # 2 GPUs

Operators against the libraries' kernels one after the other; then, of embedding bags with an
all-to-all, the order of tasks for remote ranks while one rank is late, programs resident at once,
and slices that have a flag each. The text names no sizes: these are ours.

Source: arXiv 2305.06942.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import decode, embedding, experts
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case
from benchmarks.rows import Row
from benchmarks.slices import ORDERS, Sliced
from counterpoint.gpu.delay import Delay
from counterpoint.measure.timing import relative_error

D, POOLING, BAGS, ENTRIES = 256, 20, 8192, 1 << 20  # of a rank
LATE, LATE_BAGS = "order of remote tasks", 1 << 16  # a hundredth of its time outlasts a launch
CPU_S = 1e-2  # what an operator takes on CPU ranks, where nothing is measured
SKEWS = (0, 1, 2, 5, 10)  # percent of the operator's time that the last rank is late
SLICES = (1, 2, 4, 16, 64)
PER_SM = (1, 2, 4, 8, 9)  # 12 fit an SM, and a PeerKernel leaves 32 SMs to others
FULL_GRID = "a program per task"
BASELINE = "lookup + all-to-all"


def cases(_: int) -> list[Case]:
    """Three operators, then three experiments with one of them."""
    found = [
        _of("embedding + all-to-all", embedding.case_of(16, 256, 20, 16384)),
        _of("GEMV + all-reduce", decode.case_of(1, 8192, 3584)),
        _of("small GEMV + all-reduce", decode.case_of(1, 8192, 1024)),
        *(_of(f"GEMM + all-to-all, {model.name}", experts.case_of(
            "matmul_all_to_all", model, 1024, "uniform")) for model in experts.MODELS),
    ]  # fmt: skip
    return found + [sliced_case(name, LATE_BAGS if name == LATE else BAGS) for name in EXPERIMENTS]


def _of(name: str, case: Case) -> Case:
    return Case(name, {**case.facts, "experiment": "operators"})


def sliced_case(
    experiment: str, bags: int = BAGS, d: int = D, entries: int = ENTRIES, pooling: int = POOLING
) -> Case:
    """One of EXPERIMENTS, of so many bags a rank."""
    return Case(experiment, {"experiment": experiment, "bags": bags, "d": d, "entries": entries,
                             "pooling": pooling})  # fmt: skip


KEPT = {  # of an operator's benchmark: the paper's comparison
    # outputs that calls take in turn cannot be captured: theirs are in `bench embedding`
    "embedding": (embedding.arms, ("bags cat", "ours serial", "fused copy")),
    "all-reduce": (decode.arms, ("serial", "matmul", "fused", "auto")),
    "GEMM": (experts.arms, ("pair looped", "pair grouped", "in place looped", "in place grouped",
                            "matmul grouped", "communication", "one kernel")),
}  # fmt: skip


def arms(case: Case, bench: Bench) -> Arms:
    """The arms of an operator, or of an experiment."""
    if case["experiment"] != "operators":
        return sliced_arms(case, bench)
    make, names = next(kept for word, kept in KEPT.items() if word in case.name)
    made = make(case, bench)
    # one that cannot be captured loses no row of another
    return replace(made, calls={n: call for n, call in made.calls.items() if n in names},
                   parts=[n for n in made.parts if n in names],
                   peers=[n for n in names if n != made.baseline])  # fmt: skip


def sliced_arms(case: Case, bench: Bench) -> Arms:
    """Ways to launch one kernel, beside a lookup and the library's all-to-all."""
    bags, d = case["bags"], case["d"]
    table = bench.normal(case["entries"], d)
    drawn = torch.randint(0, case["entries"], (bench.ranks * bags, case["pooling"]),
                          device=bench.device, generator=bench.draw)  # fmt: skip
    indices = drawn.to(torch.int32)
    got = bench.empty(bench.ranks, bags, d)

    def serial(_: int) -> Tensor:
        pooled = torch.nn.functional.embedding_bag(drawn, table, mode="sum")
        dist.all_to_all_single(got.view(-1, d), pooled, group=bench.group)
        return got.permute(1, 0, 2).reshape(bags, bench.ranks * d)

    make = partial(Sliced, table, indices, bench)
    calls = EXPERIMENTS[case["experiment"]](make, bench)
    sample = bench.sample(bags, 16)
    own = torch.stack([table[drawn[r * bags + sample]].double().sum(1)
                       for r in range(bench.ranks)])  # fmt: skip
    want = torch.empty_like(own)
    dist.all_to_all_single(want, own, group=bench.group)
    wanted = want.permute(1, 0, 2).reshape(len(sample), -1)
    own_of = [call.call if isinstance(call, After) else call for call in calls.values()]
    made = {id(call): call for call in own_of if isinstance(call, Sliced)}
    about: dict[str, Row] = {n: {"slices": c.slices, "programs_asked": c.work}
                             for n, c in calls.items() if isinstance(c, Sliced)}  # fmt: skip
    about |= {n: {"late_s": c.late_s} for n, c in calls.items() if isinstance(c, After)}
    return Arms(
        {BASELINE: serial} | calls, lambda _, y: [relative_error(y[sample], wanted)],
        baseline=BASELINE, floor=4e-3, peers=[*calls], about=about, nan_bytes=1 << 20,
        outputs=[got, *(call.out for call in made.values())],
    )  # fmt: skip


def by_slices(make: Callable[..., Sliced], _: Bench) -> dict[str, Call | str]:
    """As many flags as slices."""
    return {f"{n} slices": make(slices=n) for n in SLICES}


def by_programs(make: Callable[..., Sliced], bench: Bench) -> dict[str, Call | str]:
    """Persistent grids, and a full grid: one program for each task."""
    sms = (
        torch.cuda.get_device_properties(bench.device).multi_processor_count if bench.on_gpu else 1
    )
    persistent = {f"{n} programs per SM": make(programs=n * sms) for n in PER_SM}
    return persistent | {FULL_GRID: make(programs=None)}


@dataclass(frozen=True)
class After:
    """A call that begins late on one rank.

    Args:
        call: what is late.
        wait: lets its stream wait for seconds.
        late_s: how late.
        here: whether on this rank.
    """

    call: Sliced
    wait: Callable[[float], None]
    late_s: float
    here: bool

    def __call__(self, i: int) -> Tensor:
        """Wait, then launch."""
        if self.here:
            self.wait(self.late_s)
        return self.call(i)


def by_order(make: Callable[..., Sliced], bench: Bench) -> dict[str, Call | str]:
    """Each order, with the last rank late by a share of what the operator takes."""
    each = {order: make(order) for order in ORDERS}
    alone = {"alone": each[ORDERS[0]]}
    alone_s = bench.quick_s(alone, 8)["alone"] if bench.on_gpu else CPU_S
    wait: Callable[[float], None] = Delay(bench.device) if bench.on_gpu else time.sleep
    here = bench.rank == bench.ranks - 1
    return {f"{order}, {percent} % late": After(call, wait, alone_s * percent / 100, here)
            for percent in SKEWS for order, call in each.items()}  # fmt: skip


EXPERIMENTS: dict[str, Callable[[Callable[..., Sliced], Bench], dict[str, Call | str]]] = {
    LATE: by_order, "programs": by_programs, "slices": by_slices,
}  # fmt: skip
PAPER_FUSED = Benchmark(
    "paper_fused", cases, arms, host=False, rounds=15,
    short=lambda case: case.name in EXPERIMENTS,
    moved=lambda case, ranks: 2 * case.facts.get("bags", 0) * case.facts.get("d", 0) * (ranks - 1),
)  # fmt: skip
