"""How experts that multiply what all ranks send, or send back what they multiply, are launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.errors import UnsupportedError
from counterpoint.kernels.all_to_all_matmul import all_to_all_matmul_kernel, clear_kernel
from counterpoint.kernels.matmul_all_to_all import (
    arrival_kernel,
    collect_kernel,
    matmul_all_to_all_kernel,
)
from counterpoint.kernels.routes import num_words, routes_kernel
from counterpoint.plan.direct import MAX_EXPERTS, MAX_RANKS
from counterpoint.plan.expert_tiles import MANY_ROWS, Tile
from counterpoint.runtime import driver
from counterpoint.runtime.device_limits import limits_here
from counterpoint.runtime.footprint import triton_footprint
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.fused_call import ALIGN
from counterpoint.runtime.lanes_cuda import raw_stream
from counterpoint.runtime.occupancy import occupancy

COLLECT_COLS = 2048  # of a row that a program takes at a time
COLLECTORS = 8  # programs for each SM
INTERPRETED: bool = triton.knobs.runtime.interpret  # pyright: ignore


@dataclass(frozen=True)
class Sending:
    """How rows are sent to their experts; equal on all ranks.

    Args:
        senders: programs that send.
        parts: of the rows of an (expert, rank), a flag behind each; a power of 2.
        piece: words of 4 bytes that a program sends at a time.
    """

    senders: int = 16
    parts: int = 8
    piece: int = 8192


def sending_of(rows: int, experts: int, ranks: int) -> Sending:
    """How to send `rows` in all to so many experts on each of `ranks` ranks, likewise."""
    senders = 16 if rows >= MANY_ROWS * experts else 32
    # all senders are at one expert at a time, so that it is there soon; a single one is in pieces
    return Sending(senders, max(1, senders // ranks) * (1 if experts > 4 else 8))


def refusal(w: Tensor, ranks: int) -> str:
    """What the kernels want of w [E_local, K, N] and so many ranks that is not so, or ''."""
    if ranks & (ranks - 1) or ranks > MAX_RANKS:
        return f"a number of ranks that is a power of two up to {MAX_RANKS}"
    if w.dtype not in (torch.bfloat16, torch.float16) and not INTERPRETED:
        return "bf16 or fp16"
    if not 0 < w.shape[0] * ranks <= MAX_EXPERTS:
        return f"1 to {MAX_EXPERTS} experts"
    if 1 not in w.stride()[1:]:
        return "a unit stride in K or N"
    sizes = (*w.shape[1:], *(s for s in w.stride() if s != 1))
    if any(not s or s * w.element_size() % ALIGN for s in sizes):
        return f"K, N and the strides of w in multiples of {ALIGN} bytes"
    return ""


class _Experts:
    """What both directions share: routes, the memory, launches past Triton's binder.

    Args:
        memory: of the group.
        tag: that a fault word names the call by.
        experts: of all ranks.
        limit: rows that a rank can take; equal on all ranks.
        k, n: of the weights.
        dtype: of all tensors.
        tile: what a program computes.
    """

    back: bool
    bases: Tensor

    def __init__(
        self, memory: FusedMemory, tag: int, experts: int, limit: int, k: int, n: int,
        dtype: torch.dtype, tile: Tile,
    ) -> None:  # fmt: skip
        self.memory, self.tag, self.experts, self.limit = memory, tag, experts, limit
        self.k, self.n, self.dtype, self.tile = k, n, dtype, tile
        workspace = memory.workspace
        self.device, self.rank = workspace.device, workspace.rank
        self.world = workspace.group.size()
        self.local = triton.next_power_of_2(experts // self.world)
        self.timeout_ns = int(workspace.timeout_s * 1e9)
        words = num_words(experts, self.world)
        self.routes = torch.zeros(words, dtype=torch.int32, device=self.device)
        self.sms = 4
        if self.device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._direct: dict[tuple[Any, ...], tuple[Any, Callable[..., None]]] = {}
        self.only_compile = False  # a call launches nothing

    def _launch(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], *kinds: object, **options: int
    ) -> None:
        """Launch on the current stream; programs 0: as many as are resident."""
        if INTERPRETED:
            kernel[(programs or self.sms,)](*arguments, **options)
            return
        key = (kernel, *kinds)
        if key not in self._direct:
            with driver.relaxed_capture():
                self._direct[key] = self._compiled(kernel, programs, arguments, options)
        if not self.only_compile:
            self._direct[key][1](*arguments, stream=raw_stream(self.device.index))

    def _compiled(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, int]
    ) -> tuple[Any, Callable[..., None]]:
        try:
            compiled: Any = kernel.warmup(*arguments, grid=(1,), **options)
            if not programs:
                footprint = triton_footprint(compiled)
                programs = occupancy(footprint, limits_here(self.device)).blocks * self.sms
        except OutOfResources as error:
            raise UnsupportedError(f"experts: {self.tile} does not fit: {error}") from error
        return compiled, compiled[(programs, 1, 1)]

    def _find_routes(self, counts: Tensor, has: int) -> None:
        arguments = (
            counts, self.routes, self.memory.over, self.experts, self.rank, self.limit, has,
            self.world, triton.next_power_of_2(self.experts), self.tile.block_m, self.back,
        )  # fmt: skip
        self._launch(routes_kernel, 1, arguments, counts.dtype, num_warps=8)

    def _collect(
        self, half_bytes: int, count: int, y: Tensor, index: Tensor | None = None,
        weights: Tensor | None = None, *, clear: bool = False,
    ) -> None:  # fmt: skip
        """Take rows out of the memory: as they are, or the weighted sums of those of `index`.

        Args:
            count: the word of `routes` that says how many there are.
            clear: zero the rows of y beyond those.
        """
        tokens, n = y.shape
        top, block = 0, min(COLLECT_COLS, triton.next_power_of_2(n))
        kinds: tuple[object, ...] = (n,)
        if index is None or weights is None:
            index = weights = y
        else:
            top = index.shape[1]
            kinds = (n, top, index.dtype, weights.dtype)
        arguments = (
            self.bases, self.memory.state, self.routes, index, weights, y, self.memory.over, tokens,
            count, n, half_bytes, self.limit, self.rank, int(clear), top, block,
        )  # fmt: skip
        self._launch(collect_kernel, COLLECTORS * self.sms, arguments, *kinds, num_warps=4)


class AllToAllMatmul(_Experts):
    """Rows to their experts, which multiply them as they come.

    Args:
        way: how rows are sent; equal on all ranks.
        Others: as above.

    Raises:
        InputError: memory has to grow while a graph is captured.
    """

    back = False

    def __init__(
        self, memory: FusedMemory, tag: int, experts: int, limit: int, k: int, n: int,
        dtype: torch.dtype, tile: Tile, way: Sending,
    ) -> None:  # fmt: skip
        super().__init__(memory, tag, experts, limit, k, n, dtype, tile)
        self.way, self.row_bytes = way, k * dtype.itemsize
        memory.turns.reserve((limit + 1) * self.row_bytes)  # the odd half begins at a whole row
        memory.flags.reserve(4 * experts * way.parts)
        self.bases, self.flags = memory.turns.bases, memory.flags.bases
        self.half_rows = -(-memory.turns.half_bytes // self.row_bytes)
        self.half_flags = memory.flags.half_bytes // 4
        rows = self.half_rows + limit
        assert memory.turns.memory is not None
        whole = memory.turns.memory.local()[: rows * self.row_bytes].view(dtype).view(rows, k)
        self.received = TensorDescriptor.from_tensor(whole, [tile.block_m, tile.block_k])

    def __call__(
        self, x: Tensor, w: Tensor, counts: Tensor, has: int, y: Tensor,
        rows: Tensor | None = None, *, clear: bool = False,
    ) -> None:  # fmt: skip
        """Launch on the current stream; tensors at multiples of 16 bytes.

        Args:
            x: [T, K] without gaps.
            w: [E_local, K, N], as `refusal` wants it.
            counts: int32 or int64 [ranks, E] without gaps, on this device.
            has: rows of x on each rank at least.
            y: [limit or fewer rows, N] without gaps; as many as come are written.
            rows: [as y, K], where to put the rows that come.
            clear: zero the rows of both beyond those that come.
        """
        self._find_routes(counts, has)
        way, memory = self.way, self.memory
        columns, w_desc = described(w, self.tile)
        arguments = (
            x, self.received, w_desc, y, self.routes, self.bases, self.flags, memory.state,
            memory.fault, x.shape[0], self.n, self.k, self.experts, self.row_bytes // 4,
            self.half_rows, self.half_flags, self.limit, self.rank, self.tag, self.timeout_ns,
            self.world, self.local, columns, way.senders, way.parts, way.piece,
            *self.tile.constants,
        )  # fmt: skip
        options = {"num_warps": self.tile.num_warps, "num_stages": self.tile.stages}
        programs = way.senders + self.sms if INTERPRETED else 0
        self._launch(all_to_all_matmul_kernel, programs, arguments, columns, **options)
        come = self.world * (2 * self.experts + 1) + self.experts  # see kernels/routes.py
        if clear:  # not before: who has few rows would send them late
            block = min(COLLECT_COLS, triton.next_power_of_2(self.n))
            beyond = (y, self.routes, y.shape[0], come, self.n, block)
            self._launch(clear_kernel, COLLECTORS * self.sms, beyond, num_warps=4)
        if rows is not None:
            self._collect(self.half_rows * self.row_bytes, come, rows, clear=clear)


class MatmulAllToAll(_Experts):
    """Experts multiply, and rows go back to where they came from; arguments as above."""

    back = True

    def __init__(
        self, memory: FusedMemory, tag: int, experts: int, limit: int, k: int, n: int,
        dtype: torch.dtype, tile: Tile,
    ) -> None:  # fmt: skip
        super().__init__(memory, tag, experts, limit, k, n, dtype, tile)
        memory.turns.reserve(max(limit, 1) * n * dtype.itemsize)
        memory.flags.reserve(4 * self.world)
        self.bases, self.flags = memory.turns.bases, memory.flags.bases
        self.half_bytes = memory.turns.half_bytes
        self.half_flags = memory.flags.half_bytes // 4

    def __call__(
        self, x: Tensor, w: Tensor, counts: Tensor, has: int, y: Tensor | None = None, *,
        add: Tensor | None = None, sums: tuple[Tensor, Tensor, Tensor] | None = None,
        clear: bool = False,
    ) -> None:  # fmt: skip
        """Launch on the current stream; tensors without gaps, at multiples of 16 bytes.

        Args:
            x: [R, K], R at least 1.
            w: [E_local, K, N], as `refusal` wants it.
            counts: int32 or int64 [ranks, E], on this device.
            has: rows of x on each rank at least.
            y: [rows, N], where to put own rows, sorted by expert; None: nowhere.
            add: [R, N], added to the products.
            sums: index, int32 or int64 [tokens, top] of rows, and their weights of that shape; and
                where to put the weighted sums, [tokens, N].
            clear: zero the rows of y beyond the own ones.
        """
        self._find_routes(counts, has)
        memory = self.memory
        columns, w_desc = described(w, self.tile)
        x_desc = TensorDescriptor.from_tensor(x, [self.tile.block_m, self.tile.block_k])
        arguments = (
            x_desc, w_desc, x if add is None else add, self.routes, self.bases, self.flags,
            memory.state, x.shape[0], self.n, self.k, self.experts, self.half_bytes,
            self.half_flags, self.limit, self.rank, self.world, self.local, columns,
            add is not None, *self.tile.constants,
        )  # fmt: skip
        options = {"num_warps": self.tile.num_warps, "num_stages": self.tile.stages}
        kinds = (columns, add is not None)
        self._launch(matmul_all_to_all_kernel, 0, arguments, *kinds, **options)
        arrival = (self.flags, memory.state, memory.fault, self.half_flags, self.rank, self.tag,
                   self.timeout_ns, self.world)  # fmt: skip
        self._launch(arrival_kernel, 1, arrival, num_warps=1)
        count = self.rank * (self.experts + 1) + self.experts  # own rows: see kernels/routes.py
        if y is not None:
            self._collect(self.half_bytes, count, y, clear=clear)
        if sums is not None:
            index, weights, out = sums
            self._collect(self.half_bytes, count, out, index, weights)


def described(w: Tensor, tile: Tile) -> tuple[bool, TensorDescriptor]:
    """Whether w [E_local, K, N] is stored by columns, and how TMA reads it."""
    columns = w.stride(1) == 1
    block = [1, tile.block_n, tile.block_k] if columns else [1, tile.block_k, tile.block_n]
    return columns, TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, block)
