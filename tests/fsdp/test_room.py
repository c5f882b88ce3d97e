"""What `overlap` takes of memory, and how it finds out what there is."""

from typing import Any
from unittest import mock

import pytest
import torch
from fsdp_models import Step, batch, made, mesh_of, same, trained
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import counterpoint as cp
from counterpoint.fsdp import room, torch_parts
from counterpoint.fsdp.member import ALIGN

LEFT = "counterpoint.fsdp.room.left"


def sizes_of(ranks: int, rank: int, **options: Any) -> tuple[dict[str, int], list[int]]:
    """Bytes that are taken, and of each group gathered."""
    model = made(Step(hidden=(960,) * 4), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0, **options)
    model(batch(rank, 0)).float().square().mean().backward()
    return overlapped.num_bytes(), [m.gathered_bytes for m in overlapped._groups.members]


@on_ranks(4)
def test_bytes_of_each_kind(rank: int, ranks: int):
    """Groups of bf16 blocks are gathered to two slots; the root's own weights stay gathered."""
    kept, groups = sizes_of(ranks, rank, memory="kept")
    *blocks, root = sorted(groups, reverse=True)
    most = {"published": sum(groups) // ranks, "inboxes": max(blocks),
            "gathered": 2 * max(blocks) + root}  # fmt: skip
    for name, num_bytes in kept.items():
        lost = ALIGN * 5 * len(groups)  # of 5 parameters, each of which begins at a multiple
        assert most[name] - lost <= num_bytes <= most[name] + lost
    in_turn, _ = sizes_of(ranks, rank, memory="ring")
    assert in_turn == kept | {"published": 0}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_torchs_steps_come_first_where_memory_is_to_be_found_out(
    rank: int, ranks: int, foreach: bool
):
    """Micro-batches are no steps. What one rank lacks, all do without."""
    step = Step(micro=2, steps=6, foreach=foreach)
    want = trained(made(step, mesh_of(ranks)), step, rank)
    for plenty in (True, False):
        model = made(Step(), mesh_of(ranks))
        overlapped = cp.overlap(model, trial_steps=0)
        said: list[str] = []
        model.register_forward_hook(lambda *_, of=overlapped, to=said: to.append(of.explain()))
        with mock.patch(LEFT, return_value=1 << 40 if plenty or rank else 1 << 10):
            got = trained(model, step, rank)
        assert same(want, got)
        waited = sum("not yet: after 2 steps as they are" in text for text in said)
        assert waited == 5 and "gathered in place" in said[5]  # two forwards a step, and one behind
        assert (overlapped.num_bytes()["published"] > 0) == plenty


def test_when_enough_has_run(monkeypatch: pytest.MonkeyPatch):
    weights = [0]
    monkeypatch.setattr(torch_parts, "versions", lambda g: [(0, weights[0], 0)])
    watch = room.Watch()
    assert [watch.over([None]) for _ in range(5)] == [False] * 5
    weights[0] += 1
    assert not watch.over([None])
    assert not watch.over([None])
    weights[0] += 1
    assert watch.over([None])
    watch = room.Watch()  # of a model that nobody trains
    assert [watch.over([None]) for _ in range(17)].index(True) == 16
    assert not watch.trained


def test_what_is_left_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 10**9, 80 * 10**9))
    assert room.left(torch.device("cuda", 0)) == 6 * 10**9
    assert room.left(torch.device("cpu")) is None


@on_ranks(2)
def test_several_roots_are_set_up_as_they_come(rank: int, ranks: int):
    """The second root's steps are not waited for again."""
    mesh, found = mesh_of(ranks), list[nn.Module]()
    for _ in range(2):
        found.append(fully_shard(nn.Linear(32, 32), mesh=mesh))
        found[-1].set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    model = nn.ModuleList(found)
    overlapped = cp.overlap(model, trial_steps=0)
    x = batch(rank, 0)
    with mock.patch(LEFT, return_value=1 << 40), torch.no_grad():
        for _ in range(17):
            assert not overlapped.found
            found[0](x)
        assert len(overlapped.found) == 1
        found[1](x)
        assert len(overlapped.found) == 2
    assert overlapped.num_bytes()["published"] == 0  # nobody knows what training would take
