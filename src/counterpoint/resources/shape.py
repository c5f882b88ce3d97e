"""Fewer resident blocks of a compute kernel, so that communication finds room on every SM.

A kernel that is launched with more shared memory than it uses computes the same bits with fewer
blocks per SM. Two ways in, neither of which touches the kernel: the numbers that Triton passes to
each launch, and the kernel nodes of a captured graph, for everything else. Kernels whose blocks
wait for one another are refused: they need all their blocks resident.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import graph_nodes
from counterpoint.gpu.footprint import Footprint, node_footprint
from counterpoint.gpu.limits import SmLimits
from counterpoint.gpu.occupancy import dynamic_bytes_for, feasible, occupancy

# kernels that wait: for peers NCCL's, NVSHMEM's, torch's of symmetric memory and ours, or for time
SPINNING = re.compile(
    r"nccl|nvshmem|barrier|symm(etric)?_?mem|multimem|(one|two)_shot|all_?reduce|cross_device|"
    r"deep_?ep|signal_kernel|delay_kernel",
    re.IGNORECASE,
)
ALL_SHARED_MEMORY = 100  # percent of an SM's L1


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is brought to; one of these, or none: as it is.

    Args:
        blocks_per_sm: at most this many resident; a kernel that has no more of itself stays as it
            is, one that cannot have as many has the next number below that it can.
        carve_out: all of the SM's shared memory asked for, none of it added to a block.

    Raises:
        InputError: both are given, or the number is below 1.
    """

    blocks_per_sm: int | None = None
    carve_out: bool = False

    def __post_init__(self) -> None:
        if self.blocks_per_sm is not None and self.carve_out:
            raise InputError("Shape", "arguments", want="one at a time", got=self)
        if self.blocks_per_sm is not None and self.blocks_per_sm < 1:
            raise InputError("Shape", "blocks_per_sm", want=">= 1", got=self.blocks_per_sm)

    def bytes_of(self, kernel: Footprint, limits: SmLimits) -> int:
        """The dynamic shared memory that `kernel` is to be launched with.

        Raises:
            InputError: the kernel cannot be brought to this; the message says what it can.
        """
        if self.blocks_per_sm is None:
            return kernel.dynamic_shared_bytes
        able = feasible(kernel, limits)
        below = [blocks for blocks in able if blocks <= self.blocks_per_sm]
        if not below:
            want = f">= {min(able)} for {kernel.short_name}"
            raise InputError("Shape", "blocks_per_sm", want=want, got=self.blocks_per_sm)
        return dynamic_bytes_for(kernel, limits, max(below))


def refusal(kernel: Footprint, limits: SmLimits) -> str:
    """Why a kernel cannot be shaped as it is launched; "" if it can."""
    if kernel.kind != "kernel":
        return f"a {kernel.kind} has no blocks"
    if SPINNING.search(kernel.name):
        return "it waits for peers: all its blocks must be resident"
    if kernel.cooperative:
        return "it is a cooperative launch: all its blocks must be resident"
    if max(kernel.cluster) > 1:
        return "it is launched in clusters: their blocks must be resident together"
    if occupancy(kernel, limits).blocks == 1:
        return "one block per SM is resident as it is"
    return ""


