"""How an all-gather and its matmul are launched as one kernel: tile and slices."""

from dataclasses import dataclass

from torch import Tensor

from counterpoint.kernels.all_gather_matmul import all_gather_matmul_kernel
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.fused_call import Launch
from counterpoint.runtime.launch_fused import MAX_STAGES, TILE_BYTES, Where, padded_rows

WORD_BYTES = 4
FLAGS = 128  # of all ranks together at most: each thread of a program polls one
SLICES = 16
SLICE_BYTES = 8192  # of x of one rank at least
PIECE_WORDS = 4096  # that a program stores at a time, to all ranks together
MAX_PIECE = 512


@dataclass(frozen=True)
class Gathered:
    """One way to run it; a tile as in `launch_fused.Fused`.

    Args:
        slices: in which a rank sends its rows, a flag behind each, a power of 2; equal on all.
    """

    block_n: int = 64
    block_k: int = 64
    stages: int = 8
    num_warps: int = 4
    slices: int = 16

    @property
    def spec(self) -> str:
        """As text: "fused gather 64x64x6 warps=4 slices=16"."""
        tile = f"{self.block_n}x{self.block_k}x{self.stages}"
        return f"fused gather {tile} warps={self.num_warps} slices={self.slices}"


def gather_way(m: int, n: int, k: int, ranks: int, item_bytes: int, num_sms: int) -> Gathered:
    """The way to take for y[m, n], by measurements on 4 H200; tiles as deep as two blocks fit."""
    rows = max(padded_rows(m), 16)
    block_n = 64 if n >= 24 * num_sms else 16
    stages = max(2, min(MAX_STAGES, TILE_BYTES // ((block_n + rows) * 64 * item_bytes)))
    slices = padded_rows(m // ranks * k * item_bytes // SLICE_BYTES)
    return Gathered(block_n, 64, stages, slices=min(slices, SLICES, max(FLAGS // ranks, 1)))


def reserve(way: Gathered, memory: FusedMemory, rows: int, k: int, item_bytes: int) -> None:
    """Have the memory that a call of `rows` rows of all ranks needs; collective if it grows.

    Raises:
        InputError: it has to grow while a graph is being captured.
    """
    memory.tiles.reserve(rows * k * item_bytes)
    memory.flags.reserve(4 * way.slices * memory.workspace.group.size())


def where(memory: FusedMemory) -> Where:
    """What `reserve` has made; equal on all ranks only if all ask at the same time."""
    tiles, flags = memory.tiles, memory.flags
    return Where(tiles.bases, flags.bases, tiles.half_bytes, flags.half_bytes // 4)


def constants_of(
    way: Gathered, ranks: int, x: Tensor, w: Tensor, bias: Tensor | None
) -> dict[str, int]:
    """What the kernel is compiled for, in the order of its arguments."""
    (m, k), n = x.shape, w.shape[1]
    return {
        "WORLD": ranks, "SLICES": way.slices, "PIECE": min(MAX_PIECE, PIECE_WORDS // ranks),
        "HAS_BIAS": bias is not None, "ROWS": padded_rows(m * ranks), "BLOCK_N": way.block_n,
        "BLOCK_K": way.block_k, "EVEN_N": n % way.block_n == 0, "EVEN_K": k % way.block_k == 0,
        "STAGES": way.stages,
    }  # fmt: skip


def launch_of(
    way: Gathered, memory: FusedMemory, at: Where, tag: int, x: Tensor, w: Tensor,
    bias: Tensor | None,
) -> Launch:  # fmt: skip
    """The kernel for tensors like these.

    Args:
        way: how; its tile may differ between ranks.
        memory: with room for it, by `reserve`.
        at: where in it, asked for by all ranks at the same time.
        tag: that a fault word names it by.
        x: [m, K], the own rows, without gaps; m K is a whole number of words of 4 bytes.
        w: [K, N], any strides.
        bias: [N] without gaps, or None.
    """
    (m, k), n, ranks = x.shape, w.shape[1], memory.workspace.group.size()
    numbers = (
        m, n, k, m * k * x.element_size() // WORD_BYTES, w.stride(0), w.stride(1), at.half_bytes,
        at.half_flags, memory.workspace.rank, tag, int(memory.workspace.timeout_s * 1e9),
    )  # fmt: skip
    constants = tuple(constants_of(way, ranks, x, w, bias).values())
    fixed = (at.cells, at.flags, memory.state, memory.fault, *numbers, *constants)
    options = {"num_warps": way.num_warps, "num_stages": way.stages}
    tiles = -(-n // way.block_n)
    return Launch(all_gather_matmul_kernel, fixed, options, tiles, x.device, way.slices)
