"""The training table: forward and backward of the MLP of Llama-3-70B, sequence parallel.

Run under torchrun, or by `make gpu`. The MLP is cut over the ranks that there are, so on fewer
than 8 GPUs each has more of it.
"""

import argparse
import faulthandler
import os
from pathlib import Path

import torch
import torch.distributed as dist

from counterpoint.measure import record
from counterpoint.measure.training import MlpCase, compare_training
from counterpoint.runtime.workspace import release_all

CASES = (
    MlpCase(8192, 8192, 28672, "Llama-3-70B MLP"),
    MlpCase(8192, 8192, 14336, "half its ffn, as on twice the ranks"),
    MlpCase(2048, 8192, 28672, "Llama-3-70B MLP, 2048 tokens"),
)


def main() -> None:
    """Write the rows; rank 0 prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=("smoke", "full"), default="full")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(110, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    for case in CASES[2:] if args.suite == "smoke" else CASES:
        rows = compare_training(case, group=group, device=device)
        if dist.get_rank() == 0:
            record.append(args.out, rows)
            times = {row["arm"]: row for row in rows}
            ratio = {arm: row["median_s"] / times["ours"]["median_s"] for arm, row in times.items()}
            print(f"{case.layer} {case.m},{case.hidden},{case.ffn}: " + ", ".join(
                f"{arm} {row['median_s'] * 1e3:.3f} ({ratio[arm]:.3f}x; eager "
                f"{row['plain_eager_s'] * 1e3:.3f})" for arm, row in times.items()
            ), flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    release_all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
