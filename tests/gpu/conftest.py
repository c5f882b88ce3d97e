"""Tests on GPUs: every rank runs the same tests in step, under torchrun (`make gpu`).

Ranks may share a GPU, which takes their kernels in turn: results are tested as well then, times and
what goes over links are not. Elsewhere nothing here is collected.
"""

import faulthandler
import os
import sys
from datetime import timedelta
from functools import cache

import pytest

UNDER_TORCHRUN = "LOCAL_RANK" in os.environ

if not UNDER_TORCHRUN:
    collect_ignore_glob = ["test_*.py"]


@cache
def gpu_of_mine():
    """The GPU of this rank; and whether ranks share it."""
    import torch

    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    shares = int(os.environ["LOCAL_WORLD_SIZE"]) > gpus
    return torch.device("cuda", local % gpus), shares


def be_a_host():
    """NCCL takes this rank for a host of its own: it reaches the others by sockets alone."""
    os.environ |= {
        "NCCL_HOSTID": f"rank{os.environ['RANK']}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "COUNTERPOINT_ISLAND": "one",  # they do reach each other's memory
    }


def share_a_gpu():
    """Ranks on one GPU; NCCL wants them to be on several hosts."""
    be_a_host()
    os.environ |= {
        "LOCAL_RANK": str(gpu_of_mine()[0].index),
        "COUNTERPOINT_TIMEOUT_S": "40",  # who waits for a peer takes its time from it
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def pytest_collection_modifyitems(items):
    """Leave out what wants a GPU for each rank where they share one."""
    if UNDER_TORCHRUN and gpu_of_mine()[1]:
        for item in items:
            if item.get_closest_marker("own_gpu"):
                item.add_marker(pytest.mark.skip("needs a GPU for each rank"))


def pytest_sessionstart(session):
    """One rank reports progress; what fails, every rank says for itself, on stderr."""
    if UNDER_TORCHRUN and os.environ["RANK"] != "0":
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as pytest)


def pytest_runtest_logreport(report):
    """A rank that fails says so and ends at once: the launcher then ends the others.

    Left running, it would be out of step with them, and the failure would look like a hang.
    """
    if report.failed:
        text = f"\nrank {os.environ['RANK']} failed {report.nodeid}\n{report.longreprtext}\n"
        os.write(sys.__stderr__.fileno(), text.encode())
        os._exit(1)


@pytest.fixture(scope="session", autouse=True)
def gpus(request):
    """This rank's GPU and the NCCL group of all ranks."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    device, shares = gpu_of_mine()
    if shares:
        share_a_gpu()
    elif all(item.get_closest_marker("hosts") for item in request.session.items):
        be_a_host()  # before NCCL starts, which looks once: so these tests have to be by themselves
    os.environ.setdefault("COUNTERPOINT_TIMEOUT_S", "10")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    yield device
    from counterpoint.group.workspace import release_all

    release_all()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def groups(gpus):
    """This rank's group of 2, 4 and 8 neighbours, as far as there are GPUs, by number of ranks.

    Every rank is in one group of each size: torch's rendezvous counts calls per process, so
    ranks that have set up different numbers of groups no longer meet.
    """
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    found = {world: dist.group.WORLD}
    for size in (2, 4, 8):
        if size < world:
            blocks = [list(range(i, i + size)) for i in range(0, world, size)]
            found[size] = [dist.new_group(block) for block in blocks][rank // size]
    return found


@pytest.fixture(autouse=True)
def in_step(gpus):
    """Ranks begin each test together, so that a failure on one is not a hang of the next test."""
    import torch
    import torch.distributed as dist

    yield
    torch.cuda.synchronize()
    dist.barrier()
