"""`counterpoint doctor`: what this machine has, what it lacks, and how to get that.

It reports and never fails: whoever asks may have no GPU at all. Only `--kernels` needs one: what
the kernels of a step take of it.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint import __version__
from counterpoint.cli.launch import under_torchrun
from counterpoint.errors import CounterpointError, InputError
from counterpoint.machine import KIB, MIB
from counterpoint.measure import record
from counterpoint.resources.footprint import Footprint, gemm_tile
from counterpoint.runtime import driver, symmetric_cuda

Shape = tuple[int, int, int]  # M, N, K
PACKAGES = ("torch", "triton", "numpy", "cuda-bindings")
NO_GPU = (
    "no NVIDIA GPU found; install its driver, or give this container its GPUs "
    "(docker run --gpus all), or unset CUDA_VISIBLE_DEVICES"
)
WITH_NCCL = "with NCCL's: torchrun --nproc-per-node=2 -m counterpoint doctor --kernels"
VARIABLES = {
    "NCCL_NVLS_ENABLE": "0: NCCL without NVLink multicast",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: torch's symmetric memory without multicast",
    "COUNTERPOINT_TIMEOUT_S": "bound of every wait on a peer, 30 if not set",
    "COUNTERPOINT_CHECK": "1: each call compares its arguments over the ranks first",
}


def doctor(*, as_json: bool, kernels: bool = False, shape: str = "") -> int:
    """Print the facts of this machine, or those of the kernels of a step, as tables or as JSON.

    Args:
        as_json: JSON instead of tables.
        kernels: those of the kernels.
        shape: M,N,K of the step's matmul; "" for 8192,7168,8192 with as many rows as there is
            memory for.

    Returns:
        0, or 2 if there is no GPU to run kernels on.

    Raises:
        InputError: `shape` is not three numbers, or is given without `kernels`.
        UnsupportedError: `kernels`, and cuda-bindings is not installed.
    """
    if shape and not kernels:
        raise InputError("doctor", "--shape", want="given together with --kernels", got=repr(shape))
    if kernels:
        return _doctor_kernels(_parse(shape) if shape else None, as_json=as_json)
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(Console(), facts)
    return 0


def collect() -> dict[str, Any]:
    """Facts of this machine; each is there on every machine, empty where it has no meaning."""
    environment = record.environment()
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "gpus": gpus,
        "driver": environment.get("driver", ""),
        "peer_access": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(len(gpus))]
            for i in range(len(gpus))
        ],
        "topology": _topology() if gpus else "",
        "versions": _versions(environment),
        "symmetric_memory": _symmetric_memory() if gpus else "no GPU",
        "cpu_ranks": _cpu_ranks(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }  # fmt: skip
    return facts | {"missing": _missing(facts)}


def _gpu(index: int) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(index)  # torch leaves it without types
    try:
        engines = driver.num_copy_engines(index)
    except CounterpointError:
        engines = None
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "num_sms": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_copy_engines": engines,
    }


def _versions(environment: dict[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "counterpoint": __version__,  # a source tree need not be an installed package
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["CUDA"] = torch.version.cuda
    found["NCCL"] = environment.get("nccl")
    return found


def _symmetric_memory() -> str:
    """Why torch's symmetric memory is not to be had, or "yes" if it is."""
    try:
        symmetric_cuda.torch_symmetric_memory()
    except CounterpointError as error:
        return str(error)
    return "yes"


def _cpu_ranks() -> str:
    """What CPU ranks lack here, or "yes" if nothing: a memfd that peers open through /proc."""
    if not hasattr(os, "memfd_create"):
        return f"{platform.system()} has no memfd; use Linux"
    try:
        fd = os.memfd_create("counterpoint-doctor")
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
        finally:
            os.close(fd)
    except OSError as error:
        return f"{error}; allow memfd_create and mount /proc"
    return "yes"


