"""What is asked of the driver to change a node: names, values, and that only these are changed."""

from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.errors import CounterpointError, InputError
from counterpoint.runtime import driver, graph_nodes

Names = SimpleNamespace


class Stub:
    """Takes every call, and answers as cuda-bindings 13 would."""

    CUkernelNodeAttrID = Names(
        CU_LAUNCH_ATTRIBUTE_PRIORITY=8, CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=14
    )
    CUfunction_attribute = Names(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
    )
    CUkernelNodeAttrValue = Names
    CUgraphEdgeData = Names
    CUgraphNode = int
    CUgraphDependencyType = Names(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
    CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER = 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.params = Names(sharedMemBytes=100, func=55, kern=0)
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuGraphKernelNodeGetParams": (self.params,), "cuFuncGetAttribute": (48,),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (3,), "cuGraphClone": (77,),
            "cuGraphNodeFindInClone": (66,), "cuStreamGetCaptureInfo": (1, 9, 44, [], [], 0),
        }  # fmt: skip
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.status, *self.answers.get(name, ())

        return call


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(driver, "driver_bindings", lambda: made)
    return made


@pytest.mark.parametrize(
    ("executable", "call"),
    [(0, ("cuGraphKernelNodeSetParams", 5)), (9, ("cuGraphExecKernelNodeSetParams", 9, 5))],
)
def test_shared_memory_of_a_graph_or_of_its_executable(stub: Stub, executable: int, call: tuple):
    graph_nodes.set_dynamic_bytes(5, 4096, executable)
    assert stub.calls[-1] == (*call, stub.params)
    assert stub.params == Names(sharedMemBytes=4096, func=55, kern=0)


def test_priority_and_carve_out(stub: Stub):
    graph_nodes.set_priority(5, -3)
    graph_nodes.set_carve_out(5, 100)
    assert stub.calls == [
        ("cuGraphKernelNodeSetAttribute", 5, 8, Names(priority=-3)),
        ("cuGraphKernelNodeSetAttribute", 5, 14, Names(sharedMemCarveout=100)),
    ]


def test_limits_of_a_function_come_with_what_they_were(stub: Stub):
    assert graph_nodes.allow_dynamic_bytes(55, 1000) == 48
    assert graph_nodes.prefer_carve_out(55, 100) == 48
    assert [call for call in stub.calls if call[0] == "cuFuncSetAttribute"] == [
        ("cuFuncSetAttribute", 55, 8, 1000), ("cuFuncSetAttribute", 55, 9, 100)
    ]  # fmt: skip
    assert graph_nodes.resident_blocks(55, 128, 4096) == 3
    assert graph_nodes.function_of(5) == 55


def test_clones(stub: Stub):
    assert graph_nodes.clone_of(7) == 77
    graph_nodes.copy_attributes(5, 77)
    assert stub.calls[-2:] == [
        ("cuGraphNodeFindInClone", 5, 77), ("cuGraphKernelNodeCopyAttributes", 5, 66)
    ]  # fmt: skip
    graph_nodes.destroy(77)
    assert stub.calls[-1] == ("cuGraphDestroy", 77)


def test_a_launch_order_edge_leaves_by_its_port(stub: Stub):
    graph_nodes.launch_order_edge(7, 1, 2)
    edge = Names(from_port=2, to_port=0, type=1)
    assert stub.calls == [("cuGraphAddDependencies", 7, [1], [2], [edge], 1)]


def test_the_graph_of_a_capture(stub: Stub):
    assert graph_nodes.graph_of_capture(3) == 44
    stub.answers["cuStreamGetCaptureInfo"] = (0, 0, 0, [], [], 0)
    with pytest.raises(InputError, match="stream must be in a capture, got none"):
        graph_nodes.graph_of_capture(3)


def test_a_refusal_is_an_error(stub: Stub):
    stub.status = 1
    with pytest.raises(CounterpointError, match="cuGraphDestroy failed: 1"):
        graph_nodes.destroy(77)
