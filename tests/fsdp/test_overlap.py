"""FSDP2 models, overlapped on CPU ranks: every bit is torch's own, in all of FSDP2's life."""

import os
import random
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import DIM, MIXED, Block, Step, batch, both, made, mesh_of, same, sharded, trained
from on_ranks import on_ranks
from rankpool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import counterpoint as cp
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.launch_gathers import Gathers
from counterpoint.group.workspace import workspace_of
from counterpoint.presets import preset

STEPS = {
    "mixed": Step(), "fp32": Step(policy=None), "clipped": Step(clip=True),
    "uneven rows": Step(hidden=(96, 97, 95, 96)), "accumulated": Step(micro=3),
    "accumulated, all reduced": Step(micro=2, sync_all=True), "a frozen block": Step(frozen=(1,)),
    "checkpointed": Step(checkpoint=True), "never resharded": Step(keep=True),
    "divided by 3": Step(factor=3.0), "2 ahead": Step(prefetch=2), "3 ahead": Step(prefetch=3),
}  # fmt: skip
IN_PLACE = "gathered in place"


@pytest.mark.drawn(10)
@pytest.mark.parametrize("memory", ["kept", "ring"])
@pytest.mark.parametrize("name", STEPS)
@on_ranks(2)
def test_bits_are_torchs(rank: int, world_size: int, name: str, memory: str):
    want, got, overlapped = both(STEPS[name], rank, world_size, memory=memory)
    assert same(want, got)
    assert all(IN_PLACE in str(group) for group in overlapped.found), overlapped.explain()
    with_gradients = [g for g in overlapped.found if g.why_scatter != "frozen"]
    assert not any(group.why_scatter for group in with_gradients), overlapped.explain()


@pytest.mark.parametrize("name", ["mixed", "uneven rows", "accumulated, all reduced"])
@on_ranks(4)
def test_training_on_4_ranks_goes_as_torchs(rank: int, world_size: int, name: str):
    """Sums of four numbers in fp32 are rounded by their order, which is torch's or the ranks'."""
    want, got, _ = both(STEPS[name], rank, world_size)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_sums_of_4_ranks_are_as_near_to_fp64_as_torchs(rank: int, ranks: int):
    """Against the sum in fp64 of what each rank's own model gives, in bf16, without FSDP2."""
    mesh, x = mesh_of(ranks), batch(rank, 0)
    whole = nn.Sequential(*(Block(96) for _ in range(4)), nn.Linear(DIM, DIM), nn.Tanh())
    for a, b in zip(whole.parameters(), made(Step(), mesh).parameters(), strict=True):
        a.data = b.full_tensor().to(torch.bfloat16)  # type: ignore[operator]
    whole(x.to(torch.bfloat16)).float().square().mean().backward()
    errors: list[float] = []
    for ours in (False, True):
        model = made(Step(), mesh)
        if ours:
            cp.overlap(model, trial_steps=0)
        model(x).float().square().mean().backward()
        squares = 0.0
        for p, own in zip(model.parameters(), whole.parameters(), strict=True):
            assert own.grad is not None
            exact = own.grad.double()
            dist.all_reduce(exact)
            found = p.grad.full_tensor().double()  # type: ignore[union-attr]
            squares += (found - exact / ranks).square().sum().item()
        errors.append(squares**0.5)
    torchs, mine = errors
    assert mine <= 1.02 * torchs
    assert torchs < 1e-6


@on_ranks(2)
def test_bf16_gradients_are_summed_in_fp32_even_where_torch_would_not(rank: int, world_size: int):
    step = Step(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), steps=1)
    want, got, overlapped = both(step, rank, world_size)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)
    assert "so bits differ" in overlapped.explain()


@pytest.mark.parametrize("slots", [1, 3])
@on_ranks(2)
def test_any_number_of_slots(rank: int, world_size: int, slots: int):
    want, got, _ = both(Step(prefetch=1), rank, world_size, slots=slots)
    assert same(want, got)


