"""Overlapped models whose groups are in use at a time: nested, kept, by hand, several roots."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fsdp_models import DIM, MIXED, Step, batch, made, mesh_of, same
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import counterpoint as cp

STEPS = 6
WAYS = [("kept", 0), ("kept", 2), ("ring", 0), ("ring", 2)]  # memory, and trial_steps


class Inner(nn.Module):
    """Experts, say: a group of its own within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.up(x))


class Outer(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.inner, self.b, self.again = (
            nn.Linear(DIM, DIM),
            Inner(),
            nn.Linear(DIM, DIM),
            again,
        )

    def within(self, x: Tensor) -> Tensor:
        return self.b(self.inner(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (
            checkpoint(self.within, x, use_reentrant=False) if self.again else self.within(x)
        )


def nested(world_size: int, *, again: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model, mesh = nn.Sequential(*(Outer(again) for _ in range(4))), mesh_of(world_size)
    for block in model:
        fully_shard(block.inner, mesh=mesh, mp_policy=MIXED)
        fully_shard(block, mesh=mesh, mp_policy=MIXED)
    fully_shard(model, mesh=mesh, mp_policy=MIXED)
    return summed(model)


def summed(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trained(
    model: nn.Module, rank: int, before: Callable[[int], None] = lambda i: None
) -> list[Tensor]:
    """Losses and gradients of steps; `before` is called before each."""
    weights, out = [*model.parameters()], list[Tensor]()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for i in range(STEPS):
        before(i)
        loss = model(batch(rank, i)).float().square().mean()
        loss.backward()
        out.append(loss.detach())
        out += [p.grad.to_local().clone() for p in weights if p.grad is not None]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return out


def check(make: Any, run: Any, **options: Any) -> cp.Overlapped:
    """Torch's bits."""
    want, model = run(make()), make()
    overlapped = cp.overlap(model, **{"trial_steps": 0} | options)
    assert same(want, run(model)), overlapped.explain()
    return overlapped


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("memory", "trial_steps"), WAYS)
@pytest.mark.parametrize("slots", [1, 2, 16])
@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_groups_within_groups(
    rank: int, ranks: int, again: bool, slots: int, memory: str, trial_steps: int
):
    """Gathers ahead find no room; forwards are computed again within a backward."""
    made_so = lambda: nested(ranks, again=again)  # noqa: E731
    run = lambda m: trained(m, rank)  # noqa: E731
    check(made_so, run, slots=slots, memory=memory, trial_steps=trial_steps)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("memory", "trial_steps"), WAYS)
@on_ranks(2)
def test_one_slot_and_gathers_ahead_in_the_backward(
    rank: int, ranks: int, memory: str, trial_steps: int
):
    mesh = mesh_of(ranks)
    run = lambda m: trained(m, rank)  # noqa: E731
    check(lambda: made(Step(), mesh), run, slots=1, memory=memory, trial_steps=trial_steps)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("memory", "trial_steps"), WAYS)
@on_ranks(2)
def test_weights_that_stay_gathered_while_gradients_accumulate(
    rank: int, ranks: int, memory: str, trial_steps: int
):
    def run(model: Any) -> list[Tensor]:
        weights, out = [*model.parameters()], list[Tensor]()
        for i in range(STEPS):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                model(batch(rank, 2 * i + last)).float().square().mean().backward()
            out += [p.grad.to_local().clone() for p in weights]
            for p in weights:
                p.grad = None
        return out

    check(lambda: nested(ranks), run, memory=memory, trial_steps=trial_steps)
    check(lambda: made(Step(), mesh_of(ranks)), run, memory=memory, trial_steps=trial_steps)


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_weights_that_come_to_stay_gathered_serve_the_backward_as_they_were(
    rank: int, ranks: int, memory: str
):
    """More groups than slots, and an optimizer that steps between a forward and its backward."""

    def run(model: Any) -> list[Tensor]:
        weights, out = [*model.parameters()], list[Tensor]()
        optimizer = torch.optim.SGD(weights, lr=0.5)
        for i in range(4):
            if i == 1:
                model.set_reshard_after_forward(False)
            loss = model(batch(rank, i)).float().square().mean()
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            out += [p.grad.to_local().clone() for p in weights]  # type: ignore[union-attr]
        return out

    check(lambda: made(Step(), mesh_of(ranks)), run, memory=memory)


@on_ranks(2)
def test_weights_that_stay_gathered_for_an_evaluation_take_no_memory(rank: int, ranks: int):
    model: Any = made(Step(), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    model(batch(rank, 0)).float().square().mean().backward()
    before = overlapped.num_bytes()
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(batch(rank, 1))
    assert overlapped.num_bytes() == before


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("memory", "trial_steps"), WAYS)
@on_ranks(2)
def test_gathers_by_hand_on_their_way_and_all_at_once(
    rank: int, ranks: int, memory: str, trial_steps: int
):
    """Before the first forward, too; and between steps all weights are read, as of an export."""
    mesh, read = mesh_of(ranks), list[Tensor]()

    def run(model: Any) -> list[Tensor]:
        read.clear()

        def before(i: int) -> None:
            with torch.no_grad():
                read.append(model(batch(rank, 100 + i)).float().sum() if i else torch.zeros(()))
            for handle in [block.unshard(async_op=True) for block in model[:4]]:
                handle.wait() if i % 2 else None
            if i % 2:
                weights = [p for block in model[:4] for p in block.parameters()]
                read.extend(p.detach().float().clone() for p in weights)
                for block in model[:4]:
                    block.reshard()

        return trained(model, rank, before) + read

    check(lambda: made(Step(), mesh), run, memory=memory, trial_steps=trial_steps)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("trial_steps", [0, 4])
@on_ranks(2)
def test_two_models_in_one_of_which_one_waits_for_the_other(
    rank: int, ranks: int, trial_steps: int
):
    """As a generator's graph waits while what judges it is trained; each is a root of its own."""

    def make() -> nn.Module:
        return nn.ModuleDict({"maker": nested(ranks), "judge": nested(ranks)})

    def run(models: Any) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(STEPS):
            found = models["maker"](batch(rank, i))
            models["judge"](found.detach()).float().square().mean().backward()
            models["judge"].zero_grad()
            models["judge"](found).float().square().mean().backward()
            out += [p.grad.to_local().clone() for p in models.parameters() if p.grad is not None]
            for p in models.parameters():
                p.grad = None
        return out

    overlapped = check(make, run, trial_steps=trial_steps)
    assert len(overlapped.found) == 16, "eight groups of each model"


@on_ranks(2)
def test_weights_that_are_trained_later(rank: int, ranks: int):
    def make() -> nn.Module:
        model = made(Step(), mesh_of(ranks))
        model[1].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
        return model

    def run(model: Any) -> list[Tensor]:
        return trained(model, rank, lambda i: i == 2 and model[1].up.weight.requires_grad_(True))

    check(make, run)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        a, b = self.layers[0](x).cos(), self.layers[1](x).cos()
        return a + (b.detach() if skips else b)


@on_ranks(2)
def test_ranks_that_lack_a_whole_group_do_not_take_another_groups_gradients(rank: int, ranks: int):
    mesh, model = mesh_of(ranks), Skips()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MIXED)
    fully_shard(model, mesh=mesh, mp_policy=MIXED)
    cp.overlap(summed(model), trial_steps=0)
    with warnings.catch_warnings(), pytest.raises(cp.InputError, match=r"all of layers\.\d or"):
        warnings.simplefilter("ignore")  # of a view that a layer returns
        model(batch(rank, 0), rank == 0).float().sum().backward()
