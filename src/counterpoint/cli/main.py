"""The commands and their options. What a command does is imported when it runs: help is quick."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from counterpoint import __version__
from counterpoint.errors import CounterpointError, InputError
from counterpoint.problem import EMBEDDING, EXPERTS, FORWARD, OPS

M_N_K = "M over all ranks, N and K of one rank"
TABLES = "tables of a GPU, their columns, indices of a bag, bags of all GPUs"


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


class Suite(StrEnum):
    """How much is measured."""

    smoke = "smoke"
    full = "full"


class BenchTable(StrEnum):
    """What is compared."""

    overlap = "overlap"
    resources = "resources"


# where `bench --help` lists options that only one table has
OVERLAP, RESOURCES = (f"Options of bench {table}" for table in BenchTable)


class Gemm(StrEnum):
    """What the GEMM of a loop is bound by."""

    cb = "cb"
    mb = "mb"
    all = "all"


class Collective(StrEnum):
    """What is done to the result of a loop's GEMM."""

    all_reduce = "all_reduce"
    all_to_all = "all_to_all"
    all = "all"


class Launch(StrEnum):
    """How a loop is run."""

    graph = "graph"
    eager = "eager"
    all = "all"


class By(StrEnum):
    """How a plan is chosen without running any."""

    model = "model"
    rule = "rule"


