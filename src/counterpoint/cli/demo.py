"""`counterpoint demo`: what overlap brings on GPUs, and every plan of two operators checked.

The plans are those of all_gather_matmul and matmul_reduce_scatter that take the shapes. CPU ranks
prove results; what a GPU takes is predicted, or measured where there are two.
"""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import counterpoint as cp
from counterpoint.cli.shared import checkout
from counterpoint.cli.shared.bars import LEGEND, bars
from counterpoint.group.ranks import interrupts_held_back, spawn
from counterpoint.measure.draw import draw_timeline
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem

ROWS_PER_RANK = 128
MOST_ERROR = 2.0  # of plain torch's own
TIMEOUT_S = 1800.0  # ends what hangs: however slow the machine is, no check takes as long
BEAT_S = 2.0  # without a word from the ranks, a dot says that they are at it
MACHINE, GPUS, TOKENS, PICTURED = "h100-4", 4, 16384, "QKV"  # of what is predicted

# N and K of one rank of four. Source: layer sizes of Llama-3-70B
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "all_gather_matmul": {"QKV": (2560, 8192), "gate+up": (14336, 8192)},
    "matmul_reduce_scatter": {"O": (8192, 2048), "down": (8192, 7168)},
}


class Check(NamedTuple):
    """One plan at one layer: its error against fp64, over that of torch's own, of all ranks."""

    op: str
    layer: str
    plan: str
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
        scale: layers of the checks are so many times smaller than Llama's.
    """
    out.mkdir(exist_ok=True)
    if torch.cuda.device_count() >= 2 and checkout.benchmarks() is not None:
        return _timed(out)
    # one GPU has nobody to talk to: the ranks are to take the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start_s = time.monotonic()
    console = Console(highlight=False)
    _show(console, out)
    try:
        checks = _checked(console, ranks, seed, scale)
    except cp.CounterpointError as error:
        console.print(f"\n{error}", style="red", markup=False)
        console.print("The ranks could not run. `counterpoint doctor` looks for what is missing.")
        return 1
    wrong = [check for check in checks if not check.holds]
    console.print(f"{len(checks) - len(wrong)} of {len(checks)} checks hold: errors are at most "
                  f"{MOST_ERROR:g} times those of torch's own collective and matmul.")  # fmt: skip
    for check in wrong:
        console.print(f"[red]wrong:[/] {check.op} {check.layer}, plan {check.plan}: error "
                      f"{check.error:.3g} of torch's own")  # fmt: skip
    if wrong:
        console.print("[red]A wrong result is a bug:[/] run `make test`, and report what fails, "
                      "with what `counterpoint doctor --json` says.")  # fmt: skip
    else:
        console.print("\nTry next:")
        for command in next_commands(out):
            console.print(f"  {command}", markup=False, soft_wrap=True)
    console.print(f"{time.monotonic() - start_s:.0f} s in all")
    return int(bool(wrong))


def _timed(out: Path) -> int:
    """Operators, compiled blocks and an FSDP2 step on GPUs; the exit code of what failed first."""
    tables = {"overlap": "two operators", "compile": "compiled transformer blocks",
              "fsdp": "a training step of FSDP2, before and after cp.overlap"}  # fmt: skip
    for table, what in tables.items():
        print(f"{what}, timed on {torch.cuda.device_count()} GPUs:", flush=True)
        code = checkout.run("bench", [table, "--short", "--out", str(out / f"demo-{table}.jsonl")])
        if code:
            return code
    return 0


def _show(console: Console, out: Path) -> None:
    """What overlap brings, predicted for GPUs: in the terminal, and as a picture."""
    n, k = LAYERS["all_gather_matmul"][PICTURED]
    choice = cp.choose(Problem("all_gather_matmul", TOKENS, n, k, GPUS), MACHINE)
    serial = cp.estimate(cp.build(choice.problem, "serial", choice.machine), choice.machine)
    speedup = choice.speedup(choice.seconds)
    title = (
        f"{PICTURED} of Llama-3-70B, {TOKENS} tokens, on {GPUS} H100s: predicted, {speedup:.2f}x"
    )
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    console.print(bars({"serial": serial, "ours": choice.timeline}, width=min(console.width, 100)))
    console.print(LEGEND)
    first = replace(serial, title=f"all_gather_matmul: {title}", source=f"serial, {serial.source}")
    ours = replace(choice.timeline, title="", source=f"ours, {choice.timeline.source}")
    picture = draw_timeline(first, out / "demo.png", beside=[ours], ranks=[0])
    console.print(f"The picture: {picture}", soft_wrap=True)


def _checked(console: Console, ranks: int, seed: int, scale: int) -> list[Check]:
    """Every plan at every layer, on CPU ranks. It is said how far they are, at all times."""
    cores = len(os.sched_getaffinity(0))
    ranks = ranks or min(max(cores, 2), 4)
    where = f"{ranks} CPU rank{'s' * (ranks != 1)} and {cores} core{'s' * (cores != 1)}"
    console.print(f"\nEvery plan of two operators against fp64, on {where}.")
    console.print("This proves results; times of CPUs say nothing. The ranks start", end=" ")
    sys.stdout.flush()
    with _told() as sender:
        results = spawn(_rank, ranks, seed, scale, sender, timeout_s=TIMEOUT_S)
    return results[0]


@contextmanager
def _told() -> Generator[Connection]:
    """Print what rank 0 sends, and a dot where it sends nothing for a while."""
    receiver, sender = get_context("spawn").Pipe(duplex=False)

    def listen() -> None:
        text: str | None = ""
        while text is not None:
            text = receiver.recv() if receiver.poll(BEAT_S) else "."
            print(text or "", end="", flush=True)

    listener = threading.Thread(target=listen, name="demo", daemon=True)
    try:
        with interrupts_held_back():  # a thread that has begun halfway cannot be ended
            listener.start()
        yield sender
    finally:
        if listener.ident is not None:
            sender.send(None)
            listener.join()
        receiver.close()
        sender.close()


def _rank(rank: int, ranks: int, seed: int, scale: int, sender: Connection) -> list[Check]:
    """What each rank does: all checks. Rank 0 says how far it is."""
    checks: list[Check] = []

    def say(text: str) -> None:
        if rank == 0:
            sender.send(text)

    for op, layers in LAYERS.items():
        for layer, (n, k) in layers.items():
            problem = Problem(op, ROWS_PER_RANK * ranks, n // scale, k // scale, ranks)
            plans = [f.name for f in operation_of(op).families if not f.refusal(problem)]
            say(f"\n  {op:22}{layer:8}")
            everyone = [_operands(problem, r, seed + len(checks)) for r in range(ranks)]
            want, plain = _by_torch(problem, rank, everyone)
            of_torch = _norm(plain - want)
            for plan in plans:
                y: Tensor = getattr(cp, op)(*everyone[rank], plan=plan)
                check = Check(op, layer, plan, _norm(y - want) / of_torch)
                checks.append(check)
                say("✓" if check.holds else "✗")
            worst = max(check.error for check in checks[-len(plans) :])
            say(f" {len(plans)} plans, error {worst:.2f} of torch's own")
    say("\n")
    return checks


def _norm(error: Tensor) -> float:
    """Of the errors of all ranks."""
    square = error.double().square().sum()
    dist.all_reduce(square)
    return float(square.sqrt())


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
