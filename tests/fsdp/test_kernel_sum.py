"""The sum of pushed gradients: the kernel interpreted against torch's bits, and compiled."""

import re
import warnings
from typing import Any

import pytest
import torch
from on_ranks import on_ranks

from counterpoint.fsdp.kernel_sum import sum_kernel
from counterpoint.testing.ptx import compiled

BLOCK = 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sources", [2, 3, 8])
@on_ranks(1)
def test_it_is_torchs_sum_in_rank_order(rank: int, ranks: int, sources: int, dtype: torch.dtype):
    n, stride, scale, words = 5 * BLOCK - 16, 5 * BLOCK, 1 / (2.0 * sources + 1), 4
    generator = torch.Generator().manual_seed(sources)
    parts = torch.randn(sources, stride, generator=generator).to(dtype)
    parts[:, n:] = torch.nan
    masks = torch.randint(-(2**31), 2**31, (words,), generator=generator, dtype=torch.int32)
    masks = masks.repeat(sources, 1)
    out, fault = torch.full((stride,), torch.nan), torch.zeros(2 + words, dtype=torch.int32)
    kernel: Any = sum_kernel

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            kernel[(5,)](parts, out, n, stride, scale, masks, 1, fault, 6,
                         RANKS=sources, WORDS=words, BLOCK=BLOCK)  # fmt: skip

    run()
    want = torch.zeros(n)
    for part in parts:
        want += part[:n]
    assert torch.equal(out[:n], want.mul_(scale))
    assert out[n:].isnan().all(), "it wrote behind the end"
    assert not fault.any()
    masks[sources - 1, 2] ^= 1 << 5
    run()
    assert out.isnan().all()
    # what one of the two ranks has: the last one differs from rank 1, or rank 1 from the others
    assert fault[0] == 7 and fault[1] != 1 and fault[2:].tolist() == [0, 0, 1 << 5, 0]


@on_ranks(1)
def test_parts_of_more_than_2_to_the_31_elements_in_all(rank: int, ranks: int):
    sources, n = 8, 64
    stride = 2**31 // (sources - 1) + n
    # pages that nobody touches take no memory
    parts = torch.empty((sources - 1) * stride + n, dtype=torch.int8)
    for r in range(sources):
        parts[r * stride : r * stride + n] = r
    masks = torch.zeros((sources, 2), dtype=torch.int32)
    out, fault = torch.full((n,), torch.nan), torch.zeros(4, dtype=torch.int32)
    kernel: Any = sum_kernel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        kernel[(1,)](parts, out, n, stride, 1.0, masks, 0, fault, 0,
                     RANKS=sources, WORDS=2, BLOCK=n)  # fmt: skip
    assert out.eq(sum(range(sources))).all()


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_reads_and_writes_16_bytes_at_a_time(capability: int):
    types = {"parts_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32", "stride": "i32",
             "scale": "fp32", "masks_ptr": "*i32", "rank": "i32", "fault_ptr": "*i32",
             "group": "i32"}  # fmt: skip
    aligned = ("parts_ptr", "out_ptr", "n", "stride", "masks_ptr", "fault_ptr")
    for ranks in (2, 8):
        sizes = {"RANKS": ranks, "WORDS": 1, "BLOCK": 4096}
        code = compiled(sum_kernel, capability, types, sizes, num_warps=8, aligned=aligned)
        assert len(re.findall(r"ld\.global\.v4\.b32", code.ptx)) == 2 * ranks
        assert len(re.findall(r"st\.global\.v4\.b32", code.ptx)) == 4
        assert code.spills == 0 and code.registers <= 64
