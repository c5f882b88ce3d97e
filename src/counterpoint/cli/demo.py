"""`counterpoint demo`: plan families of two operators, checked, and a picture of what they bring.

The families are those of all_gather_matmul and matmul_reduce_scatter that take the shapes. CPU
ranks show that the plans are right; their times say nothing about a GPU.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import counterpoint as cp
from counterpoint.cli import checkout
from counterpoint.cli.bars import LEGEND, bars
from counterpoint.measure.draw import draw_timeline
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem
from counterpoint.runtime.ranks import spawn
from counterpoint.timeline import Timeline

ROWS_PER_RANK = 128
MOST_ERROR = 2.0  # of plain torch's own
TIMEOUT_S = 120.0
PICTURED = "QKV"
PICTURED_ROWS = 16384  # of all CPU ranks, so that their matmuls take milliseconds
PROFILED_CALLS = 30  # the shortest is drawn: most are interrupted by what else runs here
MACHINE, TOKENS = "h200-8", 65536  # of what is predicted

# N and K of one rank of eight. Source: layer sizes of Llama-3-70B
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "all_gather_matmul": {"QKV": (1280, 8192), "gate+up": (7168, 8192)},
    "matmul_reduce_scatter": {"O": (8192, 1024), "down": (8192, 3584)},
}


class Check(NamedTuple):
    """One family at one layer: its error against fp64, over that of torch's own, of all ranks."""

    op: str
    layer: str
    family: str
    error: float

    @property
    def holds(self) -> bool:
        """Whether it computes what it should; a NaN does not."""
        return self.error <= MOST_ERROR


def demo(*, ranks: int, seed: int, out: Path, scale: int) -> int:
    """Run the demo for this machine; 0 when every check holds.

    Args:
        ranks: CPU ranks; 0: one for each core, from 2 to 4.
        seed: of the random operands.
        out: folder of the pictures, in a folder that is there.
        scale: layers are so many times smaller than Llama's.
    """
    if torch.cuda.device_count() >= 2 and checkout.benchmarks() is not None:
        out.mkdir(exist_ok=True)
        return checkout.run("bench", ["overlap", "--short", "--out", str(out / "demo.jsonl")])
    # one GPU has nobody to talk to: the ranks are to take the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start_s = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    ranks = ranks or min(max(cores, 2), 4)
    console = Console(highlight=False)
    console.print(f"Every plan of two operators against fp64, on {ranks} CPU rank"
                  f"{'s' * (ranks != 1)} and {cores} core{'s' * (cores != 1)}:")  # fmt: skip
    sys.stdout.flush()  # before what rank 0 prints
    try:
        results = spawn(_rank, ranks, seed, scale, timeout_s=TIMEOUT_S)
    except cp.CounterpointError as error:
        console.print(f"{error}", style="red", markup=False)
        console.print("The ranks could not run. `counterpoint doctor` shows what is missing here.")
        return 1
    checks, timeline = results[0]
    wrong = [check for check in checks if not check.holds]
    console.print(f"{len(checks) - len(wrong)} of {len(checks)} checks hold: errors are at most "
                  f"{MOST_ERROR:g} times those of torch's own collective and matmul.")  # fmt: skip
    if not wrong:
        _show(console, timeline, out)
    for check in wrong:
        console.print(f"[red]wrong:[/] {check.op} {check.layer}, plan {check.family}: error "
                      f"{check.error:.3g} of torch's own")  # fmt: skip
    if wrong:
        console.print("[red]A wrong result is a bug:[/] run `make test`, and report what fails, "
                      "with what `counterpoint doctor --json` says.")  # fmt: skip
    console.print(f"{time.monotonic() - start_s:.0f} s in all")
    return int(bool(wrong))


