"""Nodes of graphs of a stub driver, and the tiles and short names of real kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stub import EVENT_RECORD, GRAPH, MEMSET, StubGraphs, installed

from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.gpu import footprint
from counterpoint.gpu.footprint import Footprint, gemm_tile, graph_footprints


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubGraphs:
    return installed(monkeypatch)


def test_a_kernel_is_read_in_full(stub: StubGraphs):
    facts: dict[str, Any] = {"priority": -3, "cluster": (2, 1, 1), "registers": 96,
                             "static": 21568, "dynamic": 7168}  # fmt: skip
    stub.kernel(10, "signal_kernel", **facts)
    # of a library it is read through its function
    stub.kernel(11, "signal_kernel", in_library=True, **facts)
    assert graph_footprints(1) == (
        Footprint(
            kind="kernel", name="signal_kernel", grid=(64, 3, 2), block=(128, 1, 1),
            cluster=(2, 1, 1), registers_per_thread=96, static_shared_bytes=21568,
            dynamic_shared_bytes=7168, priority=-3,
        ),
    ) * 2  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "compiled", "want"),
    [
        ((0, 0, 0), (0, 0, 0), (1, 1, 1)), ((1, 2, 1), (0, 0, 0), (1, 2, 1)),
        ((0, 0, 0), (2, 4, 1), (2, 4, 1)), ((8, 1, 1), (1, 1, 1), (8, 1, 1)),
    ],
    ids=["none", "at launch", "compiled", "launch goes first"],
)  # fmt: skip
def test_clusters(stub: StubGraphs, asked: Any, compiled: Any, want: tuple[int, int, int]):
    stub.kernel(10, "nvjet", cluster=asked, required=compiled)
    (found,) = graph_footprints(1)
    assert found.cluster == want


def test_nodes_that_are_no_kernels(stub: StubGraphs):
    for node, sizes in enumerate(((4096, 1, 1), (100, 7, 3), (64, 0, 0)), 10):
        stub.memcpy(node, *sizes)
    stub.add(13, MEMSET, params=SimpleNamespace(elementSize=4, width=10, height=3))
    stub.add(14, EVENT_RECORD)
    *others, last = graph_footprints(1)
    assert [(f.kind, f.total_bytes) for f in others] == [
        ("memcpy", 4096), ("memcpy", 2100), ("memcpy", 64), ("memset", 120),
    ]  # fmt: skip
    assert last == Footprint(kind="event_record")


def names(stub: StubGraphs, nodes: list[int], edges: list[tuple[int, int]]) -> list[str]:
    """In the order found; a node's name is its number."""
    for node in nodes:
        if node not in stub.types:
            stub.kernel(node, str(node))
    stub.graphs[1], stub.edges[1] = nodes, edges
    return [found.name for found in graph_footprints(1)]


@pytest.mark.parametrize(
    ("nodes", "edges", "want"),
    [
        ([], [], []),
        ([13, 12, 11], [(11, 12), (12, 13)], ["11", "12", "13"]),
        # a fork and its join: lanes stay in the order of capture where both may go on
        ([10, 11, 12, 13], [(10, 12), (10, 11), (11, 13), (12, 13)], ["10", "11", "12", "13"]),
        ([13, 10, 11, 12], [(10, 12), (10, 11), (11, 13), (12, 13)], ["10", "11", "12", "13"]),
        # two edges between the same nodes, as with programmatic launches
        ([11, 10], [(10, 11), (10, 11)], ["10", "11"]),
        ([12, 10, 11], [], ["12", "10", "11"]),
    ],
    ids=["empty", "chain listed backwards", "fork", "join listed first", "double edge", "no edges"],
)
def test_order_is_topological(
    stub: StubGraphs, nodes: list[int], edges: list[tuple[int, int]], want: list[str]
):
    assert names(stub, nodes, edges) == want


def test_child_graphs_stand_where_their_node_does(stub: StubGraphs):
    stub.add(11, GRAPH, params=2)
    stub.add(21, GRAPH, graph=2, params=3)
    stub.kernel(20, "20", graph=2)
    stub.kernel(30, "30", graph=3)
    stub.edges[2] = [(21, 20)]
    assert names(stub, [12, 11, 10], [(10, 11), (11, 12)]) == ["10", "30", "20", "12"]


