"""CUDA's driver as far as graphs and the limits of functions go, without a GPU.

Like the driver it gives out copies: what is changed in them holds only once it is set. It keeps
every call that changes something, and refuses what the driver refuses.
"""

import copy
from collections.abc import Iterable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.gpu import driver


class Status(IntEnum):
    """The first of what every call returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class NodeType(IntEnum):
    """As the driver numbers them."""

    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7


class NodeAttribute(IntEnum):
    """As the driver numbers them."""

    CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
    CU_LAUNCH_ATTRIBUTE_PRIORITY = 8
    CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 14


class FunctionAttribute(IntEnum):
    """As the driver numbers them."""

    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH = 11
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT = 12
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH = 13


COOPERATIVE, CLUSTER, PRIORITY, CARVE_OUT = NodeAttribute
STATIC, REGISTERS, MOST_DYNAMIC, PREFERRED, *REQUIRED = FunctionAttribute
KERNEL, MEMCPY, MEMSET, GRAPH, EVENT_RECORD = NodeType
USUAL_LIMIT = 48 * 1024  # of dynamic shared memory, of a function that nobody has asked
NO_PREFERENCE = -1
CLONES = 10**6  # the node n of a graph is n + clone in its clone


class Handle:
    """As the bindings give them out: an object with a number, another one at every call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


