"""The matmul of a batch-invariant plan, and one with an activation: its tile and its launch.

On CPU ranks, by torch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.group.workspace import Operands, Places
from counterpoint.kernels.invariant_matmul import (
    few_rows_matmul_kernel,
    invariant_matmul_kernel,
)
from counterpoint.plan.bind import Part

GROUP_M = 8
ALIGN = 16  # bytes: addresses and rows of what has a descriptor are multiples of it
HAS_DESCRIPTORS = (9, 0)  # the first GPUs
MAX_STRIDE = 2**40  # bytes, of a descriptor


class Tile(NamedTuple):
    """What a program multiplies at a time. By all tiles the bits are the same.

    Args:
        block_m: rows; FEW_ROWS or less have a kernel of their own.
        block_n: columns.
        block_k: of K.
        num_warps: an option of Triton.
        num_stages: loads of K on their way.
        per_sm: programs that an SM has room for.
        halves: y is stored half by half.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int = 1
    halves: bool = False


FEW_ROWS = 32  # of more, a descriptor is the faster way
# of more rows, and how long one on each SM takes for so much of K: H200, of Llama-3 8B and 70B
WAVES = {
    Tile(64, 32, 128, 4, 6): 0.55, Tile(64, 64, 128, 4, 5): 0.7, Tile(64, 128, 128, 4, 4): 1.0,
    Tile(64, 128, 64, 4, 4, per_sm=2): 1.6, Tile(128, 256, 64, 8, 4, halves=True): 2.8,
}  # fmt: skip


