"""Copies between GPUs and the transports: the rows of docs/transports.md. Run by gpu_suite.py."""

import argparse
import faulthandler
import os
import time
from pathlib import Path
from typing import Any

from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.copies import MIB, measure_copies
from counterpoint.runtime.workspace import release_all


def main() -> None:
    """Write the rows; rank 0 prints the rates, and what a batch saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # captured collectives of NCCL hang on memory that is open to peers where they register it
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    faulthandler.dump_traceback_later(80, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):

        def say(text: str) -> None:
            if group.rank() == 0:
                print(f"[{time.monotonic() - start_s:4.0f} s] {text}", flush=True)

        rows = measure_copies(group=group, device=device, progress=say)
        if group.rank() == 0:
            record.append(args.out, rows)
            report(rows)
        say(f"{len(rows)} rows")
        release_all()


def report(rows: list[dict[str, Any]]) -> None:
    """Print each row, and 56 copies of 1 MiB as one batch beside one by one."""
    for row in rows:
        told = {k: v for k, v in row.items() if k in SHOWN}
        what = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in told.values())
        if "refused" not in row:
            moved = row["num_bytes"] * row.get("count", (row["ranks"] - 1) / row["ranks"])
            rate = moved / row["seconds"] / 1e9
            what += f": {row['seconds'] * 1e6:.1f} us, {rate:.0f} GB/s"
        print(what)
    for direction in ("push", "pull"):
        times = {
            row["way"]: row["seconds"] for row in rows
            if row["question"] == "submission" and (row["num_bytes"], row["count"]) == (MIB, 56)
            and row["direction"] == direction and not row["ahead"]
        }  # fmt: skip
        if "batch" in times:
            ratios = {way: times["batch"] / s for way, s in times.items() if way != "batch"}
            text = ", ".join(f"{ratio:.0%} of {way}" for way, ratio in ratios.items())
            print(f"56 copies of 1 MiB, {direction}: a batch takes {text}")


SHOWN = ("question", "transport", "op", "order", "late_copies", "num_bytes", "count", "row_bytes",
         "direction", "way", "ahead", "refused")  # fmt: skip

if __name__ == "__main__":
    main()
