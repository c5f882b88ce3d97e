"""The arms of torch.compile on CPU ranks at small sizes, and what is said of their rows."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_bodies import by_reference, world
from rankpool import RankError, RankPool
from torch import fx
from torch._inductor import config as inductor

from benchmarks import compile as compiling
from benchmarks import runner
from benchmarks.compile import COMPILE, OURS, PLAIN, case_of, kind_of
from benchmarks.declare import Arms, Bench, Case
from benchmarks.rows import Row
from counterpoint.spans import Span
from counterpoint.timeline import Timeline


def rows_of(rank: int, ranks: int, step: str) -> list[dict[str, Any]]:
    benchmark = dataclasses.replace(
        COMPILE, arms=lambda case, bench: compiling.arms(case, bench, torch.float32)
    )
    bench = Bench(world(), torch.device("cpu"), rounds=2)
    # without C++ kernels, whose compilation takes a minute: each operator is a call
    lite = inductor.patch(fallback_by_default=True)
    with by_reference(), lite, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own
        return runner.measured(benchmark, case_of(step, "toy", 2, sequence=16), bench)


@pytest.mark.parametrize(("step", "collectives"), [
    ("train", {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}),
    ("decode", {"all_reduce": 2}),
])  # fmt: skip
def test_arms_are_right_and_count_collectives(
    pool: RankPool, step: str, collectives: Mapping[str, int]
):
    rows, *_ = pool.run(rows_of, 2, step, timeout_s=300)
    found = {row["arm"]: row for row in rows}
    plain, ours = found[PLAIN], found[OURS]
    assert plain["collectives_left"] == collectives and plain["fused"] == {}
    assert ours["collectives_left"] == {} and sum(ours["fused"].values()) > 0
    assert ours["explained"].count(", plan ") == sum(collectives.values())
    for row in (plain, ours):
        assert 0 < row["error"] < 1e-5 and row["median_s"] > 0 and row["compile_s"] > 0
    refused = {arm for arm, row in found.items() if "refused" in row}
    assert refused == set(found) - {PLAIN, OURS} and len(refused) == 2


def test_an_option_that_torch_lacks_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(compiling.OPTIONS, compiling.ASYNC, {"_gone": True})
    bench = object.__new__(Bench)
    text = compiling.options_of(compiling.ASYNC, compiling.Count(), bench)
    assert text == f"torch {torch.__version__} has no option _gone"


def test_torch_has_the_options_of_its_arms():
    known = inductor.get_config_copy()
    assert {option for options in compiling.OPTIONS.values() for option in options} <= set(known)


def test_collectives_are_counted_but_not_their_waits():
    graph, c10d = fx.Graph(), torch.ops._c10d_functional
    x = graph.placeholder("x")
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "0"))
    full = graph.call_function(c10d.wait_tensor.default, (gathered,))
    graph.call_function(torch.ops.aten.mm.default, (full, full))
    count = compiling.Count()
    count(graph)
    assert count.left == {"all_gather_into_tensor": 1} and not count.fused


KINDS = {
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
    "Memcpy PtoP (Device -> Device)": "copy",
    "Memcpy DtoD (Device -> Device)": "opaque",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "matmul",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>": "opaque",
    "triton_poi_fused_all_gather_into_tensor_mul_silu_0": "opaque",
    "all_gather_matmul_kernel": "fused",
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long)": "barrier",
}


@pytest.mark.parametrize("kernel", KINDS)
def test_kernels_by_their_names(kernel: str):
    assert kind_of(kernel) == KINDS[kernel]


def test_a_timeline_of_other_code_says_what_is_exposed():
    names = ("void nvjet_tst<4>(int)", "ncclDevKernel_AllGather")
    spans = [Span(rank, f"stream {i}", 5.0 + i, 7.0 + i, "other", names[i])
             for rank in (0, 1) for i in (0, 1)]  # fmt: skip
    spans.append(Span(0, "copy", 8.0, 9.0, "copy", "copy 1"))
    told = compiling.told(Timeline(tuple(spans)))
    assert told.ranks == (0,) and told.start_s == 0
    assert [span.kind for span in told.spans] == ["matmul", "collective", "copy"]
    assert told.spans[0].label == "nvjet_tst"
    assert told.exposed_s(0) == pytest.approx(2.0)


# ---- what is said


HEAD: Row = {"ranks": 2, "gpu": "H200", "driver": "1", "torch": "2", "triton": "3", "nccl": "4",
             "multicast": False, "date": "2026-11-22", "commit": "abc"}  # fmt: skip


def written(case: Case, times_ms: Mapping[str, float], **more: Any) -> list[Row]:
    facts = {"compile_s": 8.25, "peak_bytes": 3 << 30, "symmetric_bytes": 1 << 29,
             "collectives_left": {"all_reduce": 2}}  # fmt: skip
    return [HEAD | dict(case.facts) | facts | more
            | {"case": case.name, "arm": arm, "mode": mode, "median_s": t * 1e-3}
            for mode in ("graph", "eager") for arm, t in times_ms.items()]  # fmt: skip


def test_speedups_are_over_plain_and_over_the_best():
    times = {PLAIN: 10.0, compiling.SCHEDULED: 9.0, compiling.ASYNC: 9.5, OURS: 8.0}
    rows = written(case_of("train", "8B", 4, layers=4), times)
    rows += written(case_of("decode", "8B", 1), {PLAIN: 2.0, OURS: 1.0})
    text = compiling.section({2: rows})
    cells = "10.000 | 9.000 | 9.500 | 8.000 | 1.25 | 1.12"
    assert f"| 8B, 4 layers, batch 4, graph | {cells} |" in text
    assert "1.12 (graph, 1 sizes)" in text
    assert "| 8B, 1 row, eager | 2.000 | - | - | 1.000 | 2.00 | 2.00 |" in text
    assert "| train: 8B, 4 layers, batch 4 | compile | 3.50 | 0.50 | 8.2 | 2 all_reduce |" in text
    assert "Prefill" not in text, "it has no rows"


def test_arms_that_are_not_there_are_left_out():
    rows = written(case_of("train", "8B", 1), {PLAIN: 10.0})
    assert "| 8B, 1 layer, batch 1, graph | 10.000 | - | - | - | - | - |" in (
        compiling.times_table(rows, "train")
    )


def test_the_picture_is_of_rows(tmp_path: Path):
    case = case_of("train", "8B", 1)
    assert compiling.picture({2: written(case, {PLAIN: 1.0, OURS: 1.0})}) == ""
    timeline = Timeline((Span(0, "stream 7", 0.0, 1e-3, "matmul", "nvjet"),)).to_json()
    found = {2: written(case, {PLAIN: 1.0, OURS: 1.0}, timeline=timeline)}
    assert compiling.picture(found).count("images/compile-") == 2
    compiling.pictures(found, tmp_path)
    for theme in ("light", "dark"):
        assert "torch.compile with counterpoint" in (tmp_path / f"compile-{theme}.svg").read_text()


# ---- the runner


def captures(rank: int, ranks: int, peers: tuple[str, ...]) -> tuple[list[str], list[Row]]:
    def captured(call: Any, calls: int, pool: Any) -> tuple[Any, None]:
        if call(calls) == pool and rank == ranks - 1:
            raise RuntimeError("no graph\nof this")
        return (lambda: None), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "captured", captured)
        calls: dict[str, Any] = {"ours": lambda n: n, "torch": lambda _: "pool"}
        arms = Arms(calls, lambda *_: [], peers=peers, pool="pool")
        bench = Bench(world(), torch.device("cpu"))
        replays, rows = runner._captured(calls, 2, arms, bench)  # pyright: ignore[reportPrivateUsage]
        return list(replays), rows


def test_a_peer_that_one_rank_cannot_capture_is_left_out_on_all(pool: RankPool):
    why = {"arm": "torch", "mode": "graph", "refused": "it cannot be captured: no graph"}
    assert pool.run(captures, 2, ("torch",)) == [(["ours"], [why])] * 2
    with pytest.raises(RankError, match="no graph"):
        pool.run(captures, 1, ())
