"""The first paper's experiments on CPU ranks, at small sizes; and what its metrics mean."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from loop_rows import FACTS
from rank_bodies import world
from rankpool import RankPool

from benchmarks import loop, options, paper_resources, paper_thread_blocks
from benchmarks.declare import Bench, Benchmark, Case
from benchmarks.loop import Pair
from benchmarks.rows import Row
from benchmarks.runner import declared, measured
from counterpoint.errors import InputError
from counterpoint.measure.trace import Activity

M, N, K = 128, 192, 64
CASES: dict[str, tuple[Benchmark, Case]] = {
    "cuBLAS": (paper_resources.PAPER_RESOURCES,
               paper_resources.case_of(Pair("cb", "cuBLAS", "all_reduce"))),
    "tile": (paper_resources.PAPER_RESOURCES,
             paper_resources.case_of(Pair("mb", "64x64x32", "all_to_all"))),
    "blocks": (paper_thread_blocks.PAPER_THREAD_BLOCKS,
               paper_thread_blocks.case_of(Pair("cb", "64x64x32", "all_reduce"))),
}  # fmt: skip


def rows_of(rank: int, ranks: int, name: str) -> list[Row]:
    """At sizes that an interpreter can do."""
    # the interpreter multiplies no bf16
    small = {"SHAPES": {"cb": (M, N, K), "mb": (M, 2 * N, K)}, "COLLECTIVE_BYTES": 8 * M * N,
             "DTYPE": torch.float32}  # fmt: skip
    with ExitStack() as undo:
        for where, value in small.items():
            undo.enter_context(mock.patch.object(loop, where, value))
        some = {"GRIDS": ((1, 1), (2, 3), (1, 5)), "FULL": 2, "SMALLER": 1}
        for where, value in some.items():
            undo.enter_context(mock.patch.object(paper_thread_blocks, where, value))
        benchmark, case = CASES[name]
        return measured(benchmark, case, Bench(world(), torch.device("cpu"), rounds=2))


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
    rows, *_ = pool.run(rows_of, 2, "blocks", timeout_s=120)
    timed = [row for row in rows if "refused" not in row]
    assert [(row["blocks"], row["arm"]) for row in timed] == [
        (blocks, arm) for blocks in (1, 6, 5) for arm in ("sequential", "overlap")
    ]
    assert len(rows) == 9 and all(row["median_s"] > 0 for row in timed)


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
    assert len(paper_thread_blocks.cases(2)) == 8
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
