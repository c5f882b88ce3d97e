"""Whole training steps of torchtitan's kind on CPU ranks, at a toy's size."""

import warnings
from typing import Any

import torch
from rank_bodies import by_reference, world
from rankpool import RankPool
from torch._inductor import config as inductor

from benchmarks import tp_training
from benchmarks.compile import ASYNC, OURS, PLAIN, SCHEDULED
from benchmarks.declare import Bench


def _timed(rank: int, ranks: int) -> list[dict[str, Any]]:
    bench = Bench(world(), torch.device("cpu"), rounds=2)
    # without C++ kernels, whose compilation takes a minute: each operator is a call
    lite = inductor.patch(fallback_by_default=True)
    with by_reference(), lite, warnings.catch_warnings():
        # torch's own
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)
        return tp_training.rows(tp_training.case_of("toy", 16, layers=1), bench, torch.float32)


def test_steps_are_right_and_timed(pool: RankPool):
    for rows in pool.run(_timed, 2):
        arms = {row["arm"]: row for row in rows}
        assert {name for name, row in arms.items() if "refused" in row} == {SCHEDULED, ASYNC}
        for name in (PLAIN, OURS):
            row = arms[name]
            assert row["median_s"] > 0 and len(row["rounds_ms"]) == 2
            assert 0 < row["error"] < 1e-5 and row["worst_error"] < 1e-4
            assert row["loss_off"] < 1e-5 and row["losses"][-1] < row["losses"][0]
        assert arms[PLAIN]["fused"] == {} and arms[OURS]["collectives_left"] == {}
        assert sum(arms[OURS]["fused"].values()) > 0
