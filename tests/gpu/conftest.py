"""Tests on GPUs: every rank runs the same tests in step, under torchrun (`make gpu`).

Elsewhere nothing here is collected.
"""

import faulthandler
import os
from datetime import timedelta

import pytest

UNDER_TORCHRUN = "LOCAL_RANK" in os.environ

if not UNDER_TORCHRUN:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def gpus():
    """This rank's GPU and the NCCL group of all ranks."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    os.environ.setdefault("COUNTERPOINT_TIMEOUT_S", "10")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    yield device
    from counterpoint.runtime.workspace import release_all

    release_all()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def groups(gpus):
    """Groups of the first 2, 4 and 8 ranks, as far as there are GPUs, by number of ranks."""
    import torch.distributed as dist

    world = dist.get_world_size()
    found = {n: dist.new_group(list(range(n))) for n in (2, 4, 8) if n < world}
    return {**found, world: dist.group.WORLD}


@pytest.fixture(autouse=True)
def in_step(gpus):
    """Ranks begin each test together, so that a failure on one is not a hang of the next test."""
    import torch
    import torch.distributed as dist

    yield
    torch.cuda.synchronize()
    dist.barrier()
