"""`counterpoint bench resources`: a GEMM and a collective under each control, and as tuned."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint.cli.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.measure import record
from counterpoint.measure.energy import nvml
from counterpoint.measure.loop import KERNELS, Pair, pairs
from counterpoint.measure.loop_arms import measure
from counterpoint.measure.sharing import PLAIN, Timed, draw_shapes, draw_timed, timed
from counterpoint.resources.controls import MODES, Mode

SMOKE_SCALE = 8
Gemm = Literal["cb", "mb"]
GEMMS: tuple[Gemm, ...] = ("cb", "mb")


def bench_resources(
    *, gemm: str, kernels: str, collective: str, mode: str, budget_s: float, rounds: int,
    suite: str, out: Path | None, pictures: Path | None, energy: bool,
) -> int:  # fmt: skip
    """Time and print; 0 when every arm was right.

    Args:
        gemm: "cb", "mb" or "all".
        kernels: of the GEMM, with commas.
        collective: "all_reduce", "all_to_all" or "all".
        mode: "graph", "eager" or "all".
        budget_s: of each search.
        rounds: of the rotation of all arms.
        suite: "smoke": an eighth of M and of the collective; "full": as published.
        out: JSONL file that rows are added to.
        pictures: folder for arms-MODE.png, and shapes.png if a kernel can be shaped.
        energy: read NVML beside the arms of the graph.

    Raises:
        InputError: an unknown kernel.
        UnsupportedError: energy is wanted, and NVML is not there.
    """
    wanted = _pairs(gemm, kernels, collective, SMOKE_SCALE if suite == "smoke" else 1)
    modes: list[Mode] = [m for m in MODES if mode in (m, "all")]
    if torch.cuda.device_count() < 2:
        return too_few_gpus("bench", "`counterpoint occupancy` predicts without")
    if energy and "graph" in modes:
        _check_energy()
    # captured collectives of NCCL hang with memory that peers write: transport.py says when
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if not under_torchrun():
        arguments = ["bench", "resources", "--gemm", gemm, "--kernels", kernels]
        arguments += ["--collective", collective, "--mode", mode, "--budget", str(budget_s)]
        arguments += ["--rounds", str(rounds), "--suite", suite]
        arguments += ["--out", str(out)] if out else []
        arguments += ["--pictures", str(pictures)] if pictures else []
        arguments += [] if energy else ["--no-energy"]
        return torchrun(torch.cuda.device_count(), arguments)
    with nccl_group() as (group, device):
        first = group.rank() == 0
        console = Console(quiet=not first)
        rows: list[dict[str, Any]] = []
        for pair in wanted:
            with console.status(pair.label) as status:

                def say(what: str, label: str = pair.label, show: Any = status.update) -> None:
                    show(f"{label}: {what}")

                found, text = measure(
                    pair, group=group, device=device, rounds=rounds, budget_s=budget_s,
                    modes=modes, energy=energy, progress=say,
                )  # fmt: skip
            for one in timed(found):
                _show(one, console)
            console.print(text, highlight=False, markup=False, soft_wrap=True)
            rows += found
            if first and out is not None:
                record.append(out, found)
        if first and pictures is not None:
            for path in _draw(rows, pictures):
                console.print(f"as a picture: {path}", soft_wrap=True)
    return 0


def title_of(one: Timed) -> str:
    """The pair, its mode and size, where it ran, and the time of its ideal pipeline."""
    head = one.head
    size = f"1/{head['scale']} of the size, " if head["scale"] > 1 else ""
    return (
        f"{one.label}, {one.mode}, {size}{head['ranks']}x {head['gpu']}, "
        f"ideal {one.ideal_s * 1e3:.3f} ms"
    )


def table_of(one: Timed) -> Table:
    """All arms of a pair in one mode, the fastest bold; energy only where it was read."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    has_energy = any(row.get("energy_j") for row in one.arms.values())
    table.add_column("arm", no_wrap=True)
    for column in ("ms", "less than plain", "/ ideal", *(("J a GPU", "MHz") if has_energy else ())):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("controls")
    for arm, row in one.arms.items():
        used: list[str] = []
        if has_energy and row.get("energy_j"):
            used = [f"{row['energy_j']:.1f}", f"{row['arm_sm_clock_mhz']:.0f}"]
        elif has_energy:
            used = ["", ""]
        less = "" if arm == PLAIN else f"{one.less(arm):.1%}"
        of_ideal = f"{one.seconds(arm) / one.ideal_s:.3f}"
        table.add_row(
            arm, f"{one.seconds(arm) * 1e3:.3f}", less, of_ideal, *used,
            row["controls"].removeprefix("overlap "), style="bold" if arm == one.fastest else "",
        )  # fmt: skip
    return table


def _show(one: Timed, console: Console) -> None:
    console.print(title_of(one), style="bold", highlight=False, soft_wrap=True)
    console.print(table_of(one))
    for controls, why in one.refused.items():
        console.print(f"{controls}: cannot be had: {why}", markup=False, soft_wrap=True)


def _draw(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    found = timed(rows)
    paths = [
        draw_timed([one for one in found if one.mode == mode], folder / f"arms-{mode}.png",
                   title=f"Each control by itself, and tuned ({mode})")
        for mode in dict.fromkeys(one.mode for one in found)
    ]  # fmt: skip
    if any(row["arm"] == "shapes" for row in rows):
        path = folder / "shapes.png"
        paths.append(draw_shapes(rows, path, title="What shaping a GEMM does to its overlap"))
    return paths


def _pairs(gemm: str, kernels: str, collective: str, scale: int) -> list[Pair]:
    names = [name.strip() for name in kernels.split(",")]
    for name in names:
        if name not in KERNELS:
            want = f"some of {', '.join(KERNELS)}"
            raise InputError("bench", "--kernels", want=want, got=repr(name))
    gemms: list[Gemm] = [g for g in GEMMS if gemm in (g, "all")]
    return [
        replace(pair, scale=scale)
        for pair in pairs(list(dict.fromkeys(names)), gemms)
        if collective in (pair.collective, "all")
    ]


def _check_energy() -> None:
    """Fail now, not after the search."""
    try:
        nvml()
    except UnsupportedError as error:
        raise UnsupportedError(f"bench: {error}; or leave it out: --no-energy") from error
