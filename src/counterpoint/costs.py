"""What the parts of a plan cost on one machine: eighteen constants and the closed forms over them.

Everything that predicts a time reads these: the sizes of graded groups, the choosers, the model.
`counterpoint characterize` measures them; without that they are derived from the datasheet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import ceil, log
from types import MappingProxyType
from typing import Literal

from counterpoint.ranges import check

# the matmul library has tiles of the machine's rows and of half as many, and of any columns that
# are a multiple of these; 4xH200, bf16, 2026-11
TILE_STEP = 8
# of a tile's products for each number that is loaded for it, against those of the largest: below
# this part the loads bound it, by that power; 2xH200 and 4xH200, tiles from 64x64 to 128x320
TILE_REUSE, TILE_POWER = 0.66, 0.6
# the library sends what is little with a flag beside each word: at this part of its rate, but
# without the start of the other way; NCCL 2.28, 2xH200 and 4xH200
SMALL_RATE = 0.4
# of fp8 products against 16-bit ones; of scales of rows or tensors, of blocks 1.55. H200, torch
# 2.11, cuBLAS 13.0, M 1024 to 8192, N 7168, K 8192, 2026-11
FP8_RATE = 1.8
# time of our own matmul, of batch-invariant plans, against the library's: the middle of what
# Llama-3's layers take at so many rows, 0.87 to 1.05, 1.01 to 1.29 and 0.98 to 1.05; H200, 2026-11
OWN_MATMUL = ((64, 0.96), (256, 1.15), (8192, 1.01))
# of the rate of the matmul library: cuDNN's attention at 128 columns a head, one H200
ATTENTION_RATE, BACKWARD_RATE = 0.85, 0.7
# what a call of its backward takes beside matmuls: a tail, and passes over bf16 dy and y and a dq
# that is summed in fp32, then rounded, for each element of q; the same GPU, 8k tokens
BACKWARD_CALL_S, BACKWARD_PASSES = 25e-6, 14  # bytes
BACKWARD_MATMULS = 5  # for the two of a forward
ROW_BYTES = 1400  # that a row of a strided copy costs beside its own; 4xH200, 2 KiB rows, 2026-11

Collective = Literal["all_gather", "reduce_scatter"]
Tile = tuple[int, int]  # rows and columns of the result that one block computes
Tiles = Mapping[tuple[int, int, int], Tile]  # of (rows, n, k), where the library's tile is known
NO_TILES: Tiles = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Constants of one machine with its GPUs at work, in SI base units.

    Args:
        gemm_flop_per_s: Of whole waves of the largest tile, in matmuls too short to lower clocks.
        gemm_settled: Time of long matmuls against that by `gemm_flop_per_s`: power lowers clocks.
        gemm_settling_s: Matmuls of this length in a call bring half of that loss of clock.
        hbm_bytes_per_s: Of a kernel that only reads and writes.
        kernel_s: Of each such kernel beside its bytes, and of a wait that is none; of a matmul two.
        copy_bytes_per_s: Of a large copy to one peer while all ranks copy.
        copy_overhead_s: Of each copy beside its bytes, its signal included.
        barrier_s: Of a barrier of all ranks that nobody is late for.
        collective_bytes_per_s: Of the library's all-gather or reduce-scatter, received by a rank.
        all_gather_s: Of the library's all-gather beside its bytes.
        reduce_scatter_s: Of its reduce-scatter beside its bytes.
        collective_small_s: Of either, where they are few.
        direct_bytes_per_s: Of a collective of our own, of one kernel, received by a rank.
        direct_s: Of such a one beside its bytes.
        matmul_beside_copy: A long matmul takes this many times as long while a copy is under way.
        copy_beside_matmul: And a copy while a matmul is.
        host_call_s: Host time of an eager call of one of our operators.
        host_step_s: Host time of each of its steps.

    Raises:
        InputError: A constant is not positive, a rate looks like GB/s, a time like microseconds.
    """

    gemm_flop_per_s: float
    gemm_settled: float
    gemm_settling_s: float
    hbm_bytes_per_s: float
    kernel_s: float
    copy_bytes_per_s: float
    copy_overhead_s: float
    barrier_s: float
    collective_bytes_per_s: float
    all_gather_s: float
    reduce_scatter_s: float
    collective_small_s: float
    direct_bytes_per_s: float
    direct_s: float
    matmul_beside_copy: float
    copy_beside_matmul: float
    host_call_s: float
    host_step_s: float

    def __post_init__(self) -> None:
        check("Costs", self)

    def matmul_s(
        self, rows: int, n: int, k: int, item_bytes: int, sms: "Sms", tile: Tile | None = None,
        *, again: bool = False, count: int = 1,
    ) -> float:  # fmt: skip
        """Seconds of y[rows, n] = x[rows, k] w[k, n] on one GPU, clocks not yet lowered.

        Waves of one tile per SM, and memory as a bound; either has a start and an end. Where the
        library's tile is not known, the best of those it has is taken. fp32 products are counted at
        half the rate of 16-bit ones, fp8 ones at FP8_RATE of it, with results of 16 bits.

        Args:
            again: the matmul before had the same w, of which the L2 then keeps what it has room
                for: nothing of one as large as itself, all of a small one.
            count: of as many such matmuls, of weights of their own, in one launch.
        """
        if not rows * n * k:
            return 0.0
        flop_per_s = self.gemm_flop_per_s * (FP8_RATE if item_bytes == 1 else 2 / item_bytes)
        compute_s = _waves_flop(rows, n, k, sms, tile, count) / flop_per_s
        w_bytes = n * k * item_bytes
        kept = max(1 - w_bytes / sms.l2_bytes, 0.0) if again and sms.l2_bytes else 0.0
        y_bytes = rows * n * max(item_bytes, 2)
        moved = count * (rows * k * item_bytes + y_bytes + (1 - kept) * w_bytes)
        return 2 * self.kernel_s + max(compute_s, moved / self.hbm_bytes_per_s)

    def settling(self, matmuls_s: float) -> float:
        """The factor on the times of matmuls that take `matmuls_s` seconds of a call together."""
        return 1 + (self.gemm_settled - 1) * self._at_limit(matmuls_s)

    def beside_copy(self, matmuls_s: float) -> float:
        """The factor on the time of such matmuls while a copy is under way: it takes power too."""
        return 1 + (self.matmul_beside_copy - 1) * self._at_limit(matmuls_s)

    def _at_limit(self, matmuls_s: float) -> float:
        """How far matmuls of that length bring a GPU to its power limit, from 0 to 1."""
        return matmuls_s / (matmuls_s + self.gemm_settling_s) if matmuls_s else 0.0

    def copy_s(self, num_bytes: int, row_bytes: int = 0) -> float:
        """Seconds of one copy-engine copy between two ranks, and of its signal.

        Args:
            row_bytes: of a strided copy, how many bytes follow one another.
        """
        strides = num_bytes / row_bytes * ROW_BYTES if row_bytes else 0.0
        return self.copy_overhead_s + (num_bytes + strides) / self.copy_bytes_per_s

    def memory_s(self, num_bytes: int) -> float:
        """Seconds of a kernel that reads and writes `num_bytes` in all."""
        return self.kernel_s + num_bytes / self.hbm_bytes_per_s

    def attention_s(self, queries: int, keys: float, cols: int, *, backward: bool = False) -> float:
        """Seconds of a call of the library's attention.

        Args:
            queries: rows of them.
            keys: that a query attends to, in the mean.
            cols: of the queries, of all heads.
            backward: of its gradients.
        """
        elements = queries * cols
        if not backward:
            return self.kernel_s + 4 * elements * keys / (ATTENTION_RATE * self.gemm_flop_per_s)
        flop = 2 * BACKWARD_MATMULS * elements * keys
        passes_s = BACKWARD_CALL_S + self.memory_s(BACKWARD_PASSES * elements)
        return passes_s + flop / (BACKWARD_RATE * self.gemm_flop_per_s)

    def collective_s(self, kind: Collective, received_bytes: int) -> float:
        """Seconds of the library's all-gather or reduce-scatter."""
        latency_s = self.all_gather_s if kind == "all_gather" else self.reduce_scatter_s
        seconds = latency_s + received_bytes / self.collective_bytes_per_s
        return min(seconds, self.collective_small_s + self.flagged_s(received_bytes))

    def flagged_s(self, received_bytes: int) -> float:
        """Seconds of the bytes of the library's collective alone, a flag beside each word."""
        return received_bytes / (SMALL_RATE * self.collective_bytes_per_s)


