"""How experts that multiply what all ranks send, or send back what they multiply, are launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.kernels.all_to_all_matmul import all_to_all_matmul_kernel
from counterpoint.kernels.matmul_all_to_all import (
    arrival_kernel,
    collect_kernel,
    matmul_all_to_all_kernel,
)
from counterpoint.kernels.routes import num_words, routes_kernel
from counterpoint.resources.footprint import triton_footprint
from counterpoint.resources.occupancy import occupancy
from counterpoint.resources.shape import limits_here
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.lanes_cuda import raw_stream

ALIGN = 16  # bytes, of every row: what TMA asks for
NUM_WARPS = 8
COLLECT_COLS = 2048  # of a row that a program takes at a time
INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time.

    Args:
        block_m, block_n, block_k: rows and columns of y, and how much of K is loaded at a time.
        stages: loads in flight.
        num_warps: of a program.
        group_m: blocks of rows that share their columns of w in L2.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 3
    num_warps: int = NUM_WARPS
    group_m: int = 8

    @property
    def constants(self) -> tuple[int, ...]:
        """As the kernels take them."""
        return self.block_m, self.block_n, self.block_k, self.group_m, self.stages


@dataclass(frozen=True)
class Sending:
    """How rows are sent to their experts; equal on all ranks.

    Args:
        senders: programs that send.
        parts: of the rows of an (expert, rank), a flag behind each; a power of 2.
        piece: words of 4 bytes that a program sends at a time.
        join: whether senders take tiles when they have sent all.
    """

    senders: int = 32
    parts: int = 8
    piece: int = 8192
    join: bool = not INTERPRETED  # where programs run one after another, senders may not wait


def tile_of(rows: int, n: int, experts: int) -> Tile:
    """The tile for `rows` in all of so many experts on a rank, by measurements on H200."""
    each = rows / max(experts, 1)
    return Tile() if each > 96 else Tile(block_m=64, block_n=min(256, n), stages=4, num_warps=4)


def sending_of(experts: int, ranks: int) -> Sending:
    """How to send to so many experts on each of `ranks` ranks."""
    return Sending(parts=max(1, (32 if experts > 4 else 256) // ranks))


def refusal(n: int, k: int, dtype: torch.dtype, ranks: int, experts: int, stride: int) -> str:
    """What the kernels want that these sizes do not have, or ''.

    Args:
        stride: elements between rows of the weight as it is stored.
    """
    if ranks & (ranks - 1) or ranks > 32:
        return "a number of ranks that is a power of two up to 32"
    if dtype not in (torch.bfloat16, torch.float16) and not INTERPRETED:
        return "bf16 or fp16"
    if any(size * dtype.itemsize % ALIGN for size in (n, k, stride)):
        return f"N, K and the stride of w in multiples of {ALIGN} bytes"
    return "1024 experts at most" if experts > 1024 else ""


class _Experts:
    """What both directions share: routes, the memory, launches past Triton's binder.

    Args:
        memory: of the group.
        tag: that a fault word names the call by.
        experts: of all ranks.
        limit: rows that a rank can take from all ranks, or send to them; equal on all ranks.
        tile: what a program computes.
    """

    def __init__(
        self, memory: FusedMemory, tag: int, experts: int, limit: int, tile: Tile, over: Tensor
    ) -> None:
        self.memory, self.tag, self.experts, self.limit = memory, tag, experts, limit
        self.tile, self.over = tile, over
        workspace = memory.workspace
        self.device, self.rank = workspace.device, workspace.rank
        self.world = workspace.group.size()
        self.timeout_ns = int(workspace.timeout_s * 1e9)
        words = num_words(experts, self.world)
        self.routes = torch.zeros(words, dtype=torch.int32, device=self.device)
        self.sms = 4
        if self.device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._direct: dict[str, tuple[Any, Callable[..., None]]] = {}

    def launch(self, name: str, kernel: Any, programs: int, arguments: tuple[Any, ...],
               **options: int) -> None:  # fmt: skip
        """Launch on the current stream; 0 programs: as many as fit."""
        if INTERPRETED:
            kernel[(programs or self.sms,)](*arguments, **options)
            return
        if name not in self._direct:
            self._compile(name, kernel, programs, arguments, options)
        self._direct[name][1](*arguments, stream=raw_stream(self.device.index))

    def _compile(self, name: str, kernel: Any, programs: int, arguments: tuple[Any, ...],
                 options: dict[str, int]) -> None:  # fmt: skip
        try:
            compiled: Any = kernel.warmup(*arguments, grid=(1,), **options)
            if not programs:
                found = triton_footprint(compiled)
                programs = occupancy(found, limits_here(self.device)).blocks * self.sms
        except OutOfResources as error:
            raise UnsupportedError(f"{name}: {self.tile} does not fit: {error}") from error
        self._direct[name] = compiled, compiled[(programs, 1, 1)]

    def find_routes(self, counts: Tensor, spread: bool) -> None:
        """Read counts [ranks, experts] on the device."""
        arguments = (
            counts, self.routes, self.over, self.experts, self.rank, self.limit, self.tag,
            self.world, triton.next_power_of_2(self.experts), self.tile.block_m, spread,
        )  # fmt: skip
        self.launch(f"routes {counts.dtype}", routes_kernel, 1, arguments, num_warps=NUM_WARPS)

    def collect(self, name: str, half_bytes: int, count: int, y: Tensor,
                index: Tensor | None, weights: Tensor | None) -> None:  # fmt: skip
        """Take rows out of the memory: as they are, or the weighted sums of those of `index`."""
        tokens, n = y.shape
        top = index.shape[1] if index is not None else 0
        arguments = (
            self.memory.tiles.bases, self.memory.state, self.routes[count:],
            y if index is None else index, y if weights is None else weights, y, tokens, n,
            half_bytes, self.rank, top, min(COLLECT_COLS, triton.next_power_of_2(n)),
        )  # fmt: skip
        kinds = "" if index is None or weights is None else f"{index.dtype} {weights.dtype}"
        programs = min(max(tokens, 1), 16 * self.sms)
        self.launch(f"{name} {top} {kinds} {tokens} {n}", collect_kernel, programs, arguments,
                    num_warps=4)  # fmt: skip


class AllToAllMatmul(_Experts):
    """Rows to their experts, which multiply them as they come.

    Args:
        k, n: of the weights.
        dtype: of all tensors.
        way: how rows are sent; equal on all ranks.
        Others: as above.

    Raises:
        InputError: memory has to grow while a graph is captured.
    """

    def __init__(
        self, memory: FusedMemory, tag: int, experts: int, limit: int, k: int, n: int,
        dtype: torch.dtype, tile: Tile, way: Sending, over: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(memory, tag, experts, limit, tile, over)
        self.k, self.n, self.dtype, self.way = k, n, dtype, way
        row_bytes = k * dtype.itemsize
        memory.tiles.reserve((limit + 1) * row_bytes)
        memory.flags.reserve(4 * experts * way.parts)
        self.bases, self.flags = memory.tiles.bases, memory.flags.bases
        self.half_rows = -(-memory.tiles.half_bytes // row_bytes)
        self.half_flags = memory.flags.half_bytes // 4
        rows = self.half_rows + limit
        assert memory.tiles.memory is not None
        whole = memory.tiles.memory.local()[: rows * row_bytes].view(dtype).view(rows, k)
        self.received = TensorDescriptor.from_tensor(whole, [tile.block_m, tile.block_k])

    def __call__(self, x: Tensor, w: Tensor, counts: Tensor, y: Tensor) -> None:
        """Launch on the current stream.

        Args:
            x: [T, K] without gaps.
            w: [E_local, K, N], with a unit stride in one of the last two.
            counts: int32 or int64 [ranks, E], on this device.
            y: [limit or fewer rows, N] without gaps; as many as come are written.
        """
        self.find_routes(counts, spread=True)
        way, memory = self.way, self.memory
        columns, w_desc = described(w, self.tile)
        arguments = (
            x, self.received, w_desc, y, self.routes, self.bases, self.flags, memory.state,
            memory.fault, x.shape[0], self.n, self.k, self.experts,
            self.k * self.dtype.itemsize // 4, self.half_rows, self.half_flags, self.limit,
            self.rank, self.tag, self.timeout_ns, self.world,
            triton.next_power_of_2(self.experts // self.world), columns, way.senders, way.parts,
            way.piece, way.join, *self.tile.constants,
        )  # fmt: skip
        options = {"num_warps": self.tile.num_warps, "num_stages": self.tile.stages}
        programs = way.senders + self.sms if INTERPRETED else 0
        name = f"all_to_all_matmul {columns}"
        self.launch(name, all_to_all_matmul_kernel, programs, arguments, **options)

    def take_rows(self, rows: Tensor) -> None:
        """What has come, [limit or fewer, K], for the weights' gradient."""
        row_bytes = self.k * self.dtype.itemsize
        starts = (self.world + 1) * self.experts + self.world  # see kernels/routes.py
        self.collect("rows", self.half_rows * row_bytes, starts + self.experts, rows, None, None)


