"""Steps that are predicted before they run: torch's way and ours."""

from dataclasses import replace

import pytest
import torch
from fsdp_models import MIXED, Step, made, mesh_of
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import counterpoint as cp
from counterpoint.fsdp.predicted_step import Sizes, predicted_step
from counterpoint.machine_of import machine_of

COSTS = machine_of("test", "h200-4").costs
LAYER = Sizes(218_000_000, 218_000_000)  # of Llama-8B


def test_a_step_is_its_computation_where_nothing_else_takes_time():
    free = replace(COSTS, hbm_bytes_per_s=1e18, copy_bytes_per_s=1e18, collective_bytes_per_s=1e18,
                   kernel_s=1e-12, copy_overhead_s=1e-12, all_gather_s=1e-12,
                   reduce_scatter_s=1e-12, collective_small_s=1e-12, host_call_s=1e-12)  # fmt: skip
    for seconds in predicted_step([LAYER] * 6, 4, free, 0.06):
        assert seconds == pytest.approx(0.06, rel=1e-6)


def test_what_bounds_a_step():
    layers, rates = [LAYER] * 6, (COSTS.copy_bytes_per_s, COSTS.collective_bytes_per_s)
    long = predicted_step(layers, 4, COSTS, 1.0)
    assert 1.0 < long.ours_s < long.as_is_s < 1.04
    # no computation: the bytes of two gathers and a scatter of each layer, torch's scatter in fp32
    received = LAYER.numel * 3 / 4
    short = predicted_step(layers, 4, replace(COSTS, host_call_s=1e-9), 1e-3)
    assert short.ours_s == pytest.approx(6 * 2 * 2 * received / rates[0], rel=0.2)
    assert short.as_is_s == pytest.approx(6 * (2 * 2 + 4) * received / rates[1], rel=0.2)
    # nor bytes, but a host that takes long
    tiny = [Sizes(1000, 1000)] * 6
    of_host = predicted_step(tiny, 4, COSTS, 1e-3, host_s=0.5)
    assert 0.5 < of_host.ours_s < of_host.as_is_s < 0.6


def test_what_is_left_to_torch_or_gathered_once():
    torchs = predicted_step([LAYER._replace(ours=False)] * 6, 4, COSTS, 0.06)
    assert 0.06 < torchs.ours_s <= torchs.as_is_s  # gathers and scatters alone in turn
    frozen = predicted_step([LAYER._replace(trained=0)] * 6, 4, COSTS, 0.06)
    once = predicted_step([LAYER._replace(gathers=(1, 1))] * 6, 4, COSTS, 0.06)
    whole = predicted_step([LAYER] * 6, 4, COSTS, 0.06)
    for less in (frozen, once):
        assert less.as_is_s < whole.as_is_s
        assert less.ours_s < whole.ours_s


@on_ranks(2)
def test_a_model_is_predicted_before_it_runs(rank: int, ranks: int):
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)), nn.Linear(8, 8))
    for layer in [*model][:4]:
        fully_shard(layer, mesh=mesh_of(ranks), mp_policy=MIXED)
    fully_shard(model, mesh=mesh_of(ranks), mp_policy=MIXED)
    overlapped = cp.overlap(model, memory="kept")
    found = overlapped.predict(2.0, machine="h200-2")
    costs = machine_of("test", "h200-2").costs
    layers = [Sizes(4096**2, 4096**2, gathers=(2, 1 if i > 2 else 2)) for i in range(4)]
    want = predicted_step([Sizes(72, 72), *layers[:3], layers[3]], ranks, costs, 2e-3)
    assert found.as_is_s == pytest.approx(want.as_is_s)
    assert found.ours_s == pytest.approx(want.ours_s, rel=0.05)
    assert "ms a step as is" in str(found)
    with pytest.raises(cp.UnsupportedError, match="nothing is known of this machine"):
        overlapped.predict(2.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(cp.InputError, match="computation_ms"):
            overlapped.predict(wrong, machine="h200-2")
    with pytest.raises(cp.InputError, match="machine"):
        overlapped.predict(2.0, machine=3)  # type: ignore[arg-type]


@on_ranks(2)
def test_prediction_changes_nothing(rank: int, ranks: int):
    model = made(Step(), mesh_of(ranks))
    overlapped = cp.overlap(model, trial_steps=0)
    overlapped.predict(2.0, machine="h200-2")
    overlapped.off()
    x = torch.randn(2, 4, 32)
    want = model(x)
    assert torch.equal(want, model(x))
