"""The matmul library's tile for every matmul of the scenarios, as rows for `counterpoint evaluate`.

    python benchmarks/ask_tiles.py --out benchmarks/results/tiles-h200.jsonl

One GPU, seconds. Rows that `counterpoint evaluate` measures from now on carry their tiles; those of
2026-11-21 do not: the committed file has the tiles that give back the predictions in them.
"""

import argparse
from pathlib import Path

import torch

from counterpoint.choose.by_model import part_rows
from counterpoint.measure import record
from counterpoint.measure.scenarios import scenarios
from counterpoint.ops.auto import matmul_tile


def main() -> None:
    """Ask, and write a file anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, written anew")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    shapes = {
        (rows, s.problem.n, s.problem.k)
        for ranks in (2, 4)
        for s in scenarios(ranks)
        for rows in part_rows(s.problem)
    }
    args.out.unlink(missing_ok=True)
    found = [
        {"table": "tiles", "rows": rows, "n": n, "k": k, "tile": list(tile)}
        for rows, n, k in sorted(shapes)
        if (tile := matmul_tile(rows, n, k, torch.bfloat16, device, True))
    ]
    facts = record.environment()
    record.append(args.out, [row | facts for row in found])
    print(f"{len(found)} tiles of {len(shapes)} matmuls: {args.out}")


if __name__ == "__main__":
    main()
