"""`counterpoint doctor --kernels`: what the kernels of a step take of a GPU."""

import json
import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint.cli.doctor import no_gpu
from counterpoint.cli.shared.launch import under_torchrun
from counterpoint.cli.shared.problems import Shape, shape_of
from counterpoint.errors import InputError
from counterpoint.gpu.footprint import Footprint, gemm_tile
from counterpoint.machine import KIB, MIB

WITH_NCCL = "with NCCL's: torchrun --nproc-per-node=2 -m counterpoint doctor --kernels"


def kernels(*, shape: str, as_json: bool) -> int:
    """Print what the kernels of a step take of a GPU, as a table or as JSON.

    Args:
        shape: M,N,K of the step's matmul; "" for 8192,7168,8192 with as many rows as there is
            memory for.
        as_json: JSON instead of a table.

    Returns:
        0.

    Raises:
        InputError: `shape` is not three numbers, or there is no GPU to run kernels on.
        UnsupportedError: cuda-bindings is not installed.
    """
    own = shape_of("doctor", "--shape", shape) if shape else None
    if not torch.cuda.is_available() or torch.version.hip:
        want, fix = "an NVIDIA one", no_gpu(torch.version.cuda)
        raise InputError("doctor", "GPU of this machine", want=want, got="none", fix=fix)
    # needs Triton, and `counterpoint doctor` says whether that is there
    from counterpoint.gpu.step_footprints import fitting_shape, step_footprints

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if under_torchrun() else 0)
    torch.cuda.set_device(device)
    group, first = None, True
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl", device_id=device)
        group, first = dist.group.WORLD, dist.get_rank() == 0
    try:
        sizes = own or fitting_shape(_free_bytes(group))
        num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        rows = [
            _row(name, footprint, sizes, num_sms)
            for name, footprint in step_footprints(sizes, group)
        ]
    finally:
        if group is not None:
            dist.destroy_process_group()
    facts = {
        "gpu": torch.cuda.get_device_name(device),
        "ranks": int(os.environ["WORLD_SIZE"]) if group else 1,
        "shape": sizes,
        "kernels": rows,
    }
    if first and as_json:
        print(json.dumps(facts, indent=2))
    elif first:
        _print(Console(), facts)
    return 0


def _free_bytes(group: dist.ProcessGroup | None) -> int:
    """Free memory of this GPU; of the fullest one of the group, so that its ranks agree."""
    free = torch.tensor(torch.cuda.mem_get_info()[0], device="cuda")
    if group is not None:
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=group)
    return int(free)


def _row(step: str, found: Footprint, shape: Shape, num_sms: int) -> dict[str, Any]:
    """A node in a step's call as JSON takes it; tile and waves are null where there is no tile."""
    tile, waves = gemm_tile(found), None
    if tile:
        (m, n, _), (rows, cols) = shape, tile
        # the tile's rows may lie along either dim: the way that needs fewer tiles
        waves = min(-(-m // a) * -(-n // b) for a, b in ((rows, cols), (cols, rows))) / num_sms
    return {
        "step": step, "short_name": found.short_name, **asdict(found),
        "threads": found.threads, "tile": tile, "waves": waves,
    }  # fmt: skip


def _print(console: Console, facts: dict[str, Any]) -> None:
    title = "kernels of a step  M {} N {} K {}  {}".format(*facts["shape"], facts["gpu"])
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for column in ("step", "kernel", "kind", "grid", "threads", "registers",
                   "static + dynamic KiB", "cluster", "priority", "tile", "waves"):  # fmt: skip
        table.add_column(column, overflow="fold")
    for row in facts["kernels"]:
        if row["kind"] != "kernel":
            size = f"{row['total_bytes'] / MIB:.2f} MiB" if row["total_bytes"] else ""
            table.add_row(row["step"], size, row["kind"])
            continue
        static, dynamic = row["static_shared_bytes"] / KIB, row["dynamic_shared_bytes"] / KIB
        table.add_row(
            row["step"], row["short_name"], row["kind"], _by(row["grid"]), str(row["threads"]),
            str(row["registers_per_thread"]), f"{static:.1f} + {dynamic:.1f}",
            _by(row["cluster"]), str(row["priority"]), _by(row["tile"] or ()),
            f"{row['waves']:.2f}" if row["tile"] else "",
        )  # fmt: skip
    console.print(table)
    if facts["ranks"] == 1:
        console.print(WITH_NCCL, markup=False)


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