def test_every_status_is_checked(stub: StubGraphs):
    stub.kernel(10, in_library=True)
    stub.memcpy(11)
    stub.add(12, MEMSET, params=SimpleNamespace(elementSize=1, width=1, height=1))
    stub.add(13, GRAPH, params=2)
    stub.kernel(20, graph=2)
    stub.edges[1] = [(10, 11)]
    stub.asked.clear()
    assert len(graph_footprints(1)) == 4
    calls = sorted(stub.asked - {"cuGraphGetEdges_v2"})
    assert len(calls) == 11
    for call in calls:
        stub.fails = call
        with pytest.raises(CounterpointError, match=f"^{call} failed: CUDA_ERROR_INVALID_VALUE$"):
            graph_footprints(1)


def test_edges_of_programmatic_launches_need_the_second_form_of_cuda_12(
    stub: StubGraphs, monkeypatch: pytest.MonkeyPatch
):
    second = stub.cuGraphGetEdges
    monkeypatch.setattr(StubGraphs, "cuGraphGetEdges_v2", lambda _, *a: second(*a), raising=False)
    stub.fails = "cuGraphGetEdges"
    assert names(stub, [11, 10], [(10, 11)]) == ["10", "11"]


def test_edges_without_data(stub: StubGraphs, monkeypatch: pytest.MonkeyPatch):
    """CUDA 12's first form returns one value less."""
    full = StubGraphs.cuGraphGetEdges

    def first_form(self: StubGraphs, graph: int, count: int):
        status, sources, targets, _, found = full(self, graph, count)
        return status, sources, targets, found

    monkeypatch.setattr(StubGraphs, "cuGraphGetEdges", first_form)
    assert names(stub, [11, 10], [(10, 11)]) == ["10", "11"]


def test_footprints_capture_the_call_and_never_run_it(
    stub: StubGraphs, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []

    class Graph:
        """No way to instantiate or to replay it."""

        def __init__(self, *, keep_graph: bool) -> None:
            assert keep_graph

        def capture_begin(self, *, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            seen.append("begin")

        def capture_end(self) -> None:
            seen.append("end")

        def raw_cuda_graph(self) -> int:
            assert seen == ["stream", "begin", "call", "end", "back"]
            return 1

    class Capture:
        """Not entered: torch's empties the allocator's cache then."""

        def __init__(self, graph: Graph) -> None:
            self.stream_ctx = Stream()

    class Stream:
        def __enter__(self) -> None:
            seen.append("stream")

        def __exit__(self, *_: object) -> None:
            seen.append("back")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    stub.kernel(10, "relu")
    (found,) = footprint.footprints(lambda: seen.append("call"))
    assert found.short_name == "relu"
    del seen[:]

    def fails() -> None:
        raise RuntimeError("no capture of this")

    with pytest.raises(RuntimeError, match=r"^no capture of this$"):
        footprint.footprints(fails)
    assert seen == ["stream", "begin", "end", "back"], "the capture goes on"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"^footprints: needs an NVIDIA GPU; `counterpoint"):
        footprint.footprints(lambda: pytest.fail("called"))


def test_counts():
    found = Footprint(kind="kernel", grid=(4, 3, 2), block=(32, 4, 1))
    assert (found.threads, found.num_blocks) == (128, 24)


def mangled(name: str) -> str:
    """As nvcc writes an instance of cutlass::Kernel2."""
    return f"_ZN7cutlass7Kernel2I{len(name)}{name}EEvNT_6ParamsE"


SM80_GEMM = "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8"
ELEMENTWISE = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EE"
    "EEviT0_T1_"
)


@pytest.mark.parametrize(
    ("symbol", "want"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
        ("triton_poi_fused_add_mul_silu_23", "triton_poi_fused_add_mul_silu_23"),
        ("signal_kernel", "signal_kernel"),
        (
            "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
            "ncclDevKernel_AllGather_RING_LL",
        ),
        ("_ZN2at4cuda12_GLOBAL__N_111spin_kernelEl", "at::cuda::spin_kernel"),
        ("_ZL6fill_kPfi", "fill_k"),
        (ELEMENTWISE, "at::native::vectorized_elementwise_kernel"),
        ("_ZN8cublasLt19splitKreduce_kernelILi32ELi16EifEEvv", "cublasLt::splitKreduce_kernel"),
        (
            "_ZN2at6native12_GLOBAL__N_143distribution_elementwise_grid_stride_kernelIfEEvv",
            "at::native::distribution_elementwise_grid_stride_kernel",
        ),
        (
            "_ZN49_GLOBAL__N__d2ba64fb_16_TensorCompare_cu_71e06f4eL5clampEv",
            "clamp",
        ),
        (mangled(SM80_GEMM), SM80_GEMM),
        (
            "_ZN7cutlass7Kernel2INS_4gemm6kernel20DefaultGemmUniversalIfNS_6layout8RowMajorEEEEEvv",
            "cutlass::Kernel2",
        ),
        ("_ZN7cutlass13device_kernelINS_4gemm6kernelEEEvv", "cutlass::device_kernel"),
        ("_ZTV3foo", "_ZTV3foo"),
        ("", ""),
    ],
)
def test_short_names(symbol: str, want: str):
    assert Footprint(kind="kernel", name=symbol).short_name == want


