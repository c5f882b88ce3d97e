"""`counterpoint demo`: plan families of two operators, checked, and one of them as a picture.

Those of all_gather_matmul and matmul_reduce_scatter that take the shapes. CPU ranks show that the
plans are right; their times say nothing about a GPU.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import counterpoint as cp
from counterpoint.cli import checkout
from counterpoint.cli.show import progress, table
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem
from counterpoint.runtime.ranks import spawn
from counterpoint.timeline import Timeline

ROWS_PER_RANK = 128
CALLS = 5  # the first is checked, the others are timed
MOST_ERROR = 2.0  # of plain torch's own
TIMEOUT_S = 120.0
PICTURED = "QKV"
PROFILED_CALLS = 5  # the shortest is drawn: with fewer cores than ranks, most are interrupted

# N and K of one rank of eight. Source: layer sizes of Llama-3-70B
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "all_gather_matmul": {"QKV": (1280, 8192), "gate+up": (7168, 8192)},
    "matmul_reduce_scatter": {"O": (8192, 1024), "down": (8192, 3584)},
}


class Check(NamedTuple):
    """One family at one layer: sums of squares of the errors of a rank, and its time."""

    layer: str
    problem: Problem
    family: str
    squares: float
    plain_squares: float
    want_squares: float
    call_s: float


def demo(*, ranks: int, seed: int, out: Path, scale: int) -> int:
    """Run the demo for this machine; 0 when every check holds."""
    gpus = torch.cuda.device_count()
    if gpus >= 2:
        return _on_gpus(out)
    return _on_cpu(ranks or 4, seed, out, scale)


def _on_gpus(out: Path) -> int:
    """The short table of the matmuls: every plan beside the libraries, from a checkout."""
    arguments = ["overlap", "--short", "--out", str(out / "demo.jsonl")]
    return checkout.run("demo", "benchmarks.runner", arguments)


def _on_cpu(ranks: int, seed: int, out: Path, scale: int) -> int:
    console = Console()
    # one GPU has nobody to talk to: the ranks are to take the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cores = len(os.sched_getaffinity(0))
    console.print(f"[bold]counterpoint[/] on {ranks} CPU rank{'s' * (ranks != 1)} and "
                  f"{cores} core{'s' * (cores != 1)}")  # fmt: skip
    start_s = time.monotonic()
    try:
        results = spawn(_rank, ranks, seed, scale, console.is_terminal, timeout_s=TIMEOUT_S)
    except cp.CounterpointError as error:
        console.print(f"{error}", style="red", markup=False, highlight=False)
        console.print("The ranks could not run. `counterpoint doctor` shows what is missing here.")
        return 1
    checks = [_over_ranks(same) for same in zip(*(checks for checks, _ in results), strict=True)]
    wrong = _print_checks(console, checks)
    _save_timeline(console, results[0][1], out)
    console.print(f"{len(checks) - wrong} of {len(checks)} checks hold, "
                  f"{time.monotonic() - start_s:.0f} s in all")  # fmt: skip
    if wrong:
        console.print("[red]A wrong result is a bug:[/] run `make test`, and report what fails, "
                      "with what `counterpoint doctor --json` says.")  # fmt: skip
    return int(wrong > 0)


def _rank(
    rank: int, ranks: int, seed: int, scale: int, show_progress: bool
) -> tuple[list[Check], Timeline]:
    """What each rank does: all checks, then one call under the profiler."""
    cases = [
        (problem, layer, family.name)
        for op, layers in LAYERS.items()
        for layer, (n, k) in layers.items()
        for problem in [_problem(op, ranks, n // scale, k // scale)]
        for family in operation_of(op).families
        if not family.refusal(problem)
    ]
    with progress(Console(), shown=show_progress and not rank) as bar:
        task = bar.add_task("checking", total=len(cases))
        checks: list[Check] = []
        for i, (problem, layer, family) in enumerate(cases):
            bar.update(task, description=f"{problem.op} {layer} {family}")
            checks.append(_check(problem, layer, family, rank, seed + i))
            bar.advance(task)
    return checks, _profiled(ranks, rank, seed, scale)


def _problem(op: str, ranks: int, n: int, k: int) -> Problem:
    return Problem(op, ROWS_PER_RANK * ranks, n, k, ranks)


def _check(problem: Problem, layer: str, family: str, rank: int, seed: int) -> Check:
    everyone = [_operands(problem, r, seed) for r in range(problem.ranks)]
    x, w = everyone[rank]
    op: Callable[..., Tensor] = getattr(cp, problem.op)
    y = op(x, w, plan=family)
    want, plain = _by_torch(problem, rank, everyone)
    times_s: list[float] = []
    for _ in range(CALLS - 1):
        start_s = time.perf_counter()
        op(x, w, plan=family)
        times_s.append(time.perf_counter() - start_s)
    squares = [float(t.double().square().sum()) for t in (y - want, plain - want, want)]
    return Check(layer, problem, family, *squares, call_s=statistics.median(times_s))


def _operands(problem: Problem, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """x and w of `rank`, which any rank can make."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = problem.rows[rank] if problem.op == "all_gather_matmul" else problem.m
    x = torch.randn(rows, problem.k, generator=generator)
    w = torch.randn(problem.k, problem.n, generator=generator) / problem.k**0.5
    return x.bfloat16(), w.bfloat16()