def own_matmul(rows: int) -> float:
    """The factor on the time of a matmul of so many rows that is our own, not the library's."""
    if rows <= OWN_MATMUL[0][0]:
        return OWN_MATMUL[0][1]
    for (low, first), (high, last) in pairwise(OWN_MATMUL):
        if rows <= high:
            return first + (last - first) * log(rows / low) / log(high / low)
    return OWN_MATMUL[-1][1]


@dataclass(frozen=True, slots=True)
class Sms:
    """What a matmul runs on: SMs, the library's largest tile (rows, columns), and the L2."""

    count: int
    tile: Tile
    l2_bytes: int = 0


@lru_cache(maxsize=16384)  # a chooser asks for the same few shapes again and again
def _waves_flop(rows: int, n: int, k: int, sms: Sms, tile: Tile | None, count: int = 1) -> float:
    """Products and sums of the waves of tiles of `count` matmuls, at the largest tile's rate."""
    enough = TILE_REUSE * _reuse(*sms.tile)

    def of(tile_m: int, tile_n: int) -> float:
        waves = ceil(count * ceil(rows / tile_m) * ceil(n / tile_n) / sms.count)
        efficiency = min(_reuse(tile_m, tile_n) / enough, 1.0) ** TILE_POWER
        return waves * 2 * tile_m * tile_n * k * sms.count / efficiency

    if tile:
        return of(*tile)
    tile_m, tile_n = sms.tile
    heights = {tile_m, max(tile_m // 2, 1)}
    widths = {*range(2 * TILE_STEP, tile_n, TILE_STEP), tile_n}
    return min(of(*each) for each in product(heights, widths))


def _reuse(tile_m: int, tile_n: int) -> float:
    """Products of a tile for each number that is loaded for it."""
    return tile_m * tile_n / (tile_m + tile_n)