@pytest.mark.parametrize(
    ("symbol", "tile"),
    [
        # cuBLAS on Hopper
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", (128, 256)),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", (192, 192)),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", (64, 8)),
        ("nvjet_tst_128x64_64x5_1x3_h_bz_coopA_NTn", (128, 64)),
        ("nvjet_hsh_320x128_64x3_1x2", (320, 128)),
        ("nvjet_hss_64x8_64x16_1x1_v_bz_splitK_NNT", (64, 8)),
        ("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", (64, 8)),
        ("nvjet_qqtst_112x128_128x7_2x1_v_bz_coopA_algo2_TNN", (112, 128)),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_"
            "execute_segment_k_off_kernel__5x_cublas",
            (128, 128),
        ),
        # and on Blackwell
        ("nvjet_tst_256x96_64x5_2x1_2cta_v_badd_NNT", (256, 96)),
        ("nvjet_sm100_tst_64x32_64x16_2x1_2cta_h_bz_splitK_TNT", (64, 32)),
        ("nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN", (64, 64)),
        ("nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT", (128, 256)),
        # cuBLAS on Ampere and before
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn", (128, 64)),
        ("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_relu_f2f_stages_64x5_tn", (64, 64)),
        ("ampere_bf16_s1688gemm_bf16_128x64_sliced1x2_ldg8_f2f_tn", (128, 64)),
        ("ampere_s16816gemm_bf16_128x128_nt", (128, 128)),
        ("ampere_sgemm_32x128_tn", (32, 128)),
        ("volta_fp16_s884gemm_fp16_256x64_ldg8_f2f_nn", (256, 64)),
        (
            "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x96x64_stage4_warpsize2x2x1_"
            "tensor16x8x16_kernel",
            (64, 96),
        ),
        # CUTLASS, by itself and in cuBLAS
        (mangled(SM80_GEMM), (256, 128)),
        (mangled("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x256_32x4_nn_align8"), (64, 256)),
        (
            mangled("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8"),
            (16, 16),
        ),
        (mangled("cutlass_80_simt_sgemm_256x128_8x4_nn_align1"), (256, 128)),
        (mangled("cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4"), (64, 64)),
        # the shape of the instruction is not that of the tile
        (
            "cutlass3x_sm90_tensorop_s64x256x16gemm_f16_f16_f32_void_f16_128x256x64_2x1x1_0_tnn_"
            "align8_warpspecialized_cooperative_epi_tma",
            (128, 256),
        ),
        (
            "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16_bf16_128x256x64_1x1x1_0_tnn_align8",
            (128, 256),
        ),
    ],
)
def test_tiles_of_gemms(symbol: str, tile: tuple[int, int]):
    assert gemm_tile(Footprint(kind="kernel", name=symbol)) == tile


@pytest.mark.parametrize(
    "symbol",
    [
        "",
        "signal_kernel",
        "matmul_kernel",
        ELEMENTWISE,
        "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
        # the second half of a GEMM that is split along k, and a matrix times a vector
        "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EifEEvv",
        "_Z17gemv2T_kernel_valIiiffffLi128ELi16ELi4ELi4ELb0ELb1E18cublasGemvParamsExEvT11_T4_S7_",
        # its tile stands in types of its template; what looks like one is an instruction's shape
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalI27SM90_64x256x16_F32BF16BF16_SS"
        "EEEEvNT_6ParamsE",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x64_stage4_"
        "warpsize2x2x1_g1_tensor16x8x16_kernel_cudnn",
        "bmm_E4m3_E4m3E4m3_Fp32_t128x64x128u2_s6_et64x64_m64x64x32_cga1x1x1_16dp256b",
    ],
)
def test_names_that_tell_no_tile(symbol: str):
    assert gemm_tile(Footprint(kind="kernel", name=symbol)) is None
