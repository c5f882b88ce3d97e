"""The options of the commands that measure: bench, tune, characterize, evaluate."""

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.shared.files import check_written
from counterpoint.cli.shared.loading import loading
from counterpoint.cli.shared.problems import M_N_K, wanted
from counterpoint.operators import op_names
from counterpoint.problem import DType

# what is behind the name goes to the benchmarks as it stands
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context) -> None:
    """Time plans, or other tables, against the libraries on this node's GPUs; from a checkout.

    `counterpoint bench overlap` (the default) times every plan of the matmuls, the others what
    their names say: overlap few_rows decode experts embedding embedding_gradient attention steps
    training resources copies transports losses ficco evaluate compile soak norms fp8
    attention_replay epilogue expert_layer invariant overlap_replay two_islands prefill
    decode_experts fsdp fsdp_models expert_calls transformers_experts advise host_calls served
    tp_training.
    `-h` lists all options.

    **Example:** `counterpoint bench overlap --list`

    ```text
    all_gather_matmul 8192,5120,8192
    all_gather_matmul 8192,28672,8192
    all_gather_matmul 2048,28672,8192
    ```

    **Example:** `counterpoint bench overlap --cases all_gather_matmul --shapes 2048,7168,8192`

    **Example:** `counterpoint bench resources --cases "cb cuBLAS" --out rows.jsonl`
    """
    from counterpoint.cli.shared.checkout import run

    raise typer.Exit(run("bench", context.args))


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
    experts: Annotated[
        int, typer.Option(min=0, help="Of one GPU, of all-to-alls; M: rows that each GPU sends.")
    ] = 0,
    dtype: Annotated[DType, typer.Option(help="Of the operands.")] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="JSONL file that rows are added to.")] = None,
) -> None:
    """Time plans on the GPUs of this node, and keep the fastest for `plan="auto"`.

    The model's best 12 of each shape are timed side by side, in a CUDA graph. What is kept is a
    file; delete it to undo. On CPU ranks nothing is kept.

    **Example:** `counterpoint tune --op all_gather_matmul --shape 512,256,256 --ranks 2`

    ```text
    plan                    measured us speedup verdict
    direct                       3873.3    1.71 chosen
    serial                       6626.8    1.00 slower
    ```
    """
    check_written("tune", "--out", out, (".jsonl",))
    layers = wanted("tune", op, shape, layer)
    with loading():
        from counterpoint.cli.tune import Asked
        from counterpoint.cli.tune import tune as run

    asked = Asked(layers, not shape, specs, rounds, ranks, experts, dtype, out)
    raise typer.Exit(run(asked))


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
) -> None:
    """Measure this machine's constants, by which plans are predicted: about a minute.

    Without it they are those that came with the library, or derived from the datasheet.

    **Example:** `counterpoint characterize --rows rows.jsonl`

    ```text
    constant               measured datasheet unit    meaning
    hbm_bytes_per_s            4169      3840 GB/s    Of a kernel that only reads and writes.
    ```
    """
    check_written("characterize", "--out", out, (".json",))
    check_written("characterize", "--rows", rows, (".jsonl",))
    with loading():
        from counterpoint.cli.characterize import characterize as run

    raise typer.Exit(run(full=full, ranks=ranks, out=out, rows=rows))


def evaluate(context: typer.Context) -> None:
    """Score the choice of plans at layers of real models: how often right; from a checkout.

    Measures every candidate of 72 scenarios, and of 18 with experts (`--only experts`), on the GPUs
    here, or reads rows that were measured. `-h` lists the options.

    **Example:** `counterpoint evaluate --rows benchmarks/results/evaluate-4x-h200.jsonl`

    ```text
    4 GPUs: right is within 2% of the fastest candidate
    all looked at before: 72
    chosen by                       scenarios  right  regret   worst  least
    ```
    """
    from counterpoint.cli.shared.checkout import run

    raise typer.Exit(run("evaluate", context.args))