class Dtype(StrEnum):
    """Of every operand."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


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


@app.command()
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


@app.command()
def bench(
    context: typer.Context,
    table: Annotated[
        BenchTable, typer.Argument(help="Plans of operators, or how a loop shares the GPU.")
    ] = BenchTable.overlap,
    op: Annotated[
        str,
        typer.Option(
            help=f"One operator: {' or '.join(FORWARD)}. Both if left out.", rich_help_panel=OVERLAP
        ),
    ] = "",
    shapes: Annotated[
        str,
        typer.Option(
            help="M,N,K triples as 8192,7168,8192:512,7168,8192.", rich_help_panel=OVERLAP
        ),
    ] = "",
    gemm: Annotated[
        Gemm, typer.Option(help="Bound by compute, or by memory.", rich_help_panel=RESOURCES)
    ] = Gemm.all,
    kernels: Annotated[
        str,
        typer.Option(
            help="Of the GEMM, with commas: cuBLAS, or tiles of a Triton kernel as 64x64x32.",
            rich_help_panel=RESOURCES,
        ),
    ] = "cuBLAS",
    collective: Annotated[
        Collective, typer.Option(help="Of its result.", rich_help_panel=RESOURCES)
    ] = Collective.all,
    mode: Annotated[
        Launch, typer.Option(help="In one CUDA graph, or call by call.", rich_help_panel=RESOURCES)
    ] = Launch.all,
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds of each search.", rich_help_panel=RESOURCES)
    ] = 60.0,
    rounds: Annotated[
        int, typer.Option(min=3, help="How often each arm is timed.", rich_help_panel=RESOURCES)
    ] = 7,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for pictures.", rich_help_panel=RESOURCES)
    ] = None,
    energy: Annotated[
        bool,
        typer.Option(
            "--energy/--no-energy",
            help="Read energy and clock, with nvidia-ml-py.",
            rich_help_panel=RESOURCES,
        ),
    ] = True,
    suite: Annotated[
        Suite, typer.Option(help="The published shapes, or less: a few, or an eighth of the size.")
    ] = Suite.smoke,
    out: Annotated[Path | None, typer.Option(help="JSONL file that rows are added to.")] = None,
) -> None:
    """Time plans against the serial way, or controls against plain overlap, on this node's GPUs.

    `counterpoint bench` times every plan of the operators. `counterpoint bench resources` times a
    loop of GEMMs and collectives: each control of how they share the GPU by itself, and the
    setting that a search finds.

    **Example:** `counterpoint bench --op all_gather_matmul --shapes 2048,7168,8192`

    **Example:** `counterpoint bench resources --gemm cb --collective all_to_all --pictures out`
    """
    _refuse_options_of_others(context, table)
    if table == BenchTable.resources:
        from counterpoint.cli.bench_resources import bench_resources

        raise typer.Exit(
            bench_resources(gemm=gemm.value, kernels=kernels, collective=collective.value,
                            mode=mode.value, budget_s=budget, rounds=rounds, suite=suite.value,
                            out=out, pictures=pictures, energy=energy)
        )  # fmt: skip
    from counterpoint.cli.bench import bench as run

    raise typer.Exit(run(op=op, shapes=shapes, suite=suite.value, out=out))


def _refuse_options_of_others(context: typer.Context, table: BenchTable) -> None:
    own = {BenchTable.overlap: ("op", "shapes"),
           BenchTable.resources: ("gemm", "kernels", "collective", "mode", "budget", "rounds",
                                  "pictures", "energy")}  # fmt: skip
    for other in set(BenchTable) - {table}:
        for name in own[other]:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                want, got = f"left out with table {table}", repr(str(context.params[name]))
                fix = f"it is an option of `counterpoint bench {other}`"
                raise InputError("bench", f"--{name}", want=want, got=got, fix=fix)


@app.command()
def plan(
    op: Annotated[
        str,
        typer.Argument(
            show_default=False, help=f"One of {', '.join((*OPS, *EXPERTS, EMBEDDING))}."
        ),
    ],
    shape: Annotated[
        str,
        typer.Option(
            metavar="M,N,K", show_default=False, help=f"{M_N_K}; of embedding bags {TABLES}."
        ),
    ],
    machine: Annotated[
        str,
        typer.Option(help="A kind of GPU and how many, or a file that `characterize` wrote."),
    ] = "h200-8",
    ranks: Annotated[int, typer.Option(min=0, help="GPUs that take part; 0: all of them.")] = 0,
    experts: Annotated[
        int, typer.Option(min=0, help="Of one GPU, of all-to-alls; M: rows that each GPU sends.")
    ] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the operands.")] = Dtype.bfloat16,
    spec: Annotated[
        str, typer.Option("--plan", help='A plan, such as "graded 1/1/2", to see beside serial.')
    ] = "auto",
    by: Annotated[
        By, typer.Option(help="Choose by simulating plans, or by comparing two sizes.")
    ] = By.model,
    eager: Annotated[
        bool, typer.Option("--eager", help="Count host time, as outside of a CUDA graph.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="The plan's steps too.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Draw what runs when: .png, .svg or .pdf; .json for ui.perfetto.dev."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON, in SI units.")] = False,
) -> None:
    """Predict which plan is fastest on a machine, and say why. Needs no GPU.

    **Example:** `counterpoint plan all_gather_matmul --shape 8192,7168,8192 --out plan.png`

    **Example:** `counterpoint plan embedding_bag_all_to_all --shape 8,128,5,65536`
    """
    if op == EMBEDDING:
        from counterpoint.cli.plan_embedding import plan_embedding

        raise typer.Exit(
            plan_embedding(shape=shape, machine=machine, ranks=ranks, experts=experts,
                           dtype=dtype.value, spec=spec, by=by.value, eager=eager, show=show,
                           out=out, as_json=as_json)
        )  # fmt: skip
    from counterpoint.cli.plan import plan as run

    raise typer.Exit(
        run(op=op, shape=shape, machine=machine, ranks=ranks, experts=experts, dtype=dtype.value,
            spec=spec, by=by.value, eager=eager, show=show, out=out, as_json=as_json)
    )  # fmt: skip


@app.command()
def occupancy(
    threads: Annotated[int, typer.Option(min=1, show_default=False, help="Of a block.")],
    registers: Annotated[int, typer.Option(min=0, show_default=False, help="Per thread.")],
    shared: Annotated[
        int, typer.Option(min=0, show_default=False, help="Bytes of a block, static + dynamic.")
    ],
    machine: Annotated[
        str, typer.Option(help="Kinds of GPU, with commas; b200 and mi300x too, or all.")
    ] = "a40,a100,h100,h200,mi250x",
    beside: Annotated[
        str,
        typer.Option(
            metavar="T,R,S",
            help="Threads, registers and bytes of a block of communication; nccl: those of NCCL.",
        ),
    ] = "nccl",
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON, in bytes.")] = False,
) -> None:
    """Predict how many blocks of a kernel an SM holds, alone and beside communication.

    By arithmetic, for any GPU and without one: what bounds them, how much shared memory brings
    them to fewer, and whether a block of communication then fits beside them. `counterpoint
    doctor --kernels` shows what a kernel takes.

    **Example:** `counterpoint occupancy --threads 128 --registers 64 --shared 16384`
    """
    from counterpoint.cli.occupancy import occupancies as run

    raise typer.Exit(
        run(threads=threads, registers=registers, shared=shared, machine=machine, comm=beside,
            as_json=as_json)
    )  # fmt: skip


@app.command()
def tune(
    op: Annotated[
        str, typer.Option(help=f"One of {', '.join(OPS)}. Both forward ones if left out.")
    ] = "",
    shape: Annotated[
        str,
        typer.Option(help=f"{M_N_K}, as 8192,7168,8192:512,7168,8192. Published ones if left out."),
    ] = "",
    layer: Annotated[str, typer.Option(help="Published layers by a part of their name: 70B.")] = "",
    specs: Annotated[
        str, typer.Option(help="Plans to time besides serial, with commas: graded,shard_p2p xor.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=2, help="How often each plan is timed.")] = 9,
    ranks: Annotated[
        int, typer.Option(min=0, help="GPUs, 0 for all; CPU ranks where there are no GPUs.")
    ] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the operands.")] = Dtype.bfloat16,
    out: Annotated[Path | None, typer.Option(help="JSONL file that rows are added to.")] = None,
) -> None:
    """Time plans on the GPUs of this node, and keep the fastest for `plan="auto"`.

    The model's best 12 of each shape are timed side by side, in a CUDA graph. What is kept is a
    file; delete it to undo. On CPU ranks nothing is kept.

    **Example:** `counterpoint tune --op all_gather_matmul --shape 2048,7168,8192`
    """
    from counterpoint.cli.tune import tune as run

    raise typer.Exit(
        run(op=op, shapes=shape, layer=layer, specs=specs, rounds=rounds, ranks=ranks,
            dtype=dtype.value, out=out)
    )  # fmt: skip


@app.command()
def characterize(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Each thing timed 7 times, or 3.")
    ] = True,
    ranks: Annotated[int, typer.Option(min=0, help="GPUs; 0: all.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File of the machine; left out: where `auto` looks.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="JSONL file that what was measured is added to.")
    ] = None,
    losses: Annotated[
        bool, typer.Option("--losses", help="What decomposition and contention cost, instead.")
    ] = False,
) -> None:
    """Measure this machine's constants, by which plans are predicted: about a minute.

    Without it they are those that came with the library, or derived from the datasheet.

    **Example:** `counterpoint characterize --rows rows.jsonl`
    """
    from counterpoint.cli.characterize import characterize as run

    raise typer.Exit(run(full=full, ranks=ranks, out=out, rows=rows, losses=losses))


@app.command()
def evaluate(
    rows: Annotated[
        list[Path] | None, typer.Option(help="Score a file of rows; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="JSONL file that what is measured is added to.")] = Path(
        "evaluate.jsonl"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="Draw the speedup of each scenario: .png, .svg or .pdf.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured times, likewise.")
    ] = None,
    part: Annotated[
        str, typer.Option(help='"1/4": every fourth scenario, from the first on.')
    ] = "1/1",
    only: Annotated[str, typer.Option(help="Scenarios with this in their name.")] = "",
) -> None:
    """Score the choice of plans at layers of real models: how often right, and how far off.

    Measures every candidate of 72 scenarios, and of 18 with experts (`--only experts`), on the GPUs
    here, or reads rows that were measured.
    Rows of the matmul library's tiles (`--rows tiles-h200.jsonl`) may stand beside those of times.

    **Example:** `counterpoint evaluate --rows benchmarks/results/evaluate-4x-h200.jsonl`
    """
    from counterpoint.cli.evaluate import evaluate as run

    raise typer.Exit(run(rows=rows or [], out=out, picture=picture, errors=errors, part=part,
                         only=only))  # fmt: skip


@app.command()
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
    dtype: Annotated[Dtype, typer.Option(help="Of the operands.")] = Dtype.bfloat16,
    ranks: Annotated[int, typer.Option(min=0, help="GPUs; 0: all.")] = 0,
) -> None:
    """Compile the kernels of your sizes before traffic comes: Triton keeps them.

    A first call compiles for about a second for each new number of rows, rounded up to a power of
    2; after this command it loads what is in Triton's cache (TRITON_CACHE_DIR). Starts a process
    for each GPU by itself.

    **Example:** `counterpoint warmup --layers 8192,3584:8192,1024 --rows 1,8,32,64`
    """
    from counterpoint.cli.warmup import warmup as run

    raise typer.Exit(run(ops=op, layers=layers, rows=rows, dtype=dtype.value, ranks=ranks))


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
    if shape and not kernels:
        raise InputError("doctor", "--shape", want="given together with --kernels", got=repr(shape))
    if kernels:
        from counterpoint.cli.kernels import kernels as show

        raise typer.Exit(show(shape=shape, as_json=as_json))
    from counterpoint.cli.doctor import doctor as run

    raise typer.Exit(run(as_json=as_json))


if __name__ == "__main__":
    app(prog_name="counterpoint")
