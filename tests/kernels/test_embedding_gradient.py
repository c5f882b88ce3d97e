"""Gradients of embedding bags by our kernels: interpreted against torch's, and compiled."""

import re
import warnings
from typing import Any

import pytest
import torch
import triton.language as tl
from embedding_cases import random_bags
from rankpool import RankPool

from counterpoint.kernels.embedding_gradient import table_gradient_kernel, weight_gradient_kernel
from counterpoint.ops import embedding_gradients as ops
from counterpoint.testing.ptx import compiled

CASES: tuple[tuple[tuple[int, ...], str, Any], ...] = (
    ((32, 16), "sum", torch.float32), ((5, 40, 7), "mean", torch.float16),
    ((300,), "weights", torch.float32), ((8, 8, 8), "weights", torch.bfloat16),
)  # fmt: skip


def wrong_gradients(rank: int, ranks: int) -> list[str]:
    """The path of a GPU, on the CPU, against the CPU's own: index_add in fp32."""
    found: list[str] = []
    for dims, mode, dtype in CASES:
        bags = random_bags(dims, 20, dtype=dtype, weighted=mode == "weights", rows=6)
        dy = torch.randn(20, sum(dims)).to(dtype)
        tensors = (bags.tables, bags.indices, bags.offsets, bags.weights)
        how = {"last": True, "mean": mode == "mean"}
        entries = ops.entries_of(bags.offsets, bags.indices.numel(), last=True)
        scales = ops.scales_of(entries, bags.weights, mean=mode == "mean")
        for sparse in (False, True):
            want = ops.table_gradients(dy, *tensors, **how, sparse=sparse)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                got = ops._by_kernel(  # pyright: ignore[reportPrivateUsage]
                    dy, bags.tables, bags.indices, entries.bag, entries.bag // 20, scales,
                    sparse=sparse,
                )  # fmt: skip
            for i, (one, other) in enumerate(zip(got, want, strict=True)):
                if sparse and not torch.equal(one.indices(), other.indices()):
                    found.append(f"{dims} {mode}: rows of table {i}")
                one, other = (t.to_dense().double() for t in (one, other))
                bound = 1e-5 + torch.finfo(dtype).eps * other.abs()
                if not bool(((one - other).abs() <= bound).all()):
                    found.append(f"{dims} {mode} {sparse=}, {i}: {(one - other).abs().max()}")
        if bags.weights is not None:
            want = ops.weight_gradient(dy, *tensors[:3], bags.weights, last=True)
            out = torch.full_like(want, torch.nan)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                ops.weight_gradient_into(out, dy, bags.tables, bags.indices, entries.bag)
            bound = 1e-4 + torch.finfo(dtype).eps * want.double().abs()
            if not bool(((out.double() - want.double()).abs() <= bound).all()):
                found.append(f"{dims}: weights")
    return found


def test_rows_are_summed_by_kernels_as_by_torch(pool: RankPool):
    assert pool.run(wrong_gradients, 1, group=False) == [[]]


def test_gradients_are_loaded_16_bytes_at_a_time():
    types = {"dy_ptr": "*bf16", "bags_ptr": "*i64", "scales_ptr": "*fp32", "starts_ptr": "*i64",
             "names_ptr": "*i64", "count_ptr": "*i64", "tables_ptr": "*i64", "num_bags": "i32",
             "stride": "i32"}  # fmt: skip
    for compact in (False, True):
        constants = {"DTYPE": tl.bfloat16, "SCALED": True, "COMPACT": compact, "STEP": 8,
                     "BLOCK_D": 128, "VEC": 8}  # fmt: skip
        found = compiled(table_gradient_kernel, 90, types, constants, num_warps=2,
                         aligned=("dy_ptr",))  # fmt: skip
        assert "ld.global.v4.b32" in found.ptx
        assert found.spills <= 2  # a number of a row's, once a row
        # a row is as many elements as there are threads, or twice
        assert re.search(r"st\.global\.(v\d\.)?b32", found.ptx)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_weights_gradient_compiles(capability: int):
    types = {"dy_ptr": "*bf16", "indices_ptr": "*i32", "bags_ptr": "*i64", "tables_ptr": "*i64",
             "out_ptr": "*fp32", "n": "i32", "num_bags": "i32", "stride": "i32"}  # fmt: skip
    constants = {"DTYPE": tl.bfloat16, "ENTRIES": 16, "BLOCK_D": 64}
    assert not compiled(weight_gradient_kernel, capability, types, constants, num_warps=2).spills
