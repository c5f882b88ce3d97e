"""embedding_all_to_all compiled without a GPU: order of memory, width of loads, registers."""

import re
from functools import cache

import pytest
import triton.language as tl

from counterpoint.kernels.embedding_all_to_all import embedding_all_to_all_kernel, lookup_kernel
from counterpoint.ops.embedding_kernels import Setting, settings_of
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.runtime.embedding_layout import VECTOR_BYTES
from counterpoint.runtime.limits import LIMITS
from counterpoint.runtime.occupancy import Kernel, occupancy
from counterpoint.testing.ptx import (
    ACQUIRE,
    BARRIER,
    CAPABILITIES,
    PAYLOAD,
    RELEASE,
    Compiled,
    compiled,
)

ARRIVAL = r"\batom\.global\.gpu\.acq_rel\.add|\batom\.global\.acq_rel\.gpu"
PROBLEM = Problem("embedding_bag_all_to_all", 8, tables=((8,), (8,)))
FEW, SOME, MANY = settings_of(build(PROBLEM, "fused").steps[0])
ROW = r"\bld\.global\.v4\.b32"
OWN = ("chunks_ptr", "starts_ptr", "outs_ptr", "flags_ptr", "state_ptr",
       "fault_ptr", "one_ptr")  # fmt: skip
NUMBERS = ("num_bags", "num_indices", "num_offsets", "num_chunks", "stride", "blocks", "half",
           "half_flags", "turn", "rank", "tag")  # fmt: skip


@cache
def kernel(
    capability: int, block_d: int, dtype: tl.dtype = tl.bfloat16, setting: Setting = MANY, *,
    weighted: bool = False, even: bool = True, vec: int = 0, ranks: int = 4,
) -> Compiled:  # fmt: skip
    item_bytes = dtype.primitive_bitwidth // 8
    types = {"indices_ptr": "*i64", "weights_ptr": f"*{dtype.name}" if weighted else "*i64",
             "offsets_ptr": "*i64", "one_ptr": "*fp32", "chunks_ptr": "*i64", "starts_ptr": "*i32",
             "outs_ptr": "*i64", "flags_ptr": "*i64", "state_ptr": "*i32",
             "fault_ptr": "*i64"}  # fmt: skip
    types |= dict.fromkeys(NUMBERS, "i32") | {"timeout_ns": "i64"}
    vec = vec or VECTOR_BYTES // item_bytes
    constants = {
        "WORLD": ranks, "LANES": ranks, "DTYPE": dtype, "MEAN": False, "WEIGHTED": weighted,
        "BAGS": setting.tile_bytes // item_bytes // block_d, "BLOCK_D": block_d, "EVEN_D": even,
        "VEC_IN": vec, "VEC_OUT": vec, "UNROLL": setting.unroll,
    }  # fmt: skip
    return compiled(
        embedding_all_to_all_kernel, capability, types, constants, num_warps=setting.num_warps,
        aligned=OWN,
    )  # fmt: skip


def at(ptx: str, pattern: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, ptx)]


def wrong_order(ptx: str) -> list[str]:
    """What of the order does not hold: rows < barrier < arrival < barrier < flag; then the wait."""
    rows, arrivals, flags, waits = (at(ptx, p) for p in (PAYLOAD, ARRIVAL, RELEASE, ACQUIRE))
    found = [
        f"{len(some)} {name}"
        for name, some in (("arrivals", arrivals), ("flags", flags), ("waits", waits))
        if len(some) != 1
    ]
    if found:
        return found
    steps = [("rows", rows[-1]), ("arrival", arrivals[0]), ("flag", flags[0])]
    for (before, start), (behind, stop) in zip(steps, steps[1:], strict=False):
        if not start < stop or not re.search(BARRIER, ptx[start:stop]):
            found.append(f"no barrier between {before} and {behind}")
    if waits[0] < flags[0]:
        found.append("a wait before the flag")
    return found


