"""`counterpoint evaluate`: how often the chooser is right, at layers of real models."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import Knowledge, shipped
from counterpoint.cli.evaluate_report import draw, draw_errors, report, rule_text
from counterpoint.cli.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.costs import Tiles
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.machine import Machine
from counterpoint.measure import canvas, record
from counterpoint.measure.compare import Case, compare
from counterpoint.measure.compare_experts import Layer, compare_experts
from counterpoint.measure.evaluated import scenarios_of, tiles_of
from counterpoint.measure.scenarios import TOKENS, Scenario, expert_scenarios, scenarios
from counterpoint.ops.auto import knowledge_of, known_tiles
from counterpoint.problem import Problem
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import workspace_of

ROUNDS = 7
WHOLE = "1/1"


def evaluate(
    *,
    rows: Sequence[Path],
    out: Path,
    picture: Path | None,
    errors: Path | None,
    part: str,
    only: str,
) -> int:
    """Measure, or read what was measured, and print scores; 0, or 2 where there are no GPUs.

    Args:
        rows: files to score; none: measure first, into `out`.
        out: JSONL file that rows are added to.
        picture: file of the speedups; None draws none.
        errors: file of predicted against measured times, of the most GPUs; None draws none.
        part: "1/4": the first quarter of the scenarios, of those left.
        only: scenarios whose name has this in it; "" for all.

    Raises:
        InputError: no scenario is left, a file has no scenario, or `part` is none.
        UnsupportedError: no preset describes this GPU.
    """
    for path in (picture, errors):
        if path is not None:
            canvas.checked("evaluate", path)  # before minutes of measurement
    if rows and part != WHOLE:
        raise InputError("evaluate", "--part", want="left out with --rows", got=part)
    if not rows:
        gpus = torch.cuda.device_count()
        if gpus < 2:
            return too_few_gpus("evaluate", "`--rows FILE` scores what was measured elsewhere")
        if not under_torchrun():
            chosen_from(part, only, gpus)  # a wrong option is said before ranks start
            given = {
                "--out": out,
                "--picture": picture,
                "--errors": errors,
                "--part": part,
                "--only": only,
            }
            options = [str(word) for name, value in given.items() if value
                       for word in (name, value)]  # fmt: skip
            return torchrun(gpus, ["evaluate", *options])
        if not _measured(out, part, only):
            return 0
        rows = [out]
    # of a shape in several files the last counts
    shapes = {e.measured.problem: e for path in rows for e in scenarios_of(record.read(path))}
    found = [each for each in shapes.values() if only.lower() in each.measured.name.lower()]
    if not found:
        want = "rows of `counterpoint evaluate` or `bench`" + (f" with {only!r}" if only else "")
        raise InputError("evaluate", "--rows", want=want, got=", ".join(map(str, rows)))
    known = tiles_of(row for path in rows for row in record.read(path))
    found = [each._replace(tiles={**known, **each.tiles}) for each in found]
    counts = sorted({each.measured.problem.ranks for each in found}, reverse=True)
    parts = {n: [each for each in found if each.measured.problem.ranks == n] for n in counts}
    machines = {n: shipped(part[0].gpu, n) for n, part in parts.items()}
    for ranks, part_found in parts.items():
        print(report(part_found, machines[ranks]))
    print(rule_text())
    if picture is not None:
        print(f"drawn: {draw(list(parts.values()), picture)}")
    machine = machines[counts[0]]
    if errors is not None and machine is not None:
        print(f"drawn: {draw_errors(parts[counts[0]], machine, errors)}")
    return 0


def chosen_from(part: str, only: str, ranks: int) -> tuple[Scenario, ...]:
    """The scenarios that are asked for.

    Raises:
        InputError: there are none, `part` is not "I/N", or `ranks` do not divide the tokens.
    """
    if min(TOKENS) % ranks:
        raise InputError("evaluate", "GPUs", want="2, 4, 8 or another number that divides "
                         f"{min(TOKENS)} tokens", got=ranks)  # fmt: skip
    known = (*scenarios(ranks), *expert_scenarios(ranks))
    left = tuple(s for s in known if only.lower() in s.name.lower())
    if not left:
        some = ", ".join(dict.fromkeys(s.model for s in known))
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
                more: dict[str, Any] = {"group": group, "device": device, "rounds": ROUNDS,
                                        "soak_s": 0.2}  # fmt: skip
                layer = f"{each.model} {each.layer}"
                if p.experts:
                    of = Layer(layer, each.tokens)
                    rows = compare_experts(p, of, specs, machine, **more)
                else:
                    case = Case(p.op, p.m, p.n, p.k, layer, p.dtype)
                    rows = compare(case, specs, eager=False, **more)
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