def _missing(facts: dict[str, Any]) -> dict[str, str]:
    """What is missing -> how to get it."""
    missing: dict[str, str] = {}
    gpus, versions = facts["gpus"], facts["versions"]
    if not gpus:
        why = _no_gpu(versions["CUDA"])
        missing["GPUs"] = f"{why}. CPU ranks run every plan, to check it and not to be fast"
    elif len(gpus) == 1:
        missing["a second GPU"] = (
            "one GPU has no peer; take a node with two or more, or name more of them in "
            "CUDA_VISIBLE_DEVICES. CPU ranks run every plan"
        )
    if gpus and facts["symmetric_memory"] != "yes":
        missing["symmetric memory"] = facts["symmetric_memory"]
    if gpus and not all(map(all, facts["peer_access"])):
        missing["peer access"] = (
            "all GPUs of a group must reach each other; take those that "
            "`nvidia-smi topo -p2p n` shows as OK, by CUDA_VISIBLE_DEVICES"
        )
    if gpus and versions["cuda-bindings"] is None:
        major = str(versions["CUDA"]).split(".")[0]
        missing["cuda-bindings"] = f"pip install 'cuda-bindings=={major}.*'"
    if versions["triton"] is None:
        missing["triton"] = "pip install 'triton>=3.6'"
    if facts["cpu_ranks"] != "yes":
        missing["CPU ranks"] = facts["cpu_ranks"]
    return missing


def _no_gpu(cuda: str | None) -> str:
    """What to do about it, on a torch that was built for that CUDA."""
    if cuda or torch.version.hip:
        return NO_GPU
    return "torch is a CPU build; install a CUDA build of torch"


def _topology() -> str:
    try:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _print(console: Console, facts: dict[str, Any]) -> None:
    table = Table(title="this machine", title_justify="left", title_style="bold", show_header=False)
    for i, gpu in enumerate(facts["gpus"]):
        engines = gpu["num_copy_engines"]
        copies = "unknown" if engines is None else engines
        table.add_row(f"GPU {i}", f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, "
                      f"{gpu['num_sms']} SMs, copy engines {copies}")  # fmt: skip
    table.add_row("GPUs", str(len(facts["gpus"])))
    table.add_row("driver", facts["driver"] or "-")
    table.add_row("peer access", _peers(facts["peer_access"]))
    table.add_row("symmetric memory", facts["symmetric_memory"])
    table.add_row("CPU ranks", facts["cpu_ranks"], end_section=True)
    for name, number in facts["versions"].items():
        table.add_row(name, number or "-", end_section=name == "NCCL")
    for name, value in facts["environment"].items():
        table.add_row(name, f"{'not set' if value is None else value} [dim]({VARIABLES[name]})[/]")
    console.print(table)
    if facts["topology"]:
        console.print("links (nvidia-smi topo -m)", style="bold")
        console.print(facts["topology"], markup=False, highlight=False, soft_wrap=True)
    for what, fix in facts["missing"].items():
        console.print(f"[yellow]missing:[/] {what}: {fix}")
    if not facts["missing"]:
        console.print("[green]nothing is missing[/]")


def _peers(matrix: list[list[bool]]) -> str:
    """A line for each GPU that lacks a peer."""
    if len(matrix) < 2:
        return "-"
    lacking = [
        f"GPU {i} does not reach {', '.join(str(j) for j, ok in enumerate(row) if not ok)}"
        for i, row in enumerate(matrix)
        if not all(row)
    ]
    return "\n".join(lacking) or "every GPU reaches every other"


def _doctor_kernels(shape: Shape | None, *, as_json: bool) -> int:
    if not torch.cuda.is_available() or torch.version.hip:
        what = "counterpoint doctor --kernels: needs an NVIDIA GPU"
        print(f"{what}; {_no_gpu(torch.version.cuda)}", file=sys.stderr)
        return 2
    # needs Triton, and `doctor` says whether that is there
    from counterpoint.resources.step import fitting_shape, step_footprints

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if under_torchrun() else 0)
    torch.cuda.set_device(device)
    group, first = None, True
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl", device_id=device)
        group, first = dist.group.WORLD, dist.get_rank() == 0
    try:
        shape = shape or fitting_shape(_free_bytes(group))
        num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        rows = [
            _row(name, footprint, shape, num_sms)
            for name, footprint in step_footprints(shape, group)
        ]
    finally:
        if group is not None:
            dist.destroy_process_group()
    facts = {
        "gpu": torch.cuda.get_device_name(device),
        "ranks": int(os.environ["WORLD_SIZE"]) if group else 1,
        "shape": shape,
        "kernels": rows,
    }
    if first and as_json:
        print(json.dumps(facts, indent=2))
    elif first:
        _print_kernels(Console(), facts)
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


def _print_kernels(console: Console, facts: dict[str, Any]) -> None:
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


def _parse(shape: str) -> Shape:
    parts = shape.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise InputError("doctor", "--shape", want="M,N,K of numbers above 0", got=repr(shape))
    m, n, k = (int(part) for part in parts)
    return m, n, k
