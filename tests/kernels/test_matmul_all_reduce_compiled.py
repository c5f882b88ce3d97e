"""matmul_all_reduce compiled for three generations, without a GPU: order of memory, registers.

x86 orders stores and the interpreter runs one thread: what stands here no run on a CPU shows.
"""

import re
from functools import cache
from math import prod

import pytest
from ttgir import all_stop_alike

from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.ops.fused_sum import SHOTS
from counterpoint.plan.families import parse
from counterpoint.plan.fused_sum import Settings, padded, rows_of_tile, settings_of
from counterpoint.problem import Problem
from counterpoint.runtime.launch import RESERVED_SMS, Grid
from counterpoint.runtime.limits import LIMITS
from counterpoint.runtime.occupancy import Kernel, occupancy
from counterpoint.testing.ptx import ACQUIRE, RELEASE, Compiled, compiled, lines_with

SMS = 132  # of H200
POINTERS = {"words_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64"}
NUMBERS = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wk", "stride_wn"), "i32")
UNALIGNED = ("M", "rank", "tag", "timeout_ns")


@cache
def kernel(
    capability: int, settings: Settings, m: int, ranks: int = 8, dtype: str = "bf16",
    columns: bool = True,
) -> Compiled:  # fmt: skip
    """As a launch on contiguous tensors whose sizes tiles divide would compile it."""
    one = "stride_wk" if columns else "stride_wn"
    tensors = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), f"*{dtype}")
    last = {"half_bytes": "i64", "rank": "i32", "tag": "i32", "timeout_ns": "i64"}
    types = tensors | POINTERS | {n: t for n, t in NUMBERS.items() if n != one} | last
    constants = {
        one: 1, "WORLD": ranks, "SHOTS": SHOTS[settings.shots],
        "SCATTER": settings.shots == "scatter", "HAS_BIAS": False, "IN_ORDER": False,
        "OWN": padded(m), "BLOCK_N": settings.block_n, "BLOCK_K": settings.block_k,
        "EVEN_N": True, "EVEN_K": True, "STAGES": settings.stages, "NUM_WARPS": settings.num_warps,
    }  # fmt: skip
    return compiled(
        matmul_all_reduce_kernel, capability, types, constants, num_warps=settings.num_warps,
        num_stages=settings.stages, aligned=tuple(name for name in types if name not in UNALIGNED),
    )  # fmt: skip


def small(shots: str) -> Settings:
    return Settings(shots, 64, 64, 4, 4)


def default(m: int, n: int, ranks: int, *, scatters: bool = False) -> Settings:
    """What "fused" stands for, of m rows in all."""
    op = "matmul_reduce_scatter" if scatters else "matmul_all_reduce"
    problem = Problem(op, m, n, 1024, ranks)
    found = settings_of(problem, parse(problem, "fused")[1], SMS, scatters=scatters)
    # of two shots each rank sends 1 / ranks of what one shot sends, and the sums
    few = rows_of_tile(problem, scatters=scatters) * (ranks - 1) <= 8
    assert found.block_n % ranks == 0 and (found.shots == "one_shot") == (few and not scatters)
    return found


def resident(settings: Settings, found: Compiled) -> int:
    """Blocks at once on an H200, beside the reserve."""
    block = Kernel(32 * settings.num_warps, found.registers, 0, found.dynamic_bytes)
    return occupancy(block, LIMITS["sm_90"]).blocks * (SMS - RESERVED_SMS)


@pytest.mark.shows(
    "matmul_all_reduce matmul_all_reduce_rms_norm", "compiled for", "sm_80 sm_90 sm_100"
)
@pytest.mark.parametrize("shots", ["one_shot", "two_shot"])
@pytest.mark.parametrize(("capability", "ranks"), [(80, 8), (90, 2), (90, 4), (90, 8), (100, 8)])
def test_words_arrive_whole(capability: int, shots: str, ranks: int):
    """Each is one element of a store, and is polled by loads that are never cached."""
    for m, dtype in ((1, "bf16"), (2, "bf16"), (8, "bf16"), (8, "fp32")):
        ptx = kernel(capability, small(shots), m, ranks, dtype).ptx
        polls = re.findall(r"\bld\.volatile\S*", ptx)
        assert polls and all(name.endswith(".b32") for name in polls), (m, dtype, polls)
        # one kind of store for each trip
        assert len(lines_with(ptx, r"\bst\.global\S*\.b32")) >= SHOTS[shots]
        assert not lines_with(ptx, RELEASE) and not lines_with(ptx, ACQUIRE)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_thread_polls_words_of_its_own(ranks: int):
    """Else several warps poll one word, of which one is heard: what the others read may be old.

    Of the loads that poll no thread is left out, even where there are fewer words than threads.
    """
    for m, n in ((1, 2048), (2, 8192), (2, 2048), (4, 2048)):
        chosen = default(m, n, ranks)
        ir = kernel(90, chosen, m, ranks).ttgir
        polled = re.findall(r"tt\.load .*isVolatile = true.*: tensor<([0-9x]+)x!tt\.ptr<i32>", ir)
        sizes = [prod(map(int, shape.split("x"))) for shape in polled]
        assert len(sizes) >= 2 * SHOTS[chosen.shots]
        assert min(sizes) >= 32 * chosen.num_warps, (chosen, m, polled)


def test_all_threads_stop_waiting_alike():
    assert all_stop_alike(kernel(90, small("two_shot"), 32).ttgir) == 2


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 64])
def test_rows_are_scattered_as_words(m: int, ranks: int):
    """16 bytes at a time, polled alike; nothing spills and every SM beside the reserve has work."""
    chosen = default(m, 8192, ranks, scatters=True)
    found = kernel(90, chosen, m // ranks, ranks)
    polls = re.findall(r"\bld\.volatile\S*", found.ptx)
    assert polls and all(name.endswith(".b32") for name in polls), polls
    assert lines_with(found.ptx, r"\bst\.global\.v[24]\.b32") and not found.spills
    assert resident(chosen, found) >= 8192 // chosen.block_n


@pytest.mark.parametrize("columns", [True, False])
def test_weights_stream_through_shared_memory(columns: bool):
    """16 bytes at a time, in the background, whichever way they are stored; on tensor cores."""
    ptx = kernel(90, small("two_shot"), 1, columns=columns).ptx
    assert re.search(r"cp\.async\.cg\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*0x10", ptx)
    assert "wgmma.mma_async" in ptx


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("n", [7168, 8192, 16384])
@pytest.mark.parametrize("m", [1, 8, 32, 64])
def test_the_default_grid_is_resident_beside_a_reserve(m: int, n: int, ranks: int):
    """Of H200: nothing spills; with 32 SMs left every program has one tile, of a wide w two."""
    chosen = default(m, n, ranks)
    found = kernel(90, chosen, m, ranks)
    assert not found.spills
    assert found.dynamic_bytes > 40_000, "tiles on their way"
    tiles = n // chosen.block_n
    rounds = tiles // Grid(tiles).programs(resident(chosen, found))
    assert rounds == (2 if n > 8192 and m > 16 else 1), (chosen, found[1:5])
