"""matmul_all_reduce compiled for three generations, without a GPU: order of memory, registers.

x86 orders stores and the interpreter runs one thread: what stands here no run on a CPU shows.
"""

import re
from functools import cache
from math import prod

import pytest
from ptx import (
    ACQUIRE,
    CAPABILITIES,
    LOAD,
    PAYLOAD,
    RELEASE,
    Compiled,
    compiled,
    lines_with,
    wrong_order,
)

from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.runtime.fused_call import grid
from counterpoint.runtime.launch_fused import (
    WORD_BYTES,
    Fused,
    default_way,
    padded_rows,
    scatter_way,
)
from counterpoint.runtime.limits import LIMITS
from counterpoint.runtime.occupancy import Kernel, occupancy

POINTERS = {"cells_ptr": "*i64", "flags_ptr": "*i64", "state_ptr": "*i32",
            "fault_ptr": "*i64"}  # fmt: skip
NUMBERS = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wk", "stride_wn"), "i32")
UNALIGNED = ("M", "rank", "tag", "timeout_ns")


@cache
def kernel(
    capability: int, way: Fused, m: int, ranks: int = 8, dtype: str = "bf16", columns: bool = True
) -> Compiled:
    """As a launch on contiguous tensors whose sizes tiles divide would compile it."""
    one = "stride_wk" if columns else "stride_wn"
    tensors = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), f"*{dtype}")
    last = {
        "half_bytes": "i64",
        "half_flags": "i32",
        "rank": "i32",
        "tag": "i32",
        "timeout_ns": "i64",
    }
    types = tensors | POINTERS | {n: t for n, t in NUMBERS.items() if n != one} | last
    constants = {
        one: 1, "WORLD": ranks, "SHOTS": way.shots, "SCATTER": way.scatter,
        "WORD_BYTES": WORD_BYTES[way.by],
        "HAS_BIAS": False, "OWN": padded_rows(m), "BLOCK_N": way.block_n,
        "BLOCK_K": way.block_k, "EVEN_N": True, "EVEN_K": True, "STAGES": way.stages,
        "NUM_WARPS": way.num_warps,
    }  # fmt: skip
    return compiled(
        matmul_all_reduce_kernel, capability, types, constants, num_warps=way.num_warps,
        num_stages=way.stages, aligned=tuple(name for name in types if name not in UNALIGNED),
    )  # fmt: skip


def way(shots: int, by: str) -> Fused:
    return Fused(shots, by, 64, 64, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_flags_publish_what_stands_before_them(capability: int):
    """Payload stores < barrier of the block < release; acquire < barrier < loads; twice."""
    ptx = kernel(capability, way(2, "flags"), 32).ptx
    for pattern in (PAYLOAD, RELEASE, ACQUIRE, LOAD):
        assert len(re.findall(pattern, ptx)) >= 2, pattern
    assert not wrong_order(ptx)
    # of GPU scope is what stays on the rank: whether to stop, twice, who says so, who has ended
    own = re.findall(r"\b(?:atom|red)\.\S*\.(?:gpu|cta)\.\S+", ptx)
    kinds = [re.search(r"\.(or|cas|add)\.", name)[1] for name in own]  # type: ignore[index]
    assert kinds == ["or", "or", "cas", "add"], own
    bulk = r"cp\.async\.bulk\.(tensor|global)"
    assert not lines_with(ptx, bulk), "a bulk store may be overtaken by its flag"


def test_planted_faults_show():
    """The checks above can fail: barriers taken out, orders made weaker."""
    ptx = kernel(90, way(2, "flags"), 32).ptx
    assert set(wrong_order(re.sub(r".*\bbar\.sync.*\n", "", ptx))) == {
        "a release that no barrier parts from the payload",
        "an acquire without a barrier behind it",
        "loads that no barrier parts from the acquire",
    }
    for order in ("release", "acquire"):
        assert f"no {order} of system scope" in wrong_order(ptx.replace(f"sys.{order}", "relaxed"))
        assert wrong_order(ptx.replace(f"sys.{order}", f"gpu.{order}"))


@pytest.mark.parametrize(
    ("shots", "by"), [(1, "words"), (2, "words"), (1, "stamps"), (2, "stamps")]
)
@pytest.mark.parametrize(("capability", "ranks"), [(80, 8), (90, 2), (90, 4), (90, 8), (100, 8)])
def test_words_arrive_whole(capability: int, shots: int, by: str, ranks: int):
    """Each is one element of a store, and is polled by loads that are never cached."""
    bits = 8 * WORD_BYTES[by]
    for m, dtype in ((1, "bf16"), (2, "bf16"), (8, "bf16"), (8, "fp32")):
        ptx = kernel(capability, way(shots, by), m, ranks, dtype).ptx
        polls = re.findall(r"\bld\.volatile\S*", ptx)
        assert polls and all(name.endswith(f".b{bits}") for name in polls), (m, dtype, polls)
        # one kind of store for each trip, and the word of the fault
        assert len(lines_with(ptx, rf"\bst\.global\S*\.b{bits}")) >= shots + (by == "stamps")
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


@pytest.mark.parametrize("by", ["words", "flags"])
def test_all_threads_stop_waiting_alike(by: str):
    """By the atomic's answer alone: a clock that each thread reads for itself may part them."""
    ir = kernel(90, way(2, by), 32).ttgir
    verdicts = re.findall(r"(%\S+) = tt\.atomic_rmw or,", ir)
    assert len(verdicts) == 2
    for verdict in verdicts:
        uses = [line for line in ir.splitlines() if re.search(rf"= .*{verdict}\b", line)]
        assert [re.search(r"= (\S+)", line)[1] for line in uses] == ["arith.cmpi"], uses  # type: ignore[index]
    clock = re.findall(r"(%\S+) = tt\.elementwise_inline_asm .*globaltimer", ir)
    for late in re.findall(r"tt\.atomic_rmw or, relaxed, gpu, \S+, (%\w+)", ir):
        others = [line for line in ir.splitlines() if re.search(rf"= .*{late}\b", line)]
        assert len(others) == 1, others  # what the clock says goes into the atomic and nowhere else
    assert len(clock) >= 4


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
    ptx = kernel(90, way(2, "words"), 1, columns=columns).ptx
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
