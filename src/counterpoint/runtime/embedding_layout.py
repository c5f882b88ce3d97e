"""What embedding bags are to their kernel: who has which columns, and how they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import triton.language as tl

MAX_RANKS = 32  # that the bits of a fault word name
MAX_COUNT = (1 << 31) - 1  # of bags of all tables, and elements of a row
MAX_INDICES = (1 << 30) - 64  # a bag's begin and another's length, added, are an int32
VECTOR_BYTES = 16
MIN_BLOCK_D, MAX_BLOCK_D = 16, 256
ROW_COST = 32  # columns: what another piece of the same row costs beside its elements
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Layout:
    """What is where; equal on all ranks.

    Args:
        dims: columns of each rank's tables.
        batch: bags of each rank.
        dtype: of tables and output.
    """

    dims: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...]
    dtype: torch.dtype

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.batch, self.dtype))

    @cached_property
    def flat_dims(self) -> list[int]:
        """As the dispatcher takes them: those of each rank behind how many they are."""
        return [n for each in self.dims for n in (len(each), *each)]

    @cached_property
    def columns(self) -> int:
        """Of the output: those of all tables of all ranks, in that order."""
        return sum(map(sum, self.dims))

    @cached_property
    def num_bags(self) -> int:
        """Of the global batch."""
        return sum(self.batch)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first bag of each rank, and their number."""
        return tuple(accumulate(self.batch, initial=0))

    def first_columns(self, rank: int) -> list[int]:
        """Where the columns of each table of `rank` begin in the output, and where they end."""
        before = sum(map(sum, self.dims[:rank]))
        return list(accumulate(self.dims[rank], initial=before))

    @property
    def half_bytes(self) -> int:
        """Of the output of the rank that has most bags."""
        return max(self.batch) * self.columns * self.dtype.itemsize


@dataclass(frozen=True)
class Way:
    """One way to run it: any sums in the same order, and without weights gives the same bits.

    Args:
        tile_bytes: of the rows that a program loads at a time, of one index of each bag.
        unroll: indices of a bag at a time.
        num_warps: of a program.
    """

    tile_bytes: int = 2048
    unroll: int = 8
    num_warps: int = 4


# up to so many indices in a bag on average: wide tiles where each bag is soon done, small ones,
# whose work differs less between programs, where there is much to pool
# 4xH200, 2026-11, 8 to 64 tables of 64 to 256 columns: within 4 % of the best of eight ways
WAYS = ((15.0, Way(4096, 2, 4)), (50.0, Way(2048, 4, 4)), (float("inf"), Way(2048, 8, 4)))


def way_for(num_indices: int, num_bags: int) -> Way:
    """The way to take, by what the host knows of own tables: the mean pooling of all bags.

    Args:
        num_indices: of all own tables.
        num_bags: likewise.
    """
    mean = num_indices / max(num_bags, 1)
    return next(way for limit, way in WAYS if mean < limit)


class Facts(NamedTuple):
    """What of the arguments a kernel is compiled for."""

    layout: Layout
    mean: bool
    weights: torch.dtype | None
    indices: torch.dtype
    offsets: torch.dtype


def block_of(dims: Sequence[int]) -> int:
    """Columns of a chunk: what wastes least, with a row in few pieces."""
    sizes = [1 << i for i in range(MIN_BLOCK_D.bit_length() - 1, MAX_BLOCK_D.bit_length())]
    return min(sizes, key=lambda b: (sum(-(-d // b) * (b + ROW_COST) for d in dims), b))


def vector_of(numbers: Sequence[int], item_bytes: int) -> int:
    """Elements of the widest loads and stores that all `numbers` of elements allow."""
    vec = VECTOR_BYTES // item_bytes
    while any(n % vec for n in numbers):
        vec //= 2
    return vec
