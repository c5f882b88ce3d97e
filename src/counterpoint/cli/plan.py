"""`counterpoint plan`: which plan, how fast and why, predicted for any machine without a GPU.

It imports no torch: the answer is there in the time of a simulation.
"""

import json
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint.choose.by_model import MARGINS, MIN_GAIN_S, parts_s
from counterpoint.choose.choice import Candidate, Choice
from counterpoint.choose.choose import Level, choose, machine_of
from counterpoint.cli.problems import BAGS, bags_of, op_of, problem_of, shape_of
from counterpoint.costs import NO_TILES
from counterpoint.machine import MIB, Machine
from counterpoint.model.estimate import estimate, predicted_s
from counterpoint.plan.families import build
from counterpoint.problem import Problem, op_names

AUTO = "auto"
ASKED = "asked for"
HIDDEN = "hidden: of what serial takes beyond the ideal"
CLOSED = "closed form: a first guess, by which those to simulate are sorted out"


def plan(
    *, op: str, shape: str, machine: str, ranks: int, experts: int, dtype: str, spec: str,
    by: Level, eager: bool, show: bool, out: Path | None, as_json: bool, into: bool = False,
) -> int:  # fmt: skip
    """Print the choice and why, or a plan that is asked for beside serial; 0.

    Args:
        op: an operator or the gradients of one.
        shape: M,N,K; of embedding bags TABLES,D,POOLING,BATCH.
        machine: a preset, or a file that `counterpoint characterize` wrote.
        ranks: how many GPUs take part; 0 for all of the machine.
        experts: of one GPU, of ops that have some; M is then the rows that each sends.
        spec: "auto", or a plan as an operator's `plan=` takes it.
        by: how "auto" chooses.
        eager: count the host's time.
        show: the plan's steps too.
        out: where the timelines go.
        as_json: facts in SI units instead of tables.
        into: of embedding bags, peers write to outputs that the caller keeps.

    Raises:
        InputError: there is no such op, machine or plan, `shape` is not three numbers, or its rows
            are not to be shared evenly.
    """
    where = machine_of(machine)
    name = op_of("plan", "OP", op, op_names())
    ranks = ranks or where.num_devices
    if name == BAGS:
        problem = bags_of("plan", shape, ranks, dtype, experts, out=into)
    else:
        problem = problem_of(
            "plan", name, shape_of("plan", "--shape", shape), ranks, dtype, experts
        )
    # of "auto" too: it refuses more ranks than GPUs
    choice = choose(problem, where, by=by, eager=eager)
    if spec != AUTO:
        choice = _asked(problem, where, spec, eager)
    saved = _save(choice, out) if out else None
    if as_json:
        print(json.dumps(_facts(choice, spec, saved), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(_head(choice, spec))
    console.print(_table(choice))
    guessed = any(c.basis == "closed form" for c in choice.table)
    console.print(HIDDEN, *([CLOSED] if guessed else []), sep="\n", style="dim")
    if show:
        console.print(str(choice.plan), markup=False, soft_wrap=True)
    if saved:
        what = "serial" if choice.spec == "serial" else "serial and this plan"
        console.print(f"predicted timeline of {what}: {saved}", soft_wrap=True)
    return 0


def _asked(problem: Problem, machine: Machine, spec: str, eager: bool) -> Choice:
    """The plan that `spec` names as if it had been chosen, beside serial."""
    plans = [build(problem, name, machine) for name in ("serial", spec)]
    times = {p.spec: predicted_s(p, machine, eager=eager) for p in plans}
    asked = plans[1].spec
    table = [
        Candidate(name, seconds, "simulated", ASKED if name == asked else "")
        for name, seconds in sorted(times.items(), key=lambda item: item[1])
    ]
    return Choice(
        problem, machine, asked, tuple(table), eager, "model", *parts_s(problem, machine), NO_TILES
    )


def _head(choice: Choice, spec: str) -> Table:
    """What is asked, where, and the answer."""
    machine, us = choice.machine, 1e6
    rates = "measured" if machine.measured else "derived from the datasheet"
    if spec == AUTO and choice.basis == "model":
        margin = MARGINS[machine.measured is not None] - 1
        rates += f"; a plan has to gain {margin:.0%} and {MIN_GAIN_S * us:.0f} us on serial"
    held = choice.plan.workspace_bytes / MIB
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column()
    mode = "eager, host time included" if choice.eager else "in a CUDA graph"
    head.add_row("problem", f"{choice.problem}, {mode}")
    head.add_row("machine", f"{machine.name}: {machine.source}")
    head.add_row("rates", rates)
    parts = f"{choice.computed} alone {choice.compute_s * us:.0f} us, communication alone"
    ideal = f"{choice.ideal_s * us:.0f} us: {parts} {choice.comm_s * us:.0f} us"
    head.add_row("ideal", ideal)
    hidden = f"{choice.hidden:.0%} hidden" if choice.hidden >= 0 else "slower than serial"
    took = f"{choice.seconds * us:.0f} us, serial / {_ratio(choice, choice.seconds)}, {hidden}"
    how = ASKED if spec != AUTO else f"by {choice.basis}"
    head.add_row(how, f"[bold]{choice.spec}[/]: {took}, {held:.0f} MiB of workspace")
    return head


def _table(choice: Choice) -> Table:
    """All candidates, the fastest first; it fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("plan", no_wrap=True)
    table.add_column("us", justify="right", no_wrap=True)
    table.add_column("serial /", justify="right", no_wrap=True)
    table.add_column("basis", no_wrap=True)
    table.add_column("verdict")
    for c in choice.table:
        known = isfinite(c.seconds)
        style = "bold" if c.spec == choice.spec else "" if c.basis == "simulated" else "dim"
        table.add_row(
            c.spec, f"{c.seconds * 1e6:.1f}" if known else "-",
            _ratio(choice, c.seconds) if known else "-", c.basis, c.verdict, style=style,
        )  # fmt: skip
    return table


def _ratio(choice: Choice, seconds: float) -> str:
    """Serial's time over `seconds`."""
    return f"{choice.serial_s / seconds:.2f}"


def _save(choice: Choice, out: Path) -> Path:
    """Serial above the plan on one time axis; of serial, itself alone."""
    title = str(choice.problem)
    # a picture starts with the first step
    since = ", host time before it left out" if choice.eager else ""
    own = replace(choice.timeline, title=title, source=choice.timeline.source + since)
    if choice.spec == "serial":
        return own.save(out)
    serial = build(choice.problem, "serial", choice.machine)
    beside = estimate(serial, choice.machine, eager=choice.eager, tiles=choice.tiles)
    return replace(beside, title=title, source=f"serial, {beside.source}{since}").save(
        out, beside=replace(own, source=f"{choice.spec}, {own.source}")
    )


def _facts(choice: Choice, spec: str, saved: Path | None) -> dict[str, Any]:
    """The choice as JSON takes it; a time that is not known is null."""
    machine = choice.machine
    rows = [asdict(c) for c in choice.table]
    for row in rows:
        row["seconds"] = row["seconds"] if isfinite(row["seconds"]) else None
    return {
        "problem": asdict(choice.problem),
        "machine": {"name": machine.name, "measured": machine.measured is not None,
                    "source": machine.source},
        "eager": choice.eager,
        "by": choice.basis if spec == AUTO else ASKED,
        "plan": choice.spec,
        "seconds": choice.seconds,
        "serial_s": choice.serial_s,
        "compute_s": choice.compute_s,
        "comm_s": choice.comm_s,
        "ideal_s": choice.ideal_s,
        "hidden": choice.hidden,
        "workspace_bytes": choice.plan.workspace_bytes,
        "table": rows,
        "picture": str(saved) if saved else None,
    }  # fmt: skip
