"""Training steps of FSDP2 models as benchmarks run them, on CPU ranks and small."""

from statistics import median
from unittest import mock

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks
from torch.distributed.distributed_c10d import _get_default_group as world
from torch.distributed.fsdp import FSDPModule

from benchmarks import advise, fsdp, fsdp_models
from benchmarks.declare import Bench
from benchmarks.rows import results


@on_ranks(2)
def test_all_arms_of_a_step(rank: int, ranks: int, draw: Draw):
    for more in draw([{}, {"adamw": True, "memory": "ring"}], 1):
        case = fsdp.case_of("eager", 16, width="toy", **more)
        rows = fsdp.rows(case, Bench(world(), torch.device("cpu"), rounds=2))
        arms = [fsdp.AS_IS, fsdp.COMPUTE, fsdp.OURS, fsdp.ZERO2]
        if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
            arms.append(fsdp.BUFFERS)
        assert [row["arm"] for row in rows] == arms
        assert all(len(row["rounds_ms"]) == 2 and row["gradients_off"] == 0 for row in rows)


@on_ranks(2)
def test_arms_of_a_step_that_is_advised(rank: int, ranks: int):
    """Without a GPU there is nothing to advise; its arms are timed all the same."""
    bench = Bench(world(), torch.device("cpu"), rounds=2)
    rows = advise.rows(fsdp.case_of("eager", 16, width="toy"), bench)
    assert [row["arm"] for row in rows] == [fsdp.AS_IS, fsdp.COMPUTE, fsdp.OURS]
    assert not any(name.startswith("advised") for row in rows for name in row)


def test_a_table_of_advice():
    """What is lost and saved, and how far from true."""
    said = {"scoring": 2, "advised_lost_ms": 10.0, "advised_saves_ms": 4.5}
    made = dict.fromkeys(("date", "commit", "gpu", "torch", "driver", "nccl", "triton"), "x")
    made |= {"ranks": 2, "num_gpus": 2, "multicast": False, "nvls": False}
    rows = [
        {"case": "eager 2048", "arm": name, "mode": "eager", "median_s": median_s, **said, **made}
        for name, median_s in ((fsdp.AS_IS, 0.050), (fsdp.COMPUTE, 0.038), (fsdp.OURS, 0.045))
    ]
    text = advise.advise_table(rows)
    assert "10.0 of 12.0 (-17%)" in text and "4.5 of 5.0 (-10%)" in text


@pytest.mark.drawn(2)
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
