"""Nodes of captured graphs, to read and to change: what torch does not tell of them.

A kernel of any library is launched as its node says: its shared memory and its priority are numbers
of the node, and may be changed without touching the kernel.
"""

from typing import Any, NamedTuple

from counterpoint.errors import InputError
from counterpoint.gpu import driver


class KernelNode(NamedTuple):
    """What a kernel node of a graph launches; triples are along x, y and z."""

    name: str  # as the linker sees it
    grid: tuple[int, int, int]  # blocks
    block: tuple[int, int, int]  # threads
    cluster: tuple[int, int, int]  # blocks; ones where there are no clusters
    registers_per_thread: int
    static_shared_bytes: int  # per block, here and below
    dynamic_shared_bytes: int
    priority: int
    cooperative: bool  # all blocks must be resident at once


def nodes(graph: int) -> list[int]:
    """The nodes of a graph (a CUgraph), in no promised order.

    Raises:
        UnsupportedError: cuda-bindings is not installed; so for all that ask about graphs.
        CounterpointError: the driver refused the call; likewise.
    """
    _, count = driver.ask("cuGraphGetNodes", graph, 0)
    found, _ = driver.ask("cuGraphGetNodes", graph, count)
    return [int(node) for node in found]


def edges(graph: int) -> list[tuple[int, int]]:
    """The edges of a graph, each from the node that comes first."""
    # without this name, CUDA 12's query refuses graphs that have edges of programmatic launches
    newer = hasattr(driver.driver_bindings(), "cuGraphGetEdges_v2")
    call = "cuGraphGetEdges_v2" if newer else "cuGraphGetEdges"
    *_, count = driver.ask(call, graph, 0)
    # the data of the edges, third, is already freed here
    sources, targets, *_ = driver.ask(call, graph, count)
    return [(int(a), int(b)) for a, b in zip(sources, targets, strict=True)]


def kind_of(node: int) -> str:
    """Type of a node as the driver names it, in lower case: kernel, memcpy, memset, graph, ..."""
    kinds, prefix = driver.driver_bindings().CUgraphNodeType, "CU_GRAPH_NODE_TYPE_"
    kind = int(driver.ask("cuGraphNodeGetType", node))
    # enumerations of some versions of the bindings are not Python's
    names = (name for name in dir(kinds) if name.startswith(prefix))
    name = next((n for n in names if int(getattr(kinds, n)) == kind), f"kind {kind}")
    return name.removeprefix(prefix).lower()


def child_of(node: int) -> int:
    """The graph in a node of kind graph."""
    return int(driver.ask("cuGraphChildGraphNodeGetGraph", node))


def kernel_of(node: int) -> KernelNode:
    """What a node of kind kernel launches."""
    params = driver.ask("cuGraphKernelNodeGetParams", node)
    function = _function(params)
    return KernelNode(
        name=driver.ask("cuFuncGetName", function).decode(),
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        cluster=_cluster(node, function),
        registers_per_thread=_function_attribute(function, "NUM_REGS"),
        static_shared_bytes=_function_attribute(function, "SHARED_SIZE_BYTES"),
        dynamic_shared_bytes=params.sharedMemBytes,
        priority=_node_attribute(node, "PRIORITY").priority,
        cooperative=bool(_node_attribute(node, "COOPERATIVE").cooperative),
    )


def function_of(node: int) -> int:
    """The function (a CUfunction) that a node of kind kernel launches."""
    return _function(driver.ask("cuGraphKernelNodeGetParams", node))


def memcpy_bytes(node: int) -> int:
    """What a node of kind memcpy copies."""
    box = driver.ask("cuGraphMemcpyNodeGetParams", node)
    return box.WidthInBytes * max(box.Height, 1) * max(box.Depth, 1)


def memset_bytes(node: int) -> int:
    """What a node of kind memset sets."""
    rows = driver.ask("cuGraphMemsetNodeGetParams", node)
    return rows.elementSize * rows.width * max(rows.height, 1)


def graph_of_capture(stream: int) -> int:
    """The graph that a stream (a CUstream) is being captured into.

    Raises:
        InputError: the stream is not being captured.
    """
    found = driver.ask("cuStreamGetCaptureInfo", stream)
    graph = int(found[2])
    if not graph:
        raise InputError("graph_of_capture", "stream", want="in a capture", got="none")
    return graph