@pytest.mark.parametrize(("gather", "scatter"), [(True, False), (False, True), (False, False)])
@on_ranks(2)
def test_a_part_of_it(rank: int, world_size: int, gather: bool, scatter: bool):
    want, got, overlapped = both(Step(), rank, world_size, gather=gather, scatter=scatter)
    assert same(want, got)
    assert (IN_PLACE in overlapped.explain()) == gather
    assert ("pushed in place" in overlapped.explain()) == (gather and scatter)


def twice(make: Any, run: Any, **options: Any) -> tuple[Any, Any, cp.Overlapped]:
    """What `run` returns of a model as torch has it, and overlapped."""
    want = run(make())
    model = make()
    overlapped = cp.overlap(model, **{"trial_steps": 0} | options)
    return want, run(model), overlapped


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[union-attr]


def changed(model: nn.Module) -> None:
    """As an optimizer changes weights, or a user."""
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(1.5)  # type: ignore[operator]


@on_ranks(2)
def test_weights_that_were_changed_are_gathered_anew(rank: int, world_size: int):
    """Blocks called without the root, and gathered by hand, right behind a change."""

    def run(model: nn.Module) -> list[Tensor]:
        x, out = batch(rank, 0).detach(), list[Tensor]()
        model(x).float().sum().backward()
        for _ in range(2):
            changed(model)
            out.append(model[0](x).detach())  # type: ignore[index]
            changed(model)
            model[2].unshard()  # type: ignore[index]
            out += [p.detach().float().clone() for p in model[2].parameters()]  # type: ignore[index]
            model[2].reshard()  # type: ignore[index]
            changed(model)
            handle = model[1].unshard(async_op=True)  # type: ignore[index]
            handle.wait()
            out += [p.detach().float().clone() for p in model[1].parameters()]  # type: ignore[index]
            model[1].reshard()  # type: ignore[index]
        return out

    mesh = mesh_of(world_size)
    want, got, _ = twice(lambda: made(Step(), mesh), run)
    assert same(want, got)


@on_ranks(2)
def test_weights_that_change_between_forward_and_backward(rank: int, world_size: int):
    def run(model: nn.Module) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(3):
            loss = model(batch(rank, i)).float().square().mean()
            changed(model[1])  # type: ignore[index]
            loss.backward()
            out += gradients(model)
            model.zero_grad()
        return out

    mesh = mesh_of(world_size)
    want, got, _ = twice(lambda: made(Step(), mesh), run)
    assert same(want, got)


@on_ranks(2)
def test_two_forwards_before_a_backward_and_an_optimizer_within(rank: int, world_size: int):
    def run(model: nn.Module) -> list[Tensor]:
        weights, out = [*model.parameters()], list[Tensor]()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in weights}

        def step(p: Tensor) -> None:
            optimizers[p].step()
            out.append(p.grad.to_local().clone())  # type: ignore[union-attr]
            p.grad = None

        for p in weights:
            p.register_post_accumulate_grad_hook(step)
        for i in range(3):
            a, b = (model(batch(rank, 2 * i + j)).float().square().mean() for j in (0, 1))
            (a + b).backward()
            out.append(a.detach())
        return out

    mesh = mesh_of(world_size)
    want, got, _ = twice(lambda: made(Step(), mesh), run)
    assert same(want, got)


@on_ranks(2)
def test_an_exception_in_a_forward(rank: int, world_size: int):
    class Failed(Exception):
        pass

    def run(model: nn.Module) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(3):
            if i == 1 and hasattr(model, "reset_iter_state"):

                def fail(*_: Any) -> None:
                    raise Failed

                hook = model[2].register_forward_pre_hook(fail)  # type: ignore[index]
                with pytest.raises(Failed):
                    model(batch(rank, 9))
                hook.remove()
                model.reset_iter_state()  # type: ignore[operator]
            model(batch(rank, i)).float().square().mean().backward()
            out += gradients(model)
            model.zero_grad()
        return out

    mesh = mesh_of(world_size)
    want, got, _ = twice(lambda: made(Step(), mesh), run)
    assert same(want, got)


