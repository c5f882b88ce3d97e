"""Training steps of FSDP2 models as benchmarks run them, on CPU ranks and small."""

from statistics import median
from unittest import mock

import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.distributed_c10d import _get_default_group as world
from torch.distributed.fsdp import FSDPModule

from benchmarks import fsdp, fsdp_models
from benchmarks.declare import Bench
from benchmarks.rows import results


@on_ranks(2)
def test_all_arms_of_a_step(rank: int, ranks: int):
    for case in (fsdp.case_of("eager", 16, width="toy"),
                 fsdp.case_of("eager", 16, width="toy", adamw=True, memory="ring")):  # fmt: skip
        rows = fsdp.rows(case, Bench(world(), torch.device("cpu"), rounds=2))
        arms = [fsdp.AS_IS, fsdp.COMPUTE, fsdp.OURS, fsdp.ZERO2]
        if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
            arms.append(fsdp.BUFFERS)
        assert [row["arm"] for row in rows] == arms
        assert all(len(row["rounds_ms"]) == 2 and row["gradients_off"] == 0 for row in rows)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", fsdp_models.MODELS)
@on_ranks(2)
def test_losses_of_a_model_are_torchs(rank: int, ranks: int, name: str):
    """While both ways take turns; on two ranks every bit is torch's."""
    bench = Bench(world(), torch.device("cpu"), rounds=1)
    with mock.patch.object(fsdp_models, "MOST_STEPS", 10):
        as_is, ours = fsdp_models.rows(fsdp_models.case_of(name, toy=True), bench)
    assert as_is["loss_off"] == ours["loss_off"] == 0
    assert ours["left"] == 0 < ours["groups"]


def test_committed_steps_are_near_what_was_predicted_of_them():
    """Before either way had run; where the host decides, at 1,024 tokens, they are far off."""
    for arm in (fsdp.AS_IS, fsdp.OURS):
        rows = [row for of in results("fsdp").values() for row in of if row.get("predicted_ms")]
        off = [
            abs(row["predicted_ms"] / 1e3 / row["median_s"] - 1) for row in rows
            if row["arm"] == arm
        ]  # fmt: skip
        assert len(off) >= 6
        assert median(off) <= 0.05
