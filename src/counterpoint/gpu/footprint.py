"""What each kernel of a step takes of a GPU, whoever wrote it.

Read from a CUDA graph that is captured and never run: the only way that shows a kernel of cuBLAS
or NCCL as it is launched, and the same for Triton's and one's own.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import torch

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import graph_nodes

Triple = tuple[int, int, int]  # along x, y and z


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One node of a captured graph: what a kernel takes, or what a copy moves.

    Args:
        kind: "kernel", "memcpy", "memset", or another type of node as the driver names it.
        name: Symbol of a kernel, mangled if it is a C++ one. Empty for other kinds, and all
            numbers down to `priority` are then 0.
        grid: Blocks.
        block: Threads of a block.
        cluster: Blocks of a cluster; ones where there are no clusters.
        registers_per_thread: As compiled.
        static_shared_bytes: Per block, as compiled.
        dynamic_shared_bytes: Per block, as asked for at launch.
        priority: Of the stream that it was captured on; the lower goes first.
        cooperative: Whether all its blocks must be resident at once.
        total_bytes: What a memcpy or a memset writes, 0 for other kinds.
    """

    kind: str
    name: str = ""
    grid: Triple = (0, 0, 0)
    block: Triple = (0, 0, 0)
    cluster: Triple = (0, 0, 0)
    registers_per_thread: int = 0
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    priority: int = 0
    cooperative: bool = False
    total_bytes: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)

    @property
    def short_name(self) -> str:
        """The kernel's name without its types; a generated GEMM's own name, which says its tile.

        `at::native::vectorized_elementwise_kernel` for a function of torch,
        `cutlass_80_tensorop_bf16_s16816gemm_...` for the instance of `cutlass::Kernel2`.
        """
        return _short(self.name)


def footprints(call: Callable[[], object]) -> tuple[Footprint, ...]:
    """Footprints of what `call` launches, each after those that it waits for.

    `call` runs once, under capture on a stream of priority 0, and nothing that it launches runs.
    Side streams must be joined and nothing may synchronise, as in any capture. What it launches
    must have run before: libraries set themselves up, and kernels are compiled and loaded, at
    their first launch. A call that communicates is captured on all ranks.

    Args:
        call: Takes no argument; what it returns is dropped.

    Raises:
        UnsupportedError: There is no NVIDIA GPU, or cuda-bindings is not installed.
        CounterpointError: The driver refused a query.
    """
    if torch.version.hip or not torch.cuda.is_available():
        fix = "`counterpoint doctor` shows what is here"
        raise UnsupportedError(f"footprints: needs an NVIDIA GPU; {fix}")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # on torch's own stream, but without entering its context: that empties the allocator's cache,
    # and whoever calls this in a step of a model would wait for all memory to be allocated again
    with torch.cuda.graph(graph).stream_ctx:
        # other threads may call CUDA meanwhile
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    return graph_footprints(int(graph.raw_cuda_graph()))


def graph_footprints(graph: int) -> tuple[Footprint, ...]:
    """Footprints of the nodes of a graph and of the graphs within it, as `footprints` orders them.

    Args:
        graph: A CUgraph that lives meanwhile, e.g. from `torch.cuda.CUDAGraph.raw_cuda_graph`.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
        CounterpointError: The driver refused a query.
    """
    return tuple(_walk(graph))


def gemm_tile(footprint: Footprint) -> tuple[int, int] | None:
    """Rows and columns of a GEMM's output tile, read from the name of its kernel.

    In the order of the name, which is not always that of a tensor: libraries hold matrices by
    column and may swap the operands, so that the rows may lie along either dim.

    Returns:
        None if it is no GEMM, or none whose name tells.
    """
    name = footprint.short_name
    found = _NVJET.match(name) or _GEMM.search(name)
    return (int(found[1]), int(found[2])) if found else None


# nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT: tile, its k and its stages, cluster
_NVJET = re.compile(r"nvjet_(?:[a-z0-9]+_)*?(\d+)x(\d+)")
# ampere_bf16_s16816gemm_bf16_128x64_ldg8_..., cutlass_80_tensorop_..gemm_bf16_256x128_32x3_...,
# sm90_xmma_gemm_..._tilesize128x256x64_...; an instruction's shape may stand before the gemm.
# A convolution is no GEMM of the user's
_GEMM = re.compile(r"(?<!implicit_)gemm\w*?_(?:tilesize)?(\d+)x(\d+)")
_SOURCE_NAME = re.compile(r"L?(\d+)")  # of mangled C++: the length of the identifier that follows


def _walk(graph: int) -> Iterator[Footprint]:
    for node in _in_order(graph_nodes.nodes(graph), graph_nodes.edges(graph)):
        if graph_nodes.kind_of(node) == "graph":
            yield from _walk(graph_nodes.child_of(node))
        else:
            yield node_footprint(node)


def node_footprint(node: int) -> Footprint:
    """Footprint of one node of a graph (a CUgraphNode).

    Raises:
        UnsupportedError: cuda-bindings is not installed.
        CounterpointError: The driver refused a query.
    """
    kind = graph_nodes.kind_of(node)
    if kind == "kernel":
        return Footprint(kind=kind, **graph_nodes.kernel_of(node)._asdict())
    if kind == "memcpy":
        return Footprint(kind=kind, total_bytes=graph_nodes.memcpy_bytes(node))
    if kind == "memset":
        return Footprint(kind=kind, total_bytes=graph_nodes.memset_bytes(node))
    return Footprint(kind=kind)


def _in_order(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Each node after all that have an edge to it; of those that are free to come, as listed."""
    place = {node: i for i, node in enumerate(nodes)}
    followers: dict[int, list[int]] = {node: [] for node in nodes}
    num_before = dict.fromkeys(nodes, 0)
    for before, after in edges:
        followers[before].append(after)
        num_before[after] += 1
    free = [place[node] for node in nodes if not num_before[node]]
    heapify(free)
    while free:
        node = nodes[heappop(free)]
        yield node
        for after in followers[node]:
            num_before[after] -= 1
            if not num_before[after]:
                heappush(free, place[after])


def _short(symbol: str) -> str:
    nested = symbol.startswith("_ZN")
    if not symbol.startswith("_Z"):
        return symbol
    parts, rest = _identifiers(symbol.removeprefix("_ZN" if nested else "_Z"))
    if not parts:
        return symbol
    if not nested:  # the types of its arguments come next
        return parts[0]
    if parts[0] == "cutlass" and parts[-1].startswith("Kernel"):
        instance, _ = _identifiers(rest.removeprefix("I"))
        parts = instance[:1] or parts
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N"))


def _identifiers(mangled: str) -> tuple[list[str], str]:
    """The identifiers that `mangled` begins with, and what follows them."""
    parts: list[str] = []
    while length := _SOURCE_NAME.match(mangled):
        end = length.end() + int(length[1])
        parts.append(mangled[length.end() : end])
        mangled = mangled[end:]
    return parts, mangled


def triton_footprint(kernel: Any) -> Footprint:
    """What a block of a compiled Triton kernel takes; its grid is not known here.

    Raises:
        InputError: it is no compiled kernel.
    """
    metadata = getattr(kernel, "metadata", None)
    if metadata is None or not hasattr(kernel, "packed_metadata"):
        want = "compiled Triton kernels, as kernel[grid](...) returns them"
        raise InputError("shape", "kernels", want=want, got=type(kernel).__name__)
    if getattr(kernel, "n_regs", None) is None:
        kernel._init_handles()  # loads it: registers are known then
    registers: Any = kernel.n_regs
    return Footprint(
        kind="kernel",
        name=metadata.name,
        grid=(0, 0, 0),
        block=(metadata.num_warps * 32, 1, 1),
        cluster=(metadata.num_ctas, 1, 1),
        registers_per_thread=registers,
        dynamic_shared_bytes=metadata.shared,
        cooperative=bool(getattr(metadata, "launch_cooperative_grid", False)),
    )
