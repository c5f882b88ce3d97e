"""Predicted times of embedding bags: against measured rows, and by what they must depend on."""

import json
from dataclasses import replace
from functools import cache
from statistics import fmean, median
from typing import Any

import pytest
import torch
from embedding_cases import OP, problem_of

import counterpoint as cp
from benchmarks.embedding import MLPERF_POOLING, shards
from benchmarks.rows import RESULTS
from counterpoint.embedding.plan_seconds import START_S, seconds
from counterpoint.machine import LinkSpec
from counterpoint.machine_of import shipped
from counterpoint.model.estimate import predicted_s as one_rank_s
from counterpoint.problem import Problem

MACHINE = shipped("NVIDIA H200", 4) or cp.preset("h200-4")
UNIFORM = problem_of(
    ((128,) * 8,) * 4, (4096,) * 4, torch.bfloat16, indices=(16384 * 8 * 5,) * 4, out=True
)
FILES = ("embedding-2x-h200.jsonl", "embedding_4x_before.jsonl")  # of the second: no fused kernel
RIGHT = 1.02


def indices_of(row: dict[str, Any]) -> tuple[int, ...]:
    """Of each rank; rows that do not say are of the grid, or of MLPerf's tables as shared there."""
    if "indices" in row:
        return tuple(row["indices"])
    if row["case"].startswith("MLPerf"):
        pooled = (sum(MLPERF_POOLING[t] for t in own) for own in shards(row["ranks"]))
        return tuple(row["batch"] * each for each in pooled)
    return tuple(row["batch"] * row["pooling"] * tables for tables in row["tables"])


SERIAL = "ours serial"  # a lookup, the library's all-to-all, a concat
SERIALS = (SERIAL, "lookup cat")  # as rows of before the runner call it


