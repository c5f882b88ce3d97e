"""One measurement as one line of JSON, with what is needed to believe it."""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl


def environment() -> dict[str, Any]:
    """GPU, driver, libraries, commit, multicast, date: what every row carries."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "commit": os.environ.get("COUNTERPOINT_COMMIT") or _commit(),
        "multicast": os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1",
        "nvls": os.environ.get("NCCL_NVLS_ENABLE") != "0",
    }
    if torch.cuda.is_available():
        import triton

        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "num_gpus": torch.cuda.device_count(),
            "driver": _nvidia_smi("driver_version"),
            "triton": triton.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _nvidia_smi(field: str) -> str:
    return _said("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "-i", "0")


def _commit() -> str:
    """Of the checkout that this file is of, marked where files differ; "" of an installed
    package."""
    git = ("git", "-C", str(Path(__file__).parent))
    if not _said(*git, "ls-files", "."):
        return ""
    return _said(*git, "describe", "--always", "--dirty", "--exclude=*")


def _said(*command: str) -> str:
    """What a program writes; "" where there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
