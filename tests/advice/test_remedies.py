"""What is advised: by what stands beside a collective, at most how much, and what was measured."""

from pathlib import Path

import pytest
from trace_files import TraceFile

from counterpoint.advice.advise import Report, advise
from counterpoint.advice.before import advise_model
from counterpoint.advice.kinds import COMMUNICATION, COMPUTATION, HOST_COPY, PACKING, kind_of
from counterpoint.advice.remedies import MECHANISMS, gains, nearest
from counterpoint.machine_of import machine_of
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import MODELS

GEMM, LOOKUP = "nvjet_hsh_128x256_64x4", "EmbeddingBag_updateOutputKernel_sum"


def report_of(trace: TraceFile, tmp_path: Path) -> Report:
    return advise(trace.write(tmp_path / "trace.json"))


def names_of(report: Report) -> list[str]:
    return [each.name for each in report.remedies]


@pytest.mark.parametrize(
    ("kind", "before", "after", "mark", "mechanism"),
    [
        ("all_gather", "copy_kernel", GEMM, "", "all_gather_matmul"),
        ("reduce_scatter", GEMM, "copy_kernel", "", "matmul_reduce_scatter"),
        ("allreduce", GEMM, "rms_norm", "", "matmul_all_reduce"),
        ("all_to_all", "permute", GEMM, "", "experts"),
        ("all_to_all", LOOKUP, "interact", "", "embeddings"),
        ("allreduce", GEMM, "adam", "DistributedDataParallel.forward", "data parallel"),
        ("all_gather", "copy_kernel", GEMM, "FSDP::all_gather (layers.3)", "overlap"),
        ("broadcast", GEMM, GEMM, "", "others"),
        ("peer copy", GEMM, GEMM, "", "copies"),
        ("all_gather", GEMM, GEMM, "FullyShardedDataParallel.forward", "FSDP1"),
    ],
)
def test_each_collective_has_its_remedy(tmp_path, kind, before, after, mark, mechanism):
    trace = TraceFile(world=2).step(1, -1000, 9000)
    if mark:
        trace.event("user_annotation", mark, -50, 40)
    for start in (0, 300, 600):
        trace.gpu(before, start, 100, asked=-100)
        if kind == "peer copy":
            trace.gpu("Memcpy PtoP (Device -> Device)", start + 100, 100, category="gpu_memcpy",
                      bytes=2**25, asked=-20)  # fmt: skip
        else:
            trace.collective(kind, start + 100, 100, elements=2**24, ranks=2, asked=-20)
        trace.gpu(after, start + 200, 100, asked=-100)
    report = report_of(trace, tmp_path)
    words = MECHANISMS[mechanism]
    name = words.name.format(kinds=kind)
    (found,) = [each for each in report.remedies if each.name == name]
    assert (found.why, found.line) == (words.why, words.line)
    bound_us = 200 if mechanism == "data parallel" else 300  # nothing hides the last bucket
    assert found.bound_s == pytest.approx(bound_us * 1e-6)
    if mechanism in gains():
        assert found.gain is not None and found.saves_s == found.bound_s * found.gain.share
    else:
        assert found.gain is None and found.saves_s is None
    assert report.verdict.startswith(f"First: {name}, up to ")


def test_fsdp2_counts_copies_and_what_matmuls_lose(tmp_path):
    """What is launched within a range of FSDP2 is its own; its bound has all three."""
    trace = TraceFile(world=2).step(1, -1000, 90000)
    trace.event("user_annotation", "FSDP::all_gather (layers.3)", -60, 40)
    trace.event("user_annotation", "FSDP::all_gather_copy_out (layers.3)", -50, 20)
    for start in (0, 1000, 2000):
        trace.gpu(GEMM, start, 100, asked=-100)
        trace.gpu("at::native::unrolled_elementwise_kernel", start + 100, 50, asked=-45)  # a cast
        trace.gpu(GEMM, start + 200, 120, asked=-100)
        trace.collective("all_gather", start + 200, 160, elements=2**24, ranks=2, asked=-40)
    report = report_of(trace, tmp_path)
    first = report.losses[0]
    assert first.packing_s == pytest.approx(150e-6) and first.slowed_s == pytest.approx(60e-6)
    assert first.exposed_s == pytest.approx(120e-6)
    assert [row.group for row in first.collectives] == ["FSDP2"]
    assert report.remedies[0].bound_s == pytest.approx((150 + 60 + 120) * 1e-6)
    assert "counterpoint.overlap(model)" in report.remedies[0].line
    assert "fewer SMs for collectives" not in names_of(report)  # the same loss, once


