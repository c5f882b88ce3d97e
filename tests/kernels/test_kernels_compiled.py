"""Each kernel compiled for three generations of GPUs, without one: what must stand in its PTX.

x86 orders stores, so no run on CPU ranks shows a missing release, or a missing barrier before it.
"""

import re
from contextlib import nullcontext

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import PTXASError

from counterpoint import machine
from counterpoint.kernels.delay import delay_kernel
from counterpoint.kernels.exchange import exchange_kernel
from counterpoint.kernels.matmul import matmul_kernel
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.testing.ptx import CAPABILITIES, Compiled, compiled, lines_with

SIGNAL_TYPES = {
    "post_ptrs": "*i64", "num_posts": "i32", "wait_ptrs": "*i64", "num_waits": "i32",
    "epoch_ptr": "*i32", "fault_ptr": "*i64", "step": "i32", "timeout_ns": "i64",
}  # fmt: skip


def signal(capability: int, *, advance: bool, lanes: int = 32) -> Compiled:
    constants = {"ADVANCE": advance, "LANES": lanes}
    return compiled(signal_kernel, capability, SIGNAL_TYPES, constants, num_warps=1)


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("lanes", [32, 128])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_signal_publishes_and_acquires(capability: int, advance: bool, lanes: int):
    ptx = signal(capability, advance=advance, lanes=lanes).ptx

    releases = lines_with(ptx, r"atom\.global\.sys\.release\.exch\.b32")
    acquires = lines_with(ptx, r"atom\.global\.sys\.acquire\.add\.u32|ld\.global\.sys\.acquire")
    barriers = lines_with(ptx, r"\bbar(rier)?\.(warp\.)?sync")
    stores = lines_with(ptx, r"\bst\.global")
    assert len(releases) == lanes // 32
    assert len(acquires) == lanes // 32
    # the epoch's store, then a barrier of the block, then the release; then the polls
    if advance:
        assert stores[0] < barriers[0]
    assert barriers[0] < releases[0] <= releases[-1] < acquires[0]
    # nothing of it has block or GPU scope
    assert not lines_with(ptx, r"\b(atom|red|ld|st)\.\S*(\.gpu|\.cta)\b")
    assert "globaltimer" in ptx
    # that a wait gave up, the epoch far back, and the word of the fault: after the polls
    assert len(stores) == advance + 3
    assert stores[-3] > acquires[-1]


@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_signal_fits_beside_any_kernel(capability: int, advance: bool):
    found = signal(capability, advance=advance)
    assert found.registers <= 32
    assert found.shared_bytes == found.spills == 0
    assert ".reqntid 32" in found.ptx, "one warp"


@pytest.mark.parametrize("capability", ["6.0", *machine.CAPABILITIES])
def test_signals_compile_where_kernels_are_said_to_run(capability: str):
    number = int(capability.replace(".", ""))
    constants = {"ADVANCE": True, "LANES": 32}
    types = SIGNAL_TYPES | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=signal_kernel, signature=types, constexprs=constants)
    refused = capability not in machine.CAPABILITIES
    with pytest.raises(PTXASError, match="target sm_70") if refused else nullcontext():
        built = triton.compile(source, target=GPUTarget("cuda", number, 32))
        assert built.asm["cubin"]


REDUCE_TYPES = {
    "slots_ptr": "*{}", "own_ptr": "*{}", "bias_ptr": "*{}", "out_ptr": "*{}",
    "order_ptr": "*i64", "num_sources": "i32", "rows": "i32", "cols": "i32", "stride_slot": "i32",
    "stride_slots": "i32", "stride_own": "i32", "stride_out": "i32",
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reduce_loads_16_bytes_at_a_time(capability: int, dtype: str):
    types = {name: kind.format(dtype) for name, kind in REDUCE_TYPES.items()}
    constants = {"HAS_BIAS": True, "BLOCK": 1024}
    aligned = tuple(name for name in types if name not in ("num_sources", "rows"))
    found = compiled(reduce_kernel, capability, types, constants, num_warps=4, aligned=aligned)

    accesses = re.findall(r"\b(ld|st)\.global\.(\S+)", found.ptx)
    wide = {"v4.b32", "v2.b64"}
    # the number of a slot is one word for the whole block
    assert [kind for kind in accesses if kind[1] not in wide] == [("ld", "b64")]
    assert {op for op, size in accesses if size in wide} == {"ld", "st"}
    assert not found.spills
    assert found.shared_bytes == 0
    assert found.registers <= 64  # 8 blocks of 128 threads on an SM, and more


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reduce_of_any_width_compiles(capability: int):
    """The last column of an odd width: nothing is a multiple of anything."""
    types = {name: kind.format("bf16") for name, kind in REDUCE_TYPES.items()}
    constants = {"HAS_BIAS": False, "BLOCK": 1024}
    found = compiled(reduce_kernel, capability, types, constants, num_warps=4)
    assert not found.spills


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_delay_reads_the_clock_until_it_has_passed(capability: int):
    types = {"out_ptr": "*i64", "delay_ns": "i64"}
    found = compiled(delay_kernel, capability, types, {}, num_warps=1)
    body = found.ptx[found.ptx.index(".visible") :]
    same_block = r"(?:(?!\$L__BB).)*"
    loop = rf"(\$L__BB\d+_\d+):{same_block}globaltimer{same_block}bra\s+\1"
    assert re.search(loop, body, re.DOTALL), "no loop reads the clock"
    assert found.shared_bytes == found.spills == 0


@pytest.mark.parametrize("tile", [(64, 64, 32), (128, 128, 64)])
def test_the_subject_of_shaping_leaves_room_for_it(tile: tuple[int, int, int]):
    """Several blocks per SM, nothing spilled: shared memory can bring the number down."""
    block_m, block_n, block_k = tile
    types = {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "y_ptr": "*bf16",
        "M": "i32",
        "N": "i32",
        "K": "i32",
    }
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}
    found = compiled(
        matmul_kernel, 90, types, constants, num_warps=4 if block_m == 64 else 8,
        aligned=tuple(types),
    )  # fmt: skip
    assert not found.spills
    assert 32 <= found.registers <= 128 if block_m == 64 else found.registers <= 255


EXCHANGE_TYPES = {"source_ptr": "*i32", "bases_ptr": "*i64", "rank": "i32", "ranks": "i32",
                  "part": "i32", "source_stride": "i32"}  # fmt: skip


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_exchange_stores_16_bytes_at_a_time(capability: int):
    aligned = ("source_ptr", "bases_ptr", "part", "source_stride")
    found = compiled(exchange_kernel, capability, EXCHANGE_TYPES, {"BLOCK": 2048}, num_warps=4,
                     aligned=aligned)  # fmt: skip
    accesses = re.findall(r"\b(ld|st)\.global\.(\S+)", found.ptx)
    wide = {"v4.b32", "v2.b64"}
    # the address of a peer's memory is one word for the whole block
    assert [kind for kind in accesses if kind[1] not in wide] == [("ld", "b64")]
    assert {op for op, size in accesses if size in wide} == {"ld", "st"}
    assert found.spills == found.shared_bytes == 0
    assert found.registers <= 64


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_exchange_of_any_part_compiles(capability: int):
    found = compiled(exchange_kernel, capability, EXCHANGE_TYPES, {"BLOCK": 2048}, num_warps=4,
                     aligned=("source_ptr", "bases_ptr"))  # fmt: skip
    assert not found.spills