SETTINGS: dict[str, Any] = {
    "set_reshard_after_backward": lambda m: m[1].set_reshard_after_backward(False),
    "set_unshard_in_backward": lambda m: m[3].set_unshard_in_backward(True),
    "set_requires_all_reduce": lambda m: m.set_requires_all_reduce(True),
    "set_is_last_backward": lambda m: m.set_is_last_backward(True),
    "set_reshard_after_forward": lambda m: m.set_reshard_after_forward(False),
    "set_unshard_async_op": lambda m: m._set_unshard_async_op(True),
    "set_post_optim_event": lambda m: None,
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_settings_of_fsdp2(rank: int, world_size: int, name: str):
    mesh = mesh_of(world_size)

    def make() -> nn.Module:
        model = made(Step(), mesh)
        SETTINGS[name](model)
        return model

    def run(model: nn.Module) -> list[Any]:
        return trained(model, Step(), rank)

    want, got, _ = twice(make, run)
    assert same(want, got)


class Reused(nn.Module):
    """A linear layer that is used twice, tied to another one, and a weight that FSDP2 ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = (
            nn.Embedding(16, DIM),
            Block(),
            nn.Linear(DIM, 16, False),
        )
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().float().sum(-1) * 7).long() % 16
        return self.head(self.block(self.block(self.embed(tokens)))) * self.scale.sum()


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_gradients_that_were_kept_in_fp32_travel_so(rank: int, world_size: int, memory: str):
    """By turns with steps that keep none; and a weight may miss in the last backward."""
    mesh = mesh_of(world_size)

    def run(model: Any) -> list[Tensor]:
        weights, out = [*model.parameters()], list[Tensor]()
        for i, micro in enumerate((1, 3, 1, 2)):
            for j in range(micro):
                model.set_requires_gradient_sync(j == micro - 1)
                x = batch(rank, 10 * i + j)
                (model[0](x) if j == 2 else model(x)).float().square().mean().backward()
            out += [p.grad.to_local().clone() for p in weights if p.grad is not None]
            for p in weights:
                p.grad = None
        return out

    want, model = run(made(Step(), mesh)), made(Step(), mesh)
    overlapped = cp.overlap(model, trial_steps=0, memory=memory)
    with mock.patch.object(torch_parts.torch_groups, "foreach_reduce", None):  # none is torch's
        assert same(want, run(model))
    inbox = overlapped.num_bytes()["inboxes"]
    model = made(Step(), mesh)
    overlapped = cp.overlap(model, trial_steps=0, memory=memory)
    model(batch(rank, 0)).float().square().mean().backward()
    assert 1.9 < inbox / overlapped.num_bytes()["inboxes"] < 2.1


@on_ranks(2)
def test_tied_reused_and_ignored_weights(rank: int, world_size: int):
    mesh = mesh_of(world_size)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Reused()
        fully_shard(model.block, mesh=mesh, mp_policy=MIXED)
        fully_shard(model, mesh=mesh, mp_policy=MIXED, ignored_params={model.scale})
        for module in (model.block, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        return model

    def run(model: nn.Module) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(3):
            model(batch(rank, i)).float().square().mean().backward()
            out += [p.grad.clone() if p.ndim == 1 and p.numel() == 3 else p.grad.to_local().clone()  # type: ignore[union-attr]
                    for p in model.parameters()]  # fmt: skip
            model.zero_grad()
        return out

    want, got, _ = twice(make, run)
    assert same(want, got)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@on_ranks(4)
def test_beside_tensor_parallelism(rank: int, world_size: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Parallel() for _ in range(3)]
        for block in blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        return sharded(nn.Sequential(*blocks), [*blocks], Step(), mesh["dp"])

    def run(model: nn.Module) -> list[Tensor]:
        of, out = mesh["dp"].get_local_rank(), list[Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for i in range(3):
            loss = model(batch(of, i)).float().square().mean()
            loss.backward()
            out += [loss.detach(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return out

    want, got, overlapped = twice(make, run)
    assert same(want, got)
    assert overlapped.explain().count(IN_PLACE) == 3


@on_ranks(4)
def test_groups_of_other_ranks_beside_each_other(rank: int, world_size: int):
    """As experts are sharded over fewer ranks than the rest of a model, and over other ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "rest"))

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        for i, block in enumerate(model):
            fully_shard(block, mesh=mesh_of(4) if i % 2 else mesh["experts"], mp_policy=MIXED)
            block.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        fully_shard(model, mesh=mesh["rest"], mp_policy=MIXED)
        return model

    want, got, overlapped = twice(make, lambda m: trained(m, Step(), rank))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert overlapped.explain().count("pushed in place") == 4


