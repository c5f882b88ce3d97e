"""The place that this process measures and chooses in: its GPU, ranks, islands and versions."""

import re
from functools import cache
from pathlib import Path

import torch
import torch.cuda.nccl

from counterpoint import __version__
from counterpoint.choose.known import CPU, Place

DRIVER, CPUS = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")


def place_of(device: torch.device, ranks: int, islands: int = 1) -> Place:
    """Where `ranks` devices like this one work together, on so many islands."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
    return Place(gpu=gpu, ranks=ranks, islands=islands, versions=_versions(device.type))


@cache
def _versions(device: str) -> dict[str, str]:
    found = {"counterpoint": __version__, "torch": torch.__version__}
    found["cpu"] = _said(CPUS, r"model name\s*:\s*(.*)")  # calls and steps take its time
    if device == "cuda":
        import triton

        found["triton"] = triton.__version__
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _said(DRIVER, r"(\d+(?:\.\d+)+)")
    return found


def _said(file: Path, pattern: str) -> str:
    """What a file of the system says; "" where there is none."""
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return found[1] if found else ""