def _by_torch(
    problem: Problem, rank: int, everyone: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """What `rank` must get in fp64, and what torch's collective and matmul give in bf16."""
    x, w = everyone[rank]
    if problem.op == "all_gather_matmul":
        gathered = torch.cat([x for x, _ in everyone])
        return gathered.double() @ w.double(), gathered @ w
    mine = slice(*problem.row_starts[rank : rank + 2])
    want = sum((x[mine].double() @ w.double() for x, w in everyone), torch.zeros(()))
    plain = x @ w
    dist.all_reduce(plain)
    return want, plain[mine]


def _profiled(ranks: int, rank: int, seed: int, scale: int) -> Timeline:
    """One graded all_gather_matmul as it ran, at eight times the rows."""
    n, k = LAYERS["all_gather_matmul"][PICTURED]
    problem = Problem("all_gather_matmul", 8 * ROWS_PER_RANK * ranks, n // scale, k // scale, ranks)
    x, w = _operands(problem, rank, seed)
    spec = f"graded {'/'.join(map(str, _doubling(ranks)))}"

    def call() -> Tensor:
        return cp.all_gather_matmul(x, w, plan=spec)

    call()
    timelines = [cp.profile(call, title=f"{spec}: {problem}")[1] for _ in range(PROFILED_CALLS)]
    return min(timelines, key=lambda timeline: timeline.duration_s)


def _doubling(ranks: int) -> list[int]:
    """Groups of 1, 1, 2, 4, ... shards, which add up to `ranks`."""
    sizes: list[int] = []
    while (done := sum(sizes)) < ranks:
        sizes.append(min(max(done, 1), ranks - done))
    return sizes


def _over_ranks(same: tuple[Check, ...]) -> Check:
    """One check from those of all ranks: errors add up, the slowest rank gives the time."""
    fields = ("squares", "plain_squares", "want_squares")
    sums = {field: sum(getattr(check, field) for check in same) for field in fields}
    return same[0]._replace(**sums, call_s=max(check.call_s for check in same))


def _print_checks(console: Console, checks: list[Check]) -> int:
    """A table for each operator; returns how many checks fail."""
    wrong = 0
    for op in LAYERS:
        columns = ("layer", "M, N, K", "plan family", ">error", ">/ torch's", "ok", ">CPU ms")
        made = table(*columns, title=f"{op}, bfloat16")
        mine = [check for check in checks if check.problem.op == op]
        for i, check in enumerate(mine):
            p, ratio = check.problem, (check.squares / check.plain_squares) ** 0.5
            ok = ratio <= MOST_ERROR  # not for a NaN
            wrong += not ok
            first = i == 0 or mine[i - 1].layer != check.layer
            if first:
                made.add_section()
            made.add_row(
                check.layer if first else "", f"{p.m}, {p.n}, {p.k}" if first else "",
                check.family, f"{(check.squares / check.want_squares) ** 0.5:.1e}",
                f"{ratio:.2f}", "[green]yes[/]" if ok else "[bold red]NO[/]",
                f"{check.call_s * 1e3:.1f}",
            )  # fmt: skip
        console.print(made)
    console.print(
        "error: relative to fp64, over all ranks; / torch's: over the error of torch's own "
        f"collective and matmul, at most {MOST_ERROR:g}.\nCPU ms says nothing about a GPU: the "
        "ranks share cores, and a copy is a memcpy that competes with the matmul.", style="dim",
    )  # fmt: skip
    return wrong


def _save_timeline(console: Console, timeline: Timeline, out: Path) -> None:
    picture = timeline.save(out / "demo-cpu.png")
    trace = timeline.save(out / "demo-cpu.json")
    console.print(f"what ran when on the CPU ranks: {picture}, and for ui.perfetto.dev {trace}",
                  soft_wrap=True)  # fmt: skip
