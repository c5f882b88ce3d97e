"""Copies and the nodes of captured graphs, through cuda-bindings. The only importer of it.

torch's `copy_` is a DMA copy only for contiguous tensors of one dtype; here a copy is a DMA copy
because nothing else is asked for. What a node of a graph launches, torch does not tell at all.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from counterpoint.errors import CounterpointError, UnsupportedError


class Copy(NamedTuple):
    """`height` rows of `width` bytes, from one pitch to another; one row is a plain copy."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


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


@cache
def bindings() -> ModuleType:
    """The CUDA runtime.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
    """
    return _bindings("runtime", "copy engine")


@cache
def driver_bindings() -> ModuleType:
    """The CUDA driver.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
    """
    return _bindings("driver", "graph nodes")


def _bindings(part: str, user: str) -> ModuleType:
    try:
        return import_module(f"cuda.bindings.{part}")
    except ImportError as error:
        fix = "pip install cuda-bindings, of torch's CUDA version"
        raise UnsupportedError(f"{user}: needs cuda-bindings ({error}); {fix}") from error


def copy_async(copy: Copy, stream: int) -> None:
    """Enqueue one DMA copy on `stream` (a cudaStream_t). Capturable.

    Raises:
        CounterpointError: CUDA refused it.
    """
    rt = bindings()
    kind = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    if copy.height == 1:
        (status,) = rt.cudaMemcpyAsync(copy.target, copy.source, copy.width, kind, stream)
    else:
        (status,) = rt.cudaMemcpy2DAsync(
            copy.target, copy.target_pitch, copy.source, copy.source_pitch,
            copy.width, copy.height, kind, stream,
        )  # fmt: skip
    _check(status, "cudaMemcpyAsync")


def copy_batch_async(copies: Sequence[Copy], stream: int) -> None:
    """Enqueue plain copies in one call: they have no order among themselves. Not capturable.

    Raises:
        CounterpointError: CUDA refused it.
    """
    rt = bindings()
    attributes = rt.cudaMemcpyAttributes()
    attributes.srcAccessOrder = rt.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    targets = [c.target for c in copies]
    sources = [c.source for c in copies]
    sizes = [c.width for c in copies]
    result = rt.cudaMemcpyBatchAsync(
        targets, sources, sizes, len(copies), [attributes], [0], 1, stream
    )
    _check(result[0], "cudaMemcpyBatchAsync")


def num_copy_engines(device: int) -> int:
    """How many copies of a GPU's copy engines can run at a time.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
        CounterpointError: there is no such GPU.
    """
    rt = bindings()
    engines = rt.cudaDeviceAttr.cudaDevAttrAsyncEngineCount
    status, count = rt.cudaDeviceGetAttribute(engines, device)
    _check(status, "cudaDeviceGetAttribute")
    return int(count)


def _check(status: Any, call: str) -> None:
    if int(status) != 0:
        raise CounterpointError(f"{call} failed: {getattr(status, 'name', status)}")


@contextmanager
def relaxed_capture() -> Generator[None]:
    """Let this thread allocate, load modules and synchronise although a capture is open.

    What runs inside must use a stream that is not being captured.
    """
    rt = bindings()
    relaxed = rt.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    status, before = rt.cudaThreadExchangeStreamCaptureMode(relaxed)
    _check(status, "cudaThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        (status, *_) = rt.cudaThreadExchangeStreamCaptureMode(before)
        _check(status, "cudaThreadExchangeStreamCaptureMode")


def upload(host: Tensor, target: int, stream: int) -> None:
    """Copy a CPU tensor to address `target` on `stream` now, capture or not; waits for it.

    Raises:
        CounterpointError: CUDA refused it.
    """
    rt = bindings()
    num_bytes = host.numel() * host.element_size()
    kind = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
    with relaxed_capture():
        (status,) = rt.cudaMemcpyAsync(target, host.data_ptr(), num_bytes, kind, stream)
        _check(status, "cudaMemcpyAsync")
        (status,) = rt.cudaStreamSynchronize(stream)
        _check(status, "cudaStreamSynchronize")


def graph_nodes(graph: int) -> list[int]:
    """The nodes of a graph (a CUgraph), in no promised order.

    Raises:
        UnsupportedError: cuda-bindings is not installed; so for all that ask about graphs.
        CounterpointError: the driver refused the call; likewise.
    """
    _, count = _ask("cuGraphGetNodes", graph, 0)
    nodes, _ = _ask("cuGraphGetNodes", graph, count)
    return [int(node) for node in nodes]


def graph_edges(graph: int) -> list[tuple[int, int]]:
    """The edges of a graph, each from the node that comes first."""
    # without this name, CUDA 12's query refuses graphs that have edges of programmatic launches
    newer = hasattr(driver_bindings(), "cuGraphGetEdges_v2")
    call = "cuGraphGetEdges_v2" if newer else "cuGraphGetEdges"
    *_, count = _ask(call, graph, 0)
    # the data of the edges, third, is already freed here
    sources, targets, *_ = _ask(call, graph, count)
    return [(int(a), int(b)) for a, b in zip(sources, targets, strict=True)]


def node_kind(node: int) -> str:
    """Type of a node as the driver names it, in lower case: kernel, memcpy, memset, graph, ..."""
    kinds, prefix = driver_bindings().CUgraphNodeType, "CU_GRAPH_NODE_TYPE_"
    kind = int(_ask("cuGraphNodeGetType", node))
    # enumerations of some versions of the bindings are not Python's
    names = (name for name in dir(kinds) if name.startswith(prefix))
    name = next((n for n in names if int(getattr(kinds, n)) == kind), f"kind {kind}")
    return name.removeprefix(prefix).lower()


def child_graph(node: int) -> int:
    """The graph in a node of kind graph."""
    return int(_ask("cuGraphChildGraphNodeGetGraph", node))


def kernel_node(node: int) -> KernelNode:
    """What a node of kind kernel launches."""
    params = _ask("cuGraphKernelNodeGetParams", node)
    # a node holds a kernel of a context, or else one of a library
    function = int(params.func) or int(_ask("cuKernelGetFunction", params.kern))
    return KernelNode(
        name=_ask("cuFuncGetName", function).decode(),
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        cluster=_cluster(node, function),
        registers_per_thread=_function_attribute(function, "NUM_REGS"),
        static_shared_bytes=_function_attribute(function, "SHARED_SIZE_BYTES"),
        dynamic_shared_bytes=params.sharedMemBytes,
        priority=_node_attribute(node, "PRIORITY").priority,
    )


def memcpy_bytes(node: int) -> int:
    """What a node of kind memcpy copies."""
    box = _ask("cuGraphMemcpyNodeGetParams", node)
    return box.WidthInBytes * max(box.Height, 1) * max(box.Depth, 1)


def memset_bytes(node: int) -> int:
    """What a node of kind memset sets."""
    rows = _ask("cuGraphMemsetNodeGetParams", node)
    return rows.elementSize * rows.width * max(rows.height, 1)


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
    names = driver_bindings().CUkernelNodeAttrID
    attribute = getattr(names, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return _ask("cuGraphKernelNodeGetAttribute", node, attribute)


def _function_attribute(function: int, name: str) -> int:
    names = driver_bindings().CUfunction_attribute
    return _ask("cuFuncGetAttribute", getattr(names, f"CU_FUNC_ATTRIBUTE_{name}"), function)


def _ask(call: str, *arguments: Any) -> Any:
    """What a driver call returns behind its status: one value, or a list of them."""
    status, *found = getattr(driver_bindings(), call)(*arguments)
    _check(status, call)
    return found[0] if len(found) == 1 else found
