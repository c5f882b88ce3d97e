"""The tiled matmul on tensor cores and interpreted, and what Triton would launch it by."""

import os
import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import triton
from rankpool import RankPool
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from counterpoint.kernels.delay import delay_kernel
from counterpoint.kernels.matmul import matmul_kernel

TYPES = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "M": "i32", "N": "i32", "K": "i32"}


@cache
def compiled(capability: int, tile: tuple[int, int, int], num_stages: int) -> Any:
    """As a launch on bf16 of contiguous tensors, all sizes multiples of 16, would compile it."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "here kernels are compiled"
    constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True)) | {"GROUP_M": 8}
    source = ASTSource(
        fn=matmul_kernel,
        signature=TYPES | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(TYPES))},
    )
    options = {"num_warps": 4, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("tile", [(64, 64, 32), (128, 64, 64)])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_matmul_runs_on_tensor_cores(capability: int, tile: tuple[int, int, int]):
    ptx = compiled(capability, tile, 2).asm["ptx"]
    core = {80: r"mma\.sync\.aligned\S*\.f32\.bf16\.bf16\.f32", 90: r"wgmma\.mma_async\S*\.bf16"}
    assert re.search(core[capability], ptx)
    # tiles come by copies of 16 bytes in the background, as stages have it
    assert re.search(r"cp\.async\.cg\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*0x10", ptx)
    assert not re.search(r"\bfma\.rn\.f32", ptx), "no products on ordinary cores"


def test_shared_memory_is_that_of_the_stages():
    """What shaping adds to: two operands of each stage, 8 KiB at this tile."""
    sizes = [compiled(90, (64, 64, 32), stages).metadata.shared for stages in (2, 3, 4)]
    assert sizes == [16384, 24576, 32768]


@pytest.mark.parametrize("capability", [80, 90])
def test_triton_launches_by_the_numbers_that_are_known(capability: int):
    """Of a launch that shaping changes: `shape` refuses any other layout."""
    kernel = compiled(capability, (64, 64, 32), 2)
    metadata = kernel.metadata
    assert kernel.packed_metadata == (4, 1, metadata.shared)
    assert (metadata.name, metadata.num_warps, metadata.num_ctas) == ("matmul_kernel", 4, 1)


def product_errors(rank: int, ranks: int, tile: tuple[int, int, int], group_m: int) -> list[float]:
    """Errors against fp64 of the kernel and of torch, over shapes that groups do not divide."""
    block_m, block_n, block_k = tile
    found = [0.0, 0.0]
    for rows, cols, steps in [(1, 1, 1), (3, 5, 2), (5, 2, 3)]:
        m, n, k = rows * block_m, cols * block_n, steps * block_k
        x, w = torch.randn(m, k), torch.randn(k, n)
        y = torch.full((m, n), torch.nan)
        launch: Any = matmul_kernel
        with warnings.catch_warnings():
            # the interpreter's own: it takes the bound of a loop from an array of one element
            warnings.simplefilter("ignore", DeprecationWarning)
            launch[(rows * cols,)](x, w, y, m, n, k, *tile, group_m)
        want = x.double() @ w.double()
        for i, got in enumerate((y, x @ w)):
            found[i] = max(found[i], ((got.double() - want).norm() / want.norm()).item())
    return found


@pytest.mark.parametrize("group_m", [1, 2, 8])
@pytest.mark.parametrize("tile", [(16, 16, 16), (16, 32, 16)])
def test_the_matmul_interpreted(pool: RankPool, tile: tuple[int, int, int], group_m: int):
    ((error, plain),) = pool.run(product_errors, 1, tile, group_m, group=False)
    assert error <= 2 * plain


def test_a_delay_is_one_kernel_whatever_its_length():
    """Its length is no part of what is compiled: a search tries several."""
    length = next(p for p in delay_kernel.params if p.name == "delay_ns")
    assert length.do_not_specialize and not length.is_constexpr
