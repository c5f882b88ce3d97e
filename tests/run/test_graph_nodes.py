"""What the functions that change nodes ask of the driver, and that its bindings have the names."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from graph_stub import (
    CARVE_OUT,
    MOST_DYNAMIC,
    NO_PREFERENCE,
    PREFERRED,
    PRIORITY,
    USUAL_LIMIT,
    StubGraphs,
    installed,
)

from counterpoint.errors import CounterpointError, InputError
from counterpoint.gpu import graph_nodes


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubGraphs:
    made = installed(monkeypatch)
    made.kernel(10, "relu", dynamic=100)
    made.kernel(11, "gelu", dynamic=200, priority=-2)
    return made


def test_dynamic_bytes_of_a_graph(stub: StubGraphs):
    graph_nodes.set_dynamic_bytes(10, 4096)
    assert stub.changes == [("cuGraphKernelNodeSetParams", 10, 4096)]
    assert stub.bytes_of([10, 11]) == [4096, 200]
    # all else of the launch is as it was
    assert stub.params[10].blockDimX == 128 and stub.params[10].func == 1010


def test_dynamic_bytes_of_an_executable_leave_the_graph(stub: StubGraphs):
    graph_nodes.set_dynamic_bytes(10, 4096, executable=7)
    assert stub.changes == [("cuGraphExecKernelNodeSetParams", 7, 10, 4096)]
    assert stub.bytes_of([10]) == [100]


def test_priority(stub: StubGraphs):
    graph_nodes.set_priority(11, -5)
    value = SimpleNamespace(priority=-5)
    assert stub.changes == [("cuGraphKernelNodeSetAttribute", 11, PRIORITY, value)]
    assert [graph_nodes.kernel_of(node).priority for node in (10, 11)] == [0, -5]


def test_carve_out_and_its_way_back_by_a_clone(stub: StubGraphs):
    before = stub.snapshot()
    clone = graph_nodes.clone_of(1)
    graph_nodes.set_carve_out(10, 100)
    value = SimpleNamespace(sharedMemCarveout=100)
    assert stub.changes[-1] == ("cuGraphKernelNodeSetAttribute", 10, CARVE_OUT, value)
    graph_nodes.copy_attributes(10, clone)
    assert stub.changes[-1] == ("cuGraphKernelNodeCopyAttributes", 10, 10 + clone)
    graph_nodes.destroy(clone)
    assert stub.changes[-1] == ("cuGraphDestroy", clone)
    assert stub.snapshot() == before


def test_limits_of_a_function_say_what_they_were(stub: StubGraphs):
    assert graph_nodes.allow_dynamic_bytes(1010, 200_000) == USUAL_LIMIT
    assert graph_nodes.allow_dynamic_bytes(1010, USUAL_LIMIT) == 200_000
    assert graph_nodes.prefer_carve_out(1010, 100) == NO_PREFERENCE
    assert graph_nodes.prefer_carve_out(1010, NO_PREFERENCE) == 100
    assert stub.changes == [
        ("cuFuncSetAttribute", 1010, MOST_DYNAMIC, 200_000),
        ("cuFuncSetAttribute", 1010, MOST_DYNAMIC, USUAL_LIMIT),
        ("cuFuncSetAttribute", 1010, PREFERRED, 100),
        ("cuFuncSetAttribute", 1010, PREFERRED, NO_PREFERENCE),
    ]


def test_resident_blocks_are_the_drivers(stub: StubGraphs):
    assert graph_nodes.resident_blocks(1010, 256, 1234) == 25_601_234


def test_the_graph_of_a_capture(stub: StubGraphs):
    stub.captures[5] = 1
    assert graph_nodes.graph_of_capture(5) == 1
    with pytest.raises(InputError, match=r"^graph_of_capture: stream must be in a capture, got no"):
        graph_nodes.graph_of_capture(6)


def test_the_function_of_a_node_is_direct_or_of_its_library(stub: StubGraphs):
    stub.kernel(12, in_library=True)
    assert [graph_nodes.function_of(node) for node in (11, 12)] == [1011, 1012]


CHANGES = {
    "cuGraphKernelNodeSetParams": lambda: graph_nodes.set_dynamic_bytes(10, 1),
    "cuGraphExecKernelNodeSetParams": lambda: graph_nodes.set_dynamic_bytes(10, 1, 7),
    "cuGraphKernelNodeSetAttribute": lambda: graph_nodes.set_carve_out(10, 100),
    "cuFuncSetAttribute": lambda: graph_nodes.allow_dynamic_bytes(1010, 1),
}


@pytest.mark.parametrize("call", CHANGES)
def test_every_status_is_checked(stub: StubGraphs, call: str):
    stub.refuses = (call, 0)
    with pytest.raises(CounterpointError, match=f"^{call} failed: CUDA_ERROR_INVALID_VALUE$"):
        CHANGES[call]()
    assert stub.changes == []


def test_the_stub_and_the_bindings_have_the_same_names():
    bindings = pytest.importorskip("cuda.bindings.driver")
    for kind in ("CUgraphNodeType", "CUkernelNodeAttrID", "CUfunction_attribute"):
        for member in getattr(StubGraphs, kind):
            assert int(getattr(getattr(bindings, kind), member.name)) == member
    value = bindings.CUkernelNodeAttrValue()
    for field in ("priority", "sharedMemCarveout"):
        setattr(value, field, 7)
        assert getattr(value, field) == 7
    source = Path(graph_nodes.__file__).read_text()
    calls = set(re.findall(r'"(cu[A-Z]\w+)"', source))
    # CUDA 12 alone has the second form
    assert {call for call in calls if not hasattr(bindings, call)} <= {"cuGraphGetEdges_v2"}
    assert calls >= set(CHANGES)
