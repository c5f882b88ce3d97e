"""Every transport moves the same bytes on CPU ranks, and a machine that lacks one says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import world
from refusals import wrongly_refused
from torch import Tensor

from benchmarks import peer_moves, transports
from benchmarks.transports import TRANSPORTS, missing, open_transport
from counterpoint.errors import UnsupportedError
from counterpoint.gpu import driver
from counterpoint.group import symmetric_cuda
from counterpoint.machine import kernels_refused

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
SENTINEL = 0xA5


def payload(rank: int, call: int, num_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("part", [20 * 1024, 48])
@pytest.mark.parametrize("name", TRANSPORTS)
@on_ranks(1, 2, 3)
def test_parts_arrive_where_they_belong(rank: int, ranks: int, name: str, part: int):
    """All-gathers and all-to-alls by turns, of one transport, against what must come out.

    20 KiB: several blocks of the kernel, the last one cut; 48 bytes: one, of odd alignment.
    """
    import triton

    room = ranks * part + 4096

    assert triton.knobs.runtime.interpret, "the kernel itself runs, not its stand-in"
    transport = open_transport(name, world(), CPU, room)
    gather, exchange = transport.all_gather(part), transport.all_to_all(part)
    for call in range(3):
        for scatters, move in ((False, gather), (True, exchange)):
            sent = [payload(r, 2 * call + scatters, room) for r in range(ranks)]
            transport.source.copy_(sent[rank])
            transport.target.fill_(SENTINEL)
            dist.barrier()
            move()
            start = rank * part if scatters else 0
            want = torch.cat([s[start : start + part] for s in sent])
            assert torch.equal(transport.target[: ranks * part], want), (name, call, scatters)
            assert (transport.target[ranks * part :] == SENTINEL).all(), "wrote past the parts"
            assert torch.equal(transport.source, sent[rank])
            dist.barrier()
    transport.check()
    transport.close()
    again = open_transport(name, world(), CPU, room)
    again.source.copy_(payload(rank, 9, room))
    again.all_gather(part)()
    want = torch.cat([payload(r, 9, room)[:part] for r in range(ranks)])
    assert torch.equal(again.target[: ranks * part], want), "the second of its kind"


@pytest.mark.parametrize("name", ["sm", "copy_engine"])
@on_ranks(2)
def test_peers_can_push_without_a_meeting(rank: int, ranks: int, name: str):
    transport = open_transport(name, world(), CPU, 64 * ranks)
    transport.source.copy_(payload(rank, 0, 64 * ranks))
    move = transport.all_gather(64, meets=False)
    if rank == 0:
        move()  # with a barrier in it, this rank would hang here
    dist.barrier()
    arrived = transport.target[:64].clone()
    dist.barrier()
    assert torch.equal(arrived, payload(0, 0, 64 * ranks)[:64])


@on_ranks(2)
def test_parts_and_memory_that_do_not_fit(rank: int, ranks: int) -> list[str]:
    part = "part_bytes must be a multiple of 16 from 16 to 64, got"
    memory = "num_bytes must be a multiple of 16 above 0, got"
    names = "name must be one of nccl, nccl_zero_cta, sm, copy_engine, got"
    move = open_transport("copy_engine", world(), CPU, 128).all_to_all
    parts = [({"part_bytes": n}, f"{part} {n}") for n in (0, 24, 80)]
    found = wrongly_refused(move, {}, parts, name="transport copy_engine", exact=True)
    for name, size, want, op in (("nic", 64, f"{names} nic", "transport"),
                                 ("sm", 24, f"{memory} 24", "transport sm"),
                                 ("sm", 0, f"{memory} 0", "transport sm")):  # fmt: skip
        given = {"name": name, "group": world(), "device": CPU, "num_bytes": size}
        found += wrongly_refused(open_transport, given, [({}, want)], name=op, exact=True)
    return found


@on_ranks(3)
def test_without_the_interpreter_the_kernel_has_a_stand_in(rank: int, ranks: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_moves.triton.knobs.runtime, "interpret", False)
        patch.setattr(peer_moves, "exchange_kernel", None)
        transport = open_transport("sm", world(), CPU, 64 * ranks)
        transport.source.copy_(payload(rank, 0, 64 * ranks))
        transport.all_to_all(48)()
    sent = [payload(r, 0, 64 * ranks)[48 * rank :][:48] for r in range(ranks)]
    assert torch.equal(transport.target[: 48 * ranks], torch.cat(sent))


def test_cpu_ranks_lack_none():
    group: Any = SimpleNamespace(size=lambda: 2)
    assert [missing(name, group, CPU) for name in TRANSPORTS] == [""] * 4
    assert missing("sm", group, torch.device("meta")) == "ranks are on cpu or cuda, not on meta"


# what a GPU lacks -> the transports that are then missing, and what is said
MACHINES = {
    "whole": ({}, {}),
    "no NCCL": ({"nccl": False}, {"nccl": "no NCCL; install one that is built for CUDA",
                                  "nccl_zero_cta": "no NCCL; install one"}),
    "gloo": ({"backend": "cpu:gloo"}, {"nccl": "backend is cpu:gloo; make it by init_process_group",
                                       "nccl_zero_cta": "make it by init_process_group"}),
    "NVLS": ({"nvls": "1"}, {"nccl_zero_cta": "needs NVLS off, .*; set NCCL_NVLS_ENABLE=0 before"}),
    "old torch": ({"policy": False}, {"nccl_zero_cta": "cannot ask NCCL for it; install torch >="}),
    "old NCCL": ({"version": (2, 27, 5)},
                 {"nccl_zero_cta": r"NCCL 2\.27\.5 has none; install 2\.28 or newer"}),
    "no symmetric memory": ({"symmetric": False}, {"sm": "install torch >= 2.11",
                                                   "copy_engine": "install torch >= 2.11"}),
    "an island": ({"reached": (1,)}, {"sm": r"GPU 0 does not reach GPUs \[2, 3\]; NVLink or PCIe",
                                      "copy_engine": "GPU 0 does not reach GPUs"}),
    "no copy engine": ({"engines": 0}, {"copy_engine": "a GPU has no copy engine"}),
    "an old GPU": ({"capability": "7.5"},
                   dict.fromkeys(("sm", "copy_engine"), "capabilities .*, not on 7.5")),
    "no bindings": ({"engines": None}, {"copy_engine": "pip install cuda-bindings"}),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_machine_lacks_is_named(machine: str, monkeypatch: pytest.MonkeyPatch):
    facts, lacking = MACHINES[machine]
    gpus(monkeypatch, **facts)
    group: Any = SimpleNamespace(size=lambda: 4)
    for name in TRANSPORTS:
        if name not in lacking:
            assert missing(name, group, GPU) == ""
            continue
        with pytest.raises(UnsupportedError, match=f"^transport {name}: .*{lacking[name]}"):
            open_transport(name, group, GPU, 64)


def gpus(
    monkeypatch: pytest.MonkeyPatch, *, nccl: bool = True, backend: str = "cuda:nccl",
    nvls: str = "0", policy: bool = True, version: tuple[int, ...] = (2, 28, 9),
    symmetric: bool = True, reached: tuple[int, ...] = (1, 2, 3), engines: int | None = 3,
    capability: str = "9.0",
) -> None:  # fmt: skip
    """Four GPUs on paper, with what they have."""

    def num_copy_engines(_: int) -> int:
        if engines is None:
            raise UnsupportedError("copy engine: needs cuda-bindings; pip install cuda-bindings")
        return engines

    def torch_symmetric_memory() -> None:
        if not symmetric:
            raise UnsupportedError("allocate: torch 2.9 lacks it; install torch >= 2.11")

    class Nccl:
        @staticmethod
        def Options() -> Any:
            return SimpleNamespace(config=SimpleNamespace(cta_policy=0))

    if policy:
        Nccl.NCCL_CTA_POLICY_ZERO = 2  # type: ignore[attr-defined]
    monkeypatch.setenv("NCCL_NVLS_ENABLE", nvls)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, i: i in reached)
    monkeypatch.setattr(driver, "num_copy_engines", num_copy_engines)
    monkeypatch.setattr(transports, "refused_on", lambda _: kernels_refused(capability))
    monkeypatch.setattr(symmetric_cuda, "torch_symmetric_memory", torch_symmetric_memory)


def test_ring_order_never_meets():
    """At each step every rank pushes to another one, and to each of its peers once."""
    for ranks in (2, 3, 4, 8):
        orders = []
        for rank in range(ranks):
            moves_of = peer_moves.ring(rank, ranks)
            assert sorted([*moves_of, rank]) == list(range(ranks))
            orders.append(moves_of)
        for step in zip(*orders, strict=True):
            assert len(set(step)) == ranks