class Nodes:
    """The kernel nodes of a captured graph, to be shaped and brought back.

    A context: on leaving it, by an exception or not, the graph's nodes are as they were captured.

    Args:
        graph: that was captured with `keep_graph=True` (CUgraph), e.g. `raw_cuda_graph()`.
        limits: of the SMs.
        nodes: of the graph (CUgraphNode); None: all. Those that are no kernels, or cannot be
            shaped, are left alone; `refused` says which kernels and why.
    """

    def __init__(self, graph: int, limits: SmLimits, nodes: Sequence[int] | None = None) -> None:
        self.graph, self.limits = graph, limits
        nodes = graph_nodes.nodes(graph) if nodes is None else nodes
        self.kernels: dict[int, Footprint] = {}
        self.refused: dict[str, str] = {}
        for node in nodes:
            kernel = node_footprint(node)
            why = refusal(kernel, limits)
            if not why:
                self.kernels[node] = kernel
            elif kernel.kind == "kernel":
                self.refused[kernel.short_name] = why
        self._before_carving = 0  # a clone of the graph
        self._undo = ExitStack()

    def feasible(self) -> tuple[int, ...]:
        """The numbers of blocks per SM that any of the kernels can be brought to, falling."""
        found = {k for kernel in self.kernels.values() for k in feasible(kernel, self.limits)}
        return tuple(sorted(found, reverse=True))

    def check(self) -> None:
        """Refuse to shape where nothing can be.

        Raises:
            UnsupportedError: there is no kernel that can be shaped; says why of each.
        """
        if not self.kernels:
            whys = [f"{name}: {why}" for name, why in self.refused.items()] or ["no kernels"]
            raise UnsupportedError(f"shape: nothing can be shaped; {'; '.join(whys)}")

    def __enter__(self) -> "Nodes":
        """Let the kernels be launched with all the shared memory that a block may have."""
        with ExitStack() as undo:
            for function, kernel in self._functions().items():
                undo.enter_context(allowing(function, kernel, self.limits))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Bring all back."""
        try:
            self.set(Shape())
        finally:
            self._undo.close()

    def set(self, shape: Shape, executable: int = 0) -> dict[str, int]:
        """Bring all kernels to `shape`.

        Args:
            shape: for each of them.
            executable: an instantiated graph (CUgraphExec) that is updated in place, for replays to
                come; 0: the graph itself, for instantiations to come.

        Returns:
            Dynamic shared memory of each kernel, by its short name.

        Raises:
            InputError: a kernel cannot be brought to it, or `executable` with a carve-out, which
                is fixed when a graph is instantiated. Nothing was changed.
        """
        if executable and shape.carve_out:
            want = "0 with a carve-out"
            raise InputError("Nodes.set", "executable", want=want, got="an instantiated graph")
        found = {n: shape.bytes_of(kernel, self.limits) for n, kernel in self.kernels.items()}
        if not executable:
            self._carve(shape.carve_out)
        for node, num_bytes in found.items():
            graph_nodes.set_dynamic_bytes(node, num_bytes, executable)
        return {self.kernels[node].short_name: size for node, size in found.items()}

    def _carve(self, wanted: bool) -> None:
        if wanted and not self._before_carving:
            self._before_carving = graph_nodes.clone_of(self.graph)
            for node in self.kernels:
                graph_nodes.set_carve_out(node, ALL_SHARED_MEMORY)
        elif not wanted and self._before_carving:
            for node in self.kernels:
                priority = graph_nodes.kernel_of(node).priority
                graph_nodes.copy_attributes(node, self._before_carving)
                graph_nodes.set_priority(node, priority)
            graph_nodes.destroy(self._before_carving)
            self._before_carving = 0

    def _functions(self) -> Mapping[int, Footprint]:
        return {graph_nodes.function_of(n): kernel for n, kernel in self.kernels.items()}


_allowed: dict[int, tuple[int, int]] = {}  # of a function: who needs it, and its own limit


@contextmanager
def allowing(function: int, kernel: Footprint, limits: SmLimits) -> Generator[None]:
    """Let a function be launched with all the shared memory that a block may have.

    The limit is the function's, for the whole process: the last one who needs it brings it back.
    """
    count, before = _allowed.get(function, (0, 0))
    if not count:
        most = limits.shared_bytes_per_block - kernel.static_shared_bytes
        before = graph_nodes.allow_dynamic_bytes(function, most)
    _allowed[function] = count + 1, before
    try:
        yield
    finally:
        count, before = _allowed.pop(function)
        if count > 1:
            _allowed[function] = count - 1, before
        else:
            graph_nodes.allow_dynamic_bytes(function, before)