class StubGraphs:
    """The driver of cuda-bindings 13, with these graphs and functions."""

    CUgraphNodeType = NodeType
    CUkernelNodeAttrID = NodeAttribute
    CUfunction_attribute = FunctionAttribute
    CUkernelNodeAttrValue = SimpleNamespace

    class CUgraphNode(int):
        """A handle."""

    def __init__(self) -> None:
        self.graphs: dict[int, list[int]] = {}
        self.edges: dict[int, list[tuple[int, int]]] = {}
        self.types: dict[int, NodeType] = {}
        self.params: dict[int, Any] = {}  # or the number of a child graph
        self.attributes: dict[int, dict[int, Any]] = {}
        self.functions: dict[int, tuple[bytes, dict[int, int]]] = {}
        self.executables: dict[int, dict[int, int]] = {}  # dynamic bytes of each node
        self.captures: dict[int, int] = {}  # the graph that a stream is captured into
        self.changes: list[tuple[Any, ...]] = []  # calls that change something
        self.refuses: tuple[str, int] = ("", 0)  # a change, and the function or node it is of
        self.fails = ""  # a call
        self.asked: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            self.asked.add(name)
            if name == self.fails:
                return lambda *_: (Status.CUDA_ERROR_INVALID_VALUE, None, None, None, None)
        return super().__getattribute__(name)

    def kernel(
        self, node: int, name: str = "relu", *, graph: int = 1, threads: int = 128,
        registers: int = 32, static: int = 0, dynamic: int = 0, priority: int = 0,
        cluster: tuple[int, int, int] = (0, 0, 0), required: tuple[int, int, int] = (0, 0, 0),
        cooperative: int = 0, function: int = 0, in_library: bool = False,
    ) -> int:  # fmt: skip
        """Add a node that launches 64 x 3 x 2 blocks; its function, 1000 more unless given.

        One that is `in_library` is named by its kernel, 1000 more again.
        """
        function = function or 1000 + node
        self.functions[function] = (
            name.encode(),
            {REGISTERS: registers, STATIC: static, MOST_DYNAMIC: USUAL_LIMIT,
             PREFERRED: NO_PREFERENCE, **dict(zip(REQUIRED, required, strict=True))},
        )  # fmt: skip
        self.add(node, KERNEL, graph=graph, params=SimpleNamespace(
            func=0 if in_library else function, kern=function + 1000 if in_library else 0,
            gridDimX=64, gridDimY=3, gridDimZ=2, blockDimX=threads, blockDimY=1, blockDimZ=1,
            sharedMemBytes=dynamic,
        ))  # fmt: skip
        x, y, z = cluster
        self.attributes[node] = {
            COOPERATIVE: SimpleNamespace(cooperative=cooperative),
            CLUSTER: SimpleNamespace(clusterDim=SimpleNamespace(x=x, y=y, z=z)),
            PRIORITY: SimpleNamespace(priority=priority),
        }
        return function

    def add(self, node: int, kind: NodeType, *, graph: int = 1, params: Any = None) -> None:
        """Add a node of any kind."""
        self.graphs.setdefault(graph, []).append(node)
        self.types[node], self.params[node] = kind, params

    def memcpy(self, node: int, width: int = 64, height: int = 1, depth: int = 1) -> None:
        """Add a node that copies."""
        rows = SimpleNamespace(WidthInBytes=width, Height=height, Depth=depth)
        self.add(node, MEMCPY, params=rows)

    def bytes_of(self, nodes: Iterable[int]) -> list[int]:
        """Dynamic shared memory with which the nodes would be launched."""
        return [self.params[node].sharedMemBytes for node in nodes]

    def limits(self) -> dict[int, int]:
        """Of each function's dynamic shared memory."""
        return {f: attributes[MOST_DYNAMIC] for f, (_, attributes) in self.functions.items()}

    def snapshot(self) -> object:
        """All that calls can change, but for executables."""
        return copy.deepcopy((self.graphs, self.params, self.attributes, self.functions))

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each change by this call."""
        return [call[1:] for call in self.changes if call[0] == name]

    def _change(self, name: str, subject: int, *arguments: object) -> tuple[Status]:
        if self.refuses in ((name, subject), (name, 0)):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.changes.append((name, subject, *arguments))
        return (Status.CUDA_SUCCESS,)

    def cuGraphGetNodes(self, graph: int, count: int):
        return Status(0), list(map(Handle, self.graphs[graph][:count])), len(self.graphs[graph])

    def cuGraphGetEdges(self, graph: int, count: int):
        some, total = self.edges.get(graph, [])[:count], len(self.edges.get(graph, []))
        return Status(0), [Handle(a) for a, _ in some], [Handle(b) for _, b in some], [], total

    def cuGraphChildGraphNodeGetGraph(self, node: int):
        return Status(0), Handle(self.params[node])

    def cuGraphMemsetNodeGetParams(self, node: int):
        return Status(0), copy.copy(self.params[node])

    def cuKernelGetFunction(self, kernel: Handle):
        return Status(0), Handle(int(kernel) - 1000)

    def cuGraphNodeGetType(self, node: int):
        return Status(0), self.types[node]

    def cuGraphKernelNodeGetParams(self, node: int):
        found = copy.copy(self.params[node])
        found.func, found.kern = Handle(found.func), Handle(found.kern)
        return Status(0), found

    def cuGraphMemcpyNodeGetParams(self, node: int):
        return Status(0), copy.copy(self.params[node])

    def cuFuncGetName(self, function: int):
        return Status(0), self.functions[function][0]

    def cuFuncGetAttribute(self, attribute: FunctionAttribute, function: int):
        assert isinstance(attribute, FunctionAttribute), "the attribute comes first"
        return Status(0), self.functions[function][1].get(attribute, 0)

    def cuGraphKernelNodeGetAttribute(self, node: int, attribute: NodeAttribute):
        return Status(0), copy.copy(self.attributes[node][attribute])

    def cuFuncSetAttribute(self, function: int, attribute: FunctionAttribute, value: int):
        done = self._change("cuFuncSetAttribute", function, attribute, value)
        if not done[0]:
            self.functions[function][1][attribute] = value
        return done

    def cuGraphKernelNodeSetParams(self, node: int, params: SimpleNamespace):
        params = copy.copy(params)
        params.func, params.kern = int(params.func), int(params.kern)
        limit = self.functions[params.func][1][MOST_DYNAMIC]
        if params.sharedMemBytes > limit:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        done = self._change("cuGraphKernelNodeSetParams", node, params.sharedMemBytes)
        if not done[0]:
            self.params[node] = params
        return done

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: SimpleNamespace):
        done = self._change(
            "cuGraphExecKernelNodeSetParams", executable, node, params.sharedMemBytes
        )
        if not done[0]:
            self.executables.setdefault(executable, {})[node] = params.sharedMemBytes
        return done

    def cuGraphKernelNodeSetAttribute(self, node: int, attribute: NodeAttribute, value: Any):
        done = self._change("cuGraphKernelNodeSetAttribute", node, attribute, copy.copy(value))
        if not done[0]:
            self.attributes[node][attribute] = copy.copy(value)
        return done

    def cuGraphClone(self, graph: int):
        clone = (1 + len(self.called("cuGraphClone"))) * CLONES
        done = self._change("cuGraphClone", graph)
        self.graphs[clone] = [node + clone for node in self.graphs[graph]]
        for node in self.graphs[graph]:
            self.types[node + clone] = self.types[node]
            self.params[node + clone] = copy.copy(self.params[node])
            self.attributes[node + clone] = copy.deepcopy(self.attributes.get(node, {}))
        return *done, clone

    def cuGraphNodeFindInClone(self, node: int, clone: int):
        assert node + clone in self.graphs[clone]
        return Status(0), node + clone

    def cuGraphKernelNodeCopyAttributes(self, target: int, source: int):
        done = self._change("cuGraphKernelNodeCopyAttributes", target, source)
        self.attributes[target] = copy.deepcopy(self.attributes[source])
        return done

    def cuGraphDestroy(self, graph: int):
        for node in self.graphs.pop(graph):
            del self.types[node], self.params[node], self.attributes[node]
        return self._change("cuGraphDestroy", graph)

    def cuStreamGetCaptureInfo(self, stream: int):
        graph = self.captures.get(stream, 0)
        return Status(0), bool(graph), 1, graph, [], [], 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, num: int):
        assert function in self.functions
        return Status(0), 100_000 * threads + num


def installed(monkeypatch: pytest.MonkeyPatch) -> StubGraphs:
    """The stub in the driver's place."""
    made = StubGraphs()
    monkeypatch.setattr(driver, "driver_bindings", lambda: made)
    return made
