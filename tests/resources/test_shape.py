"""Shapes as numbers, and that shaping leaves nothing behind.

Nodes and launches are those of a driver that keeps all it is told.
"""

from contextlib import nullcontext
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stub import (
    CARVE_OUT,
    MOST_DYNAMIC,
    NO_PREFERENCE,
    PREFERRED,
    USUAL_LIMIT,
    StubGraphs,
    installed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.gpu import device_limits, graph_nodes
from counterpoint.gpu.footprint import Footprint, triton_footprint
from counterpoint.gpu.limits import LIMITS
from counterpoint.gpu.occupancy import Kernel, feasible, occupancy
from counterpoint.resources.shape import Nodes, Shape, refusal
from counterpoint.resources.shape_triton import triton_launches

SM90 = LIMITS["sm_90"]
MOST = SM90.shared_bytes_per_block  # 227 KiB


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"blocks_per_sm": 2, "carve_out": True}, "Shape: arguments must be one at a time, got"),
        ({"blocks_per_sm": 0}, "Shape: blocks_per_sm must be >= 1, got 0"),
        ({"blocks_per_sm": -3}, "Shape: blocks_per_sm must be >= 1, got -3"),
    ],
)
def test_a_shape_is_one_thing(given: dict[str, Any], text: str):
    with pytest.raises(InputError) as caught:
        Shape(**given)
    assert str(caught.value).startswith(text)


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """A kernel that fits an SM of sm_90 and may be shaped, but for its own occupancy."""
    threads = draw(st.integers(1, 1024))
    quarters = ceil(threads / 32 / 4)  # warps in the fullest quarter
    most = min(255, SM90.registers // 4 // quarters // 256 * 256 // 32)
    total = draw(st.integers(0, MOST))
    static = draw(st.integers(0, min(total, USUAL_LIMIT)))
    return Footprint(
        kind="kernel", name="relu", block=(threads, 1, 1), cluster=(1, 1, 1), grid=(64, 1, 1),
        registers_per_thread=draw(st.integers(0, most)), static_shared_bytes=static,
        dynamic_shared_bytes=total - static,
    )  # fmt: skip


def resident(kernel: Footprint, num_bytes: int) -> int:
    """Blocks per SM when launched with this much dynamic shared memory."""
    taken = Kernel(
        kernel.threads, kernel.registers_per_thread, kernel.static_shared_bytes, num_bytes
    )
    return occupancy(taken, SM90).blocks


@settings(max_examples=200)
@given(footprints(), st.integers(1, 40))
def test_bytes_for_blocks_per_sm(kernel: Footprint, blocks: int):
    able = feasible(kernel, SM90)
    wanted, own = Shape(blocks_per_sm=blocks), kernel.dynamic_shared_bytes
    assert Shape().bytes_of(kernel, SM90) == Shape(carve_out=True).bytes_of(kernel, SM90) == own
    if blocks < min(able):
        with pytest.raises(InputError, match=rf"blocks_per_sm must be >= {min(able)} for relu, "):
            wanted.bytes_of(kernel, SM90)
        return
    num_bytes = wanted.bytes_of(kernel, SM90)
    assert own <= num_bytes <= MOST - kernel.static_shared_bytes
    assert resident(kernel, num_bytes) == max(k for k in able if k <= blocks)
    # no more is taken than that needs
    assert num_bytes == own or resident(kernel, num_bytes - 1) > resident(kernel, num_bytes)


def a_kernel(**changes: Any) -> Footprint:
    """One of 16 blocks per SM."""
    values: dict[str, Any] = {
        "kind": "kernel", "name": "relu", "block": (128, 1, 1), "cluster": (1, 1, 1),
        "registers_per_thread": 32, **changes,
    }  # fmt: skip
    return Footprint(**values)


PEERS = "it waits for peers: all its blocks must be resident"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kind": "memcpy"}, "a memcpy has no blocks"),
        ({"name": "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgs"}, PEERS),
        ({"name": "signal_kernel"}, PEERS),
        ({"name": "delay_kernel"}, PEERS),
        ({"name": "nvshmemi_transfer"}, PEERS),
        ({"name": "_ZN4c10d16symmetric_memory19multimem_all_reduceE"}, PEERS),
        ({"cooperative": True}, "it is a cooperative launch: all its blocks must be resident"),
        (
            {"cluster": (1, 2, 1)},
            "it is launched in clusters: their blocks must be resident together",
        ),
        ({"dynamic_shared_bytes": 120_000}, "one block per SM is resident as it is"),
        ({"dynamic_shared_bytes": 110_000}, ""),
    ],
)
def test_refusals(changes: dict[str, Any], why: str):
    assert refusal(a_kernel(**changes), SM90) == why


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubGraphs:
    """A graph of two kernels that can be shaped, one of NCCL's, one that fills an SM, a copy."""
    made = installed(monkeypatch)
    made.kernel(10, "relu", threads=256, registers=32)  # 8 per SM
    made.kernel(11, "gemm", threads=128, registers=64, static=1024, dynamic=16384, priority=-1)
    made.kernel(12, "ncclDevKernel_AllGather", threads=544, registers=96)
    made.kernel(13, "flash", dynamic=200_000)
    made.memcpy(14)
    return made


