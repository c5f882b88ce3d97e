"""The paper's experiment on all pairs: rows for docs/sharing.md. Run by gpu_suite.py.

`counterpoint bench resources` is the same for a user's own look.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.loop import Pair, build, pairs
from counterpoint.measure.loop_arms import measure
from counterpoint.measure.tune_resources import tune
from counterpoint.resources.controls import Mode

GRAPH: tuple[Mode, ...] = ("graph",)
BOTH: tuple[Mode, ...] = ("graph", "eager")
QUICK = pairs(["cuBLAS", "64x64x32"], ["cb"])
LONG = pairs(["cuBLAS"], ["mb"])  # 50 ms a loop
REST = [pair for kernel in ("64x64x32", "128x256x64", "64x64x64", "128x128x64")
        for pair in pairs([kernel]) if pair not in QUICK]  # fmt: skip
SUITES: dict[str, list[tuple[Pair, tuple[Mode, ...]]]] = {
    "smoke": [(pair, BOTH) for pair in pairs(["cuBLAS"], ["cb"])],
    "full": [(pair, GRAPH) for pair in QUICK],
    # with those of full, all pairs that have bars
    "loops": [*((pair, ("eager",)) for pair in QUICK), *((pair, GRAPH) for pair in LONG)],
    # memory-bound ones of Triton last: 100 ms a loop
    "slow": [*((pair, ("eager",)) for pair in LONG),
             *((pair, GRAPH) for pair in sorted(REST, key=lambda pair: pair.gemm))],
}  # fmt: skip


def main() -> None:
    """Time the pairs; rank 0 writes rows and prints what was tuned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default="full")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--decisions", type=int, default=0, help="searches of the first pair")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    wanted = SUITES[args.suite]
    start_s = time.monotonic()
    with nccl_group() as (group, device):

        def progress(text: str) -> None:
            if group.rank() == 0:
                print(f"{time.monotonic() - start_s:5.0f} s  {text}", flush=True)

        if args.decisions:
            rows = decisions(wanted[0][0], args.decisions, group, device)
            if group.rank() == 0:
                record.append(args.out, rows)
        for pair, modes in wanted:
            heavy = pair.gemm == "mb" and pair.kernel != "cuBLAS"  # 100 ms and more
            rows, text = measure(
                pair, group=group, device=device, rounds=5 if heavy else 15,
                budget_s=12.0 if heavy else 20.0, soak_s=1.0,
                modes=modes,
                energy=pair.kernel == "cuBLAS",
                progress=lambda text, pair=pair: progress(f"{pair.label}: {text}"),
            )  # fmt: skip
            if group.rank() == 0:
                print(text, flush=True)
                record.append(args.out, rows)


def decisions(
    pair: Pair, count: int, group: dist.ProcessGroup, device: torch.device
) -> list[dict[str, Any]]:
    """What that many searches decide, one after the other, and how long each takes."""
    facts = {"table": "decisions", "pair": pair.label, "ranks": group.size()}
    facts |= record.environment()
    pipeline = build(pair, group, device).pipeline
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        start_s = time.monotonic()
        with tune(pipeline, remember=False) as tuned:
            seconds = tuned.found.arm(tuned.controls).seconds
            row = {"controls": tuned.controls.spec, "why": tuned.found.why, "median_s": seconds}
        rows.append(row | {"search_s": time.monotonic() - start_s} | facts)
    return rows


if __name__ == "__main__":
    main()
