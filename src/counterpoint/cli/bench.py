"""`counterpoint bench`: plans against the serial way at one's own shapes, on this node's GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint.cli.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.cli.problems import op_of, shape_of
from counterpoint.measure import record
from counterpoint.measure.compare import FIXED, Case, compare, profile_best
from counterpoint.measure.shapes import SHAPES
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem

SMOKE = slice(3, 4)  # of the published shapes of an op: 2048 tokens of Llama-3-70B


def bench(
    *, op: str, shapes: str, suite: str, out: Path | None, pictures: Path | None = None
) -> int:
    """Time and print; 0 when every plan was right.

    Args:
        op: one operator; "" for all.
        shapes: M,N,K triples with colons between; "" for the published ones.
        suite: "smoke": one of those for each op, and a few plans; "full": all.
        out: JSONL file that rows are added to.
        pictures: folder for the timeline of the best plan of each shape.

    Raises:
        InputError: an unknown op, or shapes that are not three numbers each.
    """
    cases = _cases(op, shapes, suite)
    if torch.cuda.device_count() < 2:
        return too_few_gpus("bench", "`counterpoint demo` runs without")
    if not under_torchrun():
        arguments = ["bench", "--suite", suite, *(("--op", op) if op else ())]
        arguments += [
            *(("--shapes", shapes) if shapes else ()),
            *(("--out", str(out)) if out else ()),
        ]
        return torchrun(torch.cuda.device_count(), arguments)
    with nccl_group() as (group, device):
        first = group.rank() == 0
        console = Console(quiet=not first)
        for case in cases:
            specs = _specs(case, group.size())
            if suite == "smoke":
                specs = specs[:8]
            with console.status(f"{case.op} {case.m},{case.n},{case.k}") as status:
                rows = compare(case, specs, group=group, device=device, progress=status.update)
            console.print(table_of(rows))
            if first and out is not None:
                record.append(out, rows)
            if pictures is not None:
                timeline = profile_best(case, rows, group=group, device=device)
                if first:
                    path = timeline.save(pictures / f"{case.op}-{case.m}-{case.n}-{case.k}.png")
                    console.print(f"its best plan as a picture: {path}")
    return 0


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One shape: what is compared, our plans from the fastest to the slowest, eager beside."""
    graph = {r["arm"]: r for r in rows if r["mode"] == "graph"}
    eager = {r["arm"]: r for r in rows if r["mode"] == "eager"}
    head = rows[0]
    title = (
        f"{head['op']}  M {head['m']}  N {head['n']}  K {head['k']}  {head['ranks']}x {head['gpu']}"
    )
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for column in ("arm", "graph ms", "serial /", "eager ms", "host us", "error"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    ours = sorted((a for a in graph if a not in FIXED), key=lambda a: graph[a]["median_s"])
    serial_s = graph["serial"]["median_s"]
    for arm in (*(a for a in FIXED if a in graph), *ours):
        row, beside = graph[arm], eager.get(arm)
        table.add_row(
            arm,
            f"{row['median_s'] * 1e3:.3f}",
            f"{serial_s / row['median_s']:.2f}",
            f"{beside['plain_eager_s'] * 1e3:.3f}" if beside else "",
            f"{beside['host_s'] * 1e6:.0f}" if beside else "",
            f"{row['error']:.1e}" if row["error"] is not None else "",
        )
    return table


def _specs(case: Case, ranks: int) -> list[str]:
    """Candidates that the problem allows, without serial."""
    operation = operation_of(case.op)
    problem = Problem(case.op, case.m, case.n, case.k, ranks)
    refused = {f.name for f in operation.families if f.refusal(problem)}
    return [s for s in operation.candidates(problem)[1:] if s.split()[0] not in refused]


def _cases(op: str, shapes: str, suite: str) -> list[Case]:
    ops: Sequence[str] = [op_of("bench", "--op", op, tuple(SHAPES))] if op else tuple(SHAPES)
    own = [shape_of("bench", "--shapes", text) for text in shapes.split(":")] if shapes else None
    some = SMOKE if suite == "smoke" else slice(None)
    return [
        Case(name, *shape) for name in ops for shape in own or list(SHAPES[name].values())[some]
    ]
