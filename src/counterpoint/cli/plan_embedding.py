"""`counterpoint plan embedding_bag_all_to_all`: which way, how fast and why, of equal ranks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import cast

from counterpoint.choose.choose import Level, choose, machine_of
from counterpoint.cli.plan import AUTO
from counterpoint.embedding_problem import EMBEDDING, EmbeddingProblem
from counterpoint.errors import InputError
from counterpoint.problem import DType

SIZES = "TABLES,D,POOLING,BATCH"  # tables and pooling of each GPU, bags of all


def plan_embedding(
    *, shape: str, machine: str, ranks: int, experts: int, dtype: str, spec: str, by: Level,
    eager: bool, show: bool, out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Print both ways of embedding bags and why one is taken, copied or not; 0.

    Args:
        shape: tables of each GPU, their columns, indices of a bag, bags of all GPUs.
        machine, ranks, dtype, by, eager, as_json: as for `counterpoint plan`.
        experts, spec, show, out: refused: there are none, and no plan of steps.

    Raises:
        InputError: an option does not fit embedding bags, or `shape` is not four numbers.
    """
    no_plan, no_experts = "has no plan of steps", "has none"
    for option, value, default, why in (
        ("--plan", spec, AUTO, no_plan), ("--show", show, False, no_plan),
        ("--out", out, None, no_plan), ("--experts", experts, 0, no_experts),
    ):  # fmt: skip
        if value != default:
            want = f"left out with {EMBEDDING}, which {why}"
            raise InputError("plan", option, want=want, got=value)
    parts = shape.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError("plan", "--shape", want=f"{SIZES} of numbers above 0", got=repr(shape))
    tables, columns, pooling, batch = map(int, parts)
    where = machine_of(machine)
    ranks = ranks or where.num_devices
    choices = [
        choose(
            EmbeddingProblem(
                ((columns,) * tables,) * ranks, batch, (tables * batch * pooling,) * ranks,
                dtype=cast(DType, dtype), out=own,
            ), where, by=by, eager=eager,
        )
        for own in (False, True)
    ]  # fmt: skip
    if as_json:
        facts = [
            {"problem": asdict(c.problem), "machine": c.machine.name, "plan": c.plan,
             "seconds": c.seconds, "serial_s": c.serial_s, "table": [asdict(t) for t in c.table]}
            for c in choices
        ]  # fmt: skip
        print(json.dumps(facts, indent=2))
    else:
        print("\n\n".join(choice.explain() for choice in choices))
    return 0
