"""What this library saved of what communication costs: of committed rows, for `advise`.

`make readme` writes src/counterpoint/advice/gains.json. A share is (baseline - ours) / (baseline -
computation alone) of one rotation.
"""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from benchmarks.rows import Row, kind_of, results, taken
from counterpoint import advice

PATH = Path(advice.__file__).parent / "gains.json"
LEAST = 0.02  # of the baseline: what costs less is within the noise of its rows
# by mechanism: tables, and the arms of baseline, computation alone and ours
ARMS = {
    "overlap": (("fsdp",), "as is", "compute", "ours"),
    "all_gather_matmul": (("overlap",), "serial", "compute", "auto"),
    "matmul_reduce_scatter": (("overlap",), "serial", "compute", "auto"),
    "matmul_all_reduce": (("decode", "prefill"), "serial", "matmul", "auto"),
    "experts": (("experts",), "pair grouped", "matmul grouped", "one kernel"),
}


def gains_of(name: str, tables: Iterable[str], baseline: str, alone: str, ours: str) -> list[Row]:
    """The share that ours saved in each case of these tables."""
    keys = ("case", "op", "m", "n", "k", "tokens", "model", "routing")
    found = [taken(rows, *keys) for table in tables for rows in results(table).values()]
    lines: list[Row] = []
    for case in chain.from_iterable(found):
        head, of = case.head, str(case.head.get("op", name))
        if not {baseline, alone, ours} <= {*case.main} or (of in ARMS and of != name):
            continue
        cost_s = case.s(baseline) - case.s(alone)
        size = round(cost_s / case.s(baseline), 3) if name == "overlap" else moved(head)
        saved = (case.s(baseline) - case.s(ours)) / cost_s if cost_s else 0.0
        # ours below computation alone: in that rotation the latter was no bound
        if cost_s < LEAST * case.s(baseline) or not size or saved > 1:
            continue
        lines.append({
            "case": str(head.get("case", f"{of} {head.get('m')},{head.get('n')},{head.get('k')}")),
            "gpu": kind_of(head["gpu"]).upper(), "gpus": head["ranks"], "date": head["date"],
            "size": size, "share": round(max(0.0, saved), 3),
        })  # fmt: skip
    return lines


def moved(head: Row) -> int:
    """Bytes of a case's collective, the larger of input and output; 0 where rows do not say it."""
    across = "k" if head.get("op") == "all_gather_matmul" else "n"
    return head.get("bytes") or 2 * head.get("m", 0) * head.get(across, 0)


def write(path: Path = PATH) -> None:
    """Write the file that comes with the library, a case a line."""
    lists = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, gains_of(name, *arms))) + "\n]"
        for name, arms in ARMS.items()
    ]
    path.write_text("{\n" + ",\n".join(lists) + "\n}\n")


if __name__ == "__main__":
    write()