def test_nodes_that_can_be_shaped_and_those_that_cannot(stub: StubGraphs):
    nodes = Nodes(1, SM90)
    assert list(nodes.kernels) == [10, 11]
    assert nodes.refused == {
        "ncclDevKernel_AllGather": PEERS,
        "flash": "one block per SM is resident as it is",
    }
    relu, gemm = (feasible(kernel, SM90) for kernel in nodes.kernels.values())
    assert (max(relu), max(gemm)) == (8, 8)
    assert nodes.feasible() == tuple(sorted({*relu, *gemm}, reverse=True))
    nodes.check()
    assert stub.changes == []
    assert list(Nodes(1, SM90, [11, 12]).kernels) == [11]


@pytest.mark.parametrize(
    ("some", "text"),
    [
        ([14], "^shape: nothing can be shaped; no kernels$"),
        ([12, 13], "^shape: nothing can be shaped; ncclDevKernel_AllGather: it waits for peers.*; "
                   "flash: one block per SM"),
    ],
)  # fmt: skip
def test_nothing_to_shape(stub: StubGraphs, some: list[int], text: str):
    nodes = Nodes(1, SM90, some)
    assert nodes.feasible() == ()
    with pytest.raises(UnsupportedError, match=text):
        nodes.check()


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 32])
def test_a_graph_is_shaped_and_brought_back(stub: StubGraphs, blocks: int):
    before = stub.snapshot()
    with Nodes(1, SM90) as nodes:
        assert stub.limits() == {1010: MOST, 1011: MOST - 1024, 1012: USUAL_LIMIT,
                                 1013: USUAL_LIMIT}  # fmt: skip
        kernels = dict(nodes.kernels)
        found = nodes.set(Shape(blocks_per_sm=blocks))
        relu, gemm = stub.bytes_of([10, 11])
        assert found == {"relu": relu, "gemm": gemm}
        for node, num_bytes in ((10, relu), (11, gemm)):
            want = max(k for k in feasible(kernels[node], SM90) if k <= blocks)
            assert resident(kernels[node], num_bytes) == want
        assert stub.bytes_of([12, 13]) == [0, 200_000]
    assert stub.snapshot() == before


def test_shapes_follow_one_another_from_what_was_captured(stub: StubGraphs):
    with Nodes(1, SM90) as nodes:
        sizes = [nodes.set(Shape(blocks_per_sm=k)) for k in (1, 8, 2, 1)]
        assert sizes[0] == sizes[3] and sizes[1] == {"relu": 0, "gemm": 16384}
        assert nodes.set(Shape()) == sizes[1]


def test_an_exception_brings_all_back(stub: StubGraphs):
    before = stub.snapshot()
    with pytest.raises(RuntimeError, match="on purpose"):  # noqa: SIM117
        with Nodes(1, SM90) as nodes:
            nodes.set(Shape(carve_out=True))
            nodes.set(Shape(blocks_per_sm=1))
            nodes.set(Shape(carve_out=True))
            raise RuntimeError("on purpose")
    assert stub.snapshot() == before


def test_limits_come_back_although_nodes_do_not(stub: StubGraphs):
    """The driver refuses on the way out: the functions' limits are not left behind as well."""
    limits = stub.limits()
    with pytest.raises(CounterpointError, match=r"^cuGraphKernelNodeSetParams failed"):  # noqa: SIM117
        with Nodes(1, SM90) as nodes:
            nodes.set(Shape(blocks_per_sm=2))
            stub.refuses = ("cuGraphKernelNodeSetParams", 11)
    assert stub.limits() == limits


def test_limits_come_back_where_the_second_is_refused(stub: StubGraphs):
    before = stub.snapshot()
    stub.refuses = ("cuFuncSetAttribute", 1011)
    with pytest.raises(CounterpointError, match=r"^cuFuncSetAttribute failed"):  # noqa: SIM117
        with Nodes(1, SM90):
            pytest.fail("a limit was refused")
    assert stub.called("cuFuncSetAttribute")[0] == (1010, MOST_DYNAMIC, MOST)
    assert stub.snapshot() == before


