"""matmul_all_reduce compiled for three generations, without a GPU: order of memory, registers.

x86 orders stores and the interpreter runs one thread: what stands here no run on a CPU shows.
"""

import re
from functools import cache
from math import prod

import pytest
from counterpoint.runtime.fused_call import grid
from counterpoint.runtime.launch_fused import (
    Fused,
    default_way,
    padded_rows,
    scatter_way,
)
from ptx import ACQUIRE, RELEASE, Compiled, all_stop_alike, compiled, lines_with

from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.runtime.limits import LIMITS
from counterpoint.runtime.occupancy import Kernel, occupancy

POINTERS = {"words_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64"}
NUMBERS = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wk", "stride_wn"), "i32")
UNALIGNED = ("M", "rank", "tag", "timeout_ns")


@cache
def kernel(
    capability: int, way: Fused, m: int, ranks: int = 8, dtype: str = "bf16", columns: bool = True
) -> Compiled:
    """As a launch on contiguous tensors whose sizes tiles divide would compile it."""
    one = "stride_wk" if columns else "stride_wn"
    tensors = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), f"*{dtype}")
    last = {"half_bytes": "i64", "rank": "i32", "tag": "i32", "timeout_ns": "i64"}
    types = tensors | POINTERS | {n: t for n, t in NUMBERS.items() if n != one} | last
    constants = {
        one: 1, "WORLD": ranks, "SHOTS": way.shots, "SCATTER": way.scatter,
        "HAS_BIAS": False, "OWN": padded_rows(m), "BLOCK_N": way.block_n,
        "BLOCK_K": way.block_k, "EVEN_N": True, "EVEN_K": True, "STAGES": way.stages,
        "NUM_WARPS": way.num_warps,
    }  # fmt: skip
    return compiled(
        matmul_all_reduce_kernel, capability, types, constants, num_warps=way.num_warps,
        num_stages=way.stages, aligned=tuple(name for name in types if name not in UNALIGNED),
    )  # fmt: skip


def way(shots: int) -> Fused:
    return Fused(shots, 64, 64, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize(("capability", "ranks"), [(80, 8), (90, 2), (90, 4), (90, 8), (100, 8)])
def test_words_arrive_whole(capability: int, shots: int, ranks: int):
    """Each is one element of a store, and is polled by loads that are never cached."""
    for m, dtype in ((1, "bf16"), (2, "bf16"), (8, "bf16"), (8, "fp32")):
        ptx = kernel(capability, way(shots), m, ranks, dtype).ptx
        polls = re.findall(r"\bld\.volatile\S*", ptx)
        assert polls and all(name.endswith(".b32") for name in polls), (m, dtype, polls)
        # one kind of store for each trip
        assert len(lines_with(ptx, r"\bst\.global\S*\.b32")) >= shots
        assert not lines_with(ptx, RELEASE) and not lines_with(ptx, ACQUIRE)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_thread_polls_words_of_its_own(ranks: int):
    """Else several warps poll one word, of which one is heard: what the others read may be old.

    Of the loads that poll no thread is left out, even where there are fewer words than threads.
    """
    for m, n in ((1, 2048), (2, 8192), (2, 2048), (4, 2048)):
        chosen = default_way(m, n, ranks, 2, 132)
        ir = kernel(90, chosen, m, ranks).ttgir
        polled = re.findall(r"tt\.load .*isVolatile = true.*: tensor<([0-9x]+)x!tt\.ptr<i32>", ir)
        sizes = [prod(map(int, shape.split("x"))) for shape in polled]
        assert len(sizes) >= 2 * chosen.shots
        assert min(sizes) >= 32 * chosen.num_warps, (chosen.spec, m, polled)


def test_all_threads_stop_waiting_alike():
    assert all_stop_alike(kernel(90, way(2), 32).ttgir) == 2


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 64])
def test_rows_are_scattered_as_words(m: int, ranks: int):
    """16 bytes at a time, polled alike; nothing spills and every SM beside the reserve has work."""
    chosen = scatter_way(m, 8192, ranks, 2, 132)
    found = kernel(90, chosen, m // ranks, ranks)
    polls = re.findall(r"\bld\.volatile\S*", found.ptx)
    assert polls and all(name.endswith(".b32") for name in polls), polls
    assert lines_with(found.ptx, r"\bst\.global\.v[24]\.b32") and not found.spills
    block = Kernel(32 * chosen.num_warps, found.registers, 0, found.dynamic_bytes)
    assert occupancy(block, LIMITS["sm_90"]).blocks * (132 - 32) >= 8192 // chosen.block_n


@pytest.mark.parametrize("columns", [True, False])
def test_weights_stream_through_shared_memory(columns: bool):
    """16 bytes at a time, in the background, whichever way they are stored; on tensor cores."""
    ptx = kernel(90, way(2), 1, columns=columns).ptx
    assert re.search(r"cp\.async\.cg\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*0x10", ptx)
    assert "wgmma.mma_async" in ptx


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("n", [7168, 8192, 16384])
@pytest.mark.parametrize("m", [1, 8, 32, 64])
def test_the_default_grid_is_resident_beside_a_reserve(m: int, n: int, ranks: int):
    """Of H200: nothing spills; with 32 SMs left every program has one tile, of a wide w two."""
    chosen = default_way(m, n, ranks, 2, 132)
    found = kernel(90, chosen, m, ranks)
    assert not found.spills
    assert found.dynamic_bytes > 40_000, "tiles on their way"
    block = Kernel(32 * chosen.num_warps, found.registers, 0, found.dynamic_bytes)
    resident = occupancy(block, LIMITS["sm_90"]).blocks
    tiles = n // chosen.block_n
    rounds = tiles // grid(tiles, resident * (132 - 32))
    assert rounds == (2 if n > 8192 and m > 16 else 1), (chosen.spec, found[1:5])
