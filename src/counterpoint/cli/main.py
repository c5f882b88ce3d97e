"""The command `counterpoint`: all that it can do, in the order of its help; demo, warmup, doctor.

A command is a function with its options; what it does is imported when it runs, so help is quick.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from counterpoint import __version__
from counterpoint.cli.measuring import PASSED_ON, bench, characterize, evaluate, tune
from counterpoint.cli.occupancy import occupancy
from counterpoint.cli.plan import plan
from counterpoint.errors import CounterpointError, InputError
from counterpoint.problem import DType


class _Commands(TyperGroup):
    """Shows our own errors as their message: a traceback would say no more."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (CounterpointError, OSError) as error:
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
    """Communication hidden behind computation on multi-GPU machines.

    Exit codes: 0 done; 1 an error, a wrong value too, or a check that fails; 2 no such option, or
    what the command needs is not on this machine.
    """


def demo(
    ranks: Annotated[
        int, typer.Option(min=0, max=8, help="CPU ranks (0: 4), or GPUs (0: all).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the random operands.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out"),
    scale: Annotated[int, typer.Option(min=1, max=64, hidden=True)] = 16,
) -> None:
    """Check all plan families of all_gather_matmul and matmul_reduce_scatter against fp64.

    With two GPUs or more it times them; otherwise it runs on CPU ranks, which takes some seconds
    and shows that the plans are right, not how fast they are.

    **Example:** `counterpoint demo --ranks 2 --out /tmp/demo`
    """
    from counterpoint.cli.demo import demo as run

    raise typer.Exit(run(ranks=ranks, seed=seed, out=out, scale=scale))


def warmup(
    layers: Annotated[
        str, typer.Option(show_default=False, help="N,K of one rank: 8192,3584:8192,1024.")
    ],
    rows: Annotated[str, typer.Option(help="M over all ranks.")] = "1,2,4,8,16,32,64,128,256",
    op: Annotated[
        str,
        typer.Option(
            help="Operators, with commas: matmul_all_reduce, all_gather_matmul, "
            "matmul_reduce_scatter."
        ),
    ] = "matmul_all_reduce",
    dtype: Annotated[DType, typer.Option(help="Of the operands.")] = "bfloat16",
    ranks: Annotated[int, typer.Option(min=0, help="GPUs; 0: all.")] = 0,
) -> None:
    """Compile the kernels of your sizes before traffic comes: Triton keeps them.

    A first call compiles for about a second for each new number of rows, rounded up to a power of
    2; after this command it loads what is in Triton's cache (TRITON_CACHE_DIR). Starts a process
    for each GPU by itself.

    **Example:** `counterpoint warmup --layers 8192,3584:8192,1024 --rows 1,8,32,64`
    """
    from counterpoint.cli.warmup import warmup as run

    raise typer.Exit(run(ops=op, layers=layers, rows=rows, dtype=dtype, ranks=ranks))


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON, for a report.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Instead: what a step's kernels take of a GPU.")
    ] = False,
    shape: Annotated[
        str, typer.Option(help="M,N,K of that step's matmul; 8192,7168,8192 if left out.")
    ] = "",
    group: Annotated[
        bool, typer.Option("--group", help="Instead, under torchrun: who is where.")
    ] = False,
) -> None:
    """Show what this machine has, what it lacks, and how to get that.

    With `--kernels`: threads, registers, shared memory, grid, cluster, priority and tile of the
    kernels of a step, as they are launched. Under torchrun, those of NCCL too.

    **Example:** `counterpoint doctor --json > doctor.json`

    **Example:** `counterpoint doctor --kernels --shape 2048,7168,8192`

    With `--group`: host, process, GPU and peers of each rank, and what settings differ.

    **Example:** `torchrun --nproc-per-node=2 -m counterpoint doctor --group`
    """
    if group and kernels:
        raise InputError("doctor", "--group", want="given without --kernels", got="both")
    if shape and not kernels:
        raise InputError("doctor", "--shape", want="given together with --kernels", got=repr(shape))
    if kernels:
        from counterpoint.cli.kernels import kernels as show

        raise typer.Exit(show(shape=shape, as_json=as_json))
    if group:
        from counterpoint.cli.group import group as show_group

        raise typer.Exit(show_group(as_json=as_json))
    from counterpoint.cli.doctor import doctor as run

    raise typer.Exit(run(as_json=as_json))


for command in (demo, bench, plan, occupancy, tune, characterize, evaluate, warmup, doctor):
    app.command(context_settings=PASSED_ON if command in (bench, evaluate) else None)(command)

if __name__ == "__main__":
    app(prog_name="counterpoint")
