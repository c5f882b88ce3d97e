"""`overlap` that begins, ends or changes its way in the midst of a model's life."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp_models import MIXED, Block, Step, batch, made, mesh_of, same, sharded
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import counterpoint as cp
from counterpoint.fsdp.trial import Trial, Verdict

PLENTY = mock.patch("counterpoint.fsdp.room.left", return_value=1 << 40)  # as on a GPU: it waits
POLICIES = {"fp32": None, "mixed": MIXED}


class Skipping(nn.Module):
    """Blocks, of which some calls leave one out."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks, self.used = nn.ModuleList(Block() for _ in range(blocks)), range(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = self.blocks[i](x)
        return torch.tanh(x)


def skipping(ranks: int, blocks: int = 3) -> Skipping:
    torch.manual_seed(0)
    model = Skipping(blocks)
    sharded(model, list(model.blocks), Step(), mesh_of(ranks))
    return model


def backward(model: Any, rank: int, index: int) -> Tensor:
    loss = model(batch(rank, index)).float().square().mean()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[union-attr]


def updated(model: nn.Module) -> list[Tensor]:
    """Its gradients, and a step by them."""
    found = gradients(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
                p.grad = None
    return found


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"g": made(Step(), mesh_of(2)), "d": made(Step(), mesh_of(2))})