def test_nodes_of_one_function(stub: StubGraphs):
    stub.kernel(15, "relu", threads=256, registers=32, function=1010)
    with Nodes(1, SM90) as nodes:
        assert len(stub.called("cuFuncSetAttribute")) == 2
        nodes.set(Shape(blocks_per_sm=3))
        one, other = stub.bytes_of([10, 15])
        assert one == other > 0
    assert stub.bytes_of([10, 15]) == [0, 0]
    assert stub.limits()[1010] == USUAL_LIMIT


def test_an_executable_is_updated_in_place(stub: StubGraphs):
    with Nodes(1, SM90) as nodes:
        before, calls = stub.snapshot(), len(stub.changes)
        found = nodes.set(Shape(blocks_per_sm=2), 99)
        assert [call[0] for call in stub.changes[calls:]] == ["cuGraphExecKernelNodeSetParams"] * 2
        assert stub.executables == {99: {10: found["relu"], 11: found["gemm"]}}
        assert stub.snapshot() == before, "the graph itself is as it was"


def test_a_carve_out_and_its_clone(stub: StubGraphs):
    before = stub.snapshot()
    with Nodes(1, SM90) as nodes:
        nodes.set(Shape(carve_out=True))
        for node in (10, 11):
            assert stub.attributes[node][CARVE_OUT].sharedMemCarveout == 100
        assert CARVE_OUT not in stub.attributes[12]
        assert stub.bytes_of([10, 11]) == [0, 16384]
        nodes.set(Shape(carve_out=True))
        assert stub.called("cuGraphClone") == [(1,)], "one clone is enough"
        # what was given meanwhile stays
        graph_nodes.set_priority(11, -3)
        nodes.set(Shape(blocks_per_sm=4))
        assert CARVE_OUT not in stub.attributes[10] | stub.attributes[11]
        assert [graph_nodes.kernel_of(node).priority for node in (10, 11)] == [0, -3]
        assert len(stub.called("cuGraphDestroy")) == 1 and list(stub.graphs) == [1]
        nodes.set(Shape(carve_out=True))
        assert len(stub.called("cuGraphClone")) == 2
        graph_nodes.set_priority(11, -1)
    assert stub.snapshot() == before


def test_a_carve_out_is_fixed_once_instantiated(stub: StubGraphs):
    with Nodes(1, SM90) as nodes:
        calls = len(stub.changes)
        text = "^Nodes.set: executable must be 0 with a carve-out, got an instantiated graph$"
        with pytest.raises(InputError, match=text):
            nodes.set(Shape(carve_out=True), 99)
        assert len(stub.changes) == calls


class Compiled:
    """As Triton 3.6 returns it from a launch; loaded when asked, as there."""

    def __init__(self, name: str, function: int, shared: int = 16384, **more: Any) -> None:
        self.metadata = SimpleNamespace(
            name=name, num_warps=4, num_ctas=1, shared=shared, **more
        )  # fmt: skip
        self.packed_metadata = (4, 1, shared)
        self.function = function
        self.n_regs: int | None = None

    def _init_handles(self) -> None:
        self.n_regs = 64


@pytest.fixture
def launched(stub: StubGraphs) -> tuple[Compiled, Compiled]:
    """Two kernels; the stub has functions of these numbers."""
    stub.kernel(20, "matmul_kernel")
    stub.kernel(21, "norm_kernel")
    return Compiled("matmul_kernel", 1020), Compiled("norm_kernel", 1021, shared=512)


def test_the_footprint_of_a_compiled_kernel(launched: tuple[Compiled, Compiled]):
    assert triton_footprint(launched[0]) == Footprint(
        kind="kernel", name="matmul_kernel", block=(128, 1, 1), cluster=(1, 1, 1),
        registers_per_thread=64, dynamic_shared_bytes=16384,
    )  # fmt: skip


def test_triton_launches_with_a_carve_out(stub: StubGraphs, launched: tuple[Compiled, Compiled]):
    before = stub.snapshot()
    with triton_launches(launched[:1], Shape(carve_out=True), SM90) as found:
        assert found == {"matmul_kernel": 16384}
        assert launched[0].packed_metadata == (4, 1, 16384)
        assert stub.functions[1020][1][PREFERRED] == 100
        assert stub.functions[1021][1][PREFERRED] == NO_PREFERENCE
    assert stub.snapshot() == before


