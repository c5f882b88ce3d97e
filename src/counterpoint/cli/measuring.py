"""The options of the commands that measure: bench, tune, characterize, evaluate."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.options import M_N_K, Dtype
from counterpoint.errors import InputError
from counterpoint.measure.shapes import SHAPES
from counterpoint.problem import op_names


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


def bench(
    context: typer.Context,
    table: Annotated[
        BenchTable, typer.Argument(help="Plans of operators, or how a loop shares the GPU.")
    ] = BenchTable.overlap,
    op: Annotated[
        str,
        typer.Option(
            help=f"One operator: {' or '.join(SHAPES)}. Both if left out.", rich_help_panel=OVERLAP
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


def tune(
    op: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(op_names())}. Those of published shapes if none."),
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
    experts: Annotated[int, typer.Option(min=0, help="Of one GPU, of all-to-alls.")] = 0,
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
            experts=experts, dtype=dtype.value, out=out)
    )  # fmt: skip


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