def test_small_collectives(tmp_path):
    """Many that are far below the links' rate: fewer, larger ones."""
    trace = TraceFile(world=2).step(1, -1000, 90000).gpu(GEMM, 0, 100, asked=-100)
    for i in range(10):
        trace.collective("broadcast" if i < 0 else "allreduce", 200 + 100 * i, 50, elements=500,
                         ranks=2, asked=-90)  # fmt: skip
    report = report_of(trace, tmp_path)
    (found,) = [each for each in report.remedies if each.name == "fewer, larger collectives"]
    rate = 1000 / 50e-6
    assert found.bound_s == pytest.approx(500e-6 * (1 - rate / report.link_bytes_per_s))


def test_nothing_to_win(tmp_path):
    trace = TraceFile(world=2).step(1, -1000, 90000).gpu(GEMM, 0, 1000, asked=-100)
    trace.collective("allreduce", 500, 500, elements=500, ranks=2, asked=-90)
    trace.gpu(GEMM, 1005, 995, asked=-80)
    report = report_of(trace, tmp_path)
    assert report.verdict == "Nothing here: 100% is computation." and not report.remedies
    alone = TraceFile().step(1, -1000, 9000).gpu(GEMM, 0, 1000, asked=-100)
    assert "No communication in this trace; 100% of" in report_of(alone, tmp_path).verdict


def test_waiting_for_a_late_rank_is_in_no_other_bound(tmp_path):
    paths: list[Path] = []
    for rank, wait in enumerate((200, 0)):
        trace = TraceFile(rank, 2).step(1, -1000, 9000).gpu(GEMM, 0, 100, asked=-100)
        trace.collective("allreduce", 300 - wait, 100 + wait, elements=2**24, ranks=2, asked=-90)
        trace.gpu("rms_norm", 400, 100, asked=-80)
        paths.append(trace.write(tmp_path / f"{rank}.json"))
    bounds = {each.name: each.bound_s for each in advise(*paths).remedies}
    assert bounds[MECHANISMS["matmul_all_reduce"].name] == pytest.approx(100e-6)
    assert bounds["equal work for all ranks"] == pytest.approx(200e-6)


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", "ncclDevKernel_AllGather_RING_LL", COMMUNICATION),
        ("kernel", "ncclSymkDevKernel_AllReduce_AGxLL_R", COMMUNICATION),
        ("kernel", "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 4>", COMMUNICATION),
        ("kernel", "two_shot_all_reduce_kernel_inplace<c10::BFloat16>", COMMUNICATION),
        ("kernel", "multimem_all_gather_kernel", COMMUNICATION),
        ("kernel", "flashinfer::trtllm_allreduce_fusion::oneshot_lamport", COMMUNICATION),
        ("kernel", "deep_ep::intranode::dispatch<8, 768>", COMMUNICATION),
        ("kernel", "nvshmemi_transfer_rma", COMMUNICATION),
        ("kernel", "all_reduce_norm_kernel", COMMUNICATION),
        ("kernel", "collective_kernel", COMMUNICATION),
        ("kernel", "barrier_kernel", COMMUNICATION),
        ("kernel", "rcclGenericKernel<1, false>", COMMUNICATION),
        ("kernel", "reduce_kernel", COMPUTATION),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", COMMUNICATION),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", COMPUTATION),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", HOST_COPY),
        ("gpu_memset", "Memset (Device)", COMPUTATION),
        ("kernel", "chunk_cat_cuda_kernel", PACKING),
        ("kernel", "all_to_all_matmul_kernel", COMPUTATION),
        ("kernel", "matmul_all_reduce_kernel", COMPUTATION),
        ("kernel", "nvjet_tst_128x256", COMPUTATION),
        ("kernel", "triton_red_fused_all_reduce_add_0", COMPUTATION),
    ],
)
def test_kernels_by_name(category, name, kind):
    assert kind_of(category, name) == kind


