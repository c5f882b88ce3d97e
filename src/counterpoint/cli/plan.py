"""`counterpoint plan`: which plan, how fast and why, predicted for any machine without a GPU.

It imports no torch: the answer is there in the time of a simulation.
"""

import json
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from counterpoint.choose.by_model import parts_s
from counterpoint.choose.choice import Candidate, Choice
from counterpoint.choose.choose import Level, choose
from counterpoint.choose.gains import MARGINS, MIN_GAIN_S
from counterpoint.cli.shared.files import check_written
from counterpoint.cli.shared.problems import (
    M_N_K,
    NORM,
    Beside,
    Fp8,
    check_ranks,
    machine_at,
    op_of,
    problem_of,
)
from counterpoint.cli.shared.show import candidates
from counterpoint.costs import NO_TILES
from counterpoint.machine import MIB, LinkSpec, Machine
from counterpoint.model.estimate import estimate, predicted_s
from counterpoint.operators import op_names
from counterpoint.plan.families import build
from counterpoint.problem import Activation, DType, Norm, Problem
from counterpoint.schedules.invariant import said
from counterpoint.timeline import PICTURE_SUFFIXES

AUTO = "auto"
TABLES = "tables of a GPU, their columns, indices of a bag, bags of all GPUs"
ASKED = "asked for"
HIDDEN = "hidden: of what serial takes beyond the longer part alone"
CLOSED = "closed form: a first guess, by which those to simulate are sorted out"

