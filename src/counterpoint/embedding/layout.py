"""How tables are cut for the kernels of embedding bags, and what these can count."""

from collections.abc import Sequence

import torch
import triton.language as tl

MAX_RANKS = 32  # that the bits of a fault word name
MAX_COUNT = (1 << 31) - 1  # of bags of all tables, and elements of a row
MAX_INDICES = (1 << 30) - 64  # a bag's begin and another's length, added, are an int32
VECTOR_BYTES = 16
MIN_BLOCK_D, MAX_BLOCK_D = 16, 256
ROW_COST = 32  # columns: what another chunk of the same row costs beside its elements
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def block_of(dims: Sequence[int]) -> int:
    """Columns of a chunk: what wastes least, with a row in few chunks."""
    sizes = [1 << i for i in range(MIN_BLOCK_D.bit_length() - 1, MAX_BLOCK_D.bit_length())]
    return min(sizes, key=lambda b: (sum(-(-d // b) * (b + ROW_COST) for d in dims), b))


def vector_of(numbers: Sequence[int], item_bytes: int) -> int:
    """Elements of the widest loads and stores that all `numbers` of elements allow."""
    vec = VECTOR_BYTES // item_bytes
    while any(n % vec for n in numbers):
        vec //= 2
    return vec
