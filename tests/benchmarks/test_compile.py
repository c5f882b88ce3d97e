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


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("step", "collectives"), [
    ("train", {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}),
    ("decode", {"all_reduce": 2}),
])  # fmt: skip
def test_arms_are_right_and_count_collectives(
    pool: RankPool, step: str, collectives: Mapping[str, int]
):
    rows, *_ = pool.run(rows_of, 2, step)
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
    "Memcpy DtoD (Device -> Device)": "move",
    "memcpy128": "move",
    "Memset (Unknown)": "opaque",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128>": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "opaque",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>": "opaque",
    "triton_poi_fused_all_gather_into_tensor_mul_silu_0": "opaque",
    "triton_red_fused__fused_rms_norm_add_all_gather_into_tensor_5": "opaque",
    "all_gather_matmul_kernel": "fused",
    "reduce_kernel": "reduce",
    "signal_kernel": "barrier",
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long)": "barrier",
}


@pytest.mark.parametrize("kernel", KINDS)
def test_kernels_by_their_names(kernel: str):
    assert kind_of(kernel) == KINDS[kernel]


# from input to the sum behind attention, in us: of replays on 2 H200s, 8B, forward
REPLAYED = {
    PLAIN: """\
0 21 stream 7 triton_red_fused__fused_rms_norm_all_gather_into_tensor_0
30 197 stream 7 ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
200 202 stream 244 Memset (Unknown)
206 401 stream 244 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
401 450 stream 244 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
450 499 stream 244 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
499 516 stream 244 triton_poi_fused__unsafe_view_add_cat_mul_neg_split_transpose_view_1
517 548 stream 244 triton_poi_fused__unsafe_view_add_cat_clone_expand_mul_neg_split_transpose_3
552 554 stream 244 Memset (Unknown)
557 1094 stream 244 cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128
1099 1100 stream 244 Memset (Unknown)
1103 1302 stream 244 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
1302 1333 stream 244 triton_poi_fused__unsafe_view_cat_reduce_scatter_tensor_split_4
1342 1508 stream 7 ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
""",
    OURS: """\
0 23 stream 7 triton_red_fused__fused_rms_norm_0
23 68 stream 7 signal_kernel
23 121 stream 256 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
76 165 stream 257 Memcpy PtoP (Device -> Device)
122 150 stream 256 nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT
150 177 stream 256 nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT
170 172 stream 257 Memcpy PtoP (Device -> Device)
177 179 stream 7 signal_kernel
180 275 stream 7 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
276 303 stream 7 nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT
303 330 stream 7 nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT
335 405 stream 257 triton_poi_fused__unsafe_view_add_cat_mul_neg_split_transpose_view_1
409 411 stream 257 Memset (Unknown)
414 967 stream 257 cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128
969 1022 stream 255 signal_kernel
972 973 stream 258 Memset (Unknown)
976 1081 stream 258 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
1086 1174 stream 258 Memcpy PtoP (Device -> Device)
1086 1089 stream 259 Memset (Unknown)
1095 1196 stream 259 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT
1177 1180 stream 258 Memcpy PtoP (Device -> Device)
1198 1230 stream 259 signal_kernel
1230 1257 stream 259 reduce_kernel
""",
}


def replayed(arm: str, *, rank: int = 0, late_us: float = 0, slower: float = 1) -> list[Span]:
    found: list[Span] = []
    for line in REPLAYED[arm].splitlines():
        start, end, _, stream, name = line.split(" ", 4)
        start_s, end_s = ((late_us + slower * float(us)) * 1e-6 for us in (start, end))
        found.append(Span(rank, f"stream {stream}", start_s, end_s, "other", name))
    return found


def test_what_a_replay_exposes():
    plain, ours = (compiling.told(Timeline(tuple(replayed(arm)))) for arm in (PLAIN, OURS))
    assert plain.lanes(0) == ("compute", "collective")
    assert ours.lanes(0) == ("compute", "signal", "copy")
    # an all-gather and a reduce-scatter, beside which nothing runs
    assert plain.exposed_s(0) == pytest.approx(((197 - 30) + (1508 - 1342)) * 1e-6)
    # a copy between two matmuls, a signal after them, one before and after a memset, a copy
    # behind a memset, and the wait for the peer's part of the sum
    assert ours.exposed_s(0) == pytest.approx((1 + 2 + 3 + 3 + 6 + 32) * 1e-6)
    assert ours.communication_s(0) == pytest.approx((45 + 89 + 2 + 2 + 53 + 88 + 3 + 32) * 1e-6)
    said = dict.fromkeys(s.label for s in plain.spans)
    assert list(said) == [
        "other", "all-gather", "opaque", "matmul", "attention", "reduce-scatter",
    ]  # fmt: skip


