"""What decomposition and contention cost: the rows of docs/losses.md. Run by gpu_suite.py."""

import argparse
import faulthandler
import time
from pathlib import Path

from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.losses import measure_losses
from counterpoint.runtime.workspace import release_all


def main() -> None:
    """Write the rows; rank 0 prints each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(110, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):
        rows = measure_losses(group=group, device=device)
        if group.rank() == 0:
            record.append(args.out, rows)
            told = {"question", "table", "seconds", "whole_s", "alone_s"}
            for row in rows:
                loss = row["seconds"] / (row.get("whole_s") or max(row["alone_s"], row["other_s"]))
                facts = list(row)[: list(row).index("seconds")]
                what = " ".join(str(row[f]) for f in facts if f not in told)
                print(f"{row['question']}: {what}: {row['seconds'] * 1e6:.1f} us, {loss:.2f}")
            print(f"{len(rows)} rows in {time.monotonic() - start_s:.0f} s", flush=True)
        release_all()


if __name__ == "__main__":
    main()
