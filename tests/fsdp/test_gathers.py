"""Which groups `overlap` gathers: what lies where it was gathered to is not gathered again."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, Step, batch, made, mesh_of, same, sharded
from on_ranks import on_ranks
from torch import Tensor, nn

import counterpoint as cp
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.launch_shards import Shards
from counterpoint.fsdp.member import Member


@contextmanager
def noted() -> Iterator[list[str]]:
    """The names of what is gathered meanwhile, in its order."""
    found: list[str] = []
    gather = Shards.gather

    def noting(self: Shards, member: Member, *given: object, **named: object) -> object:
        found.append(torch_parts.name_of(member.g))
        return gather(self, member, *given, **named)  # type: ignore[arg-type]

    with mock.patch.object(Shards, "gather", noting):
        yield found


def gradients(
    model: nn.Module, x: Tensor, between: Callable[[Any], object] = lambda _: None
) -> list[Tensor]:
    """Of one step; `between` is called before its backward."""
    loss = model(x).float().square().mean()
    between(model)
    loss.backward()
    found = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[union-attr]
    for p in model.parameters():
        p.grad = None
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize("memory", ["kept", "ring"])
@pytest.mark.parametrize(("slots", "again"), [(1, [2, 1, 0]), (2, [1, 0]), (4, [])])
@on_ranks(2)
def test_what_the_forward_gathered_last_serves_the_backward(
    rank: int, ranks: int, slots: int, again: list[int], memory: str
):
    theirs, ours = (made(Step(), mesh_of(ranks)) for _ in range(2))
    cp.overlap(ours, trial_steps=0, slots=slots, memory=memory)  # type: ignore[arg-type]
    for i in range(3):
        with noted() as found:
            assert same(gradients(theirs, batch(rank, i)), gradients(ours, batch(rank, i)))
        if i:  # a gather of "ring" is collective, and brings what is there now, as torch's own
            backward = again if memory == "kept" else [3, 2, 1, 0]
            assert found == ["root", *map(str, (*range(4), *backward))], found


def write_whole(blocks: nn.Module) -> None:
    with torch.no_grad():
        for p in blocks.parameters():
            p.mul_(0.5)


def write_parts(blocks: nn.Module) -> None:
    for p in blocks.parameters():
        p.to_local().detach().mul_(0.5)  # type: ignore[operator]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("memory", ["kept", "ring"])
@pytest.mark.parametrize("change", [write_whole, write_parts])
@on_ranks(2)
def test_shards_that_change_before_the_backward_are_gathered_again(
    rank: int, ranks: int, change: Callable[[nn.Module], None], memory: str
):
    theirs, ours = (made(Step(hidden=(96, 96)), mesh_of(ranks)) for _ in range(2))
    cp.overlap(ours, trial_steps=0, memory=memory)  # type: ignore[arg-type]
    for i in range(3):
        want = gradients(theirs, batch(rank, i), lambda model: change(model[:2]))
        with noted() as found:
            assert same(want, gradients(ours, batch(rank, i), lambda model: change(model[:2])))
        assert found == ["root", "0", "1", "1", "0"]


def write_lists(blocks: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_([*blocks.parameters()], 0.5)


def write_by_collectives(blocks: nn.Module) -> None:
    for p in blocks.parameters():
        dist.all_reduce(p.to_local().detach())  # type: ignore[operator]


@pytest.mark.parametrize("change", [write_lists, write_by_collectives])
@on_ranks(2)
def test_writes_that_no_version_tells_are_marked(
    rank: int, ranks: int, change: Callable[[nn.Module], None]
):
    theirs, ours = (made(Step(hidden=(96, 96)), mesh_of(ranks)) for _ in range(2))
    overlapped = cp.overlap(ours, trial_steps=0, memory="kept")

    def marked(model: Any) -> None:
        change(model[:2])
        overlapped.mark_dirty()

    for i in range(2):
        want = gradients(theirs, batch(rank, i), lambda model: change(model[:2]))
        with noted() as found:
            assert same(want, gradients(ours, batch(rank, i), marked))
        assert found == ["root", "0", "1", "1", "0"]


class Scaling(Block):
    """It doubles what it has gathered behind its forward, which torch then drops."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.up.bias.mul_(2)
        return y


@on_ranks(2)
def test_gathered_weights_that_a_forward_has_written_are_gathered_again(rank: int, ranks: int):
    with mock.patch("fsdp_models.Block", Scaling):
        theirs, ours = (made(Step(hidden=(96, 96)), mesh_of(ranks)) for _ in range(2))
    cp.overlap(ours, trial_steps=0)
    for i in range(3):
        want = gradients(theirs, batch(rank, i))
        with noted() as found:
            assert same(want, gradients(ours, batch(rank, i)))
        assert found == ["root", "0", "1", "1", "0"]


@on_ranks(2)
def test_a_ring_refuses_a_forward_that_writes_what_peers_read(rank: int, ranks: int):
    with mock.patch("fsdp_models.Block", Scaling):
        model = made(Step(hidden=(96, 96)), mesh_of(ranks))
    cp.overlap(model, trial_steps=0, memory="ring")
    wanted = 'gathered parameters of 0 were written, which peers read; .* memory="kept"'
    with pytest.raises(cp.UnsupportedError, match=wanted):
        model(batch(rank, 0))


def penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the slope of the loss by the input."""
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[union-attr]


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_double_backward_is_refused_where_what_it_reads_is_resharded(
    rank: int, ranks: int, memory: str
):
    theirs, ours, model = (made(Step(policy=None), mesh_of(ranks)) for _ in range(3))
    for each in (ours, model):
        cp.overlap(each, trial_steps=0, memory=memory)  # type: ignore[arg-type]
    with pytest.raises(cp.UnsupportedError, match="create_graph=True saves parameters of root"):
        penalty(model, batch(rank, 0))
    assert same(gradients(theirs, batch(rank, 0)), gradients(ours, batch(rank, 0)))
    for each in (theirs, ours):
        each.set_reshard_after_forward(False)  # type: ignore[operator]
        each.set_reshard_after_backward(False)  # type: ignore[operator]
    assert same(penalty(theirs, batch(rank, 1)), penalty(ours, batch(rank, 1)))


def retained(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    y = model(batch(rank, 0))
    y.float().square().mean().backward(retain_graph=True)
    optimizer.step()
    y.float().sin().mean().backward()


def two_forwards(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    first, second = model(batch(rank, 0)), model(batch(rank, 1))
    second.float().square().mean().backward()
    optimizer.step()
    first.float().sin().mean().backward()


def stepped_between(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(batch(rank, 0)).float().square().mean().backward()
    y = model(batch(rank, 1))
    optimizer.step()
    y.float().sin().mean().backward()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("memory", ["kept", "ring"])
@pytest.mark.parametrize("life", [retained, two_forwards, stepped_between])
@on_ranks(2)
def test_an_optimizer_that_steps_before_a_backward_is_noticed(
    rank: int, ranks: int, life: Callable[..., None], memory: str
):
    """Foreach, as on GPUs, writes DTensors so that their versions stay."""

    def run(model: nn.Module) -> list[Tensor]:
        optimizer, out = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), []
        for _ in range(3):
            life(model, optimizer, rank)
            out += [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return out

    theirs, ours = (made(Step(), mesh_of(ranks)) for _ in range(2))
    cp.overlap(ours, trial_steps=0, slots=4, memory=memory)  # type: ignore[arg-type]
    assert same(run(theirs), run(ours))


@on_ranks(2)
def test_what_was_gathered_by_hand_is_gathered_again(rank: int, ranks: int):
    def by_hand(model: Any) -> None:
        model[3].unshard()
        for p in model[3].parameters():
            p.data.mul_(2)  # which no version tells
        model[3].reshard()

    theirs, ours = (made(Step(), mesh_of(ranks)) for _ in range(2))
    cp.overlap(ours, trial_steps=0)
    for i in range(2):
        want = gradients(theirs, batch(rank, i), by_hand)
        assert same(want, gradients(ours, batch(rank, i), by_hand))


@on_ranks(2)
def test_one_rank_alone_may_change_its_shard_in_a_ring(rank: int, ranks: int):
    def change(model: Any) -> None:
        if rank == 0:
            write_parts(model[:4])

    theirs, ours = (made(Step(), mesh_of(ranks)) for _ in range(2))
    cp.overlap(ours, trial_steps=0, memory="ring")
    for i in range(2):
        want = gradients(theirs, batch(rank, i), change)
        assert same(want, gradients(ours, batch(rank, i), change))


@on_ranks(2)
def test_a_model_that_is_gone_is_told_of_no_step(rank: int, ranks: int):
    model = made(Step(), mesh_of(ranks))
    gone, optimizer = made(Step(), mesh_of(ranks)), torch.optim.SGD(model.parameters(), lr=0.1)
    cp.overlap(model, trial_steps=0)
    overlapped = weakref.ref(cp.overlap(gone, trial_steps=0))
    assert overlapped() in torch_parts._TOLD
    del gone
    gc.collect()
    assert overlapped() is None
    gradients(model, batch(rank, 0))
    optimizer.step()
    torch.compile(optimizer.step, backend="eager")()


class InSomeOrder(nn.Module):
    """Layers that are called in the order that the caller picks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = self.layers[i](x)
        return x


@on_ranks(2)
def test_kept_shards_are_gathered_in_an_order_of_each_ranks_own(rank: int, ranks: int):
    """No rank waits for a peer that waits for it: all that it has was published at first."""
    torch.manual_seed(0)
    plain = InSomeOrder()
    torch.manual_seed(0)
    model = InSomeOrder()
    sharded(model, [*model.layers], Step(policy=None), mesh_of(ranks))
    cp.overlap(model, trial_steps=0, memory="kept")
    x = batch(rank, 0).detach()
    with torch.no_grad():
        for i, orders in enumerate([((0, 1, 2), (2, 1, 0)), ((1, 0), (0, 2, 1)), ((2,), (0, 1))]):
            for p, whole in zip(model.parameters(), plain.parameters(), strict=True):
                p.to_local().mul_(1 + i)  # type: ignore[operator]
                whole.mul_(1 + i)
            assert torch.equal(model(x, orders[rank]), plain(x, orders[rank]))
