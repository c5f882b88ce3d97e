"""Kernels whose flags publish rows, compiled: order of memory, 16 bytes at a time, tensor cores."""

import re

import pytest
import triton.language as tl
from kernel_code import COUNTED, at, blocks_of, code, parted, wide

from counterpoint.embedding.kernel_lookups import embedding_all_to_all_kernel, lookup_kernel
from counterpoint.embedding.launch_lookups import Setting, settings_of
from counterpoint.embedding.layout import VECTOR_BYTES
from counterpoint.experts.fused.kernel_combine import (
    arrival_kernel,
    matmul_all_to_all_kernel,
    send_sums_kernel,
)
from counterpoint.experts.fused.kernel_dispatch import all_to_all_matmul_kernel
from counterpoint.experts.fused.memory import block_of as blocks_of_weights
from counterpoint.experts.fused.plan_fused import Sending, Tile, sending_of, tile_of
from counterpoint.experts.routes.kernel_rows import spoil_kernel
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.testing.ptx import (
    ACQUIRE,
    BARRIER,
    CAPABILITIES,
    PAYLOAD,
    RELEASE,
    Compiled,
    in_order,
    lines_with,
)

MODELS = {
    "DeepSeek-V3": (32, 7168, 2048), "Qwen3-235B": (16, 4096, 1536), "Mixtral": (1, 4096, 14336),
}  # fmt: skip
TMA = r"cp\.async\.bulk\.tensor"
PROXY = r"fence\.proxy\.async\.global"


