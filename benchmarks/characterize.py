"""The constants of the machine: rows, and the file that the library ships for such machines.

Run under torchrun, or by `make gpu`, before the tables: what "auto" then chooses is by these.
"""

import argparse
import faulthandler
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from counterpoint.choose.known import save_machine
from counterpoint.measure import record
from counterpoint.measure.characterize import characterize
from counterpoint.runtime.workspace import release_all


def main() -> None:
    """Write rows and the machine; rank 0 prints the constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file of the rows")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(110, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    start_s = time.monotonic()
    machine, rows = characterize(group=group, device=device)
    if dist.get_rank() == 0:
        record.append(args.out, rows)
        name, ranks = torch.cuda.get_device_name(device), dist.get_world_size()
        # in the cache for the runs that follow, and beside the rows to be looked at and shipped
        for folder in (None, args.out.parent):
            print(f"wrote {save_machine(machine, name, ranks, folder)}")
        print(f"{machine.measured} in {time.monotonic() - start_s:.0f} s", flush=True)
    release_all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