def test_a_lane_runs_one_thing_at_a_time():
    for arm in (PLAIN, OURS):
        told = compiling.told(Timeline(tuple(replayed(arm))))
        for lane in told.lanes(0):
            spans = [span for span in told.spans if span.lane == lane]
            assert sum(s.duration_s for s in spans) == pytest.approx(told.busy_s(0, lane), abs=4e-6)


def test_of_many_replays_the_one_of_median_time_is_shown():
    half = compiling.REPLAYS // 2
    slower = [1 + (3 * i % compiling.REPLAYS - half) / 10 for i in range(compiling.REPLAYS)]
    spans = [
        span for rank in (0, 1) for i in range(compiling.REPLAYS)
        for span in replayed(OURS, rank=rank, late_us=1e4 * i, slower=slower[i])
    ]  # fmt: skip
    got = compiling.typical(Timeline(tuple(reversed(spans))))
    assert got.start_s == 0 and got.duration_s == pytest.approx(1257e-6)
    for rank in (0, 1):
        names = sorted(span.label for span in got.spans if span.rank == rank)
        assert names == sorted(span.label for span in replayed(OURS))


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
    rows += written(case_of("decode", "70B", 1), {PLAIN: 3.0, OURS: 2.0})
    text = compiling.section({2: rows})
    cells = "10.000 | 9.000 | 9.500 | 8.000 | 1.25 | 1.12"
    assert f"| 8B, 4 layers, batch 4, graph | {cells} |" in text
    assert "8B 1.12 (graph, of 1)" in text
    assert "8B 2.00 (eager, of 1), 70B 1.50 (graph, of 1)" in text
    assert "| 8B, 1 row, eager | 2.000 | 1.000 | 2.00 | 2.00 |" in text
    assert "| train: 8B, 4 layers, batch 4 | compile | 3.50 | 0.50 | 8.2 | 2 all_reduce |" in text
    assert "Prefill" not in text, "it has no rows"


def test_arms_that_are_not_there_are_left_out():
    rows = written(case_of("train", "8B", 1), {PLAIN: 10.0})
    assert "| 8B, 1 layer, batch 1, graph | 10.000 |\n" in compiling.times_table(rows, "train")


def test_the_picture_is_of_rows(tmp_path: Path):
    case = case_of("train", "8B", 1)
    assert compiling.picture({2: written(case, {PLAIN: 1.0, OURS: 1.0})}) == ""
    rows = [
        row for arm, ms in ((PLAIN, 3.0), (OURS, 2.0))
        for row in written(case, {arm: ms}, timeline=Timeline(tuple(replayed(arm))).to_json())
    ]  # fmt: skip
    assert compiling.picture({2: rows}).count("images/compile-") == 2
    compiling.pictures({2: rows}, tmp_path)
    for theme in ("light", "dark"):
        text = (tmp_path / f"compile-{theme}.svg").read_text()
        assert "One layer of Llama-3-8B width, forward and backward" in text
        # of 1508 and of 1257 us
        assert "333 us exposed, 22.1% of the time" in text
        assert "torch.compile with counterpoint: 47.0 us exposed, 3.7% of the time" in text


# ---- the runner


def captures(
    rank: int, ranks: int, peers: tuple[str, ...], waits: tuple[str, ...] = ()
) -> tuple[list[str], list[Row]]:  # fmt: skip
    failed: list[Any] = []

    def captured(call: Any, calls: int, pool: Any) -> tuple[Any, None]:
        assert not failed, "torch captures nothing behind a capture that has failed"
        if call(calls) == pool and rank == ranks - 1:
            failed.append(call)
            raise RuntimeError("no graph\nof this")
        return (lambda: None), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "captured", captured)
        calls: dict[str, Any] = {"torch": lambda _: "pool", "ours": lambda n: n}
        arms = Arms(calls, lambda *_: [], peers=peers, waits=waits, pool="pool")
        bench = Bench(world(), torch.device("cpu"))
        replays, rows = runner._captured(calls, 2, arms, bench)  # pyright: ignore[reportPrivateUsage]
        return list(replays), rows


def test_a_peer_that_one_rank_cannot_capture_is_left_out_on_all(pool: RankPool):
    why = {"arm": "torch", "mode": "graph", "refused": "it cannot be captured: no graph"}
    assert pool.run(captures, 2, ("torch",)) == [(["ours"], [why])] * 2
    with pytest.raises(RankError, match="no graph"):
        pool.run(captures, 1, ())


def test_an_arm_whose_host_waits_is_left_out_of_graphs_untried(pool: RankPool):
    why = {"arm": "torch", "mode": "graph", "refused": "its host takes part in each call"}
    assert pool.run(captures, 1, (), ("torch",)) == [(["ours"], [why])]
