"""The command `counterpoint`: all that it can do, in the order of its help; demo, warmup, doctor.

A command is a function with its options; what it does is imported when it runs, so help is quick.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from counterpoint import __version__
from counterpoint.cli.advise import advise
from counterpoint.cli.measuring import PASSED_ON, bench, characterize, evaluate, tune
from counterpoint.cli.occupancy import occupancy
from counterpoint.cli.plan import plan
from counterpoint.cli.scale import scale
from counterpoint.cli.shared.files import check_made
from counterpoint.cli.shared.loading import loading
from counterpoint.cli.shared.usage import REFUSED, meant, told
from counterpoint.errors import InputError
from counterpoint.lazy import need
from counterpoint.problem import DType


class _Commands(TyperGroup):
    """Shows every error as one line in our words; see `cli.usage`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            typer.echo(ctx.get_help())
            raise typer.Exit(REFUSED)
        ctx.obj = list(args)
        with told("counterpoint", args, every_command):
            return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None:
            names = [command.__name__ for command in COMMANDS]
            want, fix = f"one of {', '.join(names)}", meant(cmd_name, names)
            raise InputError("counterpoint", "COMMAND", want=want, got=repr(cmd_name), fix=fix)
        return found

    def invoke(self, ctx: Any) -> Any:
        name, *words = ctx.obj
        function = next((c for c in COMMANDS if c.__name__ == name), every_command)
        with told("counterpoint" if function is every_command else name, words, function):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
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

    Exit codes: 0 done; 1 a check or a rank failed; 2 the command line or a file is wrong, or this
    machine lacks what the command needs; 130 stopped by Ctrl-C.
    """


def demo(
    ranks: Annotated[
        int, typer.Option(min=0, max=8, help="CPU ranks; 0: one for each core, from 2 to 4.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the random operands.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of the picture; made if it is not there.")
    ] = Path("out"),
    scale: Annotated[int, typer.Option(min=1, max=64, hidden=True)] = 16,
) -> None:
    """Show what overlap brings on GPUs, and check every plan of two operators on CPU ranks.

    It takes some seconds. With two GPUs or more it times operators and compiled blocks instead.

    **Example:** `counterpoint demo --ranks 2`

    ```text
    The picture: out/demo.png
    all_gather_matmul     QKV     ✓✓✓✓✓✓✓✓✓✓ 10 plans, error 1.00 of torch's own
    42 of 42 checks hold
    ```
    """
    check_made("demo", "--out", out)
    need("torch")
    need("matplotlib")
    typer.echo("counterpoint demo: communication hidden behind computation. Loading PyTorch ...")
    sys.stdout.flush()
    with loading():
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
            "matmul_reduce_scatter, matmul_all_reduce_rms_norm, all_reduce_rms_norm (of N), "
            "or the layer_norm of either."
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

    ```text
    operator                M, N, K first call, ms then, ms
    Triton keeps what was compiled; in a server, call once at the largest size
    ```
    """
    with loading():
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

    **Example:** `counterpoint doctor`

    ```text
    GPUs                0
    CPU ranks           yes
    plans are chosen by nothing: auto is serial here
    ```

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
        with loading():
            from counterpoint.cli.kernels import kernels as show

        raise typer.Exit(show(shape=shape, as_json=as_json))
    if group:
        with loading():
            from counterpoint.cli.group import group as show_group

        raise typer.Exit(show_group(as_json=as_json))
    with loading():
        from counterpoint.cli.doctor import doctor as run

    raise typer.Exit(run(as_json=as_json))


COMMANDS = (
    demo, advise, bench, plan, scale, occupancy, tune, characterize, evaluate, warmup, doctor,
)  # fmt: skip
for command in COMMANDS:
    app.command(context_settings=PASSED_ON if command in (bench, evaluate) else None)(command)