@cache
def measured() -> tuple[tuple[Problem, dict[str, float]], ...]:
    """Each case's problem, and the seconds of its arms."""
    found: list[tuple[Problem, dict[str, float]]] = []
    for file in FILES:
        cases: dict[str, tuple[Problem, dict[str, float]]] = {}
        for line in (RESULTS / file).read_text().splitlines():
            row = json.loads(line)
            if row["table"] != "embedding" or "median_s" not in row:
                continue
            if row["case"] not in cases:
                dims = tuple((row["d"],) * tables for tables in row["tables"])
                bags = (row["batch"] // row["ranks"],) * row["ranks"]
                p = problem_of(dims, bags, torch.bfloat16, indices=indices_of(row))
                cases[row["case"]] = p, {}
            if "before" not in file or not row["arm"].startswith("fused"):
                arm = SERIAL if row["arm"] in SERIALS else row["arm"]
                cases[row["case"]][1].setdefault(arm, row["median_s"])
        found += cases.values()
    return tuple(found)


def guess(p: Problem, spec: str) -> float:
    """As the model predicts a plan."""
    machine = shipped("NVIDIA H200", p.ranks)
    assert machine is not None and machine.measured
    return cp.estimate(cp.build(p, spec), machine).end_s


def test_what_was_measured():
    """Of every case in the rows; the constants are fitted to them."""
    off: dict[str, list[float]] = {}
    for p, times in measured():
        machine = shipped("NVIDIA H200", p.ranks)
        assert machine is not None
        guesses = {
            "lookup": seconds(p, machine).lookup_s,
            SERIAL: guess(p, "serial"),
            "fused copy": guess(p, "fused"),
            "fused": guess(replace(p, out=True), "fused"),
        }
        for arm, predicted_s in guesses.items():
            if arm in times:
                off.setdefault(arm, []).append(abs(predicted_s / times[arm] - 1))
    # rows of 4 GPUs, of before the runner, time the lookup alone, those of 2 the kernel
    assert len(off["lookup"]) == len(off["fused"]) == len(off["fused copy"]) == 39
    assert len(off[SERIAL]) == 78
    for arm, each in off.items():
        assert median(each) < 0.06 and max(each) < 0.25, arm


def test_auto_takes_the_faster_plan_of_what_was_measured():
    over: list[float] = []
    for p, times in measured():
        for out, arm in ((True, "fused"), (False, "fused copy")):
            if arm in times:
                spec = cp.choose(replace(p, out=out), shipped("NVIDIA H200", p.ranks)).spec
                both = {"serial": times[SERIAL], "fused": times[arm]}
                over.append(both[spec] / min(both.values()))
    assert len(over) >= 78 and fmean(over) < 1.01
    assert fmean(ratio <= RIGHT for ratio in over) > 0.9


@pytest.mark.parametrize("machine", ["h200-4", "a100-8", "mi300x-8"])
def test_more_takes_longer(machine: str):
    where = cp.preset(machine)
    first = seconds(UNIFORM, where)
    wide = replace(UNIFORM, tables=((256,) * 8,) * 4, n=0)
    more = (
        replace(UNIFORM, m=32768, rows=()), replace(UNIFORM, indices=(16384 * 8 * 50,) * 4), wide,
        replace(UNIFORM, dtype="float32"),
        replace(UNIFORM, indices=(*UNIFORM.indices[:3], 16384 * 8 * 90)),
    )  # fmt: skip
    for problem in more:
        found = seconds(problem, where)
        assert found.serial_s > first.serial_s and found.fused_s > first.fused_s, problem
    copied = seconds(replace(UNIFORM, out=False), where)
    assert copied.fused_s > first.fused_s and copied.serial_s == first.serial_s


def test_the_parts_are_the_steps_of_the_plans():
    """Also where ranks have other tables, bags or indices."""
    ragged = problem_of(((128,), (), (64, 8)), (9, 0, 700), indices=(90_000, 0, 4_000))
    for p in (UNIFORM, ragged):
        found = seconds(p, MACHINE)
        for spec, want in (("serial", found.serial_s), ("fused", found.fused_s)):
            timeline = cp.estimate(cp.build(p, spec), MACHINE)
            assert timeline.end_s == pytest.approx(want)
        spans = cp.estimate(cp.build(p, "serial"), MACHINE).spans
        assert {s.label for s in spans} == {"lookup", "exchange"}


def test_between_islands_lookups_run_beside_exchanges():
    """Of one length: what goes to the other island is hidden but for a chunk of either."""
    nic = LinkSpec(name="NIC", bytes_per_s=45e9, latency_s=5e-6)
    machine = replace(cp.preset("h200-8"), nic=nic)
    ranks, bags, pooling = 16, 65536, 35
    counts = (bags * 8 * pooling,) * ranks
    p = problem_of(((128,) * 8,) * ranks, (bags // ranks,) * ranks, torch.bfloat16,
                   indices=counts, islands=2)  # fmt: skip
    found = seconds(p, machine)
    far_s = bags // 2 * 8 * 128 * 2 / 45e9
    assert found.exchange_s > far_s
    spans = {s.label: s for s in cp.estimate(cp.build(p, "islands chunks=8"), machine).spans}
    gives = [spans[f"give_1_{i}"] for i in range(8)]
    lookups = [spans[f"lookup_1_{i}"] for i in range(8)]
    assert sum(s.end_s - s.start_s for s in gives) == pytest.approx(far_s + 8 * 5e-6)
    pooled_s = sum(s.end_s - s.start_s for s in (*lookups, spans["lookup_near"]))
    assert found.lookup_s < pooled_s < found.lookup_s + 9 * START_S
    choice = cp.choose(p, machine)
    assert choice.plan.family == "islands" and choice.serial_s > 1.4 * choice.seconds
    assert choice.seconds > max(far_s, found.lookup_s)


def test_one_rank_and_nothing():
    where = cp.preset("h200-2")
    alone = seconds(problem_of(((64,),), (100,), indices=(500,)), where)
    assert alone.serial_s == alone.fused_s == alone.lookup_s > 0
    empty = seconds(problem_of(((64,), ()), (0, 0), indices=(0, 0)), where)
    assert empty.serial_s > 0 and empty.fused_s > 0 and empty.exchange_s > 0
    unknown = seconds(problem_of(((64,), ()), (5, 5)), where)
    assert unknown == seconds(problem_of(((64,), ()), (5, 5), indices=(0, 0)), where)


def test_why():
    choice = cp.choose(UNIFORM, MACHINE)
    assert choice.spec == choice.plan.spec == "fused"
    found = seconds(UNIFORM, MACHINE)
    assert choice.seconds == pytest.approx(found.fused_s)
    assert choice.serial_s == pytest.approx(found.serial_s)
    text = choice.explain()
    assert f"fused, {found.fused_s * 1e6:.0f} us, {found.serial_s / found.fused_s:.2f}x" in text
    assert "M16384 N4096 tables 8x128/8x128/8x128/8x128, bags of 5/5/5/5 indices, into" in text
    assert "lookup alone" in text and "slower" in text and "measured rates" in text
    # where a peer's memory is stored to slowly
    slow = replace(MACHINE, measured=replace(MACHINE.costs, copy_bytes_per_s=1e9))
    assert cp.choose(UNIFORM, slow).spec == "serial"
    assert "0.01  simulated    slower" in cp.choose(UNIFORM, slow).explain()


def test_dtypes_of_torch():
    problem = replace(UNIFORM, dtype=torch.float16)  # type: ignore[arg-type]
    assert problem == replace(UNIFORM, dtype="float16") and problem.dtype == "float16"


def test_what_is_refused():
    def refused(op: str = OP, **more: object) -> str:
        facts: dict[str, object] = {"m": 4, "tables": ((8,), ()), "indices": (9, 0)}
        with pytest.raises(cp.InputError) as error:
            cp.Problem(op, **facts | more)  # type: ignore[arg-type]
        return str(error.value)

    assert "tables must be columns >= 1" in refused(tables=((), ()))
    assert "tables must be columns >= 1" in refused(tables=((8,), (0,)))
    assert "tables must be columns >= 1" in refused(tables=())
    assert "tables must be of each of 4 ranks" in refused(ranks=4)
    assert "m must be a multiple of the 2 ranks" in refused(m=5)
    assert "rows must be 2 counts >= 0" in refused(rows=(4,))
    assert "indices[0] must be a whole number" in refused(indices=(-1, 0))
    assert "indices must be 0 where a rank has no tables" in refused(indices=(1, 1))
    assert "n must be 8, columns of all tables, or 0, got 9" in refused(n=9)
    others: dict[str, Any] = {"k": 3, "bias": True, "splits": (8,), "experts": 2}
    for name, value in others.items():
        assert f"{name} must be" in refused(**{name: value})
    text = refused(dtype=torch.int8).replace("'", "")
    assert "dtype must be one of bfloat16, float16, float32, got torch.int8" in text
    assert "tables must be left out: the op has no tables" in refused("all_gather_matmul", ranks=2)
    with pytest.raises(cp.InputError, match="machine of 4 GPUs or more"):
        cp.choose(UNIFORM, "h200-2")
    assert cp.choose(UNIFORM, "h200-4", by="rule").spec == "fused"


@pytest.mark.parametrize("widest", range(4))
def test_between_islands_the_rank_with_most_columns_is_timed(widest: int):
    """It sends most, and so does its rail: which of the four ranks it is does not matter."""
    machine = replace(MACHINE, nic=LinkSpec(name="NIC", bytes_per_s=5e9, latency_s=5e-6))
    times: list[float] = []
    for place in (0, widest):
        tables = tuple((128,) * (8 if r == place else 1) for r in range(4))
        indices = tuple(16384 * len(each) * 5 for each in tables)
        p = Problem(OP, m=16384, ranks=4, islands=2, tables=tables, indices=indices)
        times.append(one_rank_s(cp.build(p, "islands chunks=2"), machine))
    assert times[0] == pytest.approx(times[1])
    sent_s = 16384 / 2 * 8 * 128 * 2 / 5e9  # bags of the other island
    assert times[0] > sent_s
