"""Tensor parallelism replayed: a rank computes what it would, and is priced as it should be."""

import pytest
import torch

from benchmarks import overlap_replay
from benchmarks.overlap import case_of, problem_of
from benchmarks.replay import COMPUTED, OneRank, lane_of, operands_of, replayed
from counterpoint.machine_of import machine_of
from counterpoint.model.estimate import predicted_s
from counterpoint.model.work import works
from counterpoint.plan.bind import Program

MACHINE = machine_of("test", overlap_replay.LINKS)
OPS = (overlap_replay.GATHER, overlap_replay.SCATTER, overlap_replay.SUM)


def programs(op: str, m: int, n: int, k: int) -> dict[str, Program]:
    problem = problem_of(case_of(op, m, n, k), overlap_replay.RANKS)
    return overlap_replay.programs_of(problem, MACHINE)


@pytest.mark.parametrize("op", OPS)
def test_what_a_rank_computes_of_each_plan_runs_by_itself(op: str):
    # more than 16 MiB of an all-reduce's result, from where on it is cut
    shape = (2048, 4112, 8) if op == overlap_replay.SUM else (64, 48, 32)
    found = programs(op, *shape)
    wanted = {"serial", "shard_p2p ring", "shard_p2p ring chunks=2"}
    wanted |= (
        {"running_sum chunks=2"} if op != overlap_replay.GATHER else {"uniform_unfused_1d ring"}
    )
    assert wanted <= set(found) and not any("xor" in spec for spec in found)
    memory = OneRank(torch.device("cpu"))
    operands = operands_of([program.plan for program in found.values()], torch.randn)
    operands = {name: tensor.bfloat16() for name, tensor in operands.items()}
    for program in found.values():
        memory.reserve(program.plan)
    for spec, program in found.items():
        lane = lane_of(program, memory, operands)
        assert list(lane) == [b.step.name for b in program.steps if b.step.kind in COMPUTED]
        for step in lane.values():
            step()
        assert operands["y"].isfinite().all(), spec


@pytest.mark.parametrize("op", OPS)
def test_a_replay_of_predicted_steps_is_the_prediction(op: str):
    for spec, program in programs(op, 8192, 8192, 3584).items():
        priced = zip(program.steps, works(program, MACHINE, {}), strict=True)
        found = {bound.step.name: work for bound, work in priced if bound.step.kind in COMPUTED}
        times = {name: (w.seconds, w.seconds * w.beside_copy) for name, w in found.items()}
        got = replayed(program, times, MACHINE, 1.0)
        assert got == pytest.approx(predicted_s(program.plan, MACHINE), rel=1e-9), spec


def test_the_sizes_of_ones_own_are_of_all_three_operators():
    assert [case["op"] for case in overlap_replay.own((64, 48, 32), 1)] == [*OPS]
    found = [case.name.split()[1] for case in overlap_replay.cases(1)]
    assert found[:4] == ["8192,8192,3584", "8192,16384,6656", "2048,7168,8192", "8192,8192,3584"]
    assert len({*found}) == len(found) - 1 == 15


def test_the_table_holds_auto_and_the_best_by_shards_against_the_ideal():
    head = {"op": "matmul_reduce_scatter", "m": 8192, "n": 8192, "k": 3584, "mode": "graph",
            "gpu": "H200", "ranks": 1, "driver": "1", "torch": "2", "triton": "3", "nccl": "4",
            "multicast": False, "date": "2026-11-24", "commit": "abc"}  # fmt: skip
    times = {"ideal": 0.5, "serial": 0.9, "shard_p2p ring": 0.6, "graded 2 ring": 0.7, "auto": 0.55}
    rows = [head | {"arm": name, "median_s": s * 1e-3} for name, s in times.items()]
    rows[-1]["pick"] = "running_sum chunks=2"
    line = overlap_replay.replay_table(rows).splitlines()[2]
    assert line == (
        "| matmul_reduce_scatter | 8192, 8192, 3584 | 0.500 | 0.900 | 0.600 shard_p2p ring "
        "| **0.550** | running_sum chunks=2 | **1.64** | 1.200 | **1.100** |"
    )
    few = [row | {"op": "matmul_all_reduce"} for row in rows if "ring" not in row["arm"]]
    *_, line, _, note = overlap_replay.replay_table(few).splitlines()
    assert "| 0.900 | **0.550** | running_sum chunks=2 | **1.64** | **1.100** |" in line
    assert "geometric mean of 1: 1.64, least 1.64" in note
