"""Start a command again as one process for each GPU, by torchrun, and be one of these."""

import os
import subprocess
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, InputError
from counterpoint.group.workspace import release_all


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun has started."""
    return "LOCAL_RANK" in os.environ


def torchrun(ranks: int, arguments: Sequence[str] = (), *, module: str = "counterpoint") -> int:
    """Run this command again, or another module, on `ranks` GPUs of this node; its exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", module, *(arguments or sys.argv[1:])]
    return subprocess.run([*launcher, f"--nproc-per-node={ranks}", *command]).returncode


@contextmanager
def nccl_group() -> Generator[tuple[dist.ProcessGroup, torch.device]]:
    """The group of all ranks that torchrun has started, and the GPU of this one."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    with _group("nccl", device) as found:
        yield found


@contextmanager
def gloo_group() -> Generator[tuple[dist.ProcessGroup, torch.device]]:
    """Likewise of CPU ranks."""
    with _group("gloo", torch.device("cpu")) as found:
        yield found


@contextmanager
def _group(
    backend: str, device: torch.device
) -> Generator[tuple[dist.ProcessGroup, torch.device]]:  # fmt: skip
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group, device
    except Exception as error:
        # peers that still communicate, and graphs that the traceback holds, would keep this rank
        # from ending: it ends here, and the launcher ends the others
        if isinstance(error, CounterpointError):
            print(f"counterpoint: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    release_all()
    dist.destroy_process_group()


def too_few_gpus(command: str, instead: str) -> InputError:
    """The error of a `command` that needs GPUs, which says what there is `instead`."""
    got = f"{torch.cuda.device_count() or 'none'} (`counterpoint doctor` says why)"
    return InputError(command, "GPUs of this machine", want="2 or more", got=got, fix=instead)