def _rank(rank: int, ranks: int, seed: int, scale: int) -> tuple[list[Check], Timeline]:
    """What each rank does: all checks, then one call under the profiler. Rank 0 says how far."""
    checks: list[Check] = []

    def say(text: str) -> None:
        if rank == 0:
            print(text, end="", flush=True)

    for op, layers in LAYERS.items():
        for layer, (n, k) in layers.items():
            problem = Problem(op, ROWS_PER_RANK * ranks, n // scale, k // scale, ranks)
            families = [f.name for f in operation_of(op).families if not f.refusal(problem)]
            say(f"  {op:22}{layer:8}")
            for family in families:
                check = Check(op, layer, family, _error(problem, family, rank, seed + len(checks)))
                checks.append(check)
                say("✓" if check.holds else "✗")
            worst = max(check.error for check in checks[-len(families) :])
            say(f" {len(families)} plans, error {worst:.2f} of torch's own\n")
    return checks, _profiled(ranks, rank, seed, scale)


def _error(problem: Problem, family: str, rank: int, seed: int) -> float:
    """Of one call against fp64, over that of torch's own collective and matmul; of all ranks."""
    everyone = [_operands(problem, r, seed) for r in range(problem.ranks)]
    x, w = everyone[rank]
    op: Callable[..., Tensor] = getattr(cp, problem.op)
    y = op(x, w, plan=family)
    want, plain = _by_torch(problem, rank, everyone)
    squares = torch.stack([t.double().square().sum() for t in (y - want, plain - want)])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


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
    """One all_gather_matmul as it ran, by a plan of the family that is predicted to be fastest."""
    n, k = LAYERS["all_gather_matmul"][PICTURED]
    rows = PICTURED_ROWS // ranks // 64 * 64 * ranks
    problem = Problem("all_gather_matmul", rows, n // scale, k // scale, ranks)
    x, w = _operands(problem, rank, seed)
    spec = "shard_p2p chunks=2"
    timelines: list[Timeline] = []
    for _ in range(PROFILED_CALLS):
        _, timeline = cp.profile(lambda: cp.all_gather_matmul(x, w, plan=spec))
        timelines.append(timeline)
    return min(timelines, key=lambda timeline: timeline.duration_s)


def _show(console: Console, here: Timeline, out: Path) -> None:
    """What overlap brings: predicted for GPUs, beside what ran here; and what to try next."""
    n, k = LAYERS["all_gather_matmul"][PICTURED]
    choice = cp.choose(Problem("all_gather_matmul", TOKENS, n, k, 8), MACHINE)
    serial = cp.estimate(cp.build(choice.problem, "serial", choice.machine), choice.machine)
    speedup = choice.speedup(choice.seconds)
    what = f"{PICTURED} of Llama-3-70B, {TOKENS} tokens"
    console.print(f"\n{what}, on 8 H200s: predicted, speedup {speedup:.2f}x", style="bold")
    gpus = {"serial": serial, "overlapped": choice.timeline}
    width = min(console.width, 100)
    console.print(bars(gpus, width=width))
    console.print("\nThe same as it ran here (the order is real, the times are not a GPU's):",
                  style="bold")  # fmt: skip
    console.print(bars({"overlapped": here}, width=width))
    console.print(LEGEND)
    out.mkdir(exist_ok=True)
    panels = [
        replace(choice.timeline, title="", source=f"overlapped, {choice.timeline.source}"),
        replace(here, title="", source=f"overlapped, a smaller layer, {here.source}"),
    ]
    title = f"all_gather_matmul: {what}, on 8 H200s: speedup {speedup:.2f}x, predicted"
    first = replace(serial, title=title, source=f"serial, {serial.source}")
    picture = draw_timeline(first, out / "demo.png", beside=panels, ranks=[0])
    console.print(f"\nThe picture: {picture}", soft_wrap=True)
    console.print("Try next:")
    for command in next_commands(out):
        console.print(f"  {command}", markup=False, soft_wrap=True)


def next_commands(out: Path) -> list[str]:
    """Three commands that work where this one did."""
    program = Path(sys.executable).parent / "counterpoint"
    name = f"{shlex.quote(sys.executable)} -m counterpoint"
    if shutil.which("counterpoint") == str(program):
        name = "counterpoint"
    elif program.exists():
        here = program.is_relative_to(Path.cwd())
        name = shlex.quote(str(program.relative_to(Path.cwd()) if here else program))
    picture = shlex.quote(str(out / "plan.png"))
    return [
        f"{name} plan all_gather_matmul --shape 8192,7168,8192 --out {picture}",
        f"{name} plan matmul_all_reduce --shape 8,8192,3584 --machine b200-8",
        f"{name} doctor",
    ]
