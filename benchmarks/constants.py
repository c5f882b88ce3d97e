"""The constants that come with the library, fitted again from committed rows.

    python -m benchmarks.constants

reads benchmarks/results/characterize-*.jsonl, and of evaluate-*.jsonl the library's collective
alone at the layers of scenarios.FITTED with few tokens, since the rows of `characterize` began at
4 MiB when these were measured. It writes src/counterpoint/measured.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.rows import RESULTS, Row, rows_of
from benchmarks.scenarios import FITTED
from counterpoint.choose.known import Place, save_machine
from counterpoint.machine_of import SHIPPED
from counterpoint.model.calibrate import SMALL_BYTES, fit
from counterpoint.presets import preset_of
from counterpoint.problem import Problem


def small_collectives(rows: Sequence[Row]) -> list[Row]:
    """The library's collectives of few tokens, as rows of `characterize`."""
    found: list[Row] = []
    for row in rows:
        if row["arm"] == "communication" and row["layer"].startswith(FITTED):
            p = Problem(row["op"], row["m"], row["n"], row["k"], row["ranks"], row["dtype"])
            if p.link_bytes <= SMALL_BYTES:
                kind = "all_gather" if p.op == "all_gather_matmul" else "reduce_scatter"
                found.append({"question": "collective", "kind": kind, "num_bytes": p.link_bytes,
                              "seconds": row["median_s"]})  # fmt: skip
    return found


def main() -> None:
    """Fit and write."""
    for path in sorted(RESULTS.glob("characterize-*.jsonl")):
        rows = rows_of(path)
        gpu, ranks = rows[0]["gpu"], rows[0]["ranks"]
        base = preset_of(gpu, ranks)
        assert base is not None, f"no preset describes {gpu!r}"
        few = small_collectives(rows_of(RESULTS / path.name.replace("characterize", "evaluate")))
        source = f"measured on {ranks}x {gpu}, torch {rows[0]['torch']}, {rows[0]['date']}"
        machine = replace(base, measured=fit([*rows, *few], base), source=source)
        written = save_machine(machine, Place(gpu=gpu, ranks=ranks), SHIPPED)
        print(f"{written}: {json.loads(machine.to_json())['measured']}")


if __name__ == "__main__":
    main()