def tile_of(m: int, n: int, num_sms: int, dtype: torch.dtype) -> Tile:
    """The fastest tile for y[m, n]: of which the waves of all SMs are the shortest in all."""
    if dtype == torch.float32:  # no tensor cores
        return Tile(64, 64, 16, 8, 3)
    if m <= FEW_ROWS:
        return Tile(16 if m <= 16 else FEW_ROWS, 64, 128, 4, 5)

    def waves(tile: Tile) -> float:
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
        return -(-tiles // (num_sms * tile.per_sm)) * WAVES[tile]

    return min(WAVES, key=waves)


# of gate and up: a larger one has more reuse, and is taken where there are enough of it for the SMs
LARGE = Tile(128, 256, 64, 8, 4, halves=True), Tile(128, 128, 64, 4, 4)
ENOUGH = 0.8  # of the SMs


def gated_tile(m: int, n: int, num_sms: int, dtype: torch.dtype) -> Tile:
    """As `tile_of`, where the columns of y[m, n] are those of two weights."""
    if dtype == torch.float32:
        return tile_of(m, n, num_sms, dtype)
    if m <= 64 and n <= 64 * num_sms:
        return Tile(64, 32, 128, 4, 6) if n <= 32 * num_sms else Tile(64, 64, 128, 4, 5)
    rows = -(-m // 64)
    if rows * -(-n // 64) <= num_sms:
        return Tile(64, 64, 128, 4, 4)
    if rows * -(-n // 128) <= num_sms:
        return Tile(64, 128, 128, 4, 4)
    smaller = Tile(64, 128, 64, 4, 4, per_sm=2)
    if m <= 64 or rows * -(-n // 128) <= 2 * num_sms:
        return smaller
    enough = (t for t in LARGE if -(-m // t.block_m) * -(-n // t.block_n) >= ENOUGH * num_sms)
    return next(enough, smaller)


def action(part: Part, places: Places) -> Callable[[Operands], None]:
    """y = x w (+ bias) of one part of a step."""
    x, w, *rest = (places.of(box) for box in part.reads)
    y, bias = places.of(part.write), rest[0] if rest else None
    into = by_kernel if places.workspace.device.type == "cuda" else by_torch
    return lambda o: into(x(o), w(o), bias(o) if bias else None, y(o))


def by_torch(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = x w (+ bias), as `by_kernel`."""
    product = in_one_chain(x, w)
    y.copy_(product if bias is None else product + bias)


def in_one_chain(x: Tensor, w: Tensor) -> Tensor:
    """x w in fp64, cell by cell summed over K from its first number to its last.

    The order in which torch's matmul sums on a CPU is as the number of rows has it.
    """
    total = x.new_zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for column, row in zip(x.double().t(), w.double(), strict=True):
        total += column[:, None] * row
    return total


def by_kernel(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, tile: Tile | None = None,
    activation: str = "", up: Tensor | None = None,
) -> None:  # fmt: skip
    """y = x w (+ bias) on a GPU, on the current stream; or an activation of it (times x up).

    Args:
        x: [M, K], the columns of a row without gaps.
        w: [K, N] of any strides.
        bias: [1, N].
        y: [M, N], the columns of a row without gaps.
        tile: None: by the sizes.
        activation: of those in kernels/activation.py; "": none.
        up: of more than FEW_ROWS rows, and as `pairs` says; None: not gated.
    """
    (m, k), n, sms = x.shape, w.shape[1], num_sms(x.device)
    if tile is None:
        tile = tile_of(m, n, sms, x.dtype) if up is None else gated_tile(m, 2 * n, sms, x.dtype)
    block_m, block_n, block_k, num_warps, num_stages, per_sm, halves = tile
    sizes = (m, n, k, x.stride(0), *w.stride(), y.stride(0))
    added = y if bias is None else bias
    flags: dict[str, Any] = {"HAS_BIAS": bias is not None, "ACTIVATION": activation}
    if block_m <= FEW_ROWS:
        launch: Any = few_rows_matmul_kernel  # its constexpr arguments are plain values here
        launch[(-(-n // block_n),)](
            x, w, added, y, *sizes, ROWS=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            EVEN_N=n % block_n == 0, EVEN_K=k % block_k == 0, STAGES=num_stages, **flags,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        return
    by_columns, gated = w.stride(0) == 1, up is not None
    halves, width = halves and not gated, block_n // (1 + gated)
    given: tuple[Any, ...] = x, w, y
    stored = x, w.t() if by_columns else w, y
    described = all(map(_describable, stored))
    if described:
        w_block = [block_n, block_k] if by_columns else [block_k, block_n]
        blocks = [block_m, block_k], w_block, [block_m, width // (1 + halves)]
        given = tuple(map(TensorDescriptor.from_tensor, stored, blocks))
    up_first = up is not None and up.data_ptr() < w.data_ptr()
    if up is not None:
        given = given[0], _of_both(w, up, [2, width, block_k]), given[2]
    launch = invariant_matmul_kernel
    launch[(min(-(-m // block_m) * -(-n // width), sms * per_sm),)](
        *given[:2], added, given[2], *sizes, int(up_first),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M,
        DESCRIPTORS=described, W_BY_COLUMNS=by_columns, HALVES=halves, GATED=gated, **flags,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def pairs(x: Tensor, w: Tensor, up: Tensor, y: Tensor) -> bool:
    """Whether one kernel multiplies by both: stored alike, as torch.nn.Linear does."""
    alike = w.stride() == up.stride() and x.shape[0] > FEW_ROWS
    in_reach = 0 < abs(up.data_ptr() - w.data_ptr()) < MAX_STRIDE
    return alike and in_reach and all(map(_describable, (x, w.t(), up.t(), y)))


def _of_both(w: Tensor, up: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of [2, N, K], the one that comes first in memory first.

    It makes no difference to it what lies between the two: as far as it is from one row to the next
    one of a matrix, it is from one matrix to the other.
    """
    first, second = sorted((w, up), key=Tensor.data_ptr)
    apart = (second.data_ptr() - first.data_ptr()) // w.element_size()
    k, n = w.shape
    return TensorDescriptor(first, [2, n, k], [apart, w.stride(1), 1], block)


@cache
def num_sms(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _has_descriptors(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= HAS_DESCRIPTORS


def _describable(tensor: Tensor) -> bool:
    """Whether a descriptor can be made of rows that lie so."""
    pitch = tensor.stride(0) * tensor.element_size()
    aligned = not (tensor.data_ptr() % ALIGN or pitch % ALIGN)
    return aligned and tensor.stride(1) == 1 and _has_descriptors(tensor.device)
