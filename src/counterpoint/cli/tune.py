"""`counterpoint tune`: the plan that is fastest here, measured and kept for `plan="auto"`."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from counterpoint.choose.choice import Candidate, Choice
from counterpoint.choose.known import PLANS, file_of
from counterpoint.cli.shared.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.cli.shared.problems import problem_of
from counterpoint.cli.shared.show import candidates, progress, us
from counterpoint.errors import InputError
from counterpoint.group.ranks import spawn
from counterpoint.group.workspace import workspace_of
from counterpoint.measure import record
from counterpoint.measure.tune import tune as measure
from counterpoint.model.estimate import predicted_s, source
from counterpoint.ops.auto import known_tiles
from counterpoint.ops.place import place_of
from counterpoint.plan.families import build
from counterpoint.problem import DType, Problem

CPU_TIMEOUT_S = 600.0
ON_CPU_RANKS = "counterpoint tune --op all_gather_matmul --shape 512,256,256 --ranks 2"
ON_CPU = (
    "On CPU ranks: the plans run, but their times mean nothing for a GPU, and nothing is saved."
)


class Case(NamedTuple):
    """A problem, and the plans to time besides serial: the model's best if there are none."""

    problem: Problem
    specs: tuple[str, ...]


class Asked(NamedTuple):
    """What was asked for: the options say what each is."""

    layers: list[tuple[str, str]]  # operators and their shapes
    published: bool  # nobody has given a shape
    specs: str
    rounds: int
    ranks: int
    experts: int
    dtype: DType
    out: Path | None


def tune(asked: Asked) -> int:
    """Time, print and save; 0.

    Raises:
        InputError: there is no such shape or plan, or there are fewer GPUs.
    """
    gpus, ranks = torch.cuda.device_count(), asked.ranks
    if gpus < 2 and not ranks:
        raise too_few_gpus("tune", f"`{ON_CPU_RANKS}` tries the command on CPU ranks")
    if gpus < 2 and asked.published:
        want = "given for CPU ranks, to which published shapes are too large"
        raise InputError("tune", "--shape", want=want, got="none", fix=f"try `{ON_CPU_RANKS}`")
    if gpus > 1 and ranks > gpus:
        raise InputError("tune", "--ranks", want=f"at most the {gpus} GPUs here", got=ranks)
    names = tuple(name.strip() for name in asked.specs.split(",") if name.strip())
    cases = [
        Case(problem_of("tune", op, shape, ranks or gpus, asked.dtype, asked.experts), names)
        for op, shape in asked.layers
    ]
    for case in cases:
        for spec in case.specs:
            build(case.problem, spec)  # before any rank is started: it refuses what is none
    if gpus < 2:
        return _on_cpu(cases, ranks, asked.rounds, asked.out)
    if under_torchrun():
        return _on_gpu(cases, asked.rounds, asked.out)
    return torchrun(ranks or gpus)


def _on_gpu(cases: Sequence[Case], rounds: int, out: Path | None) -> int:
    with nccl_group() as (group, device):
        first = group.rank() == 0
        console = Console(highlight=False, quiet=not first)
        rows = _all(cases, rounds, group, device, console)
        if first:
            islands = workspace_of(group, device).islands.number
            path, _ = file_of(PLANS, place_of(device, group.size(), islands))
            console.print(f'plan="auto" takes these from now on. They are kept in {path}: '
                          "delete it to undo.", soft_wrap=True)  # fmt: skip
            _record(out, rows, console)
    return 0


def _on_cpu(cases: Sequence[Case], ranks: int, rounds: int, out: Path | None) -> int:
    console = Console(highlight=False)
    console.print(ON_CPU)
    sys.stdout.flush()  # before what rank 0 prints
    # one GPU has nobody to talk to: the ranks are to take the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    width = console.width
    rows = spawn(_rank, ranks, tuple(cases), rounds, width, timeout_s=CPU_TIMEOUT_S)[0]
    _record(out, rows, console)
    return 0


def _rank(
    rank: int, ranks: int, cases: tuple[Case, ...], rounds: int, width: int
) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    console = Console(highlight=False, quiet=rank > 0, width=width)
    return _all(cases, rounds, group, torch.device("cpu"), console)


def _all(
    cases: Sequence[Case], rounds: int, group: dist.ProcessGroup, device: torch.device,
    console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """Tune every case and print its table; rows of all candidates."""
    rows: list[dict[str, Any]] = []
    with progress(console, shown=console.is_terminal and not console.quiet) as bar:
        task = bar.add_task("", total=len(cases))
        for problem, specs in cases:

            def say(what: str, problem: Problem = problem) -> None:
                bar.update(task, description=f"{problem}: {what}")

            choice = measure(problem, group=group, device=device, specs=specs, rounds=rounds,
                             progress=say)  # fmt: skip
            predicted = _predicted(choice, device) if device.type == "cuda" else {}
            rates = f", {source(choice.machine)}" if predicted else ""
            bar.console.print(f"[bold]{problem}[/]{rates}")
            bar.console.print(_table(choice, predicted))
            rows += _rows(choice, predicted, device.type, rounds)
            bar.advance(task)
    return rows


def _predicted(choice: Choice, device: torch.device) -> dict[str, float]:
    """Seconds that the model predicts for each candidate, in a CUDA graph as it was timed."""
    problem, machine = choice.problem, choice.machine
    tiles = known_tiles(problem, device)
    return {
        c.spec: predicted_s(build(problem, c.spec, machine), machine, tiles=tiles)
        for c in choice.table
    }


def _table(choice: Choice, predicted: dict[str, float]) -> Table:
    """The candidates, and predictions beside them where there are any."""
    beside: dict[str, Callable[[Candidate], str]] = {}
    if predicted:
        beside = {
            ">predicted us": lambda c: us(predicted[c.spec]),
            ">/ measured": lambda c: f"{predicted[c.spec] / c.seconds:.2f}",
        }
    return candidates(choice, ">measured us", beside)


def _rows(
    choice: Choice, predicted: dict[str, float], device: str, rounds: int
) -> list[dict[str, Any]]:
    p = choice.problem
    facts = {"table": "tune", "op": p.op, "m": p.m, "n": p.n, "k": p.k, "ranks": p.ranks,
             "dtype": p.dtype, "device": device, "rounds": rounds}  # fmt: skip
    return [
        facts | {"plan": c.spec, "seconds": c.seconds, "predicted_s": predicted.get(c.spec),
                 "chosen": c.spec == choice.spec}
        for c in choice.table
    ]  # fmt: skip


def _record(out: Path | None, rows: list[dict[str, Any]], console: Console) -> None:
    if out is not None:
        facts = record.environment()
        record.append(out, [row | facts for row in rows])
        console.print(f"{len(rows)} rows added to {out}", soft_wrap=True)
