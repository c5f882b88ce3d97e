"""The layers: they train as torch.nn.Linear does, hold its slices, and refuse what does not fit."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from layer_bodies import BATCH, HIDDEN, POSITIONS, K, Mlp, MlpCase, pair, wrong_training
from on_ranks import on_ranks
from torch import nn

import counterpoint.nn as cnn
from counterpoint import InputError

SEQ_FIRST, BATCH_FIRST = (POSITIONS, BATCH), (BATCH, POSITIONS)


@on_ranks(1, 2, 3, 4)
def test_layers_train_as_serial_ones(rank: int, ranks: int) -> list[str]:
    cases = [
        MlpCase(),
        MlpCase(plan="graded"),
        MlpCase(SEQ_FIRST, plan="graded"),
        MlpCase(SEQ_FIRST, bias=False),
        MlpCase(BATCH_FIRST, dim=1),
        MlpCase(BATCH_FIRST, dim=-2, plan="shard_p2p"),
    ]
    return sum(map(wrong_training, cases), [])


@on_ranks(4)
def test_groups_of_some_ranks(rank: int, world_size: int) -> list[str]:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return wrong_training(MlpCase(plan="graded"), groups[rank // 2])


@on_ranks(1, 3)
def test_equal_seeds_slice_one_whole_layer(rank: int, world_size: int):
    """Slices of what a serial model of this seed holds; the generator is where it leaves it."""
    ours, plain = pair(MlpCase())
    after_plain = torch.get_rng_state()
    torch.manual_seed(3)
    again = Mlp(MlpCase())
    assert torch.equal(torch.get_rng_state(), after_plain)
    torch.manual_seed(3)
    late = cnn.ColumnParallelLinear(K, HIDDEN, device="meta").to_empty(device="cpu")
    late.reset_parameters()
    assert torch.equal(late.weight, ours.gate.weight)
    assert torch.equal(late.bias, ours.gate.bias)
    for name in ("gate", "up", "down"):
        layer, whole = getattr(ours, name), getattr(plain, name)
        dim = 1 if name == "down" else 0
        assert torch.equal(layer.weight, whole.weight.chunk(world_size, dim)[rank]), name
        assert layer.weight.untyped_storage().nbytes() * world_size == whole.weight.nbytes
        bias = whole.bias if name == "down" else whole.bias.chunk(world_size)[rank]
        assert torch.equal(layer.bias, bias), name
        assert torch.equal(getattr(again, name).weight, layer.weight)


@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
@on_ranks(3)
def test_from_a_linear_and_back(rank: int, world_size: int, kind: str):
    layer_of = getattr(cnn, kind).from_linear
    for bias, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        whole = nn.Linear(12, 24, bias=bias, dtype=dtype)
        whole.weight.requires_grad_(bias)
        before = torch.get_rng_state()
        layer = layer_of(whole, plan="graded")
        back = layer.to_linear()
        assert torch.equal(torch.get_rng_state(), before)
        assert layer.weight.requires_grad == bias
        assert layer.weight.dtype == dtype
        assert layer.plan == "graded"
        assert (layer.in_features, layer.out_features) == (12, 24)
        state, want = back.state_dict(), whole.state_dict()
        assert list(state) == list(want) == list(layer.state_dict())
        assert all(torch.equal(state[key], want[key]) for key in want)
        # memory of their own
        with torch.no_grad():
            whole.weight.zero_()
        assert layer.weight.any()
        if bias:
            assert back.bias.data_ptr() != layer.bias.data_ptr()


@on_ranks(3)
def test_state_dict_is_that_of_the_shards(rank: int, world_size: int):
    ours, plain = pair(MlpCase())
    state = copy.deepcopy(ours.state_dict())
    assert list(state) == list(plain.state_dict())
    torch.manual_seed(4)
    other = Mlp(MlpCase())
    assert not torch.equal(other.up.weight, ours.up.weight)
    other.load_state_dict(state)
    x = torch.randn(4, K)
    assert torch.equal(other(x), ours(x))
    # the shards of all ranks are the whole weights
    for name, want in plain.state_dict().items():
        shards = [torch.empty_like(state[name]) for _ in range(world_size)]
        dist.all_gather(shards, state[name].contiguous())
        if name == "down.bias":
            assert all(torch.equal(shard, want) for shard in shards)
        else:
            assert torch.equal(torch.cat(shards, 1 if name == "down.weight" else 0), want), name


@on_ranks(2)
def test_a_model_can_be_copied(rank: int, world_size: int):
    ours, _ = pair(MlpCase())
    twin = copy.deepcopy(ours)
    x = torch.randn(4, K)
    assert torch.equal(twin(x), ours(x))
    assert twin.up.group is ours.up.group
    with torch.no_grad():
        twin.up.weight.zero_()
    assert ours.up.weight.any()


@on_ranks(3)
def test_what_does_not_fit_is_refused(rank: int, world_size: int):
    column, row = cnn.ColumnParallelLinear(4, 6), cnn.RowParallelLinear(6, 4)
    other = cnn.ColumnParallelLinear(4, 6, plan="graded")
    x = torch.randn(2, 4)
    for call, text in (
        (lambda: cnn.ColumnParallelLinear(4, 10), "ColumnParallelLinear: out_features must be a "
         "multiple of the 3 ranks, got 10; pad"),
        (lambda: cnn.RowParallelLinear.from_linear(nn.Linear(8, 3)),
         "RowParallelLinear: in_features must be a multiple of the 3 ranks, got 8"),
        (lambda: column(torch.randn(2, 5)),
         "ColumnParallelLinear: x must be [..., 4], 4 in_features, got (2, 5)"),
        (lambda: row(torch.randn(3, 6)),
         "RowParallelLinear: x must be [..., 2], 6 in_features over 3 ranks, got (3, 6"),
        (lambda: cnn.ColumnParallelLinear(4, 6, gather_dim=1)(x),
         "w must be [K=12, N], got (4, 2)"),
        (lambda: cnn.gather_once(x), "gather_once: layers must be one or more, got none"),
        (lambda: cnn.gather_once(x, column, other),
         "layers must be of one plan, got auto and graded"),
        (lambda: cnn.gather_once(x, column, cnn.ColumnParallelLinear(5, 6)),
         "x must be [..., 5], 5 in_features, got (2, 4)"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=re.escape(text)):
            call()


def test_layers_want_a_group():
    for kind in ("ColumnParallelLinear", "RowParallelLinear"):
        with pytest.raises(InputError, match=f"{kind}: group must be an initialised process group"):
            getattr(cnn, kind)(4, 4)


@on_ranks(2)
def test_repr(rank: int, world_size: int):
    row = cnn.RowParallelLinear(6, 7, bias=False, plan="graded")
    assert f"{cnn.ColumnParallelLinear(4, 6)} {row}" == (
        "ColumnParallelLinear(in_features=4, out_features=6, bias=True, ranks=2, plan='auto', "
        "gather_dim=0) "
        "RowParallelLinear(in_features=6, out_features=7, bias=False, ranks=2, plan='graded', "
        "scatter_dim=0)"
    )
