"""The first paper's experiments on CPU ranks, at small sizes; and what its metrics mean."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loop_rows import FACTS, SMALL
from rank_bodies import world
from rankpool import RankPool

from benchmarks import loop, options, paper_resources, paper_thread_blocks
from benchmarks.declare import Bench, Benchmark, Case, WrongResultError
from benchmarks.loop import Pair
from benchmarks.persistent import free_grid_matmul_kernel
from benchmarks.rows import Row
from benchmarks.runner import chosen, declared, measured, run
from counterpoint.errors import InputError
from counterpoint.gpu.limits import LIMITS
from counterpoint.gpu.occupancy import Kernel, occupancy
from counterpoint.measure.timing import rotate
from counterpoint.measure.trace import Activity
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Eager
from counterpoint.resources.search import Space
from counterpoint.testing import ptx

CPU = torch.device("cpu")
CASES: dict[str, tuple[Benchmark, Case]] = {
    "cuBLAS": (paper_resources.PAPER_RESOURCES,
               paper_resources.case_of(Pair("cb", "cuBLAS", "all_reduce"))),
    "tile": (paper_resources.PAPER_RESOURCES,
             paper_resources.case_of(Pair("mb", "64x64x32", "all_to_all"))),
}  # fmt: skip


def rows_of(rank: int, ranks: int, name: str) -> list[Row]:
    """At sizes that an interpreter can do."""
    with ExitStack() as undo:
        for where, value in SMALL.items():
            undo.enter_context(mock.patch.object(loop, where, value))
        benchmark, case = CASES[name]
        return measured(benchmark, case, Bench(world(), torch.device("cpu"), rounds=2))


def grid_rows(rank: int, ranks: int, off: str = "") -> list[Row]:
    """Of three grids, the middle one at half the size; a setting is off on rank 1."""
    right = paper_resources.Way._right

    def of(way: paper_resources.Way, controls: Controls, call: Any) -> bool:
        if controls.spec == off:
            way.loop = replace(way.loop, check=lambda _: way.bench.most([0.5 * rank])[0])
        return right(way, controls, call)

    with ExitStack() as undo:
        for where, value in SMALL.items():
            undo.enter_context(mock.patch.object(loop, where, value))
        undo.enter_context(mock.patch.object(paper_thread_blocks, "FULL", 2))
        undo.enter_context(mock.patch.object(paper_thread_blocks, "SMALLER", 1))
        undo.enter_context(mock.patch.object(paper_resources.Way, "_right", of))
        pair, bench = Pair("cb", "64x64x32", "all_reduce"), Bench(world(), CPU, rounds=2)
        cases = [paper_thread_blocks.case_of(pair, grid) for grid in ((1, 1), (2, 3), (1, 5))]
        try:
            return run(paper_thread_blocks.PAPER_THREAD_BLOCKS, cases, bench, None, print)
        except WrongResultError as error:
            return error.rows


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["cuBLAS", "tile"])
def test_arms_of_a_pair(pool: RankPool, name: str):
    rows, *_ = pool.run(rows_of, 2, name, timeout_s=120)
    timed = {row["arm"]: row for row in rows if "refused" not in row}
    assert set(timed) == {"sequential", "plain overlap"}
    assert timed["sequential"]["time_ratio"] == 1 and timed["plain overlap"]["time_ratio"] > 0
    assert all(row["gemm_s"] > 0 and row["comm_sm_s"] > 0 for row in timed.values())
    assert {row["arm"] for row in rows if "needs a GPU" in row.get("refused", "")} == {"priority"}
    assert {row["nccl_threads"] for row in rows} == {0}


def test_every_grid_computes_the_same(pool: RankPool):
    """One block for all tiles, one for each, and one that has none."""
    rows, *_ = pool.run(grid_rows, 2, timeout_s=120)
    timed = [row for row in rows if "refused" not in row]
    assert [(row["blocks"], row["arm"]) for row in timed] == [
        (blocks, arm) for blocks in (1, 6, 5) for arm in ("sequential", "overlap")
    ]
    assert len(rows) == 9 and all(row["median_s"] > 0 for row in timed)


def test_a_setting_that_is_wrong_loses_no_other_row(pool: RankPool):
    for rows in pool.run(grid_rows, 2, "overlap", timeout_s=120):
        wrong = [row for row in rows if row.get("wrong")]
        assert [(row["arm"], row["blocks"]) for row in wrong] == [
            ("overlap", blocks) for blocks in (1, 6, 5)
        ]
        assert all(row["refused"].startswith("off by 5.00e-01 against fp64") for row in wrong)
        assert sum("median_s" in row for row in rows) == 3


def test_a_part_has_all_grids_of_two_pairs():
    benchmark, seen = paper_thread_blocks.PAPER_THREAD_BLOCKS, set[str]()
    for part in ("1/4", "2/4", "3/4", "4/4"):
        found = chosen(benchmark, 2, part=part)
        grids = {pair: [c["grid"] for c in found if c["pair"] == pair]
                 for pair in {c["pair"] for c in found}}  # fmt: skip
        assert list(grids.values()) == [[*map(list, paper_thread_blocks.GRIDS)]] * 2
        seen |= {*grids}
    assert len(seen) == 8


@pytest.mark.parametrize("tile", paper_thread_blocks.KERNELS)
def test_the_kernel_of_any_grid_on_an_h100(tile: str):
    kernel, (m, n, k, warps, stages) = free_grid_matmul_kernel, loop.TRITON[tile]
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    types = {name: "*bf16" if name.endswith("ptr") else "i32"
             for name in kernel.arg_names if name not in constants}  # fmt: skip
    found = ptx.compiled(kernel, 90, types, constants, num_warps=warps, num_stages=stages,
                         aligned=(*types,))  # fmt: skip
    block = Kernel(32 * warps, found.registers, 0, found.dynamic_bytes)
    assert not found.spills and occupancy(block, LIMITS["sm_90"]).blocks >= 4


class Able:
    """In the place of `settings.Bench`: graphs that run call by call, without any control."""

    def __init__(self, pipeline: Pipeline, mode: str) -> None:
        self.pipeline, self.refused = pipeline, {"overlap priority": "no such stream"}

    def __enter__(self) -> "Able":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def able(self, controls: Controls) -> bool:
        return controls.spec not in self.refused

    def holding(self, spec: str) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, controls: Controls) -> Eager:
        return Eager(self.pipeline, SEQUENTIAL if controls == SEQUENTIAL else OFF)


def graph_rows(rank: int, ranks: int) -> list[Row]:
    """What a node with GPUs would write, its graphs and its trace made up."""
    shaped = Controls(blocks_per_sm=2)
    searched: list[tuple[int, ...]] = []

    def tune(*_: Any, space: Space, **__: Any) -> AbstractContextManager[Any]:
        searched.append(space.blocks_per_sm)
        return nullcontext(SimpleNamespace(controls=Controls(delay_s=5e-6)))

    def traced(call: Eager) -> tuple[None, dict[str, Any]]:
        if call.controls == SEQUENTIAL:
            raise RuntimeError("the profiler is taken")
        return call(), trace

    row = {"arm": "shapes", "controls": shaped.spec, "priority": False, "blocks_per_sm": 2,
           "unshaped": False, "median_s": 1.0, "time_ratio": 0.9}  # fmt: skip
    names = {"gemm": "matmul_kernel", "nccl": "ncclDevKernel"}
    event = {"ph": "X", "cat": "kernel", "ts": 0}
    trace = {"traceEvents": [event | {"name": names["gemm"], "dur": 10},
                             event | {"name": names["nccl"], "dur": 4 + rank}]}  # fmt: skip
    made: dict[str, Any] = {
        "settings.Bench": Able,
        "settings.space_of": lambda *_: Space(blocks_per_sm=(4, 3, 2, 1)),
        "unshaped": lambda _: 8, "sweep": lambda *_: ([row], {"shaping": shaped}),
        "tune": tune, "traced": traced,
        "resident": lambda _: {"comm_threads": 544, "beside_blocks": 0},
        "rotate": lambda arms, **more: rotate(arms, **more | {"soak_s": 0.0}),
    }  # fmt: skip
    with ExitStack() as undo:
        for name, value in made.items():
            undo.enter_context(mock.patch(f"benchmarks.paper_resources.{name}", value))
        for name, value in SMALL.items():
            undo.enter_context(mock.patch.object(loop, name, value))
        bench = Bench(world(), torch.device("cpu"), rounds=2)
        bench.on_gpu = True
        bench.meet = lambda: dist.barrier(bench.group)
        case = paper_resources.case_of(Pair("cb", "cuBLAS", "all_to_all"))
        rows = measured(paper_resources.PAPER_RESOURCES, case, bench)
    assert searched == [(2,)], "the shapes that the sweep has found to be best"
    return rows


@pytest.mark.parametrize("errors", [(1e-3, 3e-3), (8e-3, 1.2e-2)])
def test_a_setting_off_by_more_than_twice_the_sequential_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, ...]
):
    monkeypatch.setattr(paper_resources, "Eager", lambda _, controls: controls)
    monkeypatch.setattr(paper_resources, "rotate", lambda calls, **_: {*calls})

    def way(*found: float) -> paper_resources.Way:
        of = dict(zip((SEQUENTIAL, OFF), found, strict=True))
        made: Any = SimpleNamespace(pipeline=None, check=of.__getitem__)
        cpu: Any = SimpleNamespace(on_gpu=False, group=None, device=None, say=lambda _: None)
        return paper_resources.Way(made, cpu)

    some = (SEQUENTIAL, OFF)
    assert way(1e-3, 2e-3).timed(some, 1) == {each.spec for each in some}
    off = way(*errors)
    assert off.timed(some, 1) == {SEQUENTIAL.spec}
    assert off.why_not(OFF) == {"refused": mock.ANY, "wrong": True}
    with pytest.raises(WrongResultError, match=r"sequential: off by .* against fp64"):
        way(2e-2, 1e-3).timed(some, 1)


def test_rows_of_graphs(pool: RankPool):
    rows, *_ = pool.run(graph_rows, 2, timeout_s=120)
    arms = {row["arm"]: row for row in rows}
    assert list(arms) == ["shapes", "sequential", "plain overlap", "priority", "shaping", "tuned"]
    assert arms["priority"]["refused"] == "no such stream"
    timed = [row for row in rows if "p20_s" in row]
    assert len(timed) == 4 and all(row["time_ratio"] > 0 for row in timed)
    rates = {row["arm"]: row.get("overlap_rate") for row in timed}
    assert rates.pop("sequential") is None, "without a trace the times stay"
    assert set(rates.values()) == {0.4}, "of the rank with the least"
    assert {row["mode"] for row in rows} == {"graph"}
    assert all(row["comm_threads"] == 544 for row in rows)


def activity(name: str, start_us: float, end_us: float, category: str = "kernel") -> Activity:
    return Activity(category, name, 7, start_us, end_us, None)


def test_the_overlap_rate_is_the_time_in_which_both_run():
    gemm, comm = "matmul_kernel", "ncclDevKernel_AllReduce"
    found = [activity(gemm, 0, 4), activity(comm, 3, 7), activity(gemm, 5, 6),
             activity(gemm, 5.5, 10)]  # fmt: skip
    assert paper_resources.overlap_rate(found) == pytest.approx(0.3)
    assert paper_resources.overlap_rate(found[:1]) == 0
    copied = [activity(gemm, 0, 4), activity("Memcpy PtoP", 2, 4, "gpu_memcpy")]
    assert paper_resources.overlap_rate(copied) == pytest.approx(0.5)
    assert paper_resources.overlap_rate([activity(comm, 0, 4), activity(comm, 2, 6)]) == 0


def test_all_pairs_of_the_paper():
    names = [case.name for case in paper_resources.cases(2)]
    assert len(set(names)) == 12
    assert min(x * y for x, y in paper_thread_blocks.GRIDS) == 4
    with mock.patch.dict("os.environ", NCCL_NTHREADS="256"):
        assert all("256 threads" in case.name for case in paper_resources.cases(2))


def test_the_option_names_the_paper_s_own():
    assert options.bench(["resources", "--paper"]).names == ["paper_resources"]
    assert [declared(name).name for name in options.bench(["resources", "thread_blocks", "--paper"])
            .names] == ["paper_resources", "paper_thread_blocks"]  # fmt: skip
    with pytest.raises(InputError, match="add --paper"):
        options.bench(["thread_blocks"])
    with pytest.raises(InputError, match="one of resources, thread_blocks"):
        options.bench(["decode", "--paper"])


def paper_rows(threads: int, pairs: int) -> list[Row]:
    """Made up: what the command writes, each arm at another ratio."""
    ratios = {"sequential": 1.0, "plain overlap": 0.96, "priority": 0.8, "shaping": 0.93,
              "shaping, priority": 0.78, "tuned": 0.7}  # fmt: skip
    return [
        FACTS | paper_resources.case_of(pair).facts | {
            "nccl_threads": threads, "arm": arm, "median_s": 2e-2 * ratio, "iterations": 4,
            "time_ratio": ratio + 0.02 * i, "gemm_s": 3e-3, "comm_sm_s": 2e-3, "ranks": 2}
        for i, pair in enumerate(loop.pairs(paper_resources.KERNELS)[:pairs])
        for arm, ratio in ratios.items()
    ]  # fmt: skip


def test_the_ratios_of_each_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = paper_rows(256, 4) + paper_rows(0, 12)
    rows.append(rows[0] | {"arm": "shapes", "time_ratio": 9.0})
    drawn: list[Any] = []
    monkeypatch.setattr(paper_resources, "dots", lambda *given, **more: drawn.append((given, more)))
    paper_resources.pictures({2: rows, 1: []}, tmp_path)
    (((panels, _), more),) = drawn
    assert list(panels) == ["NCCL as it is", "NCCL with 256 threads a block"]
    as_is, few = panels.values()
    assert list(as_is) == list(few) and len(as_is) == 12 and sum(map(bool, few.values())) == 4
    pair = as_is["cb cuBLAS + all-reduce"]
    assert pair["counterpoint, tuned"] == pytest.approx(0.72) and len(pair) == 5
    assert more["marks"]["NCCL as it is"]["cb cuBLAS + all-reduce"] == pytest.approx(0.7)
    assert more["title"].startswith("TimeRatio, means: plain overlap 1.0")
    monkeypatch.undo()
    paper_resources.pictures({2: rows}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        f"sharing-paper-{theme}.svg" for theme in ("light", "dark")
    }


def test_the_figure(tmp_path: Path):
    rows: list[dict[str, Any]] = [
        FACTS | {"arm": arm, "gemm": "cb", "kernel": "64x64x32", "collective": "all_reduce",
                 "blocks": blocks, "time_ratio": 0.9, "ranks": 2}
        for arm in ("sequential", "overlap", "overlap, priority") for blocks in (64, 1024)
    ]  # fmt: skip
    paper_thread_blocks.pictures({2: rows}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        f"sharing-blocks-{theme}.svg" for theme in ("light", "dark")
    }