def nothing(model: nn.Module) -> None:
    return None


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2)
def test_it_waits_for_gradients_to_be_reduced(rank: int, ranks: int, policy: str):
    """As many forwards as tell that nobody trains, though it is micro-batches that accumulate."""

    def run(model: Any) -> list[Tensor]:
        out = list[Tensor]()
        for micro in (20, 2):
            for j in range(micro):
                model.set_requires_gradient_sync(j == micro - 1)
                out.append(backward(model, rank, 30 * micro + j))
            out += updated(model)
        return out

    step = Step(policy=POLICIES[policy])
    want, model = run(made(step, mesh_of(ranks))), made(step, mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    with PLENTY:
        assert same(want, run(model))
    assert overlapped.explain().endswith("on")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", ["on", "off"])
@on_ranks(2)
def test_on_and_off_among_micro_batches(rank: int, ranks: int, what: str, policy: str):
    def run(model: Any, between: Callable[[Any], Any]) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(2):
            model.set_requires_gradient_sync(False)
            backward(model, rank, 2 * i)
            if i:
                between(model)
            model.set_requires_gradient_sync(True)
            backward(model, rank, 2 * i + 1)
            out += updated(model)
        return out

    step = Step(policy=POLICIES[policy])
    want, model = run(made(step, mesh_of(ranks)), nothing), made(step, mesh_of(ranks))
    if what == "off":
        overlapped = cp.overlap(model, trial_steps=0)
        got = run(model, lambda _: overlapped.off())
    else:
        got = run(model, lambda m: cp.overlap(m, trial_steps=0))
    assert same(want, got)


@on_ranks(2)
def test_it_does_not_end_while_a_backward_is_to_come(rank: int, ranks: int):
    model = made(Step(), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    loss = model(batch(rank, 0)).float().square().mean()
    with pytest.raises(cp.UnsupportedError, match="call it behind the backward"):
        overlapped.off()
    loss.backward()
    overlapped.off()  # though the loss still has its graph


@pytest.mark.parametrize("memory", ["auto", "kept", "ring"])
@on_ranks(2)
def test_two_models_of_which_one_waits_for_its_backward(rank: int, ranks: int, memory: str):
    """A GAN: a forward of the one begins while a graph of the other is alive."""

    def run(models: Any) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(4):
            fake = models["g"](batch(rank, i))
            models["d"](fake.detach()).float().square().mean().backward()
            out += updated(models["d"])
            loss = models["d"](fake).float().square().mean()
            loss.backward()
            out += [loss.detach(), *updated(models["g"])]
            models.zero_grad()
        return out

    want, models = run(pair()), pair()
    overlapped = cp.overlap(models, trial_steps=0, memory=memory)
    with PLENTY:
        assert same(want, run(models))
    assert len(overlapped.found) == 10 and overlapped.explain().endswith("on")


@pytest.mark.parametrize("how", ["auto", "later"])
@on_ranks(2)
def test_a_group_that_is_not_used_next(rank: int, ranks: int, how: str):
    """Set up on a model that has run; the next micro-batch leaves a block out."""

    def run(model: Any, between: Callable[[Any], Any]) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(2):
            backward(model, rank, i)
            out += updated(model)
        between(model)
        for j, (used, last) in enumerate([((0, 2), False), (range(3), False), (range(3), True)]):
            model.used = used
            model.set_requires_gradient_sync(last)
            backward(model, rank, 10 + j)
        return [*out, *gradients(model)]

    want, model = run(skipping(ranks), nothing), skipping(ranks)
    with PLENTY:
        if how == "auto":
            cp.overlap(model, trial_steps=0)
            got = run(model, nothing)
        else:
            got = run(model, lambda m: cp.overlap(m, trial_steps=0, memory="kept"))
    assert same(want, got)


@pytest.mark.parametrize("memory", ["auto", "kept", "ring"])
@on_ranks(2)
def test_it_begins_in_inference_mode(rank: int, ranks: int, memory: str):
    def run(model: Any, between: Callable[[Any], Any]) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(4):
            if i == 2:
                between(model)
                with torch.inference_mode():
                    out.append(model(batch(rank, 9).detach()).clone())
            out.append(backward(model, rank, i))
            out += updated(model)
        return out

    want, model = run(made(Step(), mesh_of(ranks)), nothing), made(Step(), mesh_of(ranks))
    with PLENTY:
        got = run(model, lambda m: cp.overlap(m, trial_steps=0, memory=memory))
    assert same(want, got)


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_a_group_has_memory_of_its_own_only_where_no_graph_reads_it(
    rank: int, ranks: int, memory: str
):
    """A forward without a backward is forgotten with its result, and not before."""
    model = skipping(ranks, 4)
    cp.overlap(model, trial_steps=0, memory=memory)
    backward(model, rank, 0)
    model.used = (0, 1)
    waits = model(batch(rank, 1))
    model.used = (2, 3)
    backward(model, rank, 2)
    for block in (model.blocks[2], model.blocks[3]):
        block.unshard()  # type: ignore[operator]
    with pytest.raises(cp.UnsupportedError, match="call it with more slots"):
        model.blocks[0].unshard()  # type: ignore[operator]
        model.blocks[0].up.weight.sum()
    del waits
    for block in (model.blocks[0], model.blocks[1]):
        block.unshard()  # type: ignore[operator]
    want = skipping(ranks, 4)
    for block in want.blocks:
        block.unshard()  # type: ignore[operator]
    for a, b in zip(model.blocks.parameters(), want.blocks.parameters(), strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_a_block_that_is_held_in_torchs_turn_of_a_trial(rank: int, ranks: int):
    model = made(Step(), mesh_of(ranks))
    cp.overlap(model, trial_steps=8, memory="kept")
    want = made(Step(), mesh_of(ranks))
    for i in range(6):
        if i == 1:  # torch's
            for each in (model, want):
                each[2].unshard()  # type: ignore[operator]
        assert torch.equal(backward(want, rank, i), backward(model, rank, i))
        assert same(updated(want), updated(model))


@on_ranks(2)
def test_without_memory_for_gradients_in_fp32_torch_reduces_them(rank: int, ranks: int):
    def run(model: Any) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(4):
            model.set_requires_gradient_sync(i % 2 == 1)
            backward(model, rank, i)
            out += updated(model) if i % 2 else []
        return out

    want, model = run(made(Step(), mesh_of(ranks))), made(Step(), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    backward(model, rank, 0)
    model.zero_grad()
    here = "counterpoint.group.symmetric_cpu._available_bytes"
    with mock.patch(here, return_value=0 if rank else 1 << 40):
        assert same(want, run(model))
    assert "torch reduces some: no memory for gradients in fp32" in overlapped.explain()


@on_ranks(2)
def test_a_model_that_comes_after_a_verdict_against_ours_is_left(rank: int, ranks: int):
    models = pair()
    overlapped = cp.overlap(models, trial_steps=2)
    with mock.patch.object(Trial, "_look", return_value=Verdict(1.0, 2.0, 0.4, 0.6, 2)):
        for i in range(8):
            backward(models["g"], rank, i)
            updated(models["g"])
        assert overlapped.explain().endswith("overlapping was not faster beyond doubt")
        want = made(Step(), mesh_of(ranks))
        for i in range(3):
            assert torch.equal(backward(want, rank, i), backward(models["d"], rank, i))
            assert same(updated(want), updated(models["d"]))
    assert len(overlapped.found) == 5


@on_ranks(4)
def test_replicas_have_one_verdict(rank: int, ranks: int):
    """Though one of them alone finds torch faster."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    want, model = made(Step(), mesh), made(Step(), mesh)
    overlapped = cp.overlap(model, trial_steps=2)
    with mock.patch.object(Trial, "_ms", lambda self, step: 1.0 + self.ours(step) * (rank < 2)):
        for i in range(70):
            if overlapped.verdict and i % 8 == 0:
                break
            assert torch.equal(backward(want, rank, i), backward(model, rank, i))
            assert same(updated(want), updated(model))
    told: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(told, overlapped.verdict)
    assert told[0] is not None and all(each == told[0] for each in told)
    assert not told[0].ours


@on_ranks(4)
def test_replicas_leave_the_same_groups_to_torch(rank: int, ranks: int):
    """Where the ranks of one of them have no memory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    want, model = made(Step(), mesh), made(Step(), mesh)
    overlapped = cp.overlap(model, trial_steps=0)
    here = "counterpoint.fsdp.overlapped.Shards"
    lacking = mock.patch(here, side_effect=OSError(12, "none")) if rank < 2 else mock.MagicMock()
    with lacking:
        for i in range(2):
            assert torch.equal(backward(want, rank, i), backward(model, rank, i))
            assert same(updated(want), updated(model))
    why = "no memory that all ranks share" if rank < 2 else "a replica of its shards"
    assert overlapped.explain().count(why) == 5
