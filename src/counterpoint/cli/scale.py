"""`counterpoint scale`: a whole training step on many GPUs, predicted without one.

It imports no torch.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from counterpoint.cli.serving import show_serving
from counterpoint.cli.shared.files import check_made, check_written
from counterpoint.cli.shared.problems import machine_at
from counterpoint.cli.shared.show import progress, table
from counterpoint.cli.what_if import facts, show_what_if
from counterpoint.errors import InputError
from counterpoint.measure.canvas import SUFFIXES
from counterpoint.measure.draw_map import draw_map
from counterpoint.scale.assumptions import listed
from counterpoint.scale.checked import (
    MLPERF_BESIDE_S,
    RUNS,
    band,
    dense,
    fitted_error,
    held,
    mean_error,
    published,
    recommenders,
    scored,
)
from counterpoint.scale.layout import Layout, Recompute, Schedule, Sharding
from counterpoint.scale.models import Model, model_of, names
from counterpoint.scale.network.fabric import Congestion, Fabric, Network
from counterpoint.scale.operators import OVERLAPS, Overlap
from counterpoint.scale.prediction import Prediction, predict
from counterpoint.scale.recommenders.dlrm import Dlrm
from counterpoint.scale.recommenders.map import map_of
from counterpoint.scale.recommenders.step import DlrmStep

NAMES = ", ".join(names())
MODES = "none,ours,ideal"
KINDS = {"fsdp": "FSDP", "pipeline": "pipelines", "experts": "experts"}


Name = Annotated[str, typer.Argument(show_default=False, help=f"One of {NAMES}, or a config.json.")]
Gpus = Annotated[
    int, typer.Option(min=0, max=2**24, help="In all; what other degrees leave is dp.")
]
Tp = Annotated[int, typer.Option(min=1, max=2**8, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option(min=1, max=2**20, help="Pipeline stages.")]
Ep = Annotated[int, typer.Option(min=1, max=2**9, help="Ranks that share out experts.")]
Cp = Annotated[int, typer.Option(min=1, max=2**20, help="Ranks that share out a sequence.")]
Virtual = Annotated[int, typer.Option(min=1, max=2**20, help="Parts of the model on each stage.")]
Pipelined = Annotated[
    Schedule, typer.Option(help="Of the stages; zero-bubble: gradients of weights fill the bubble.")
]
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
    int,
    typer.Option(min=0, max=2**30, help="Tokens of a sequence; 0: the model's, with --serve 2048."),
]
Again = Annotated[Recompute, typer.Option(help="What the backward computes again.")]
Shards = Annotated[Sharding, typer.Option(help="What replicas share out.")]
Node = Annotated[
    str, typer.Option(help="One NVLink island: a kind of GPU and how many, or a JSON file.")
]
Nic = Annotated[str, typer.Option(help="Gbit/s of a GPU's NIC.")]
Pods = Annotated[str, typer.Option(help="GPUs of a level and its oversubscription, with commas.")]
Torus = Annotated[str, typer.Option(help="Sizes of a torus of nodes, such as 8x8.")]
Rails = Annotated[
    bool, typer.Option("--rails", help="A NIC reaches those of its place in other nodes.")
]
Congested = Annotated[
    Congestion, typer.Option(help="All-to-alls by the busiest link, or message by message.")
]
Modes = Annotated[str, typer.Option(help="How pairs are priced, with commas.")]
Chakra = Annotated[
    Path | None, typer.Option(help="Folder for Chakra traces of each mode.", show_default=False)
]
Check = Annotated[
    bool, typer.Option("--check", help="Instead: published steps, simulated over reported.")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        help="Stages over time and parts, to this .png, .svg or .pdf.", show_default=False
    ),
]
MapOut = Annotated[
    Path | None,
    typer.Option(
        "--map", help="Of a DLRM: which proportions of a step save how much.", show_default=False
    ),
]
Serve = Annotated[
    bool, typer.Option("--serve", help="Instead: times and memory of serving on --tp GPUs.")
]
Sequences = Annotated[
    int, typer.Option(min=1, max=2**16, help="With --serve: that get a token together.")
]
WhatIfs = Annotated[
    bool, typer.Option("--what-if", help="Instead: what each mechanism would save of the step.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Facts as JSON, in SI units.")]


def scale(
    model: Name = "", gpus: Gpus = 0, tp: Tp = 1, pp: Pp = 1, ep: Ep = 1, cp: Cp = 1,
    virtual_stages: Virtual = 1, schedule: Pipelined = "1f1b", micro_batch: MicroBatch = 0,
    num_micro_batches: Batches = 0, sequence: Sequence = 0, recompute: Again = "none",
    sharding: Shards = "zero1", machine: Node = "h100-8", nic: Nic = "400G", pods: Pods = "",
    torus: Torus = "", rails: Rails = False, congestion: Congested = "closed",
    overlap: Modes = MODES, picture: Picture = None, chakra: Chakra = None,
    map_to: MapOut = None, check: Check = False, serve: Serve = False,
    sequences: Sequences = 1, what_if: WhatIfs = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Predict a training step on up to millions of GPUs, and what overlap saves. Needs no GPU.

    Tensor-parallel matmuls and experts are priced serially, by this library's plans, and ideally.

    **Example:** `counterpoint scale llama3-405b --gpus 16384 --tp 8 --pp 16 --pods 3072:7`

    ```text
    seconds              10.569     9.127     8.713
    tensor parallel       0.989     0.221     0.000
    ```

    **Example:** `counterpoint scale dlrm-paper --gpus 128 --machine h100-1 --map map.svg`

    **Examples:** `counterpoint scale llama3-70b --tp 4 --serve --sequences 8`,
    `counterpoint scale llama3-70b --gpus 64 --tp 8 --what-if`, `counterpoint scale --check`
    """
    files = {"--picture": picture, "--map": map_to, "--chakra": chakra}
    _writable(files)
    console = Console(highlight=False)
    bar = progress(console, shown=console.is_terminal and not as_json)
    if check:
        _left_out("--check", {"MODEL": model, **files, "--what-if": what_if and "given"})
        return _show_check(bar, as_json)
    if serve:
        others = {"--what-if": what_if and "given", "--gpus": gpus, "--pp": pp - 1, "--ep": ep - 1}
        _left_out("--serve", files | others)
        return show_serving(model, machine_at("scale", machine), tp=tp, sequences=sequences,
                            length=sequence, as_json=as_json)  # fmt: skip
    if what_if:
        _left_out("--what-if", files | {"--overlap": overlap if overlap != MODES else ""})
    known = _known(model, gpus, mapped=map_to is not None)
    modes, where = _modes(overlap), machine_at("scale", machine)
    layout = Layout.on(
        gpus, tp=tp, pp=pp, ep=ep, cp=cp, virtual_stages=virtual_stages, schedule=schedule,
        micro_batch=micro_batch or _batch(known, gpus), num_micro_batches=num_micro_batches,
        sequence=sequence, recompute=recompute, data_parallel_sharding=sharding,
    )  # fmt: skip
    fabric = _fabric(nic, pods, torus, rails, congestion)
    if what_if:
        return show_what_if(known, layout, fabric, where, as_json=as_json)
    with bar:
        tracked = bar.track(modes, task_id=bar.add_task("predictions", total=len(modes)))
        found = [predict(known, layout, fabric, where, overlap=mode) for mode in tracked]
        _write(found, picture, chakra, bar)
        _draw_map(known, layout, Network(where, fabric), map_to)
    if as_json:
        return print(json.dumps([facts(each) for each in found], indent=2))
    return _show(found, console, {"picture": picture, "map": map_to})


