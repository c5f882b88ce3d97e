"""matmul_all_reduce compiled for three generations, without a GPU: order of memory, registers.

x86 orders stores and the interpreter runs one thread: what stands here no run on a CPU shows.
"""

import re
from functools import cache

import pytest
from ptx import (
    ACQUIRE,
    CAPABILITIES,
    LOAD,
    PAYLOAD,
    POLL,
    RELEASE,
    WORD_STORE,
    Compiled,
    compiled,
    lines_with,
    wrong_order,
)

from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.resources.limits import LIMITS
from counterpoint.resources.occupancy import Kernel, occupancy
from counterpoint.runtime.launch_fused import Fused, default_way, padded_rows

POINTERS = {"cells_ptr": "*i64", "flags_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64"}
NUMBERS = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wk", "stride_wn"), "i32")
UNALIGNED = ("M", "rank", "tag", "timeout_ns")


@cache
def kernel(
    capability: int, way: Fused, m: int, ranks: int = 8, dtype: str = "bf16", columns: bool = True
) -> Compiled:
    """As a launch on contiguous tensors whose sizes tiles divide would compile it."""
    one = "stride_wk" if columns else "stride_wn"
    tensors = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), f"*{dtype}")
    last = {"turn_bytes": "i64", "rank": "i32", "tag": "i32", "timeout_ns": "i64"}
    types = tensors | POINTERS | {n: t for n, t in NUMBERS.items() if n != one} | last
    constants = {
        one: 1, "WORLD": ranks, "SHOTS": way.shots, "WORDS": way.by == "words", "HAS_BIAS": False,
        "ROWS": padded_rows(m), "BLOCK_N": way.block_n, "BLOCK_K": way.block_k, "EVEN_N": True,
        "EVEN_K": True, "STAGES": way.stages,
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
    # nothing that peers see is of block or GPU scope, but the count of programs that have ended
    assert len(lines_with(ptx, r"\b(atom|red)\.\S*(\.gpu|\.cta)\b")) <= 1
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
    for order, pattern in (("release", RELEASE), ("acquire", ACQUIRE)):
        assert not re.search(pattern, ptx.replace(f"sys.{order}", "sys.relaxed"))


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_words_arrive_whole(capability: int, shots: int):
    """Each is one 8-byte element of a store, and is polled by loads that are never cached."""
    ptx = kernel(capability, way(shots, "words"), 8).ptx
    stores, polls = lines_with(ptx, WORD_STORE), lines_with(ptx, POLL)
    assert stores and polls
    assert not lines_with(ptx, RELEASE) and not lines_with(ptx, ACQUIRE)
    # two rows of bf16 share a word: half as many stores as a row each would have
    apart = kernel(capability, way(shots, "words"), 8, dtype="fp32").ptx
    assert len(lines_with(apart, WORD_STORE)) > len(stores)
    for line in polls:
        assert re.search(r"\.b64|\.u64", ptx.splitlines()[line])


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
    """Of H200: nothing spills, and every tile has a program of its own with 32 SMs left."""
    chosen = default_way(m, n, ranks, 2, 132)
    found = kernel(90, chosen, m, ranks)
    assert found.stack_bytes == found.local_bytes == 0
    assert found.dynamic_bytes > 40_000, "tiles on their way"
    block = Kernel(32 * chosen.num_warps, found.registers, 0, found.dynamic_bytes)
    resident = occupancy(block, LIMITS["sm_90"]).blocks
    assert resident * (132 - 32) >= n // chosen.block_n, (chosen.spec, found[1:])
