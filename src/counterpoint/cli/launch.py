"""Start a command again as one process for each GPU, by torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun has started."""
    return "LOCAL_RANK" in os.environ


def torchrun(ranks: int, arguments: Sequence[str]) -> int:
    """Run `counterpoint ARGUMENTS` on `ranks` GPUs of this node; its exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", "counterpoint.cli.main", *arguments]
    return subprocess.run([*launcher, f"--nproc-per-node={ranks}", *command]).returncode