def set_dynamic_bytes(node: int, num_bytes: int, executable: int = 0) -> None:
    """Launch the kernel of `node` with this much dynamic shared memory per block.

    Args:
        node: of kind kernel; its function must allow as much, see `allow_dynamic_bytes`.
        num_bytes: of dynamic shared memory.
        executable: an instantiated graph (a CUgraphExec) of the node's graph, which is changed and
            the graph is not; 0: the graph is changed, for instantiations to come.
    """
    params = driver.ask("cuGraphKernelNodeGetParams", node)
    params.sharedMemBytes = num_bytes
    if executable:
        driver.ask("cuGraphExecKernelNodeSetParams", executable, node, params)
    else:
        driver.ask("cuGraphKernelNodeSetParams", node, params)


def set_priority(node: int, priority: int) -> None:
    """Give a kernel node a priority, the lower the more urgent, for instantiations to come."""
    _set_node_attribute(node, "PRIORITY", "priority", priority)


def set_carve_out(node: int, percent: int) -> None:
    """Ask for this part of an SM's L1 as shared memory, for instantiations to come.

    There is no value that means none: `copy_attributes` from a clone's node undoes it.
    """
    _set_node_attribute(node, "PREFERRED_SHARED_MEMORY_CARVEOUT", "sharedMemCarveout", percent)


def clone_of(graph: int) -> int:
    """A copy of a graph, until `destroy`."""
    return int(driver.ask("cuGraphClone", graph))


def destroy(graph: int) -> None:
    """Free a graph that `clone_of` made."""
    driver.ask("cuGraphDestroy", graph)


def copy_attributes(node: int, clone: int) -> None:
    """Give a kernel node the attributes that it had when its graph was cloned."""
    original = driver.ask("cuGraphNodeFindInClone", node, clone)
    driver.ask("cuGraphKernelNodeCopyAttributes", node, original)


def allow_dynamic_bytes(function: int, num_bytes: int) -> int:
    """Let a function (a CUfunction) be launched with this much dynamic shared memory; what it was.

    The limit of a function holds for the process, until it is set again.
    """
    before = _function_attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES")
    _set_function_attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", num_bytes)
    return before


def prefer_carve_out(function: int, percent: int) -> int:
    """As `set_carve_out`, for launches of a function from now on; what it was."""
    before = _function_attribute(function, "PREFERRED_SHARED_MEMORY_CARVEOUT")
    _set_function_attribute(function, "PREFERRED_SHARED_MEMORY_CARVEOUT", percent)
    return before


def resident_blocks(function: int, threads: int, dynamic_shared_bytes: int) -> int:
    """Blocks of a function that are resident per SM, as the driver calculates it."""
    call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    return int(driver.ask(call, function, threads, dynamic_shared_bytes))


def _function(params: Any) -> int:
    """A node holds a kernel of a context, or else one of a library."""
    return int(params.func) or int(driver.ask("cuKernelGetFunction", params.kern))


def _cluster(node: int, function: int) -> tuple[int, int, int]:
    """Clusters as asked for at launch, else as compiled in, else of one block."""
    value = _node_attribute(node, "CLUSTER_DIMENSION")
    asked = value.clusterDim  # a view: it does not keep the memory of `value`
    if asked.x and asked.y and asked.z:
        return asked.x, asked.y, asked.z
    width, height, depth = (
        _function_attribute(function, f"REQUIRED_CLUSTER_{side}") or 1
        for side in ("WIDTH", "HEIGHT", "DEPTH")
    )
    return width, height, depth


def _node_attribute(node: int, name: str) -> Any:
    names = driver.driver_bindings().CUkernelNodeAttrID
    attribute = getattr(names, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return driver.ask("cuGraphKernelNodeGetAttribute", node, attribute)


def _set_node_attribute(node: int, name: str, field: str, number: int) -> None:
    cu = driver.driver_bindings()
    value = cu.CUkernelNodeAttrValue()
    setattr(value, field, number)
    attribute = getattr(cu.CUkernelNodeAttrID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    driver.ask("cuGraphKernelNodeSetAttribute", node, attribute, value)


def _set_function_attribute(function: int, name: str, number: int) -> None:
    names = driver.driver_bindings().CUfunction_attribute
    attribute = getattr(names, f"CU_FUNC_ATTRIBUTE_{name}")
    driver.ask("cuFuncSetAttribute", function, attribute, number)


def _function_attribute(function: int, name: str) -> int:
    names = driver.driver_bindings().CUfunction_attribute
    return driver.ask("cuFuncGetAttribute", getattr(names, f"CU_FUNC_ATTRIBUTE_{name}"), function)
