"""The arm that torchtitan's layer is: its padded order, and the kernel that fills it."""

import warnings

import pytest
import torch
from rankpool import RankPool

from benchmarks import titan
from counterpoint.testing import ptx


def filled(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    counts = torch.tensor([3, 0, 9, 1, 0, 2])  # of sources 0 and 1, for three experts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the interpreter's own
        index, padded = titan.permuted(counts, 3, 15)
    return index.tolist(), padded.tolist()


def test_rows_of_an_expert_are_padded_to_a_multiple(pool: RankPool):
    ((index, padded),) = pool.run(filled, 1)
    none = [-1]
    assert padded == [8, 8, 16], "an expert without rows has one group of padding"
    assert index[:8] == [0, 1, 2, 12, *none * 4] and index[8:16] == none * 8
    assert index[16:32] == [*range(3, 12), 13, 14, *none * 5]
    assert index[32:] == none * 8, "there is room for the most padding"


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_the_kernel_compiles(capability: int):
    kernel = titan.fill_indices_kernel
    types = dict.fromkeys(("counts_ptr", "starts_ptr", "edges_ptr"), "*i64")
    types |= {"indices_ptr": "*i32", "ranks": "i32", "local": "i32"}
    found = ptx.compiled(kernel, capability, types, {"BLOCK": titan.BLOCK}, num_warps=4)
    assert not found.spills