@pytest.mark.shows("embedding_bag_all_to_all", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("setting", [FEW, SOME, MANY], ids=["few", "some", "many"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_flag_publishes_the_rows_of_all_programs(capability: int, setting: Setting):
    """The arrival of each program releases its rows and acquires those of the ones before it."""
    ptx = kernel(capability, 128, setting=setting, weighted=setting == SOME).ptx
    assert not wrong_order(ptx)
    # of GPU scope is what stays on the rank: who is done, whether to stop, who says so, who has
    # ended
    own = re.findall(r"\b(?:atom|red)\.\S*\.(?:gpu|cta)\.\S+", ptx)
    kinds = [re.search(r"\.(or|cas|add)\.", name)[1] for name in own]  # type: ignore[index]
    assert kinds == ["add", "or", "cas", "add"], own
    assert not re.search(r"cp\.async\.bulk", ptx), "a bulk store may be overtaken by its flag"


def test_planted_faults_show():
    ptx = kernel(90, 128).ptx
    assert wrong_order(re.sub(r".*\bbar\.sync.*\n", "", ptx)) == [
        "no barrier between rows and arrival", "no barrier between arrival and flag",
    ]  # fmt: skip
    assert wrong_order(re.sub(r"gpu\.acq_rel|acq_rel\.gpu", "gpu.relaxed", ptx)) == ["0 arrivals"]
    assert wrong_order(re.sub(r"sys\.release|release\.sys", "gpu.release", ptx)) == ["0 flags"]


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize("block_d", [64, 128, 256])
@pytest.mark.parametrize("setting", [FEW, SOME, MANY], ids=["few", "some", "many"])
def test_rows_are_loaded_and_stored_16_bytes_at_a_time(
    setting: Setting, block_d: int, dtype: tl.dtype
):
    """Whatever the width; all loads of a turn stand before its sums, and nothing spills."""
    for even in (True, False):
        found = kernel(90, block_d, dtype, setting, even=even)
        assert not re.search(r"\bld\.global(\.v2)?\.b(16|32) \{[^}]*,", found.ptx)
        loads, stores = at(found.ptx, ROW), at(found.ptx, PAYLOAD)
        each = setting.tile_bytes // VECTOR_BYTES // (32 * setting.num_warps)
        assert len(stores) == each and len(loads) >= each * (setting.unroll + 1)
        # of the machine code: the assembler would put each sum behind its load, if it could
        names = re.findall(r"\b(FADD|FFMA|FMUL|LDG\.E\.128)\b", found.sass)
        order = "".join("l" if name.startswith("LDG") else "s" for name in names)
        assert order.startswith("l" * each * setting.unroll + "s"), order
        # some numbers of a task are kept in memory, but not among the loads of a turn
        turn = slice(*(at(found.sass, r"LDG\.E\.128")[i] for i in (0, each * setting.unroll - 1)))
        assert not at(found.sass[turn], r"\b(STL|LDL)\b") and found.spills <= 8


@pytest.mark.parametrize("setting", [FEW, SOME, MANY], ids=["few", "some", "many"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_lookup_loads_and_stores_16_bytes_at_a_time(capability: int, setting: Setting):
    types = {"indices_ptr": "*i64", "weights_ptr": "*i64", "offsets_ptr": "*i64",
             "one_ptr": "*fp32", "chunks_ptr": "*i64", "spans_ptr": "*i32",
             "out_ptr": "*bf16"}  # fmt: skip
    numbers = ("num_bags", "num_indices", "num_offsets", "num_chunks", "stride", "blocks", "spans")
    constants = {
        "DTYPE": tl.bfloat16, "MEAN": False, "WEIGHTED": False, "EVEN_D": True, "BLOCK_D": 128,
        "BAGS": setting.tile_bytes // 256, "VEC_IN": 8, "VEC_OUT": 8, "UNROLL": setting.unroll,
    }  # fmt: skip
    found = compiled(
        lookup_kernel, capability, types | dict.fromkeys(numbers, "i32"), constants,
        num_warps=setting.num_warps, aligned=("one_ptr", "chunks_ptr", "spans_ptr", "out_ptr"),
    )  # fmt: skip
    each = setting.tile_bytes // VECTOR_BYTES // (32 * setting.num_warps)
    loads, stores = at(found.ptx, ROW), at(found.ptx, PAYLOAD)
    assert len(stores) == each and len(loads) >= each * (setting.unroll + 1)
    assert not found.spills and not at(found.ptx, rf"{ARRIVAL}|{RELEASE}|{ACQUIRE}")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("block_d", [64, 128, 256])
def test_enough_rows_are_on_their_way(capability: int, block_d: int):
    """Of an SM: what covers a microsecond of 4.8 TB/s over 132 SMs, twice where bags are long."""
    for setting, times in ((FEW, 1.5), (SOME, 2), (MANY, 2)):
        found = kernel(capability, block_d, setting=setting)
        block = Kernel(
            32 * setting.num_warps, found.registers, found.shared_bytes, found.dynamic_bytes
        )
        blocks = occupancy(block, LIMITS[f"sm_{capability}"]).blocks
        assert blocks * setting.tile_bytes * setting.unroll >= times * 1e-6 * 4.8e12 / 132, found[
            1:5
        ]


def test_settings_go_by_the_mean_of_bags():
    assert [each.below for each in (FEW, SOME, MANY)] == [15, 50, float("inf")]
    assert settings_of(build(PROBLEM, "serial").steps[0]) == (FEW, SOME, MANY)


@pytest.mark.parametrize(("vec", "width"), [(4, "b64"), (1, "b16")])
def test_narrow_dims_have_narrow_loads(vec: int, width: str):
    """Those of 4 or 1 elements of 16 bits: nothing is read beyond a row."""
    ptx = kernel(90, 128, even=False, vec=vec).ptx
    wide = {"b64": r"\bld\.global\.(v2\.b32|b64)", "b16": r"\bld\.global\.b16"}[width]
    assert at(ptx, wide) and not at(ptx, ROW) and not at(ptx, PAYLOAD)
