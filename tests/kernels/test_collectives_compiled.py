"""Our own collectives compiled for three generations, without a GPU: words, polls, registers."""

import re
from math import prod

import pytest
import triton.language as tl

from counterpoint.kernels.collectives import collective_kernel
from counterpoint.runtime.launch_collective import BLOCKS, NUM_WARPS, block_of
from counterpoint.testing.ptx import ACQUIRE, RELEASE, Compiled, compiled, lines_with

POINTERS = dict.fromkeys(("source_ptr", "target_ptr", "state_ptr"), "*i32")
POINTERS |= {"words_ptr": "*i64", "fault_ptr": "*i64"}
NUMBERS = {"part": "i32", "half_bytes": "i32", "rank": "i32", "tag": "i32", "timeout_ns": "i64"}


def kernel(
    capability: int, ranks: int, wide: int, *, scatter: bool, gather: bool, dtype: tl.dtype
) -> Compiled:
    constants = {"WORLD": ranks, "SCATTER": scatter, "GATHER": gather, "DTYPE": dtype,
                 "IN_ORDER": False, "BLOCK": block_of(wide, ranks),
                 "NUM_WARPS": NUM_WARPS}  # fmt: skip
    types = POINTERS | NUMBERS
    return compiled(
        collective_kernel, capability, types, constants, num_warps=NUM_WARPS,
        aligned=(*POINTERS, "part", "half_bytes"),
    )  # fmt: skip


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce",
    "compiled for",
    "sm_80 sm_90 sm_100",
)
@pytest.mark.parametrize("wide", BLOCKS)
@pytest.mark.parametrize(
    ("scatter", "gather"), [(True, False), (False, True), (True, True)],
    ids=["reduce_scatter", "all_gather", "all_reduce"],
)  # fmt: skip
@pytest.mark.parametrize(("capability", "ranks"), [(80, 8), (90, 2), (90, 4), (90, 8), (100, 8)])
def test_words_arrive_whole_in_few_registers(
    capability: int, scatter: bool, gather: bool, ranks: int, wide: int
):
    """4 bytes are one element of each store and poll; polls are never cached, nothing is fenced.

    Every thread polls words of its own: of fewer words than threads several warps would poll one.
    """
    found = kernel(capability, ranks, wide, scatter=scatter, gather=gather, dtype=tl.bfloat16)
    polls = re.findall(r"\bld\.volatile\S*", found.ptx)
    assert polls and all(name.endswith("v4.b32") for name in polls), polls
    assert len(lines_with(found.ptx, r"\bst\.global\.v4\.b32")) >= 2
    assert not lines_with(found.ptx, RELEASE) and not lines_with(found.ptx, ACQUIRE)
    # what is spilled is stored before all loops and loaded behind them
    assert found.spills <= 12 and found.registers <= (128 if capability == 80 else 96)
    polled = re.findall(r"tt\.load .*isVolatile = true.*: tensor<([0-9x]+)x!tt\.ptr<i32>",
                        found.ttgir)  # fmt: skip
    sizes = [prod(map(int, shape.split("x"))) for shape in polled]
    assert len(sizes) >= 2 * (scatter + gather) and min(sizes) >= 32 * NUM_WARPS
