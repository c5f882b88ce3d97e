"""`counterpoint advise`: what a profiled step loses, and which line wins it back.

It imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from counterpoint.cli.serving import show_serving
from counterpoint.cli.shared.files import check_written
from counterpoint.cli.shared.problems import machine_at
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.measure.canvas import SUFFIXES
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import model_of
from counterpoint.scale.recommenders.dlrm import Dlrm

if TYPE_CHECKING:
    from counterpoint.advice.advise import Report

LARGE, PACKED = 50_000_000, 10  # bytes that take 2 s to read; those of one with gzip


Traces = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Of torch.profiler, .json or .json.gz, of one rank or several.", show_default=False
    ),
]
Step = Annotated[int, typer.Option(min=-1, help="N of ProfilerStep#N; -1: the mean of all.")]
Links = Annotated[
    str, typer.Option(help="Whose links are compared, such as h100-8; else the trace's GPU.")
]
Page = Annotated[
    Path | None, typer.Option(help="A page with all of it, to this .html.", show_default=False)
]
Picture = Annotated[
    Path | None,
    typer.Option(help="The step as a picture, to this .png, .svg or .pdf.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Facts as JSON, in SI units.")]
Name = Annotated[
    str, typer.Option(help="Instead of traces: a model or its config.json; predicted.")
]
Gpus = Annotated[int, typer.Option(min=0, max=65536, help="With --model: GPUs in all.")]
Tokens = Annotated[
    int,
    typer.Option(
        min=0, max=2**30, help="With --model: of a sequence; 0: its own, with --serve 2048."
    ),
]
Tp = Annotated[
    int,
    typer.Option(min=1, max=4096, help="With --model: tensor parallel; with --serve 1: all GPUs."),
]
Ep = Annotated[int, typer.Option(min=1, max=4096, help="With --model: expert parallel.")]
Serve = Annotated[bool, typer.Option("--serve", help="With --model: serving, not training.")]
Sequences = Annotated[
    int, typer.Option(min=1, max=2**16, help="With --serve: that get a token together.")
]


def advise(
    traces: Traces = None, step: Step = -1, machine: Links = "", html: Page = None,
    picture: Picture = None, as_json: AsJson = False, model: Name = "", gpus: Gpus = 8,
    tokens: Tokens = 0, tp: Tp = 1, ep: Ep = 1, serve: Serve = False, sequences: Sequences = 1,
) -> None:  # fmt: skip
    """Say what a step loses to communication, and which line wins it back.

    It reads traces of torch.profiler, of any program: `prof.export_chrome_trace("trace.json.gz")`.
    With the traces of several ranks it tells waiting for a late rank from moving data. With
    `--model` it predicts a training step instead, or with `--serve` the times of an engine, and
    says first whether memory suffices.

    **Example:** `counterpoint advise --model llama3-8b --gpus 8 --tp 8 --tokens 4096`

    ```text
    Largest loss: communication that nothing hides, 38.4 of 98.8 ms (39%).
    1. tensor-parallel collectives together with their matmuls: at most 33.0 ms, 1.50x
    ```

    **Example:** `counterpoint advise --model llama3-70b --gpus 4 --serve --sequences 8`

    **Example:** `counterpoint advise trace_rank*.json.gz --html report.html`
    """
    check_written("advise", "--html", html, (".html",))
    check_written("advise", "--picture", picture, SUFFIXES)
    if bool(model) == bool(traces):
        got = "both" if model else "neither"
        raise InputError("advise", "TRACES", want="given, or --model instead", got=got)
    if serve and not model:
        raise InputError("advise", "--serve", want="given with --model", got="traces")
    console = Console(highlight=False)
    if serve:
        for option, path in {"--html": html, "--picture": picture}.items():
            if path:
                raise InputError("advise", option, want="left out with --serve", got=str(path))
        show_serving(model, machine_at("advise", machine or "h100-8"), tp=tp if tp > 1 else gpus,
                     sequences=sequences, length=tokens, as_json=as_json)  # fmt: skip
        return
    if model:
        report = _predicted(model, gpus, tokens, tp, ep, machine_at("advise", machine or "h100-8"))
    else:
        report = _measured(traces or [], step, machine, console, shown=not as_json)
    files = {"page": html and report.to_html(html), "picture": picture and report.draw(picture)}
    if as_json:
        print(report.to_json())
        return
    console.print(str(report), markup=False, soft_wrap=True)
    for what, path in files.items():
        if path:
            console.print(f"\nThe {what}: {path}", soft_wrap=True)


def _measured(
    traces: Sequence[Path], step: int, machine: str, console: Console, *, shown: bool
) -> "Report":
    """Advice on traces, behind a bar where reading takes seconds."""
    from counterpoint.advice.advise import advise as advice_of

    sizes = [path.stat().st_size if path.is_file() else 0 for path in traces]
    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(),
               TimeElapsedColumn())  # fmt: skip
    unpacked = (
        size * (PACKED if path.suffix == ".gz" else 1)
        for path, size in zip(traces, sizes, strict=True)
    )
    shown &= console.is_terminal and sum(unpacked) > LARGE
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("traces", total=sum(sizes))
        before = 0
        last = 0

        def read(at: int) -> None:
            nonlocal before, last
            if at < last:  # the next file
                before += last
            last = at
            bar.update(task, completed=before + at)

        return advice_of(
            *traces, step=None if step < 0 else step,
            machine=machine_at("advise", machine) if machine else None, read=read,
        )  # fmt: skip


def _predicted(model: str, gpus: int, tokens: int, tp: int, ep: int, machine: Machine) -> "Report":
    """Advice on a step that is predicted, on one island."""
    from counterpoint.advice.before import advise_model

    known = model_of("advise", model, "--model")
    if isinstance(known, Dlrm):
        raise InputError("advise", "--model", want="a transformer", got=model,
                         fix="`counterpoint scale` predicts recommenders")  # fmt: skip
    if not 2 <= gpus <= machine.num_devices:
        want = f"from 2 to the {machine.num_devices} of --machine"
        fix = "`counterpoint scale` predicts several nodes"
        raise InputError("advise", "--gpus", want=want, got=gpus, fix=fix)
    layout = Layout.on(gpus, tp=tp, ep=ep, sequence=tokens, data_parallel_sharding="fsdp")
    return advise_model(known, layout, machine)
