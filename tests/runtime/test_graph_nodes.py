"""Changes of nodes are undone, every status is checked, and the bindings have these names."""

import re
from pathlib import Path

import pytest
from graph_stub import (
    StubGraphs,
    installed,
)

from counterpoint.errors import CounterpointError
from counterpoint.runtime import graph_nodes


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubGraphs:
    made = installed(monkeypatch)
    made.kernel(10, "relu", dynamic=100)
    made.kernel(11, "gelu", dynamic=200, priority=-2)
    return made


def test_the_function_of_a_node_is_direct_or_of_its_library(
    stub: StubGraphs, monkeypatch: pytest.MonkeyPatch
):
    assert graph_nodes.function_of(11) == 1011
    stub.params[11].func, stub.params[11].kern = 0, 77
    of_library = {77: 1010}
    monkeypatch.setattr(
        stub, "cuKernelGetFunction", lambda kernel: (0, of_library[kernel]), raising=False
    )
    assert graph_nodes.function_of(11) == 1010


CHANGES = {
    "cuGraphKernelNodeSetParams": lambda: graph_nodes.set_dynamic_bytes(10, 1),
    "cuGraphExecKernelNodeSetParams": lambda: graph_nodes.set_dynamic_bytes(10, 1, 7),
    "cuGraphKernelNodeSetAttribute": lambda: graph_nodes.set_carve_out(10, 100),
    "cuFuncSetAttribute": lambda: graph_nodes.allow_dynamic_bytes(1010, 1),
    "cuGraphAddDependencies": lambda: graph_nodes.launch_order_edge(1, 10, 11),
}


@pytest.mark.parametrize("call", CHANGES)
def test_every_status_is_checked(stub: StubGraphs, call: str):
    stub.refuses = (call, 0)
    with pytest.raises(CounterpointError, match=f"^{call} failed: CUDA_ERROR_INVALID_VALUE$"):
        CHANGES[call]()
    assert stub.changes == []


def test_the_stub_and_the_bindings_have_the_same_names():
    bindings = pytest.importorskip("cuda.bindings.driver")
    for kind in ("CUgraphNodeType", "CUkernelNodeAttrID", "CUfunction_attribute",
                 "CUgraphDependencyType"):  # fmt: skip
        for member in getattr(StubGraphs, kind):
            assert int(getattr(getattr(bindings, kind), member.name)) == member
    value, edge = bindings.CUkernelNodeAttrValue(), bindings.CUgraphEdgeData()
    for field in ("priority", "sharedMemCarveout"):
        setattr(value, field, 7)
        assert getattr(value, field) == 7
    assert all(hasattr(edge, name) for name in ("from_port", "to_port", "type"))
    source = Path(graph_nodes.__file__).read_text()
    calls = set(re.findall(r'"(cu[A-Z]\w+)"', source))
    # CUDA 12 alone has the second form
    assert {call for call in calls if not hasattr(bindings, call)} <= {"cuGraphGetEdges_v2"}
    assert calls >= set(CHANGES)
