"""`counterpoint evaluate`: how often the chooser is right, at layers of real models."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import Knowledge, shipped
from counterpoint.choose.rule import by_rule
from counterpoint.choose.score import RIGHT, Measured, Score, at_random, constants, score
from counterpoint.cli.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.costs import Tiles
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.machine import Machine
from counterpoint.measure import canvas, record
from counterpoint.measure.compare import AUTO, FIXED, TORCH_SYMM_MEM, Case, compare
from counterpoint.measure.scenarios import SEEN, TOKENS, Scenario, scenarios
from counterpoint.measure.speedups import Speedups, draw_speedups
from counterpoint.ops.auto import knowledge_of, known_tiles
from counterpoint.problem import Problem
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import workspace_of

ROUNDS = 7
WHOLE = "1/1"
MISSES = 8  # that are listed, the worst first
CONSTANTS = 3  # that are listed, the best first


class Found(NamedTuple):
    """One scenario of a file of rows."""

    measured: Measured
    picked: str  # by "auto", where it was measured
    auto_s: float
    ideal_s: float
    torch_s: float  # 0: not measured
    gpu: str


def evaluate(*, rows: Sequence[Path], out: Path, picture: Path | None, part: str, only: str) -> int:
    """Measure, or read what was measured, and print scores; 0, or 2 where there are no GPUs.

    Args:
        rows: files to score; none: measure first, into `out`.
        out: JSONL file that rows are added to.
        picture: file of the speedups; None draws none.
        part: "1/4": the first quarter of the scenarios, of those left.
        only: scenarios whose name has this in it; "" for all.

    Raises:
        InputError: no scenario is left, a file has no scenario, or `part` is none.
        UnsupportedError: no preset describes this GPU.
    """
    if picture is not None:
        canvas.checked("evaluate", picture)  # before minutes of measurement
    if rows and part != WHOLE:
        raise InputError("evaluate", "--part", want="left out with --rows", got=part)
    if not rows:
        gpus = torch.cuda.device_count()
        if gpus < 2:
            return too_few_gpus("evaluate", "`--rows FILE` scores what was measured elsewhere")
        if not under_torchrun():
            chosen_from(part, only, gpus)  # a wrong option is said before ranks start
            given = {"--out": out, "--picture": picture, "--part": part, "--only": only}
            options = [str(word) for name, value in given.items() if value
                       for word in (name, value)]  # fmt: skip
            return torchrun(gpus, ["evaluate", *options])
        if not _measured(out, part, only):
            return 0
        rows = [out]
    console = Console(highlight=False)
    # of a shape in several files the last counts
    shapes = {e.measured.problem: e for path in rows for e in scenarios_of(record.read(path))}
    found = [each for each in shapes.values() if only.lower() in each.measured.name.lower()]
    if not found:
        want = "rows of `counterpoint evaluate` or `bench`" + (f" with {only!r}" if only else "")
        raise InputError("evaluate", "--rows", want=want, got=", ".join(map(str, rows)))
    for ranks in sorted({each.measured.problem.ranks for each in found}, reverse=True):
        some = [each for each in found if each.measured.problem.ranks == ranks]
        machine = shipped(some[0].gpu, ranks)
        console.print(table_of(scores_of(some, machine), ranks))
        console.print(misses_of(some), soft_wrap=True)
    if picture is not None:
        console.print(f"drawn: {draw(found, picture)}", soft_wrap=True)
    return 0


def chosen_from(part: str, only: str, ranks: int) -> tuple[Scenario, ...]:
    """The scenarios that are asked for.

    Raises:
        InputError: there are none, `part` is not "I/N", or `ranks` do not divide the tokens.
    """
    if min(TOKENS) % ranks:
        raise InputError("evaluate", "GPUs", want="2, 4, 8 or another number that divides "
                         f"{min(TOKENS)} tokens", got=ranks)  # fmt: skip
    left = tuple(s for s in scenarios(ranks) if only.lower() in s.name.lower())
    if not left:
        some = ", ".join(dict.fromkeys(s.model for s in scenarios(ranks)))
        raise InputError("evaluate", "--only", want=f"part of a scenario's name ({some})", got=only)
    number, _, of = part.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise InputError("evaluate", "--part", want='such as "1/4"', got=repr(part))
    return left[int(number) - 1 :: int(of)]


def _measured(out: Path, part: str, only: str) -> bool:
    """Measure on all ranks; whether this one is to report."""
    with nccl_group() as (group, device):
        first = group.rank() == 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn())  # fmt: skip
        chosen, start_s = chosen_from(part, only, group.size()), time.monotonic()
        workspace = workspace_of(group, device)
        machine = knowledge_of(workspace).machine
        if machine is None:
            gpu = torch.cuda.get_device_name(device)
            raise UnsupportedError(f"evaluate: no preset describes {gpu!r}, so auto is serial")
        workspace.knowledge = Knowledge(machine, {})  # the model is scored, not what was tuned
        with Progress(*columns, transient=True, disable=not first) as progress:
            task = progress.add_task("measuring", total=len(chosen))
            for each in chosen:
                progress.update(task, description=each.name)
                p = each.problem
                # tiles are asked of each GPU by itself; all ranks time the same in one order
                specs = candidates(p, machine, known_tiles(p, device))
                specs = gather_object(specs, group)[0]
                case = Case(p.op, p.m, p.n, p.k, f"{each.model} {each.layer}", p.dtype)
                rows = compare(case, specs, group=group, device=device, rounds=ROUNDS, soak_s=0.2,
                               eager=False)  # fmt: skip
                if first:
                    record.append(out, [row | {"table": "evaluate"} for row in rows])
                if first and not progress.console.is_terminal:
                    print(f"{time.monotonic() - start_s:4.0f} s  {each.name}", flush=True)
                progress.advance(task)
                torch.cuda.empty_cache()
    return first


def candidates(problem: Problem, machine: Machine, tiles: Tiles) -> list[str]:
    """Every plan that "auto" weighs, serial left out: that is an arm of its own."""
    table = by_model(problem, machine, tiles=tiles).table
    return [c.spec for c in table if c.spec != "serial" and c.basis != "refused"]


def scenarios_of(rows: Sequence[dict[str, Any]]) -> list[Found]:
    """What rows of `compare` say of each shape, in graphs."""
    shapes: dict[Problem, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row.get("mode") == "graph" and "op" in row:
            problem = Problem(row["op"], row["m"], row["n"], row["k"], row["ranks"], row["dtype"])
            arms = shapes.setdefault(problem, {})
            if row["arm"] in arms:  # measured once more: times of two rotations do not compare
                arms.clear()
            arms[row["arm"]] = row
    found: list[Found] = []
    for problem, arms in shapes.items():
        seconds = {arm: row["median_s"] for arm, row in arms.items()}
        times = {a: t for a, t in seconds.items() if a == "serial" or a not in FIXED}
        layer = (arms["serial"].get("layer") or problem.op).partition(",")[0]
        name = f"{layer}, {problem.m} tokens"
        moved_s = min(seconds[a] for a in ("communication", "copy_engine"))
        ideal_s = max(seconds["compute"], moved_s)
        picked = arms[AUTO]["pick"] if AUTO in arms else ""
        if picked:  # the same plan, timed twice, or no candidate of that measurement
            times[picked] = fmean((times.get(picked, seconds[AUTO]), seconds[AUTO]))
        found.append(Found(Measured(name, problem, times), picked, times.get(picked, 0.0), ideal_s,
                           seconds.get(TORCH_SYMM_MEM, 0.0), arms["serial"]["gpu"]))  # fmt: skip
    return found


def scores_of(found: Sequence[Found], machine: Machine | None) -> list[Score]:
    """Of auto as it was, of the model and the rule as they are, and of what needs no chooser."""
    picked = {each.measured.problem: each.picked for each in found}
    measured = [each.measured for each in found]
    ways: dict[str, Callable[[Measured], str]] = {}
    if any(picked.values()):
        ways["auto, as it was measured"] = lambda m: picked[m.problem]
    if machine is not None:
        ways["the model now, tiles not known"] = lambda m: by_model(m.problem, machine).spec
        ways["the static rule"] = lambda m: by_rule(m.problem, machine).spec
    scores = [score(name, pick, measured) for name, pick in ways.items()]
    unseen = [m for m in measured if not any(model in m.name for model in SEEN)]
    if 0 < len(unseen) < len(measured):
        scores += [score(f"{name}: unseen models", pick, unseen) for name, pick in ways.items()]
    return [*scores, *constants(measured)[:CONSTANTS], at_random(measured)]


def table_of(scores: Sequence[Score], ranks: int) -> Table:
    """A line for each way to choose."""
    table = Table(title=f"{ranks} ranks: right is within {RIGHT - 1:.0%} of the fastest candidate",
                  title_justify="left", box=SIMPLE_HEAD)  # fmt: skip
    for name in ("chosen by", "scenarios", "right", "regret", "worst", "at", "serial /", "least"):
        table.add_column(name, justify="left" if name in ("chosen by", "at") else "right")
    for s in scores:
        of = f"{s.scenarios}" if s.scenarios == s.asked else f"{s.scenarios} of {s.asked}"
        table.add_row(s.way, of, f"{s.right:.0%}", f"{s.mean_regret:.1%}", f"{s.worst_regret:.1%}",
                      s.worst, f"{s.speedup:.2f}", f"{s.least_speedup:.2f}")  # fmt: skip
    return table


def misses_of(found: Sequence[Found]) -> str:
    """The picks of auto that were not right, the worst first."""
    lines: list[tuple[float, str]] = []
    for each in found:
        m = each.measured
        if each.picked in m.times and m.times[each.picked] > RIGHT * m.best_s:
            best = min(m.times, key=m.times.__getitem__)
            loss = m.times[each.picked] / m.best_s - 1
            lines.append((loss, f"{m.name}: {each.picked}, {loss:.1%} behind {best}"))
    text = "\n".join(line for _, line in sorted(lines, reverse=True)[:MISSES])
    return text or "auto was right everywhere"


def _place(each: Found) -> tuple[int, str, int]:
    problem = each.measured.problem
    return problem.ranks, each.measured.name.partition(",")[0], problem.m


def draw(found: Sequence[Found], path: Path) -> Path:
    """Serial over auto, the fastest candidate and torch's fused operator, by scenario."""
    rows: dict[str, dict[str, float]] = {}
    ideals: dict[str, float] = {}
    for each in sorted(found, key=_place):
        m = each.measured
        label = f"{m.name}, {m.problem.ranks} GPUs"
        serial_s = m.times["serial"]
        times = {"auto": each.auto_s, "fastest candidate": m.best_s, "torch symm_mem": each.torch_s}
        rows[label] = {kind: serial_s / t for kind, t in times.items() if t}
        ideals[label] = serial_s / each.ideal_s
    panel = Speedups("by layer and tokens", rows, ideals)
    source = "NCCL + cuBLAS is serial; CUDA graphs, one rotation a scenario"
    return draw_speedups([panel], path, title="Speedup over serial by scenario", source=source)