def experts(
    tile: Tile, *, back: bool, ranks: int = 4, columns: bool = True, tokens: bool = False,
    gated: bool = False,
) -> Compiled:  # fmt: skip
    """As a launch on a Hopper would compile it; TMA is there from capability 90 on.

    Args:
        tokens: rows go by routes.
        gated: gate and up are multiplied, and silu(gate) * up is stored.
    """
    x = f"tensordesc<bf16[{tile.block_m}, {tile.block_k}]>"
    block = blocks_of_weights(tile, columns, gated)
    types = {"w_desc": f"tensordesc<bf16{block}>"}
    way = Sending(parts=max(1, 32 // ranks))
    constants = {
        "WORLD": ranks, "EXPERTS": 32, "COLUMNS": columns, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m,
        "STAGES": tile.stages, "num_warps": tile.num_warps, "num_stages": tile.stages,
    }  # fmt: skip
    if back:
        return code(
            matmul_all_to_all_kernel, types={"x_desc": x} | types,
            sizes="N K half_bytes half_flags", HAS_ADD=False, LOCAL=tokens, **constants,
        )  # fmt: skip
    return code(
        all_to_all_matmul_kernel, types={"received_desc": x} | types, sizes="N K words half_flags",
        SENDERS=way.senders, PARTS=way.parts, CHUNK=way.words, TOKEN_WORDS=4096 * tokens,
        GATED=gated, **constants,
    )  # fmt: skip


def test_flags_publish_what_stands_before_them():
    """There: stores, barrier, release; acquire, barrier, the fence between proxies, TMA."""
    ptx = experts(Tile(), back=False).ptx
    assert lines_with(ptx, PAYLOAD) and lines_with(ptx, RELEASE)
    blocks = re.split(r"^\$L__BB\S+:", ptx, flags=re.M)
    (sending,) = (b for b in blocks if re.search(RELEASE, b))
    assert in_order(sending.partition("release")[0] + "release", BARRIER, "release")
    waits = [b for b in blocks if re.search(ACQUIRE, b)]
    assert len(waits) == 2 and all(in_order(b, ACQUIRE, BARRIER) for b in waits)
    seen, fence, load = (lines_with(ptx, pattern)[0] for pattern in (ACQUIRE, PROXY, TMA))
    assert seen <= fence <= load, "rows are loaded before their flags are seen"
    assert any(re.search(BARRIER, line) for line in ptx.splitlines()[seen:fence])


def test_the_last_program_publishes_what_all_have_stored():
    """Back: stores, barrier, a count of device scope, and only then flags of system scope."""
    ptx = experts(Tile(), back=True).ptx
    assert parted(ptx, PAYLOAD, COUNTED, RELEASE)
    assert len(lines_with(ptx, COUNTED)) == len(lines_with(ptx, RELEASE)) == 1
    assert re.search(ACQUIRE, code(arrival_kernel, plain="all", num_warps=1, WORLD=4).ptx)


@pytest.mark.drawn(4)
@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "compiled for", "sm_90")
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize(
    ("ranks", "columns", "by_routes"),
    [(2, True, False), (2, False, False), (8, True, False), (8, False, False), (8, True, True)],
)
@pytest.mark.parametrize("tokens", [256, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_experts_are_multiplied_by_tensor_cores(
    model: str, tokens: int, ranks: int, columns: bool, by_routes: bool, back: bool
):
    """One block for each SM at least; wgmma fed by TMA; 16 bytes to the peers; nothing spills.

    But some addresses, on the way back between 2 ranks. Rows by routes are taken where they lie.
    """
    local, hidden, ffn = MODELS[model]
    k, n = (ffn, hidden) if back else (hidden, 2 * ffn)
    tile = tile_of(8 * tokens, k, n, local, combines=back)
    gated = by_routes and not back
    found = experts(tile, back=back, ranks=ranks, columns=columns, tokens=by_routes, gated=gated)
    assert found.spills <= (24 if back and ranks == 2 else 0)
    assert re.search(r"wgmma\.mma_async", found.ptx) and re.search(TMA, found.ptx)
    if by_routes:
        assert back or re.search(r"cp\.async\.cg\.shared\.global .*\], 0x10,", found.ptx)
    else:
        assert lines_with(found.ptx, PAYLOAD)
    assert not lines_with(found.ptx, r"\bst\.global\.b16"), "rows are stored element by element"
    assert blocks_of(found, tile.num_warps) >= 1


def test_sums_are_sent_16_bytes_at_a_time():
    """And behind the last of them go the flags."""
    found = code(
        send_sums_kernel, pointers={"bf16": "product"}, sizes="N half_bytes half_flags", WORLD=8,
        PAIRS=256, TOP=8, WEIGHTED=True, BLOCK_N=2048,
    )  # fmt: skip
    stores, counted, releases = (lines_with(found.ptx, p) for p in (PAYLOAD, COUNTED, RELEASE))
    assert stores[-1] < counted[0] < releases[0] and found.spills == 0
    for move in ("ld", "st"):
        assert lines_with(found.ptx, rf"\b{move}\.global.*\.v4\.b32")
    assert not lines_with(found.ptx, r"\bst\.global\.b16")


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_kernels_of_an_island_are_compiled_for_one_rank_too(back: bool):
    found = experts(Tile(), back=back, ranks=1, tokens=True)
    assert found.spills == 0 and re.search(r"wgmma\.mma_async", found.ptx)


def test_what_spoils_results_stores_two_words():
    """On an island, where another one has too many rows."""
    ptx = code(spoil_kernel, pointers={"i64": "word"}, plain="all", num_warps=1, BACK=True).ptx
    stores = [re.search(r"\bst\.global\S*\.b(32|64)", line) for line in ptx.splitlines()]
    assert [found[1] for found in stores if found] == ["32", "64"]


def test_senders_are_resident_beside_a_librarys_collective():
    """All that is waited for is resident where 32 SMs are another's."""
    for ranks in (2, 4, 8, 16, 32):
        for rows, local in ((64, 1), (65536, 1), (256, 16), (65536, 32)):
            way = sending_of(rows, local, ranks)
            assert way.senders <= 132 - 32 and way.parts & (way.parts - 1) == 0
            assert way.parts * ranks <= 256  # flags that a block of threads polls at a time


BAGS = Problem("embedding_bag_all_to_all", 8, tables=((8,), (8,)))
FEW, SOME, MANY = settings_of(build(BAGS, "fused").steps[0])
SETTINGS = pytest.mark.parametrize("setting", [FEW, SOME, MANY], ids=["few", "some", "many"])
ROW = r"\bld\.global\.v4\.b32"


def bags(
    block_d: int, setting: Setting, capability: int = 90, *, dtype: tl.dtype = tl.bfloat16,
    weighted: bool = False, even: bool = True, vec: int = 0, ranks: int = 4,
) -> Compiled:  # fmt: skip
    """The pooling of bags; of no ranks: a lookup, which stays where it is."""
    item_bytes = dtype.primitive_bitwidth // 8
    vec = vec or VECTOR_BYTES // item_bytes
    of_ranks = {"WORLD": ranks, "LANES": ranks} if ranks else {}
    return code(
        embedding_all_to_all_kernel if ranks else lookup_kernel, capability, dtype=dtype.name,
        pointers={dtype.name if weighted else "i64": "weights"}, num_warps=setting.num_warps,
        plain="indices weights offsets", DTYPE=dtype, MEAN=False, WEIGHTED=weighted,
        BAGS=setting.tile_bytes // item_bytes // block_d, BLOCK_D=block_d, EVEN_D=even, VEC_IN=vec,
        VEC_OUT=vec, UNROLL=setting.unroll, **of_ranks,
    )  # fmt: skip


def wrong_order(ptx: str) -> list[str]:
    """What of the order does not hold: rows < barrier < arrival < barrier < flag; then the wait."""
    rows, arrivals, flags, waits = (at(ptx, p) for p in (PAYLOAD, COUNTED, RELEASE, ACQUIRE))
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


@pytest.mark.drawn(4)
@pytest.mark.shows("embedding_bag_all_to_all", "compiled for", "sm_80 sm_90 sm_100")
@SETTINGS
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_flag_publishes_the_rows_of_all_programs(capability: int, setting: Setting):
    """The arrival of each program releases its rows and acquires those of the ones before it."""
    ptx = bags(128, setting, capability, weighted=setting == SOME).ptx
    assert not wrong_order(ptx)
    # of GPU scope is what stays on the rank: who is done, whether to stop, who says so, who has
    # ended
    own = re.findall(r"\b(?:atom|red)\.\S*\.(?:gpu|cta)\.\S+", ptx)
    kinds = [re.search(r"\.(or|cas|add)\.", name)[1] for name in own]  # type: ignore[index]
    assert kinds == ["add", "or", "cas", "add"], own
    assert not re.search(r"cp\.async\.bulk", ptx), "a bulk store may be overtaken by its flag"


def test_planted_faults_show():
    ptx = bags(128, MANY).ptx
    assert wrong_order(re.sub(r".*\bbar\.sync.*\n", "", ptx)) == [
        "no barrier between rows and arrival", "no barrier between arrival and flag",
    ]  # fmt: skip
    assert wrong_order(re.sub(r"gpu\.acq_rel|acq_rel\.gpu", "gpu.relaxed", ptx)) == ["0 arrivals"]
    assert wrong_order(re.sub(r"sys\.release|release\.sys", "gpu.release", ptx)) == ["0 flags"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize("block_d", [64, 128, 256])
@pytest.mark.parametrize("even", [True, False])
@SETTINGS
def test_rows_are_loaded_and_stored_16_bytes_at_a_time(
    setting: Setting, even: bool, block_d: int, dtype: tl.dtype
):
    """Whatever the width; all loads of a turn stand before its sums, and nothing spills."""
    found = bags(block_d, setting, dtype=dtype, even=even)
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


@pytest.mark.drawn(4)
@SETTINGS
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_lookup_loads_and_stores_16_bytes_at_a_time(capability: int, setting: Setting):
    found = bags(128, setting, capability, ranks=0)
    each = setting.tile_bytes // VECTOR_BYTES // (32 * setting.num_warps)
    wide(found, stores=each)
    assert len(at(found.ptx, ROW)) >= each * (setting.unroll + 1)
    assert not at(found.ptx, rf"{COUNTED}|{RELEASE}|{ACQUIRE}")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("block_d", [64, 128, 256])
@SETTINGS
def test_enough_rows_are_on_their_way(setting: Setting, block_d: int, capability: int):
    """Of an SM: what covers a microsecond of 4.8 TB/s over 132 SMs, twice where bags are long."""
    found = bags(block_d, setting, capability)
    rows = blocks_of(found, setting.num_warps, capability) * setting.tile_bytes * setting.unroll
    assert rows >= (1.5 if setting == FEW else 2) * 1e-6 * 4.8e12 / 132, found[1:5]


def test_settings_go_by_the_mean_of_bags():
    assert [each.below for each in (FEW, SOME, MANY)] == [15, 50, float("inf")]
    assert settings_of(build(BAGS, "serial").steps[0]) == (FEW, SOME, MANY)


@pytest.mark.parametrize(("vec", "width"), [(4, r"(v2\.b32|b64)"), (1, "b16")])
def test_narrow_dims_have_narrow_loads(vec: int, width: str):
    """Those of 4 or 1 elements of 16 bits: nothing is read beyond a row."""
    ptx = bags(128, MANY, even=False, vec=vec).ptx
    assert at(ptx, rf"\bld\.global\.{width}") and not at(ptx, ROW) and not at(ptx, PAYLOAD)
