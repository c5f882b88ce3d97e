"""The place of this process: every version that times depend on."""

import torch

from counterpoint.choose.known import CPU
from counterpoint.ops import place


def test_a_place_of_cpu_ranks():
    found = place.place_of(torch.device("cpu"), 4, 2)
    assert (found.gpu, found.ranks, found.islands) == (CPU, 4, 2)
    assert set(found.versions) == {"counterpoint", "torch", "cpu"}
    assert found.versions["torch"] == torch.__version__


def test_a_place_of_gpus_has_the_libraries_that_run_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    place._versions.cache_clear()
    found = place.place_of(torch.device("cuda", 0), 4)
    place._versions.cache_clear()
    assert (found.gpu, found.islands, found.versions["nccl"]) == ("NVIDIA H200", 1, "2.28.9")
    assert set(found.versions) == {"counterpoint", "torch", "cpu", "triton", "nccl", "driver"}
