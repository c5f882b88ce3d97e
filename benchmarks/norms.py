"""all_reduce_rms_norm of few rows against the libraries: a sum over ranks, a residual and a norm.

    serial          NCCL's all-reduce, then residual and norm compiled by torch.compile
    torch one_shot  torch's one-shot all-reduce of what is in open memory, then the same
    kraken          kraken's one kernel of all that, from a checkout in .peers/; it keeps no h
    norm            residual and norm alone, compiled
    auto, ...       ours

NCCL's works in place: it takes the mean, so that a call leaves what the next one takes. The others
sum what is divided by the number of ranks, a power of two: all have the same numbers."""

from collections.abc import Callable
from statistics import geometric_mean

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks.choice import choice_of
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.peers import peer
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import INVARIANT, Column, arm, by_machine, price_note, sizes, table
from counterpoint.measure.timing import relative_error
from counterpoint.problem import Problem

ROWS, COLUMNS = (1, 8, 32, 64, 128, 512), (4096, 8192, 16384)
PLANS = ("auto", "direct", "fused")
TORCH, KRAKEN = "torch one_shot", "kraken"
OTHERS = (TORCH, KRAKEN)
SIGNAL_BYTES = 4  # of each row and rank, of kraken's
EPS = 1e-6


def case_of(m: int, n: int) -> Case:
    """Rows and columns."""
    return Case(f"{m},{n}", {"m": m, "n": n})


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [case_of(m, n) for n in COLUMNS for m in ROWS]


def normed(total: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What follows the sum in a model."""
    h = total + residual
    return torch.nn.functional.rms_norm(h, weight.shape, weight, EPS), h


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of a case; a call returns the norm and h."""
    m, n, group = case["m"], case["n"], bench.group
    x = bench.normal(m, n).div_(bench.ranks)
    residual, weight = bench.normal(m, n), bench.normal(n)
    for shared in (residual, weight):
        dist.broadcast(shared, 0, group=group)
    norm = normed
    if bench.on_gpu:
        torch.compiler.reset()  # a compiled function is for one shape
        norm = torch.compile(normed, dynamic=False)
    kept = x * bench.ranks

    def serial(_: int) -> tuple[Tensor, Tensor]:
        if bench.on_gpu:
            dist.all_reduce(kept, dist.ReduceOp.AVG, group=group)
            return norm(kept, residual, weight)
        return norm(bench.summed(x.clone()), residual, weight)

    def ours(plan: str) -> Call:
        return lambda _: cp.all_reduce_rms_norm(
            x, residual, weight, eps=EPS, group=group, plan=plan
        )

    calls: dict[str, Call | str] = {"serial": serial, TORCH: _torch(x, bench, norm)}
    one = calls[TORCH]
    if not isinstance(one, str):
        calls[TORCH] = lambda i: norm(one(i), residual, weight)
    calls[KRAKEN] = _kraken(x, residual, weight, bench)
    calls |= {"norm": lambda _: norm(x, residual, weight)}
    calls |= {plan: ours(plan) for plan in (*PLANS, INVARIANT)}
    want, _ = normed(bench.summed(x.double()), residual.double(), weight.double())
    problem = Problem("all_reduce_norm", m, n, ranks=bench.ranks, residual=True, eps=EPS)
    choice = choice_of(problem, bench)
    return Arms(
        calls,
        lambda _, got: [relative_error(got[0], want)],
        parts=("norm",),
        peers=OTHERS,
        about={"auto": {"pick": choice.spec if choice else "-"}},
    )


def _torch(x: Tensor, bench: Bench, norm: Callable[..., object]) -> Call | str:
    """Torch's all-reduce of memory that peers reach."""
    if not bench.on_gpu:
        return "torch's symmetric memory needs GPUs"
    own, _ = bench.opened(x.numel())
    own.copy_(x.flatten())
    one_shot, name = torch.ops.symm_mem.one_shot_all_reduce, bench.group.group_name
    return lambda _: one_shot(own, "sum", name).view(x.shape)


def _kraken(x: Tensor, residual: Tensor, weight: Tensor, bench: Bench) -> Call | str:
    """Kraken's kernel, whose bias is as large as x; a program for each row."""
    if not bench.on_gpu:
        return "kraken's kernel needs GPUs"
    fused = peer("kraken", "kraken.fused")
    if isinstance(fused, str):
        return fused
    own, handle = bench.opened(x.numel())
    if SIGNAL_BYTES * len(x) * bench.ranks > handle.signal_pad_size:
        return f"kraken's kernel has no signals for {len(x)} rows of {bench.ranks} ranks"

    def run(_: int) -> tuple[Tensor]:
        y = torch.empty_like(x)
        fused.one_shot_all_reduce_bias_rms_norm(
            own, x, residual, weight, y, eps=EPS, group=bench.group
        )
        return (y,)

    return run


def over_others(case: Timed) -> float:
    """The best of the others that there are over auto; NaN where there is none."""
    theirs = (case.s(arm) for arm in OTHERS if arm in case)
    return min(theirs, default=torch.nan) / case.s("auto")


def _over_others(case: Timed) -> str:
    over = over_others(case)
    return f"**{over:.2f}**" if over == over else "-"


TABLE = (
    sizes("m", "n", head="M, N"), arm("norm"), arm("serial", head="NCCL + norm"),
    arm(TORCH, head="torch one-shot + norm"), arm(KRAKEN), arm("direct"), arm("fused"),
    arm("auto", bold=True), Column("its plan", lambda c: c.main["auto"].get("pick", "-")),
    Column("NCCL / auto", lambda c: f"**{c.s('serial') / c.s('auto'):.2f}**"),
    Column("best other / auto", _over_others),
)  # fmt: skip


def norms_table(rows: list[Row]) -> str:
    """Every case."""
    found = taken(rows, "m", "n")
    means: list[str] = []
    for name, each in (("NCCL", [c.s("serial") / c.s("auto") for c in found]),
                       ("best other", [over_others(c) for c in found])):  # fmt: skip
        if some := [ratio for ratio in each if ratio == ratio]:
            means.append(f"{name} / auto {geometric_mean(some):.2f} (least {min(some):.2f})")
    note = f"Microseconds a call, in a graph. Geometric means: {', '.join(means)}."
    note += price_note(found)
    return table(TABLE, found, note)


NORMS = Benchmark(
    "norms", cases, arms, rounds=15, soak_s=0.1, eager=("serial", "auto"),
    short=lambda case: case["n"] == 8192 and case["m"] in (1, 64),
    moved=lambda case, ranks: 4 * case["m"] * case["n"] * (ranks - 1) // ranks,
    own=lambda shape, _: [case_of(*shape[:2])],
    sections=(Section("docs/results/decode.md", "norms", by_machine(norms_table)),),
)  # fmt: skip