@pytest.mark.parametrize("fails", [False, True])
def test_triton_launches_are_shaped_and_brought_back(
    stub: StubGraphs, launched: tuple[Compiled, Compiled], fails: bool
):
    before = stub.snapshot()
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():  # noqa: SIM117
        with triton_launches(launched, Shape(blocks_per_sm=2), SM90) as found:
            assert set(found) == {"matmul_kernel", "norm_kernel"}
            for kernel in launched:
                num_bytes = found[kernel.metadata.name]
                assert kernel.packed_metadata == (4, 1, num_bytes)
                assert resident(triton_footprint(kernel), num_bytes) == 2
            assert [stub.limits()[function] for function in (1020, 1021)] == [MOST, MOST]
            assert stub.functions[1020][1][PREFERRED] == NO_PREFERENCE
            if fails:
                raise RuntimeError("on purpose")
    assert [kernel.packed_metadata for kernel in launched] == [(4, 1, 16384), (4, 1, 512)]
    assert stub.snapshot() == before


def refuse(stub: StubGraphs, kernels: list[Any], shape: Shape, kind: type, text: str) -> None:
    """`triton_launches` raises, and all is as before: also of the kernels before the refused."""
    packed = [getattr(kernel, "packed_metadata", None) for kernel in kernels]
    before = stub.snapshot()
    with pytest.raises(kind, match=text):  # noqa: SIM117
        with triton_launches(kernels, shape, SM90):
            pytest.fail("entered")
    assert [getattr(kernel, "packed_metadata", None) for kernel in kernels] == packed
    assert stub.snapshot() == before


SHAPELESS = [
    *((wrong, InputError, "kernels must be compiled Triton kernels, as .* returns them, got "
       f"{type(wrong).__name__}")
      for wrong in (None, "matmul_kernel", lambda: None, SimpleNamespace(metadata=1))),
    *((packed, UnsupportedError, "this Triton launches by .*; Triton 3.6 is known")
      for packed in ((4, 1, 512, 1, 1, 1), (4, 1), (512, 4, 1), (4, 1, 1024))),
    (Compiled("signal_kernel", 1021), UnsupportedError,
     "signal_kernel cannot be shaped: it waits for peers"),
    (Compiled("scan", 1021, launch_cooperative_grid=True), UnsupportedError,
     "scan cannot be shaped: it is a cooperative"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "text"), SHAPELESS)
def test_what_cannot_be_shaped(
    stub: StubGraphs, launched: tuple[Compiled, Compiled], wrong: Any, kind: type, text: str
):
    """No compiled kernel, launch numbers of an unknown layout, kernels that wait: each time."""
    if isinstance(wrong, tuple):
        launched[1].packed_metadata = wrong  # type: ignore[assignment]
        wrong = launched[1]
    for _ in range(2):
        refuse(stub, [launched[0], wrong], Shape(blocks_per_sm=2), kind, text)


def test_limits_of_the_gpu_here(monkeypatch: pytest.MonkeyPatch):
    def here(**properties: Any) -> str:
        found = SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        return device_limits.limits_here(torch.device("cuda")).arch

    assert here(major=9, minor=0, name="NVIDIA H200") == "sm_90"
    with pytest.raises(UnsupportedError, match=r"^shape: no limits are known of sm_75; known: sm_"):
        here(major=7, minor=5, name="Tesla T4")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert here(gcnArchName="gfx942:sramecc+:xnack-", name="AMD Instinct MI300X") == "gfx942"


@pytest.mark.parametrize("twice", ["listed", "nested"])
def test_a_kernel_that_is_shaped_twice(
    stub: StubGraphs, launched: tuple[Compiled, Compiled], twice: str
):
    kernel, before = launched[0], stub.snapshot()
    if twice == "listed":
        with triton_launches([kernel, kernel], Shape(blocks_per_sm=2), SM90) as found:
            assert kernel.packed_metadata == (4, 1, found["matmul_kernel"])
    else:
        with triton_launches([kernel], Shape(blocks_per_sm=4), SM90) as outer:
            with triton_launches([kernel], Shape(blocks_per_sm=2), SM90) as inner:
                assert kernel.packed_metadata == (4, 1, inner["matmul_kernel"])
            assert kernel.packed_metadata == (4, 1, outer["matmul_kernel"])
    assert kernel.packed_metadata == (4, 1, 16384) and stub.snapshot() == before


def test_shapes_of_one_kernel_end_in_any_order(
    stub: StubGraphs, launched: tuple[Compiled, Compiled]
):
    """Two tuned pipelines share a kernel; the one that was first is closed first."""
    kernel, before = launched[0], stub.snapshot()
    first = triton_launches([kernel], Shape(blocks_per_sm=4), SM90)
    first.__enter__()
    with triton_launches([kernel], Shape(blocks_per_sm=2), SM90) as found:
        first.__exit__(None, None, None)
        meanwhile = kernel.packed_metadata
    assert kernel.packed_metadata == (4, 1, 16384) and stub.snapshot() == before
    assert meanwhile == (4, 1, found["matmul_kernel"])
