"""Kernels whose payload is its own flag, compiled: words, polls, registers, one order of sums.

x86 orders stores and the interpreter runs one thread: what stands here no run on a CPU shows.
"""

import re

import pytest
import triton.language as tl
from kernel_code import blocks_of, code, polled, words
from ttgir import all_stop_alike

from counterpoint.kernels.collectives import collective_kernel
from counterpoint.norms import plan_all_reduce_norm
from counterpoint.norms.kernel_add_norm import OPTIONS, add_norm_kernel
from counterpoint.norms.kernel_all_reduce_norm import all_reduce_norm_kernel
from counterpoint.norms.norms import QUANTIZED
from counterpoint.plan.families import build, parse
from counterpoint.problem import Problem
from counterpoint.ranges import next_power_of_2
from counterpoint.run.launch import RESERVED_SMS, Grid
from counterpoint.run.launch_collective import BLOCKS, NUM_WARPS, block_of
from counterpoint.tensor_parallel.kernel_matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.tensor_parallel.launch_fused_sum import SHOTS
from counterpoint.tensor_parallel.plan_fused_sum import Settings, rows_of_tile, settings_of
from counterpoint.testing.ptx import Compiled, lines_with

SMS = 132  # of H200
KINDS = {"reduce_scatter": (True, False), "all_gather": (False, True), "all_reduce": (True, True)}
PLACES = pytest.mark.parametrize(
    ("capability", "ranks"), [(80, 8), (90, 2), (90, 4), (90, 8), (100, 8)]
)


