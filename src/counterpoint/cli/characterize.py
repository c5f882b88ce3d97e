"""`counterpoint characterize`: what the parts of a plan cost here, measured and kept for "auto"."""

import inspect
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from counterpoint.choose.known import Place, save_machine
from counterpoint.cli.shared.launch import (
    gloo_group,
    nccl_group,
    too_few_gpus,
    torchrun,
    under_torchrun,
)
from counterpoint.cli.shared.show import table
from counterpoint.costs import Costs
from counterpoint.errors import InputError
from counterpoint.group.workspace import workspace_of
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.characterize import characterize as measure
from counterpoint.ops.place import place_of

ROUNDS = {True: 7, False: 3}  # of a full and of a quick run


def characterize(*, full: bool, ranks: int, out: Path | None, rows: Path | None) -> int:
    """Measure, print and save; 0. Under torchrun of all its ranks, on CPUs where they have no GPU.

    Raises:
        InputError: there are fewer than two GPUs, or than `ranks`, or that is one.
        UnsupportedError: no preset describes this GPU.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2 and not under_torchrun():
        instead = (
            "`counterpoint plan all_gather_matmul --shape 8192,7168,8192` predicts for GPUs that "
            "are known, here too"
        )
        raise too_few_gpus("characterize", instead)
    if ranks and gpus and not 2 <= ranks <= gpus:
        raise InputError("characterize", "--ranks", want=f"from 2 to the {gpus} here", got=ranks)
    if not under_torchrun():
        return torchrun(ranks or gpus)
    with (nccl_group if gpus else gloo_group)() as (group, device):
        first = group.rank() == 0
        console = Console(highlight=False, quiet=not first)
        start_s = time.monotonic()

        def say(question: str) -> None:
            # a line each where there is no terminal to write over
            status.update(f"measuring {question}")
            if not console.is_terminal:
                console.print(f"{time.monotonic() - start_s:4.0f} s: {question}")

        with console.status("measuring") as status:
            machine, measured = measure(
                group=group, device=device, rounds=ROUNDS[full], progress=say
            )
            console.print(table_of(machine))
            if machine.nic is not None:
                rate, start_us = machine.nic.bytes_per_s / 1e9, machine.nic.latency_s * 1e6
                console.print(f"to other islands: {rate:.3g} GB/s, {start_us:.0f} us")
            console.print(f"{machine.source}, in {time.monotonic() - start_s:.0f} s")
        if first:
            islands = workspace_of(group, device).islands.number
            _save(console, machine, place_of(device, group.size(), islands), out)
            if rows is not None:
                record.append(rows, measured)
                console.print(f"{len(measured)} rows added to {rows}", soft_wrap=True)
    return 0


def table_of(machine: Machine) -> Table:
    """The constants of a measured machine, those that its datasheet gives beside."""
    sheet = replace(machine, measured=None).costs
    title = f"{machine.name}: what the parts of a plan cost"
    made = table("constant", ">measured", ">datasheet", "unit", "meaning", title=title)
    told = meanings()
    for name, unit, scale in units():
        values = [f"{getattr(costs, name) / scale:.4g}" for costs in (machine.costs, sheet)]
        made.add_row(name, *values, unit, told[name])
    return made


def units() -> Iterator[tuple[str, str, float]]:
    """Each constant, the unit that people read it in, and how many SI units that is."""
    for field in fields(Costs):
        if field.name.endswith("flop_per_s"):
            yield field.name, "Tflop/s", 1e12
        elif field.name.endswith("bytes_per_s"):
            yield field.name, "GB/s", 1e9
        elif field.name.endswith("_s"):
            yield field.name, "us", 1e-6
        else:
            yield field.name, "factor", 1.0


def meanings() -> dict[str, str]:
    """What each constant is, in the words of `Costs`."""
    text = inspect.getdoc(Costs) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _save(console: Console, machine: Machine, place: Place, out: Path | None) -> None:
    if out is None:
        path = save_machine(machine, place)
        console.print(f'plan="auto" goes by it from the next process on. It is kept in {path}: '
                      "delete it to undo.", soft_wrap=True)  # fmt: skip
        return
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        save_machine(machine, place, Path(folder)).replace(out)
    console.print(f"written to {out}; see `counterpoint plan --machine`", soft_wrap=True)