def _draw_map(
    known: Model | Dlrm, layout: Layout, network: Network, path: Path | None
) -> None:  # fmt: skip
    if path and isinstance(known, Dlrm):
        draw_map(map_of(DlrmStep(known, layout, network, "ours")), path)


def _fabric(nic: str, pods: str, torus: str, rails: bool, congestion: Congestion) -> Fabric:
    return Fabric(
        nic_bytes_per_s=_nic(nic), levels=_levels(pods), torus=_torus(torus), rails=rails,
        congestion=congestion, source=f"--nic {nic}",
    )  # fmt: skip


def _known(model: str, gpus: int, *, mapped: bool) -> Model | Dlrm:
    """The model that is meant; refused without GPUs, or a map of one that has none."""
    known = model_of("scale", model, "MODEL")
    if not gpus:
        raise InputError("scale", "--gpus", want="given", got="none")
    if mapped and not isinstance(known, Dlrm):
        raise InputError("scale", "--map", want="left out: it is of a DLRM", got=model)
    return known


def _batch(known: Model | Dlrm, gpus: int) -> int:
    """Samples of a GPU at the published batch, or one sequence."""
    return max(known.batch // gpus, 1) if isinstance(known, Dlrm) else 1


def _writable(files: Mapping[str, Path | None]) -> None:
    """Refuse what cannot be written, before anything is predicted."""
    for option in ("--picture", "--map"):
        check_written("scale", option, files[option], SUFFIXES)
    if files["--chakra"] is not None:
        check_made("scale", "--chakra", files["--chakra"])


def _left_out(beside: str, given: Mapping[str, object]) -> None:
    """Refuse what an option does without."""
    for option, value in given.items():
        if value:
            raise InputError("scale", option, want=f"left out with {beside}", got=repr(str(value)))


def _write(
    found: list[Prediction], picture: Path | None, chakra: Path | None, bar: Progress
) -> None:
    """The files that are asked for; the stages that a picture shows are ours."""
    if picture:
        bar.add_task("picture", total=None)
        shown = next((each for each in found if each.overlap == "ours"), found[0])
        shown.save(picture, beside=[each for each in found if each is not shown])
    if chakra:
        task = bar.add_task("traces", total=len(found))
        for each in bar.track(found, task_id=task):
            each.save_chakra(chakra / each.overlap)


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


def _torus(text: str) -> tuple[int, ...]:
    if text and re.fullmatch(r"\d{1,8}(x\d{1,8})*", text) is None:
        raise InputError("scale", "--torus", want="sizes such as 8x8", got=repr(text))
    return tuple(map(int, text.split("x"))) if text else ()


def _show(found: list[Prediction], console: Console, files: Mapping[str, Path | None]) -> None:
    """A column for each mode, what they stand on, and which files were written."""
    first = found[0]
    console.print(first.title, markup=False, soft_wrap=True)
    console.print(str(first.memory), markup=False, soft_wrap=True,
                  style="" if first.memory.fits else "bold red")  # fmt: skip
    places = 3 if first.seconds > 0.1 else 6
    shown = table("seconds of a step", *(f">{each.overlap}" for each in found), "")
    shown.add_row("seconds", *(f"{each.seconds:.{places}f}" for each in found), style="bold")
    speedups = (f"{first.seconds / each.seconds:.2f}x" for each in found)
    if first.band_s:
        bands = (each.band_s for each in found)
        shown.add_row("band", *("{:.3f}-{:.3f}".format(*band_s) for band_s in bands if band_s))
    shown.add_row(f"speedup over {first.overlap}", *speedups)
    shown.add_row(f"{first.unit}/s", *(f"{each.items / each.seconds:,.0f}" for each in found))
    shown.add_row("Tflop/s a GPU", *(f"{each.flop_per_s / 1e12:.0f}" for each in found))
    for name in first.parts:
        values = [each.parts.get(name, 0.0) for each in found]
        if any(values):
            shown.add_row(name, *(f"{value:.{places}f}" for value in values))
    console.print(shown)
    for note in first.notes:
        console.print(note, markup=False, soft_wrap=True)
    lines = dict.fromkeys(line for each in found for line in each.assumptions)
    text = listed(lines, console.width)
    console.print(f"\n{text}", markup=False, style="dim", soft_wrap=True)
    for what, path in files.items():
        if path:
            console.print(f"\nThe {what}: {path}", soft_wrap=True)


def _show_check(bar: Progress, as_json: bool) -> None:
    """Simulated over reported, step by step, and by paper."""
    with bar:
        bar.add_task("published steps", total=None)
        steps = published()
    if as_json:
        print(json.dumps([each._asdict() | {"ratio": each.ratio} for each in steps], indent=2))
        return
    console = bar.console
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
    low, high = band(dense())
    for kind, name in KINDS.items():
        own = tuple(each for each in scored() if each.kind == kind)
        console.print(f"{name:12} mean error {mean_error(own):5.1%}: {len(own)} steps that were "
                      "once unseen, by what is modelled now", soft_wrap=True)  # fmt: skip
    console.print(
        f"all          mean error {mean_error(steps):5.1%}, no constant fitted; "
        f"{fitted_error(steps):.1%} with a factor for each machine, fitted to other papers\n"
        f"band         {low:.2f} to {high:.2f} of what is reported, without experts; a band from "
        f"the other papers holds {held(dense())} of {len(dense())}",
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