Shape = Annotated[
    str,
    typer.Option(
        metavar="M,N,K", show_default=False,
        help=f"{M_N_K}; of a norm M,N; of embedding bags {TABLES}.",
    ),
]  # fmt: skip
TopK = Annotated[
    int, typer.Option(min=0, help="Experts of a token, by routes; M: a row for each of them.")
]
Islands = Annotated[
    int, typer.Option(min=1, help="Machines like this one, between which there are NICs.")
]
Nic = Annotated[float, typer.Option(min=0, help="GB/s of a GPU's NIC; 0: as the machine has it.")]
InFp8 = Annotated[
    Fp8, typer.Option(help="What shares a scale of fp8 operands; of a norm, of its result.")
]
ByNorm = Annotated[Norm, typer.Option(help=f"Of {NORM}; by RMS if it is not said.")]
Residual = Annotated[bool, typer.Option("--residual", help=f"Of {NORM}: one is added.")]
Spec = Annotated[
    str,
    typer.Option(
        "--plan",
        help='A plan, such as "graded 1/1/2", to see beside serial; "invariant" behind it or '
        '"auto": batch-invariant.',
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Draw what runs when: .png, .svg or .pdf; .json for ui.perfetto.dev."),
]
Into = Annotated[
    bool, typer.Option("--into", help="Of embedding bags: into PooledOutputs, without a copy.")
]
Activated = Annotated[
    Activation, typer.Option(help="Of all_gather_matmul; N of gate and up together.")
]


class Asked(NamedTuple):
    """What was asked for: the options say what each is."""

    problem: Problem
    machine: Machine
    spec: str
    by: Level
    eager: bool
    show: bool
    out: Path | None
    as_json: bool


def plan(
    op: Annotated[
        str,
        typer.Argument(show_default=False, help=f"One of {', '.join(op_names())}."),
    ],
    shape: Shape,
    machine: Annotated[
        str, typer.Option(help="A kind of GPU and how many, or a JSON file of a machine.")
    ] = "h200-8",
    ranks: Annotated[int, typer.Option(min=0, help="GPUs that take part; 0: all of them.")] = 0,
    experts: Annotated[
        int, typer.Option(min=0, help="Of one GPU, of all-to-alls; M: rows that each GPU sends.")
    ] = 0,
    top_k: TopK = 0,
    islands: Islands = 1,
    nic: Nic = 0.0,
    dtype: Annotated[DType, typer.Option(help="Of the operands; with --fp8 of y.")] = "bfloat16",
    fp8: InFp8 = "",
    bias: Annotated[bool, typer.Option("--bias", help="One is added.")] = False,
    norm: ByNorm = "",
    residual: Residual = False,
    spec: Spec = "auto",
    by: Annotated[
        Level, typer.Option(help="Choose by simulating plans, or by comparing two sizes.")
    ] = "model",
    eager: Annotated[
        bool, typer.Option("--eager", help="Count host time, as outside of a CUDA graph.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="The plan's steps too.")] = False,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON, in SI units.")] = False,
    into: Into = False,
    activation: Activated = "",
) -> None:
    """Predict which plan is fastest on a machine, and say why. Needs no GPU.

    **Example:** `counterpoint plan embedding_bag_all_to_all --shape 8,128,5,65536`

    ```text
    alone     lookup 212 us, communication 318 us
    by model  fused: 400 us, speedup 1.71x, 78% hidden, 256 MiB of workspace
    fused  400.4    1.71 simulated chosen
    ```

    **Example:** `counterpoint plan all_gather_matmul --shape 8192,7168,8192 --out plan.png`
    """
    check_written("plan", "--out", out, (*PICTURE_SUFFIXES, ".json"))
    op_of("plan", "OP", op, op_names())
    where = machine_at("plan", machine)
    check_ranks("plan", -(-ranks // islands), where)
    beside = Beside(into, bias, fp8, norm, residual, top_k, islands)
    number = ranks or where.num_devices * islands
    problem = problem_of("plan", op, shape, number, dtype, experts, beside)
    problem, spec = said(replace(problem, activation=activation), spec)
    if nic:
        link = LinkSpec(name="NIC", bytes_per_s=nic * 1e9, source="--nic")
        where = replace(where, nic=link)
    if spec != AUTO:
        build(problem, spec, where)  # before any time is spent: it refuses what is none
    _print(Asked(problem, where, spec, by, eager, show, out, as_json))


def _print(asked: Asked) -> None:
    """The choice and why, or a plan that is asked for beside serial."""
    # of "auto" too: it refuses more ranks than GPUs
    choice = choose(asked.problem, asked.machine, by=asked.by, eager=asked.eager)
    if asked.spec != AUTO:
        choice = _asked(asked)
    saved = _save(choice, asked.out) if asked.out else None
    if asked.as_json:
        print(json.dumps(_facts(choice, asked.spec, saved), indent=2))
        return
    console = Console(highlight=False)
    console.print(_head(choice, asked.spec))
    console.print(candidates(choice, ">us", {"basis": lambda c: c.basis}))
    guessed = any(c.basis == "closed form" for c in choice.table)
    console.print(HIDDEN, *([CLOSED] if guessed else []), sep="\n", style="dim")
    if asked.show:
        console.print(str(choice.plan), markup=False, soft_wrap=True)
    if saved:
        what = "serial" if choice.spec == "serial" else "serial and this plan"
        console.print(f"predicted timeline of {what}: {saved}", soft_wrap=True)


def _asked(asked: Asked) -> Choice:
    """The plan that is asked for as if it had been chosen, beside serial."""
    problem, machine, eager = asked.problem, asked.machine, asked.eager
    plans = [build(problem, name, machine) for name in ("serial", asked.spec)]
    times = {p.spec: predicted_s(p, machine, eager=eager) for p in plans}
    chosen = plans[1].spec
    table = [
        Candidate(name, seconds, "simulated", ASKED if name == chosen else "")
        for name, seconds in sorted(times.items(), key=lambda item: item[1])
    ]
    return Choice(
        problem, machine, chosen, tuple(table), eager, "model", *parts_s(problem, machine), NO_TILES
    )


def _head(choice: Choice, spec: str) -> Table:
    """What is asked, where, and the answer."""
    machine, unit = choice.machine, 1e6
    rates = "measured" if machine.measured else "derived from the datasheet"
    if spec == AUTO and choice.basis == "model":
        margin = MARGINS[machine.measured is not None] - 1
        rates += f"; a plan has to gain {margin:.0%} and {MIN_GAIN_S * unit:.0f} us on serial"
    held = choice.plan.workspace_bytes / MIB
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column()
    mode = "eager, host time included" if choice.eager else "in a CUDA graph"
    head.add_row("problem", f"{choice.problem}, {mode}")
    head.add_row("machine", f"{machine.name}: {machine.source}")
    head.add_row("rates", rates)
    parts = f"{choice.computed} {choice.compute_s * unit:.0f} us, communication"
    head.add_row("alone", f"{parts} {choice.comm_s * unit:.0f} us")
    hidden = f"{choice.hidden:.0%} hidden" if choice.hidden >= 0 else "slower than serial"
    took = (
        f"{choice.seconds * unit:.0f} us, speedup {choice.speedup(choice.seconds):.2f}x, {hidden}"
    )
    how = ASKED if spec != AUTO else f"by {choice.basis}"
    head.add_row(how, f"[bold]{choice.spec}[/]: {took}, {held:.0f} MiB of workspace")
    return head


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
        "longer_s": choice.longer_s,
        "hidden": choice.hidden,
        "workspace_bytes": choice.plan.workspace_bytes,
        "table": rows,
        "picture": str(saved) if saved else None,
    }  # fmt: skip