def norm(p: Problem, spec: str, capability: int = 90) -> Compiled:
    settings = plan_all_reduce_norm.settings_in(build(p, spec).steps[0])
    two = settings.shots == "two_shot"
    return code(
        all_reduce_norm_kernel, capability, options=OPTIONS, num_warps=settings.num_warps,
        pointers={"i32": "x state", "fp8e4nv": "y" * bool(p.quantized)},
        sizes="N part half_bytes", WORLD=p.ranks, TWO_SHOT=two, LAYER=p.norm == "layer",
        HAS_RESIDUAL=p.residual, HAS_BIAS=p.bias, FP8=QUANTIZED[p.quantized], DTYPE=tl.bfloat16,
        BLOCK=next_power_of_2(plan_all_reduce_norm.row_words(p) // (p.ranks if two else 1)),
        NUM_WARPS=settings.num_warps, IN_ORDER=p.invariant,
    )  # fmt: skip


@pytest.mark.drawn(4)
@pytest.mark.shows(
    "all_reduce_rms_norm all_reduce_layer_norm", "compiled for", "sm_80 sm_90 sm_100"
)
@pytest.mark.parametrize("n", [4096, 8192, 16384])
@PLACES
def test_rows_arrive_whole_and_stay_in_registers(capability: int, ranks: int, n: int):
    p = Problem("all_reduce_norm", 1, n, ranks=ranks, residual=True)
    found = norm(p, "fused", capability)
    words(found, stores=4)  # words to the peers, the emptied ones, h and y
    # what is spilled are a few numbers of the whole kernel, on many ranks alone
    assert found.spills <= (0 if ranks < 8 else 12)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("quantized", ["tensor", "rows"])
@pytest.mark.parametrize("spec", ["fused one_shot", "fused two_shot"])
def test_a_layer_norm_in_fp8_does_so_too(spec: str, quantized: str):
    facts = {"ranks": 2, "norm": "layer", "bias": True, "residual": True, "quantized": quantized}
    found = norm(Problem("all_reduce_norm", 1, 8192, **facts), spec)  # type: ignore[arg-type]
    assert not found.spills and re.search(r"cvt\.rn\.satfinite\.e4m3x2", found.ptx)
    words(found, stores=1)


def alone(p: Problem) -> Compiled:
    """The kernel of rows that are in memory, as it is launched."""
    return code(
        add_norm_kernel, sizes="N", options=OPTIONS,
        num_warps=max(1, min(16, next_power_of_2(p.n) // 512)),
        LAYER=p.norm == "layer", HAS_RESIDUAL=p.residual, HAS_BIAS=p.bias,
        FP8=QUANTIZED[p.quantized], WHOLE=True, BLOCK=next_power_of_2(p.n),
    )  # fmt: skip


def pairs(found: Compiled) -> list[str]:
    """What sums of pairs are of, in order: [2, n] or [n, 2]."""
    sums = re.findall(r"tt\.reduce.*?\}\) : \(tensor<(\d+x\d+)xf32", found.ttgir, re.DOTALL)
    return [shape for shape in sums if "2" in shape.split("x")]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", [4096, 5120, 16384])
def test_a_row_is_added_up_in_one_order_by_both_kernels(kind: str, n: int):
    """Threads have other columns; no product is added before it is rounded."""
    facts = {"ranks": 4, "norm": kind, "residual": True, "bias": kind == "layer"}
    p = Problem("all_reduce_norm", 8, n, **facts, invariant=True)  # type: ignore[arg-type]
    both = norm(p, "fused"), alone(p)
    one, other = map(pairs, both)
    assert one == other and len(one) == (next_power_of_2(n).bit_length() - 1) * (
        1 + (kind == "layer")
    )
    assert not any(re.search(r"\bfma\.", found.ptx) for found in both)


@pytest.mark.drawn(3)
@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "compiled for",
                   "sm_80 sm_90 sm_100")  # fmt: skip
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
@PLACES
def test_collectives_poll_words_in_few_registers(
    capability: int, ranks: int, kind: str, block: int
):
    """Every thread polls words of its own: of fewer than threads several warps would poll one."""
    scatter, gather = KINDS[kind]
    found = code(
        collective_kernel, capability, dtype="i32", sizes="part half_bytes", num_warps=NUM_WARPS,
        WORLD=ranks, SCATTER=scatter, GATHER=gather, DTYPE=tl.bfloat16, IN_ORDER=False,
        BLOCK=block_of(block, ranks), NUM_WARPS=NUM_WARPS,
    )  # fmt: skip
    words(found, stores=2)
    # what is spilled is stored before all loops and loaded behind them
    assert found.spills <= 12 and found.registers <= (128 if capability == 80 else 96)
    sizes = polled(found)
    assert len(sizes) >= 2 * (scatter + gather) and min(sizes) >= 32 * NUM_WARPS


def product(
    settings: Settings, m: int, ranks: int = 8, capability: int = 90, dtype: str = "bf16",
    columns: bool = True,
) -> Compiled:  # fmt: skip
    """As a launch on contiguous tensors whose sizes tiles divide would compile it."""
    one = {"stride_wk" if columns else "stride_wn": 1}
    return code(
        matmul_all_reduce_kernel, capability, dtype=dtype, types={"half_bytes": "i64"},
        sizes="N K stride_xm stride_wk stride_wn half_bytes", num_warps=settings.num_warps,
        num_stages=settings.stages, WORLD=ranks, SHOTS=SHOTS[settings.shots],
        SCATTER=settings.shots == "scatter", HAS_BIAS=False, IN_ORDER=False, OWN=next_power_of_2(m),
        BLOCK_N=settings.block_n, BLOCK_K=settings.block_k, EVEN_N=True, EVEN_K=True,
        STAGES=settings.stages, NUM_WARPS=settings.num_warps, **one,
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
    return blocks_of(found, settings.num_warps) * (SMS - RESERVED_SMS)


@pytest.mark.drawn(6)
@pytest.mark.shows(
    "matmul_all_reduce matmul_all_reduce_rms_norm", "compiled for", "sm_80 sm_90 sm_100"
)
@pytest.mark.parametrize(("m", "dtype"), [(1, "bf16"), (2, "bf16"), (8, "bf16"), (8, "fp32")])
@pytest.mark.parametrize("shots", ["one_shot", "two_shot"])
@PLACES
def test_tiles_arrive_as_words(capability: int, ranks: int, shots: str, m: int, dtype: str):
    """There is one kind of store for each trip."""
    found = product(small(shots), m, ranks, capability, dtype)
    words(found, stores=SHOTS[shots], width=r"\S*")


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("m", "n"), [(1, 2048), (2, 8192), (2, 2048), (4, 2048)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_thread_polls_words_of_its_own(ranks: int, m: int, n: int):
    """Else several warps poll one word, of which one is heard: what the others read may be old.

    Of the loads that poll no thread is left out, even where there are fewer words than threads.
    """
    chosen = default(m, n, ranks)
    sizes = polled(product(chosen, m, ranks))
    assert len(sizes) >= 2 * SHOTS[chosen.shots] and min(sizes) >= 32 * chosen.num_warps, sizes


def test_all_threads_stop_waiting_alike():
    assert all_stop_alike(product(small("two_shot"), 32).ttgir) == 2


@pytest.mark.drawn(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 64])
def test_rows_are_scattered_as_words(m: int, ranks: int):
    """16 bytes at a time, polled alike; nothing spills and every SM beside the reserve has work."""
    chosen = default(m, 8192, ranks, scatters=True)
    found = product(chosen, m // ranks, ranks)
    words(found, stores=1, width=r"\S*")
    assert lines_with(found.ptx, r"\bst\.global\.v[24]\.b32") and not found.spills
    assert resident(chosen, found) >= 8192 // chosen.block_n


@pytest.mark.parametrize("columns", [True, False])
def test_weights_stream_through_shared_memory(columns: bool):
    """16 bytes at a time, in the background, whichever way they are stored; on tensor cores."""
    ptx = product(small("two_shot"), 1, columns=columns).ptx
    assert re.search(r"cp\.async\.cg\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*0x10", ptx)
    assert "wgmma.mma_async" in ptx


@pytest.mark.drawn(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("n", [7168, 8192, 16384])
@pytest.mark.parametrize("m", [1, 8, 32, 64])
def test_the_default_grid_is_resident_beside_a_reserve(m: int, n: int, ranks: int):
    """Of H200: nothing spills; with 32 SMs left every program has one tile, of a wide w two."""
    chosen = default(m, n, ranks)
    found = product(chosen, m, ranks)
    assert not found.spills
    assert found.dynamic_bytes > 40_000, "tiles on their way"
    tiles = n // chosen.block_n
    rounds = tiles // Grid(tiles).programs(resident(chosen, found))
    assert rounds == (2 if n > 8192 and m > 16 else 1), (chosen, found[1:5])
