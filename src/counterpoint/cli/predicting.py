"""The options of the commands that predict, and need no GPU: plan, occupancy."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.options import M_N_K, Dtype
from counterpoint.problem import op_names

TABLES = "tables of a GPU, their columns, indices of a bag, bags of all GPUs"


class By(StrEnum):
    """How a plan is chosen without running any."""

    model = "model"
    rule = "rule"


def plan(
    op: Annotated[
        str,
        typer.Argument(show_default=False, help=f"One of {', '.join(op_names())}."),
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
    into: Annotated[
        bool, typer.Option("--into", help="Of embedding bags: into PooledOutputs, without a copy.")
    ] = False,
) -> None:
    """Predict which plan is fastest on a machine, and say why. Needs no GPU.

    **Example:** `counterpoint plan all_gather_matmul --shape 8192,7168,8192 --out plan.png`

    **Example:** `counterpoint plan embedding_bag_all_to_all --shape 8,128,5,65536`
    """
    from counterpoint.cli.plan import plan as run

    raise typer.Exit(
        run(op=op, shape=shape, machine=machine, ranks=ranks, experts=experts, dtype=dtype.value,
            spec=spec, by=by.value, eager=eager, show=show, out=out, as_json=as_json, into=into)
    )  # fmt: skip


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
