"""How a matmul and the sum over ranks are launched as one kernel: tile, communication, grid."""

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.plan.direct import fused_columns
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.fused_call import Launch

OP = "matmul_all_reduce"
ALIGN_BYTES = 256
WORD_BYTES = 4
TILE_BYTES = 100_000  # of the tiles on their way: two blocks are resident on an SM of 227 KiB
MAX_STAGES = 8
MAX_RANKS = 32  # that the bits of a fault word name


@dataclass(frozen=True)
class Fused:
    """One way to run it.

    Args:
        shots: 1, every rank sums every tile; 2, each sums its part of each and gives it to all.
        block_n: columns of a tile, a multiple of the ranks.
        block_k: of K that is multiplied at a time.
        stages: tiles of w on their way at a time.
        num_warps: of a program.
        scatter: each rank gets the sum of its rows only, in one shot.

    Raises:
        InputError: two shots that scatter, or a size that is no power of 2.
    """

    shots: Literal[1, 2]
    block_n: int = 64
    block_k: int = 64
    stages: int = 8
    num_warps: int = 4
    scatter: bool = False

    def __post_init__(self) -> None:
        if self.scatter and self.shots != 1:
            raise InputError(OP, "plan", want="one shot to scatter", got=self.shots)
        for name, least in (("block_n", 16), ("block_k", 16), ("num_warps", 1), ("stages", 1)):
            n: int = getattr(self, name)
            if n < least or (n & (n - 1) and name != "stages"):
                raise InputError(OP, "plan", want=f"{name} a power of 2 >= {least}", got=n)

    @property
    def spec(self) -> str:
        """As text: "fused two_shot 64x64x8 warps=4"."""
        shots = "scatter" if self.scatter else "one_shot" if self.shots == 1 else "two_shot"
        return f"fused {shots} {self.block_n}x{self.block_k}x{self.stages} warps={self.num_warps}"

    @classmethod
    def parse(cls, spec: str) -> "Fused":
        """Read what `spec` wrote.

        Raises:
            InputError: it is other text.
        """
        found = re.fullmatch(r"fused (one_shot|two_shot) (\d+)x(\d+)x(\d+) warps=(\d+)", spec)
        if not found:
            want = "auto, serial, direct, fused or such as 'fused two_shot 64x64x8 warps=4'"
            raise InputError(OP, "plan", want=want, got=repr(spec))
        shots, *sizes = found.groups()
        block_n, block_k, stages, num_warps = map(int, sizes)
        return cls(1 if shots == "one_shot" else 2, block_n, block_k, stages, num_warps)


def default_way(m: int, n: int, ranks: int, item_bytes: int, num_sms: int) -> Fused:
    """The way to take for y[m, n], from measurements on 4 H200 up to 64 rows.

    One shot where a call sends little more than two would; tiles so that every SM has one, as deep
    on their way as two blocks fit.
    """
    rows = padded_rows(m)
    shots: Literal[1, 2] = 1 if rows * (ranks - 1) <= 8 else 2
    wide = -(-n // 64) > num_sms
    block_n = fused_columns(rows, n, ranks, num_sms)
    step_bytes = (block_n + max(rows, 16)) * 64 * item_bytes
    stages = max(2, min(MAX_STAGES, TILE_BYTES // step_bytes))
    return Fused(shots, block_n, 64, stages, 8 if rows > (16 if wide else 64) else 4)


def scatter_way(m: int, n: int, ranks: int, item_bytes: int, num_sms: int) -> Fused:
    """The way to take for the reduce-scatter of y[m, n]: the tile that m rows have."""
    rows = padded_rows(m // ranks) * ranks
    return replace(default_way(rows, n, ranks, item_bytes, num_sms), shots=1, scatter=True)


def padded_rows(m: int) -> int:
    """The next power of 2."""
    return 1 << max(m - 1, 0).bit_length()


def call_bytes(way: Fused, m: int, n: int, ranks: int, item_bytes: int) -> int:
    """Bytes of the slots and results of one call; see kernels/matmul_all_reduce.py.

    Args:
        way: it is launched by.
        m, n: shape of y.
        ranks: of the group.
        item_bytes: of the dtype of y.
    """
    rows = padded_rows(m // ranks if way.scatter else m)
    # two rows of a 16-bit dtype share a word
    rows //= 2 if rows > 1 and item_bytes == 2 else 1
    tiles, tile = -(-n // way.block_n), rows * way.block_n
    slots = ranks * tiles * tile if way.shots == 1 else tiles * tile
    results = tiles * tile if way.shots == 2 else 0
    return -(-(slots + results) * WORD_BYTES // ALIGN_BYTES) * ALIGN_BYTES


def reserve(way: Fused, memory: FusedMemory, m: int, n: int, item_bytes: int) -> None:
    """Have the memory that a call needs. Collective and synchronous where it has to grow.

    Raises:
        InputError: memory has to grow while a graph is being captured; or the ranks do not
            divide a tile.
    """
    ranks = memory.workspace.group.size()
    if ranks & (ranks - 1) or way.block_n % ranks or ranks > MAX_RANKS:
        want = f"a power of 2 up to {min(way.block_n, MAX_RANKS)} for {way.spec!r}"
        raise InputError(OP, "group", want=want, got=f"{ranks} ranks")
    memory.words.reserve(call_bytes(way, m, n, ranks, item_bytes))


class Where(NamedTuple):
    """The memory of a launch, as the kernel takes it."""

    words: Tensor
    half_bytes: int


def where(memory: FusedMemory) -> Where:
    """What `reserve` has made: memory that grows later is another, with other halves.

    Equal on all ranks only if all ask at the same time.
    """
    return Where(memory.words.bases, memory.words.half_bytes)


def launch_of(
    way: Fused, memory: FusedMemory, at: Where, tag: int, x: Tensor, w: Tensor, bias: Tensor | None
) -> Launch:
    """The kernel for tensors like these.

    Args:
        way: how, equal on all ranks.
        memory: with room for it, by `reserve`.
        at: where in it, asked for by all ranks at the same time.
        tag: that a fault word names it by.
        x: [M, K], its last dim without gaps.
        w: [K, N], any strides.
        bias: [N] without gaps, or None.
    """
    (m, k), n, ranks = x.shape, w.shape[1], memory.workspace.group.size()
    m = m // ranks if way.scatter else m  # of each owner
    numbers = (
        m, n, k, x.stride(0), w.stride(0), w.stride(1), at.half_bytes,
        memory.workspace.rank, tag, int(memory.workspace.timeout_s * 1e9),
    )  # fmt: skip
    constants = (
        ranks, way.shots, way.scatter, bias is not None, padded_rows(m),
        way.block_n, way.block_k, n % way.block_n == 0, k % way.block_k == 0, way.stages,
        way.num_warps,
    )  # fmt: skip
    fixed = (at.words, memory.state, memory.fault, *numbers, *constants)
    options = {"num_warps": way.num_warps, "num_stages": way.stages}
    return Launch(matmul_all_reduce_kernel, fixed, options, -(-n // way.block_n), x.device)