def test_the_most_similar_case(tmp_path):
    """In size first; then GPUs and their kind."""
    found = nearest("matmul_all_reduce", 16384, 4, "NVIDIA H200")
    assert found is not None and (found.size, found.gpus, found.gpu) == (16384, 4, "H200")
    on_h100s = nearest("matmul_all_reduce", 2**28, 2, "NVIDIA H100 80GB HBM3")
    assert on_h100s is not None and (on_h100s.size, on_h100s.gpu) == (2**28, "H100")
    assert nearest("others", 1, 2, "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("model", "degrees", "mechanism"),
    [("llama3-8b", {}, "overlap"), ("llama3-8b", {"tp": 8}, "tensor parallel"),
     ("mixtral-8x7b", {"ep": 8, "micro_batch": 2}, "experts")],
)  # fmt: skip
def test_before_there_is_a_trace(model, degrees, mechanism):
    """Of a predicted step: never more saved than is bound, and said to be predicted."""
    layout = Layout.on(8, sequence=4096, data_parallel_sharding="fsdp", **degrees)
    report = advise_model(MODELS[model], layout, machine_of("test", "h100-8"))
    first = report.losses[0]
    assert report.title.startswith("predicted, not measured: ")
    assert first.computation_s + first.exposed_s == pytest.approx(first.time_s)
    best = report.remedies[0]
    assert best.name == MECHANISMS[mechanism].name
    assert best.saves_s is not None and 0 < best.saves_s <= best.bound_s <= first.exposed_s


def test_tensor_parallelism_beside_ddp(tmp_path):
    """Sums of a tensor-parallel group are no gradients of DDP."""
    trace = TraceFile(world=4).step(1, -1000, 9000)
    trace.event("user_annotation", "DistributedDataParallel.forward", -50, 40)
    for start in (0, 300):
        trace.gpu(GEMM, start, 100, asked=-100)
        trace.collective("allreduce", start + 100, 100, ranks=2, group="mesh_tp", asked=-20)
        trace.gpu("rms_norm", start + 200, 100, asked=-100)
    assert MECHANISMS["matmul_all_reduce"].name in names_of(report_of(trace, tmp_path))


def test_a_launch_deep_within_ranges_of_fsdp2(tmp_path):
    """After many that have ended, a range around them still holds it; copies within are packing."""
    trace = TraceFile(world=2).step(1, -9000, 99000)
    trace.event("user_annotation", "FSDP::root_post_backward", -900, 890)
    for i in range(20):
        trace.event("user_annotation", f"FSDP::post_backward_reduce ({i})", -800 + 20 * i, 10)
    trace.gpu("gemm", 0, 100, asked=-1000)
    trace.collective("allreduce", 100, 100, elements=5, ranks=2, asked=-100)
    trace.gpu("Memcpy DtoD (Device -> Device)", 200, 50, category="gpu_memcpy", asked=-99)
    first = report_of(trace, tmp_path).losses[0]
    assert [row.group for row in first.collectives] == ["FSDP2"]
    assert first.packing_s == pytest.approx(50e-6)


def test_a_bound_that_is_the_whole_step(tmp_path):
    """Nothing but a collective: no division by what is left."""
    trace = TraceFile(world=2).gpu("gemm", 0, 1e-3).collective("broadcast", 0, 100, ranks=2)
    report = report_of(trace, tmp_path)
    assert report.verdict.endswith("up to over 1000x.") and "over 1000x" in str(report)


def test_idleness_without_a_remedy_is_not_called_nothing(tmp_path):
    trace = TraceFile(world=2).step(1, -1000, 9000).gpu(GEMM, 0, 10, asked=-100)
    trace.collective("allreduce", 0, 5, ranks=2, asked=-90).gpu(GEMM, 990, 10, asked=-80)
    assert report_of(trace, tmp_path).verdict == "No remedy is known: 2% is computation."
