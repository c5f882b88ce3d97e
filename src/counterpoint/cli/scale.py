"""`counterpoint scale`: a whole training step on many GPUs, predicted without one.

It imports no torch.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from counterpoint.cli.problems import machine_at
from counterpoint.cli.show import table
from counterpoint.cli.usage import meant
from counterpoint.errors import InputError
from counterpoint.measure.draw_map import draw_map
from counterpoint.scale.checked import (
    MLPERF_BESIDE_S,
    RUNS,
    band,
    fitted_error,
    held,
    mean_error,
    published,
    recommenders,
)
from counterpoint.scale.dlrm import Dlrm
from counterpoint.scale.dlrm_map import map_of
from counterpoint.scale.dlrm_step import DlrmStep
from counterpoint.scale.fabric import Fabric, Network
from counterpoint.scale.layer import OVERLAPS, Overlap
from counterpoint.scale.layout import Layout, Recompute, Sharding
from counterpoint.scale.models import model_of, names
from counterpoint.scale.prediction import Prediction, predict

NAMES = ", ".join(names())


Name = Annotated[str, typer.Argument(show_default=False, help=f"One of {NAMES}.")]
Gpus = Annotated[
    int, typer.Option(min=0, max=2**24, help="In all; what other degrees leave is dp.")
]
Tp = Annotated[int, typer.Option(min=1, max=2**8, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option(min=1, max=2**20, help="Pipeline stages.")]
Ep = Annotated[int, typer.Option(min=1, max=2**9, help="Ranks that share out experts.")]
Cp = Annotated[int, typer.Option(min=1, max=2**20, help="Ranks that share out a sequence.")]
Virtual = Annotated[int, typer.Option(min=1, max=2**20, help="Parts of the model on each stage.")]
MicroBatch = Annotated[
    int,
    typer.Option(
        min=0, max=2**20,
        help="Sequences of a micro-batch, or samples of a GPU; 0: one, or the published batch.",
    ),
]  # fmt: skip
Batches = Annotated[
    int, typer.Option(min=0, max=2**20, help="Of a step and a replica; 0: as many as stages.")
]
Sequence = Annotated[
    int, typer.Option(min=0, max=2**30, help="Tokens of a sequence; 0: the model's.")
]
Again = Annotated[Recompute, typer.Option(help="What the backward computes again.")]
Shards = Annotated[Sharding, typer.Option(help="What replicas share out.")]
Node = Annotated[
    str, typer.Option(help="One NVLink island: a kind of GPU and how many, or a JSON file.")
]
Nic = Annotated[str, typer.Option(help="Gbit/s of a GPU's NIC.")]
Pods = Annotated[str, typer.Option(help="GPUs of a level and its oversubscription, with commas.")]
Modes = Annotated[str, typer.Option(help="How pairs are priced, with commas.")]
Check = Annotated[
    bool, typer.Option("--check", help="Instead: published steps, simulated over reported.")
]
MapOut = Annotated[
    Path | None,
    typer.Option("--map", help="Of a DLRM: picture of what fusing saves, at which proportions."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Facts as JSON, in SI units.")]


def scale(
    model: Name = "", gpus: Gpus = 0, tp: Tp = 1, pp: Pp = 1, ep: Ep = 1, cp: Cp = 1,
    virtual_stages: Virtual = 1, micro_batch: MicroBatch = 0, num_micro_batches: Batches = 0,
    sequence: Sequence = 0, recompute: Again = "none", sharding: Shards = "zero1",
    machine: Node = "h100-8", nic: Nic = "400G", pods: Pods = "",
    overlap: Modes = "none,ours,ideal", check: Check = False, as_json: AsJson = False,
    map_to: MapOut = None,
) -> None:  # fmt: skip
    """Predict a training step on up to millions of GPUs, and what overlap saves. Needs no GPU.

    Tensor-parallel matmuls and experts are priced serially, by this library's plans, and ideally.

    **Example:** `counterpoint scale llama3-405b --gpus 16384 --tp 8 --pp 16 --pods 3072:7`

    ```text
    seconds               9.844     8.417     8.006
    tensor parallel       0.989     0.221     0.000
    ```

    **Example:** `counterpoint scale dlrm-paper --gpus 128 --machine h100-1 --map map.svg`

    **Example:** `counterpoint scale --check`
    """
    if check:
        if model:
            raise InputError("scale", "MODEL", want="left out with --check", got=repr(model))
        _show_check(as_json)
        return
    if model not in names():
        fix = meant(model, list(names()))
        raise InputError("scale", "MODEL", want=f"one of {NAMES}", got=repr(model), fix=fix)
    if not gpus:
        raise InputError("scale", "--gpus", want="given", got="none")
    known, modes = model_of("scale", model), _modes(overlap)
    if not micro_batch:
        micro_batch = max(known.batch // gpus, 1) if isinstance(known, Dlrm) else 1
    where = machine_at("scale", machine)
    layout = Layout.on(
        gpus, tp=tp, pp=pp, ep=ep, cp=cp, virtual_stages=virtual_stages, micro_batch=micro_batch,
        num_micro_batches=num_micro_batches, sequence=sequence, recompute=recompute,
        data_parallel_sharding=sharding,
    )  # fmt: skip
    fabric = Fabric(nic_bytes_per_s=_nic(nic), levels=_levels(pods), source=f"--nic {nic}")
    if map_to is not None:
        if not isinstance(known, Dlrm):
            raise InputError("scale", "--map", want="left out: it is of a DLRM", got=model)
        draw_map(map_of(DlrmStep(known, layout, Network(where, fabric), "ours")), map_to)
    found = [predict(known, layout, fabric, where, overlap=mode) for mode in modes]
    _show(found, as_json)
    if map_to is not None and not as_json:
        print(f"map: {map_to}")


def _modes(text: str) -> list[Overlap]:
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if word not in OVERLAPS]:
        want = f"of {', '.join(get_args(Overlap))}, with commas"
        raise InputError("scale", "--overlap", want=want, got=repr(wrong[0]))
    return [mode for mode in OVERLAPS if mode in words]


def _nic(text: str) -> float:
    match = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)G", text)
    if match is None or not float(match[1]) >= 8:
        want = "Gbit/s of one GPU, such as 400G, at least 8G"
        raise InputError("scale", "--nic", want=want, got=repr(text))
    return float(match[1]) * 1e9 / 8


def _levels(text: str) -> tuple[tuple[int, float], ...]:
    if not text:
        return ()
    parts = [re.fullmatch(r"(\d{1,9}):(\d{1,5}(?:\.\d+)?)", part) for part in text.split(",")]
    if any(part is None or float(part[2]) < 1 for part in parts):
        want = "GPUs and a factor of at least 1, such as 3072:7, with commas"
        raise InputError("scale", "--pods", want=want, got=repr(text))
    return tuple((int(part[1]), float(part[2])) for part in parts if part)


def _show(found: list[Prediction], as_json: bool) -> None:
    """A column for each mode, and what the first one stands on."""
    if as_json:
        print(json.dumps([_facts(each) for each in found], indent=2))
        return
    first = found[0]
    console = Console(highlight=False)
    text = first.explain()
    console.print(text.splitlines()[0], markup=False, soft_wrap=True)
    places = 3 if first.seconds > 0.1 else 6
    shown = table("seconds of a step", *(f">{each.overlap}" for each in found), "")
    shown.add_row("seconds", *(f"{each.seconds:.{places}f}" for each in found), style="bold")
    speedups = (f"{first.seconds / each.seconds:.2f}x" for each in found)
    if not isinstance(first.model, Dlrm):
        shown.add_row("band", *("{:.3f}-{:.3f}".format(*each.band_s) for each in found))
    shown.add_row(f"speedup over {first.overlap}", *speedups)
    shown.add_row(f"{first.unit}/s", *(f"{each.items / each.seconds:,.0f}" for each in found))
    shown.add_row("Tflop/s a GPU", *(f"{each.flop_per_s / 1e12:.0f}" for each in found))
    for name in first.parts:
        values = [each.parts.get(name, 0.0) for each in found]
        if any(values):
            shown.add_row(name, *(f"{value:.{places}f}" for value in values))
    console.print(shown)
    for line in first.notes:
        console.print(line, markup=False, soft_wrap=True)
    console.print(text[text.index("stands on:") :], markup=False, style="dim")


def _facts(found: Prediction) -> dict[str, Any]:
    """A prediction as JSON takes it."""
    return {
        "model": asdict(found.model), "layout": asdict(found.layout), "machine": found.machine,
        "overlap": found.overlap, "seconds": found.seconds, "parts": found.parts,
        "items": found.items, "unit": found.unit, "flop_per_s": found.flop_per_s,
        "notes": list(found.notes), "assumptions": list(found.assumptions),
    }  # fmt: skip


def _show_check(as_json: bool) -> None:
    """Simulated over reported, step by step, and by paper."""
    steps = published()
    if as_json:
        print(json.dumps([each._asdict() | {"ratio": each.ratio} for each in steps], indent=2))
        return
    console = Console(highlight=False)
    shown = table("step", ">reported s", ">simulated s", ">simulated / reported", "")
    for each in steps:
        shown.add_row(each.name, f"{each.reported_s:.3f}", f"{each.simulated_s:.3f}",
                      f"{each.ratio:.3f}")  # fmt: skip
    console.print(shown)
    for paper in RUNS:
        own = tuple(each for each in steps if each.paper == paper)
        worst = max(own, key=lambda each: abs(each.ratio - 1))
        console.print(f"{paper:12} mean error {mean_error(own):5.1%}, worst "
                      f"{worst.ratio - 1:+.1%} ({worst.name})", soft_wrap=True)  # fmt: skip
    low, high = band(steps)
    console.print(
        f"all          mean error {mean_error(steps):5.1%}, no constant fitted; "
        f"{fitted_error(steps):.1%} with a factor for each machine, fitted to other papers\n"
        f"band         {low:.2f} to {high:.2f} of what is reported; a band from the other papers "
        f"holds {held(steps)} of {len(steps)}",
        soft_wrap=True,
    )
    console.print(f"\nnot among these {len(steps)}, nor in any error above:", soft_wrap=True)
    for each in recommenders():
        beside_s = each.simulated_s + MLPERF_BESIDE_S
        console.print(
            f"{each.name}: reported {each.reported_s * 1e3:.2f} ms, simulated "
            f"{each.simulated_s * 1e3:.2f} ({each.ratio - 1:+.1%}); with {MLPERF_BESIDE_S * 1e3} "
            f"ms of launches and input, which are assumed, {beside_s * 1e3:.2f} "
            f"({beside_s / each.reported_s - 1:+.1%})", soft_wrap=True,
        )  # fmt: skip
