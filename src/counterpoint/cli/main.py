"""The commands and their options. What a command does is imported when it runs: help is quick."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from counterpoint import __version__
from counterpoint.errors import CounterpointError
from counterpoint.problem import OPS


class _Commands(TyperGroup):
    """Shows our own errors as their message: a traceback would say no more."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CounterpointError as error:
            # no ClickException: newer releases of typer hold a click of their own
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class Suite(StrEnum):
    """How much is measured."""

    smoke = "smoke"
    full = "full"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Communication hidden behind computation on multi-GPU machines."""


@app.command()
def demo(
    ranks: Annotated[
        int, typer.Option(min=0, max=8, help="CPU ranks (0: 4), or GPUs (0: all).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the random operands.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out"),
    scale: Annotated[int, typer.Option(min=1, max=64, hidden=True)] = 16,
) -> None:
    """Run every plan family of every operator and check it against fp64.

    With two GPUs or more it times them; otherwise it runs on CPU ranks, which takes some seconds
    and shows that the plans are right, not how fast they are.

    **Example:** `counterpoint demo --ranks 2 --out /tmp/demo`
    """
    from counterpoint.cli.demo import demo as run

    raise typer.Exit(run(ranks=ranks, seed=seed, out=out, scale=scale))


@app.command()
def bench(
    op: Annotated[
        str, typer.Option(help=f"One operator: {' or '.join(OPS)}. All if left out.")
    ] = "",
    shapes: Annotated[
        str, typer.Option(help="M,N,K triples as 8192,7168,8192:512,7168,8192.")
    ] = "",
    suite: Annotated[Suite, typer.Option(help="The published shapes, a few or all.")] = Suite.smoke,
    out: Annotated[Path | None, typer.Option(help="JSONL file that rows are added to.")] = None,
) -> None:
    """Time plans against the serial way on the GPUs of this node.

    **Example:** `counterpoint bench --op all_gather_matmul --shapes 2048,7168,8192`
    """
    from counterpoint.cli.bench import bench as run

    raise typer.Exit(run(op=op, shapes=shapes, suite=suite.value, out=out))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON, for a report.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Instead: what a step's kernels take of a GPU.")
    ] = False,
    shape: Annotated[
        str, typer.Option(help="M,N,K of that step's matmul; 8192,7168,8192 if left out.")
    ] = "",
) -> None:
    """Show what this machine has, what it lacks, and how to get that.

    With `--kernels`: threads, registers, shared memory, grid, cluster, priority and tile of the
    kernels of a step, as they are launched. Under torchrun, those of NCCL too.

    **Example:** `counterpoint doctor --json > doctor.json`

    **Example:** `counterpoint doctor --kernels --shape 2048,7168,8192`
    """
    from counterpoint.cli.doctor import doctor as run

    raise typer.Exit(run(as_json=as_json, kernels=kernels, shape=shape))


if __name__ == "__main__":
    app(prog_name="counterpoint")
