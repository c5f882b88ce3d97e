"""Gradients of the group that scatters last are pushed as soon as each is there, or together."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp_models import Block, Step, batch, made, mesh_of, same, sharded
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import counterpoint as cp
from counterpoint.fsdp.in_place import InPlace
from counterpoint.fsdp.launch_scatters import Scatters


@contextmanager
def pushed() -> Iterator[list[tuple[int, int, bool]]]:
    """(group, gradients, whether ahead) of what is pushed meanwhile, in its order."""
    found: list[tuple[int, int, bool]] = []
    push = Scatters._push

    def noting(self: Scatters, member: Any, grads: Any, mask: int, stream: Any) -> None:
        found.append((member.index, len(grads), not mask))
        push(self, member, grads, mask, stream)

    with mock.patch.object(Scatters, "_push", noting):
        yield found


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of one step."""
    model(x).float().square().mean().backward()
    return taken(model)


def taken(model: nn.Module) -> list[Tensor]:
    """The gradients that shards have; none have any behind it."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        p.grad = None
    return [getattr(grad, "_local_tensor", grad).clone() for grad in found]


def pair(ranks: int, make: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, nn.Module]:
    """A model as torch has it, and overlapped."""
    make = make or (lambda: made(Step(), mesh_of(ranks)))
    theirs, ours = make(), make()
    cp.overlap(ours, trial_steps=0)
    return theirs, ours


@on_ranks(2)
def test_the_last_layers_gradients_leave_one_by_one(rank: int, ranks: int):
    """Those of the root, whose head comes first in a backward, do not: others scatter between."""
    theirs, ours = pair(ranks)
    for i in range(5):
        x = batch(rank, i)
        with pushed() as found:
            assert same(gradients(theirs, x), gradients(ours, x))
        if i > 2:
            layer = found[-2][0]
            ahead = [(layer, 1, True)] * 2  # two matrices; a norm and biases are small
            assert found[-4:] == [*ahead, (layer, 3, False), (found[-1][0], 2, False)]


@on_ranks(2)
def test_a_gradient_that_changes_behind_its_push_is_pushed_again(rank: int, ranks: int):
    theirs, ours = pair(ranks)
    for i in range(6):
        x = batch(rank, i)
        if i == 3:  # parameters whose gradients are written once they are whole
            for model in (theirs, ours):
                layer: Any = model[0]  # type: ignore[index]
                group = layer._get_fsdp_state()._fsdp_param_group
                up = group.fsdp_params[1]._unsharded_param
                up.register_post_accumulate_grad_hook(_double)
                down = group.fsdp_params[3]._unsharded_param
                down.register_post_accumulate_grad_hook(_replace)
        with pushed() as found:
            want = gradients(theirs, x)
            assert same(want, gradients(ours, x))
        if i == 4:
            assert [n for _, n, ahead in found if not ahead][-2:] == [5, 2]


def _double(p: Any) -> None:
    p.grad.mul_(2)


def _replace(p: Any) -> None:
    p.grad = p.grad * 3


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13")
@on_ranks(2)
def test_a_backward_that_fails_leaves_nothing_behind(rank: int, ranks: int):
    theirs, ours = pair(ranks)
    for model in (theirs, ours):
        for i in range(4):
            gradients(model, batch(rank, i))

        def fail(_: Any) -> None:
            raise ArithmeticError("in a backward")

        x = batch(rank, 4)
        handle = model[0].norm.register_full_backward_hook(lambda *_: fail(_))  # type: ignore[index,union-attr]
        with pytest.raises(ArithmeticError):
            model(x).float().square().mean().backward()
        handle.remove()
        taken(model)  # whole gradients, too, where modules have whole parameters still
        model.reset_iter_state()  # type: ignore[operator]
        taken(model)
    for i in range(3):
        assert same(gradients(theirs, batch(rank, 5 + i)), gradients(ours, batch(rank, 5 + i)))


class Around(nn.Module):
    """Layers in an order that the caller picks, between two halves of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for i in order:
            x = self.layers[i](x)
        return self.last(x)


@on_ranks(2)
def test_layers_that_come_in_another_order_each_time(rank: int, ranks: int):
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Around()
        return sharded(model, [*model.layers], Step(), mesh_of(ranks))

    theirs, ours = pair(ranks, make)
    orders = [(0, 1, 2), (0, 1, 2), (2, 0), (0, 1, 2), (1, 2, 0), (0,), (1, 1, 0), (0, 1, 2), ()]
    for i, order in enumerate(3 * orders):
        x = batch(rank, i)
        results = list[list[Tensor]]()
        for model in (theirs, ours):
            model(x, order).float().square().mean().backward()
            results.append(taken(model))
        assert same(*results)


@on_ranks(2)
def test_hooks_that_write_gradients_as_no_version_tells(rank: int, ranks: int):
    theirs, ours = pair(ranks)
    for i in range(6):
        if i == 3:
            for layer in (theirs[0], ours[0]):  # type: ignore[index]

                def write(*_: Any, layer: Any = layer) -> None:
                    for p in (layer.up.weight, layer.down.weight):
                        p.grad.data.mul_(2)

                layer.norm.register_full_backward_hook(write)
        assert same(gradients(theirs, batch(rank, i)), gradients(ours, batch(rank, i)))


@pytest.mark.parametrize("gathered", [False, True])
@on_ranks(2)
def test_parameters_that_are_unfrozen(rank: int, ranks: int, gathered: bool):
    """Of the group that scatters last, before its forward; of the root, while it is gathered."""
    of, name = (4, "weight") if gathered else (0, "up.weight")

    def make() -> nn.Module:
        model = made(Step(), mesh_of(ranks))
        model[of].get_parameter(name).requires_grad_(False)
        return model

    theirs, ours = pair(ranks, make)
    for i in range(5):
        if i == 2:
            for model in (theirs, ours):
                if gathered:
                    with torch.no_grad():
                        model(batch(rank, 9))
                model.requires_grad_(True)
        assert same(gradients(theirs, batch(rank, i)), gradients(ours, batch(rank, i)))


@on_ranks(2)
def test_a_model_that_is_gone_leaves_no_memory(rank: int, ranks: int):
    """No collector sees what the hooks of a tensor hold."""
    model = made(Step(), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    for i in range(4):
        gradients(model, batch(rank, i))
    assert overlapped._groups.all[0].scatters.last is not None  # type: ignore[union-attr]
    shard, gathered = (
        weakref.ref(t) for t in (model[0].norm.weight, *overlapped._groups.members[0].buffers[:1])
    )  # type: ignore[union-attr,index]
    del model, overlapped
    gc.collect()
    assert shard() is None
    assert gathered() is None


@on_ranks(2)
def test_off_ends_it(rank: int, ranks: int):
    model = made(Step(), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    for i in range(4):
        gradients(model, batch(rank, i))
    overlapped.off()
    with mock.patch.object(InPlace, "push_ahead", side_effect=AssertionError):
        gradients(model, batch(rank, 4))
    found = [p for m in model.modules() if hasattr(m, "_get_fsdp_state")
             for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params]  # fmt: skip
    assert not any(getattr(p._unsharded_param, "_post_accumulate_grad_hooks", None) for p in found)