REPLICATED = {"mixed": Step(), "fp32": Step(policy=None), "by 3": Step(factor=3.0),
              "accumulated": Step(micro=2, sync_all=True)}  # fmt: skip


@pytest.mark.parametrize("name", REPLICATED)
@on_ranks(4)
def test_replicas_of_shards_are_summed_by_torch_behind_ours(rank: int, world_size: int, name: str):
    mesh, step = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), REPLICATED[name]
    )  # fmt: skip
    want, got, overlapped = twice(lambda: made(step, mesh), lambda m: trained(m, step, rank))
    assert same(want, got)
    assert overlapped.explain().count("pushed in place") == 5


@on_ranks(4)
def test_replicas_that_are_summed_later_are_left_to_torch(rank: int, world_size: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def run(model: nn.Module) -> list[Tensor]:
        out = list[Tensor]()
        for i in range(6):
            model.set_requires_all_reduce(i % 2 == 1)  # type: ignore[operator]
            model(batch(rank, i)).float().square().mean().backward()
            if i % 2:
                out += gradients(model)
                model.zero_grad()
        return out

    want, got, _ = twice(lambda: made(Step(), mesh), run)
    assert same(want, got)


@on_ranks(2)
def test_it_ends_and_begins_again(rank: int, world_size: int):
    mesh = mesh_of(world_size)
    want = trained(made(Step(), mesh), Step(steps=2), rank)
    model = made(Step(), mesh)
    for _ in range(2):
        overlapped = cp.overlap(model, trial_steps=0)
        with pytest.raises(cp.InputError, match="one that is not overlapped yet"):
            cp.overlap(model)
        overlapped.off()
    overlapped = cp.overlap(model, trial_steps=0)
    assert "has not run" in overlapped.explain()
    assert same(want, trained(model, Step(steps=2), rank))
    overlapped.off()
    assert "torch's own way" in overlapped.explain()
    group = model[0]._get_fsdp_state()._fsdp_param_group  # type: ignore[index]
    assert not {"unshard", "wait_for_unshard", "_to_sharded", "post_backward"} & {*group.__dict__}
    other = made(Step(), mesh)
    other.load_state_dict(model.state_dict())
    assert same(trained(other, Step(steps=2), rank), trained(model, Step(steps=2), rank))


@on_ranks(2)
def test_saved_and_loaded(rank: int, world_size: int):
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    names = iter(("torch's", "overlapped"))
    mesh = mesh_of(world_size)

    def run(model: nn.Module) -> list[Tensor]:
        trained(model, Step(steps=1), rank)
        path = f"{folder[0]}/{next(names)}"
        dcp.save(model.state_dict(), checkpoint_id=path)
        trained(model, Step(steps=1), rank)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        return trained(model, Step(steps=2), rank)

    want, got, _ = twice(lambda: made(Step(), mesh), run)
    assert same(want, got)


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_parameters_that_are_sharded_by_another_dimension(rank: int, ranks: int, memory: str):
    """Matrices by columns, and a stack of them, as experts are, in the middle or at the end."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = (nn.Parameter(torch.randn(3, DIM, DIM) / 6) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(5))  # uneven rows

        def forward(self, x: Tensor) -> Tensor:
            for a, b in zip(self.w1, self.w2, strict=True):
                x = x + torch.tanh(x @ a) @ b * self.scale[0]
            return x

    def by_the_last(p: nn.Parameter) -> Shard:
        return Shard(p.ndim - 1 if p.ndim > 1 else 0)

    def by_the_second(p: nn.Parameter) -> Shard:
        return Shard(min(p.ndim - 1, 1))

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Block(), Stack(), Stack(), Block()]
        model = nn.Sequential(*blocks, nn.Linear(DIM, DIM), nn.Tanh())
        for block, by in zip(blocks, [by_the_last, by_the_second, by_the_last, None], strict=True):
            fully_shard(block, mesh=mesh_of(ranks), mp_policy=MIXED, shard_placement_fn=by)
        fully_shard(model, mesh=mesh_of(ranks), mp_policy=MIXED)
        for module in (*blocks, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        return model

    want, got, overlapped = twice(make, lambda m: trained(m, Step(micro=2), rank), memory=memory)
    assert same(want, got)
    assert overlapped.explain().count(IN_PLACE) == 5, overlapped.explain()
    # while both take turns, too: torch's way writes to the same memory
    model = make()
    tried = cp.overlap(model, trial_steps=8, memory=memory)
    assert same(want, trained(model, Step(micro=2), rank))
    assert "being tried" in tried.explain()


# -- what stays torch's


WITHOUT: dict[str, tuple[Any, str]] = {
    "a smaller mesh": ({"reshard_after_forward": 2}, "to a smaller mesh"),
    "half": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}, "in two steps"),
    "reduced in fp16": (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float16)},
        "reduced in torch.float16",
    ),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "offloaded to the CPU"),
}


@pytest.mark.parametrize("name", WITHOUT)
@on_ranks(4)
def test_what_does_not_qualify_is_left_and_said(rank: int, world_size: int, name: str):
    settings, why = WITHOUT[name]
    mesh = mesh_of(world_size)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(DIM, DIM), nn.Tanh())
        fully_shard(model[0], mesh=mesh, **{"mp_policy": MIXED} | settings)
        fully_shard(model[1], mesh=mesh, mp_policy=MIXED)
        fully_shard(model, mesh=mesh, mp_policy=MIXED)
        for module in (model[0], model[1], model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        return model

    def run(model: nn.Module) -> list[Tensor]:
        model(batch(rank, 0)).float().square().mean().backward()
        return gradients(model)

    want, got, overlapped = twice(make, run)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert why in str(overlapped.found[1]), overlapped.explain()
    assert overlapped.explain().count(IN_PLACE) >= 2


@on_ranks(2)
def test_hooks_and_collectives_of_the_users_own_are_left(rank: int, world_size: int):
    mesh = mesh_of(world_size)
    calls = list[int]()

    def make() -> nn.Module:
        model = made(Step(), mesh)
        model[0].set_all_reduce_hook(lambda t: calls.append(1))  # type: ignore[index]
        return model

    def run(model: nn.Module) -> list[Any]:
        return trained(model, Step(), rank)

    want, got, _ = twice(make, run)
    assert same(want, got)
    assert len(calls) == 2 * Step().steps


# -- gradients that a rank lacks


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, right: bool) -> Tensor:
        return x + (self.right(x) if right else self.left(x) + 0)


def branched(world_size: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Branch()
    fully_shard(model, mesh=mesh_of(world_size), mp_policy=MIXED)
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_an_error_that_names_it(rank: int, world_size: int):
    model = branched(world_size)
    overlapped = cp.overlap(model, trial_steps=0)
    for right in (True, False):  # all ranks alike: a gradient that nobody has is none
        model(batch(rank, 0), right).float().sum().backward()
        assert (model.left.weight.grad is None) == right
        model.zero_grad()
    with pytest.raises(cp.InputError, match=r"gradient of (left\.weight, )?right\.weight"):
        model(batch(rank, 0), rank == 0).float().sum().backward()
    assert overlapped.found


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_zero_where_it_may(rank: int, world_size: int):
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return

    def run(model: Any) -> list[Tensor]:
        model.set_reduce_scatter_unused_params(True)
        out = list[Tensor]()
        for right in (True, rank == 0, False):
            model(batch(rank, 0), right).float().sum().backward()
            out += gradients(model)
            model.zero_grad()
        return out

    want, got, _ = twice(partial(branched, world_size), run)
    assert same(want, got)


# -- bad input, and faults


def test_what_is_no_model_of_fsdp2_is_refused():
    with pytest.raises(cp.InputError, match="model must be sharded by FSDP2, got Linear"):
        cp.overlap(nn.Linear(2, 2))
    with pytest.raises(cp.InputError, match=r"model must be a torch.nn.Module, got int"):
        cp.overlap(3)  # type: ignore[arg-type]
    for name, value in (("slots", 0), ("slots", True), ("trial_steps", -1), ("memory", "keep")):
        with pytest.raises(cp.InputError, match=name):
            cp.overlap(nn.Linear(2, 2), **{name: value})


@on_ranks(2)
def test_ddp_is_refused_and_told_of_fsdp2(rank: int, world_size: int):
    with pytest.raises(cp.InputError, match="fully_shard"):
        cp.overlap(DistributedDataParallel(nn.Linear(2, 2)))


OTHERS = {"slots": (1, 2), "gather": (True, False), "scatter": (False, True),
          "trial_steps": (0, 8), "memory": ("ring", "kept")}  # fmt: skip


@pytest.mark.parametrize(("name", "values"), OTHERS.items())
@on_ranks(2)
def test_settings_that_differ_by_rank_are_an_error_on_all(
    rank: int, world_size: int, name: str, values: tuple[Any, Any]
):
    model = made(Step(), mesh_of(world_size))
    cp.overlap(model, **{"trial_steps": 0} | {name: values[rank]})
    want = f"{name} must be equal on all ranks, {values[0]} as on rank 0, got {values[1]} on rank 1"
    with pytest.raises(cp.InputError, match=want):
        model(batch(rank, 0))


@on_ranks(2)
def test_models_that_differ_by_rank_are_an_error_on_all(rank: int, world_size: int):
    model = made(Step(frozen=(1,) if rank else ()), mesh_of(world_size))
    cp.overlap(model, trial_steps=0)
    with pytest.raises(cp.InputError, match=r"1\.norm\.weight 32 torch\.bfloat16 trained"):
        model(batch(rank, 0))


@on_ranks(2)
def test_a_group_that_torch_would_gather_sooner_is_left(rank: int, world_size: int):
    """By what is predicted: here of constants by which copies take very long."""
    mesh = mesh_of(world_size)
    h100 = preset("h100-2")
    slow = replace(h100, measured=replace(h100.costs, copy_overhead_s=0.1))
    fast = replace(h100, measured=replace(h100.costs, copy_overhead_s=1e-7, barrier_s=1e-7))
    for machine, left in ((slow, 5), (fast, 0)):
        model = made(Step(), mesh)
        overlapped = cp.overlap(model, trial_steps=0)
        known = mock.Mock(machine=machine)
        with mock.patch("counterpoint.fsdp.overlapped.knowledge_of", return_value=known):
            got = trained(model, Step(), rank)
        assert same(trained(made(Step(), mesh), Step(), rank), got)
        assert overlapped.explain().count("left to torch, predicted to be slower") == left
        assert overlapped.explain().count("predicted alone: gather") == 5 - left


@on_ranks(2)
def test_ranks_without_memory_leave_it_to_torch(rank: int, world_size: int):
    mesh = mesh_of(world_size)
    workspace_of(mesh.get_group(), torch.device("cpu"))
    want = trained(made(Step(), mesh), Step(), rank)
    model = made(Step(), mesh)
    overlapped = cp.overlap(model, trial_steps=0)
    here = "counterpoint.group.symmetric_cpu._available_bytes"
    with mock.patch(here, return_value=0 if rank else 1 << 40):
        model(batch(rank, 0))
    model.zero_grad()
    assert "no memory that all ranks share" in overlapped.explain()
    model = made(Step(), mesh)
    cp.overlap(model, trial_steps=0)
    assert same(want, trained(model, Step(), rank))


def one_ends(rank: int, world_size: int, when: str) -> str:
    """What the others are told when rank 1 ends within a step."""
    bound = mock.patch.dict(os.environ, COUNTERPOINT_TIMEOUT_S="20")
    with bound:
        model = made(Step(), mesh_of(world_size))
        cp.overlap(model, trial_steps=0)
        try:
            for i in range(3):
                loss = model(batch(rank, i)).float().square().mean()
                if rank == 1 and i == 1 and when == "backward":
                    os._exit(1)
                loss.backward()
                if rank == 1 and i == 1:
                    os._exit(1)
        except cp.PeerTimeoutError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_rank_that_ends_is_named_on_all_others(pool: RankPool, when: str):
    told = pool.run(one_ends, 3, when, expect_dead=[1])
    for text in (told[0], told[2]):
        assert "rank 1" in text, told


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_a_late_rank_is_waited_for(rank: int, world_size: int, memory: str):
    """Ranks that are late at random, one at a time, and weights that never lag behind."""
    mesh, step = mesh_of(world_size), Step(steps=6, prefetch=1)
    want = trained(made(step, mesh), step, rank)
    model = made(step, mesh)
    cp.overlap(model, trial_steps=0, memory=memory)
    late = random.Random(5)

    def wait(*_: Any) -> None:
        if late.random() < 0.3:
            time.sleep(0.02 * (late.randrange(2) == rank))

    def late_in_both(module: nn.Module, args: Any, result: Tensor) -> None:
        wait()
        if result.requires_grad:
            result.register_hook(wait)

    for block in model:
        block.register_forward_hook(late_in_both)
    assert same(want, trained(model, step, rank))


@pytest.mark.parametrize("memory", ["kept", "ring"])
@on_ranks(2)
def test_what_a_late_peer_still_reads_is_not_written(rank: int, world_size: int, memory: str):
    """In forwards alone: no gradients are pushed, for which ranks wait too."""
    mesh, late, pull = mesh_of(world_size), random.Random(6), Gathers.pull

    def pulled(self: Gathers, member: Any, r: int, ranks: Any, stream: Any) -> None:
        time.sleep(0.05 * (late.randrange(4) == rank))
        pull(self, member, r, ranks, stream)

    def run(model: nn.Module) -> list[Tensor]:
        out = list[Tensor]()
        with torch.no_grad():
            for i in range(6):
                out.append(model(batch(rank, i)))
                for p in model.parameters():
                    p.mul_(0.9)
        return out

    def alone() -> nn.Module:  # the next gather is of the group that the peer still reads
        torch.manual_seed(0)
        return fully_shard(nn.Linear(DIM, DIM), mesh=mesh, reshard_after_forward=True)

    for make in (lambda: made(Step(), mesh), alone):
        want, model = run(make()), make()
        cp.overlap(model, trial_steps=0, memory=memory, slots=1)
        with mock.patch.object(Gathers, "pull", pulled):
            assert same(want, run(model))
