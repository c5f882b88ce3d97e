"""How fused kernels are launched: tile, way of communication, grid; and the launch itself."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.runtime.fused import FusedMemory

ALIGN_BYTES = 256


@dataclass(frozen=True)
class Fused:
    """One way to run matmul_all_reduce in one kernel.

    Args:
        shots: 1, every rank sums every tile; 2, each sums its part of each and gives it to all.
        by: "words", each value with its epoch; "flags", the dtype of y behind a flag (two shots).
        block_n: columns of a tile.
        block_k: of K that is multiplied at a time.
        stages: tiles of w on their way at a time.
        num_warps: of a program.
        programs: of the grid, at most; all must be resident on every rank.
    """

    shots: Literal[1, 2]
    by: Literal["words", "flags"]
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    programs: int

    @property
    def spec(self) -> str:
        """As text."""
        way = f"{'one' if self.shots == 1 else 'two'}_shot {self.by}"
        tile = f"{self.block_n}x{self.block_k}x{self.stages} warps={self.num_warps}"
        return f"fused {way} {tile} programs={self.programs}"


def padded_rows(m: int) -> int:
    """The next power of 2."""
    return 1 << max(m - 1, 0).bit_length()


def turn_bytes(way: Fused, m: int, n: int, ranks: int, item_bytes: int) -> int:
    """Bytes of the slots and results of one call; see kernels/matmul_all_reduce.py.

    Args:
        way: it is launched by.
        m, n: shape of y.
        ranks: of the group.
        item_bytes: of the dtype of y.
    """
    rows, words = padded_rows(m), way.by == "words"
    cell_bytes = 8 if words else item_bytes
    # two rows of a 16-bit dtype share a word
    rows //= 2 if words and rows > 1 and item_bytes == 2 else 1
    tiles, tile = -(-n // way.block_n), rows * way.block_n
    slots = ranks * tiles * tile if way.shots == 1 else tiles * tile
    return -(-(slots + tiles * tile) * cell_bytes // ALIGN_BYTES) * ALIGN_BYTES


def reserve(way: Fused, memory: FusedMemory, m: int, n: int, item_bytes: int) -> None:
    """Have the memory that a call needs. Collective and synchronous where it has to grow.

    Raises:
        InputError: memory has to grow while a graph is being captured.
    """
    ranks = memory.workspace.group.size()
    cells = memory.words if way.by == "words" else memory.tiles
    cells.reserve(2 * turn_bytes(way, m, n, ranks, item_bytes))
    if way.by == "flags":
        memory.flags.reserve(4 * 4 * -(-n // way.block_n) * ranks)


def launch(
    way: Fused, memory: FusedMemory, tag: int, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """Launch the kernel on the current stream. All ranks do.

    Args:
        way: how, equal on all ranks.
        memory: with room for it, by `reserve`.
        tag: that a fault word names this call by.
        x: [M, K], its last dim without gaps.
        w: [K, N], any strides.
        bias: [N] or None.
        y: [M, N], contiguous.

    Raises:
        InputError: the number of ranks divides no tile.
    """
    (m, k), n, ranks = x.shape, w.shape[1], memory.workspace.group.size()
    if ranks & (ranks - 1) or way.block_n % ranks:
        want = f"a power of 2 up to {way.block_n}"
        raise InputError("matmul_all_reduce", "group", want=want, got=f"{ranks} ranks")
    cells = memory.words if way.by == "words" else memory.tiles
    flags = cells if way.by == "words" else memory.flags
    kernel: Any = matmul_all_reduce_kernel
    kernel[(min(way.programs, -(-n // way.block_n)),)](
        x, w, y if bias is None else bias, y, cells.bases, flags.bases, memory.state, memory.fault,
        m, n, k, x.stride(0), w.stride(0), w.stride(1),
        turn_bytes(way, m, n, ranks, y.element_size()),
        memory.workspace.rank, tag, int(memory.workspace.timeout_s * 1e9),
        WORLD=ranks, SHOTS=way.shots, WORDS=way.by == "words", HAS_BIAS=bias is not None,
        ROWS=padded_rows(m), BLOCK_N=way.block_n, BLOCK_K=way.block_k,
        EVEN_N=n % way.block_n == 0, EVEN_K=k % way.block_k == 0, STAGES=way.stages,
        num_warps=way.num_warps, num_stages=way.stages,
    )  # fmt: skip