class MatmulAllToAll(_Experts):
    """Experts multiply, and rows go back to where they came from. Arguments as above."""

    def __init__(
        self, memory: FusedMemory, tag: int, experts: int, limit: int, k: int, n: int,
        dtype: torch.dtype, tile: Tile, over: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(memory, tag, experts, limit, tile, over)
        self.k, self.n, self.dtype = k, n, dtype
        memory.tiles.reserve(limit * n * dtype.itemsize)
        memory.flags.reserve(4 * self.world)
        self.bases, self.flags = memory.tiles.bases, memory.flags.bases
        self.half_bytes = memory.tiles.half_bytes
        self.half_flags = memory.flags.half_bytes // 4

    def __call__(
        self, x: Tensor, w: Tensor, counts: Tensor, y: Tensor, index: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch on the current stream.

        Args:
            x: [R, K] without gaps.
            w: [E_local, K, N], with a unit stride in one of the last two.
            counts: int32 or int64 [ranks, E], on this device.
            y: [rows, N]: own rows, sorted by expert; or with `index` [tokens, N].
            index: int32 or int64 [tokens, TOP], the rows that make a token.
            weights: [tokens, TOP], of each.
        """
        self.find_routes(counts, spread=False)
        memory = self.memory
        columns, w_desc = described(w, self.tile)
        x_desc = TensorDescriptor.from_tensor(x, [self.tile.block_m, self.tile.block_k])
        arguments = (
            x_desc, w_desc, self.routes, self.bases, self.flags, memory.state, self.n, self.k,
            self.experts, self.half_bytes, self.half_flags, self.limit, self.rank, self.world,
            triton.next_power_of_2(self.experts // self.world), columns, *self.tile.constants,
        )  # fmt: skip
        options = {"num_warps": self.tile.num_warps, "num_stages": self.tile.stages}
        name = f"matmul_all_to_all {columns}"
        self.launch(name, matmul_all_to_all_kernel, 0, arguments, **options)
        arrival = (self.flags, memory.state, memory.fault, self.half_flags, self.rank, self.tag,
                   self.timeout_ns, self.world)  # fmt: skip
        self.launch("arrival", arrival_kernel, 1, arrival, num_warps=1)
        own = self.rank * (self.experts + 1) + self.experts
        self.collect("y", self.half_bytes, own, y, index, weights)


def described(w: Tensor, tile: Tile) -> tuple[bool, TensorDescriptor]:
    """Whether w [E_local, K, N] is stored by columns, and how TMA reads it.

    Raises:
        InputError: neither K nor N has a unit stride.
    """
    columns = w.stride(1) == 1
    if not columns and w.stride(2) != 1:
        raise InputError("experts", "w", want="a unit stride in K or N", got=w.stride())
    block = [1, tile.block_n, tile.block_k] if columns else [1, tile.block_k, tile.block_n]
    return columns, TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, block)
