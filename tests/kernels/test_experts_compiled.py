"""Experts in one kernel, compiled: order of memory, 16 bytes at a time, tensor cores fed by TMA."""

import re

import pytest

from counterpoint.kernels.all_to_all_matmul import all_to_all_matmul_kernel, clear_kernel
from counterpoint.kernels.matmul_all_to_all import (
    arrival_kernel,
    collect_kernel,
    matmul_all_to_all_kernel,
    send_sums_kernel,
)
from counterpoint.kernels.routes import spoil_kernel
from counterpoint.plan.fused_experts import Sending, Tile, sending_of, tile_of
from counterpoint.runtime.limits import LIMITS
from counterpoint.runtime.occupancy import Kernel, occupancy
from counterpoint.testing.ptx import (
    ACQUIRE,
    BARRIER,
    PAYLOAD,
    RELEASE,
    Compiled,
    compiled,
    in_order,
    lines_with,
)

SIZES = {
    "DeepSeek-V3": (32, 7168, 2048),
    "Qwen3-235B": (16, 4096, 1536),
    "Mixtral": (1, 4096, 14336),
}
POINTERS = {"routes_ptr": "*i32", "rows_ptr": "*i64", "flags_ptr": "*i64", "state_ptr": "*i32"}
LISTS = {"moves_ptr": "*i32", "sent_ptr": "*i32", "index_ptr": "*i32"}
COUNTED = r"\batom\.global\.gpu\.acq_rel\.add|\batom\.global\.acq_rel\.gpu"
TMA = r"cp\.async\.bulk\.tensor"
PROXY = r"fence\.proxy\.async\.global"


def constants_of(tile: Tile) -> tuple[int, ...]:
    return tile.block_m, tile.block_n, tile.block_k, tile.group_m, tile.stages


def kernel(
    tile: Tile, *, back: bool, ranks: int = 4, columns: bool = True, tokens: bool = False
) -> Compiled:  # fmt: skip
    """As a launch on a Hopper would compile it; TMA is there from capability 90 on.

    Args:
        tokens: rows go by routes.
    """
    block = [tile.block_n, tile.block_k] if columns else [tile.block_k, tile.block_n]
    x = f"tensordesc<bf16[{tile.block_m}, {tile.block_k}]>"
    w = f"tensordesc<bf16[1, {block[0]}, {block[1]}]>"
    way = Sending(parts=max(1, 32 // ranks))
    shared = (ranks, 32, columns)
    if back:
        names = ("R", "N", "K", "E", "half_bytes", "half_flags", "limit", "rank")
        types = {"x_desc": x, "w_desc": w, "add_ptr": "*bf16", "product_ptr": "*bf16", **POINTERS}
        fn, constants = matmul_all_to_all_kernel, (*shared, False, *constants_of(tile), tokens)
    else:
        names = ("T", "N", "K", "E", "words", "half_rows", "half_flags", "limit", "room",
                 "rank", "tag", "timeout_ns")  # fmt: skip
        types = {"x_ptr": "*bf16", "received_desc": x, "w_desc": w, "y_ptr": "*bf16",
                 "routes_ptr": "*i32", **LISTS, **POINTERS, "fault_ptr": "*i64"}  # fmt: skip
        fn = all_to_all_matmul_kernel
        words = 4096 if tokens else 0
        constants = (*shared, way.senders, way.parts, way.words, *constants_of(tile), words)
    types |= dict.fromkeys(names, "i32")
    last = fn.arg_names[len(types) :]
    plain = ("R", "T", "rank", "limit", "room", "tag", "timeout_ns", "E", "half_rows",
             "x_desc", "w_desc", "received_desc")  # fmt: skip
    return compiled(
        fn, 90, types, dict(zip(last, constants, strict=True)), num_warps=tile.num_warps,
        num_stages=tile.stages, aligned=tuple(n for n in types if n not in plain),
    )  # fmt: skip


def after(ptx: str, *patterns: str) -> bool:
    """Whether the first of each kind stands behind the first of the kind before."""
    firsts = [lines_with(ptx, pattern)[0] for pattern in patterns]
    return firsts == sorted(firsts)


def test_flags_publish_what_stands_before_them():
    """There: stores, barrier, release; acquire, barrier, the fence between proxies, TMA."""
    ptx = kernel(Tile(), back=False).ptx
    assert lines_with(ptx, PAYLOAD) and lines_with(ptx, RELEASE)
    (sending,) = (b for b in re.split(r"^\$L__BB\S+:", ptx, flags=re.M) if re.search(RELEASE, b))
    assert in_order(sending.partition("release")[0] + "release", BARRIER, "release")
    waits = [b for b in re.split(r"^\$L__BB\S+:", ptx, flags=re.M) if re.search(ACQUIRE, b)]
    assert len(waits) == 2 and all(in_order(b, ACQUIRE, BARRIER) for b in waits)
    assert after(ptx, ACQUIRE, PROXY, TMA), "rows are loaded before their flags are seen"
    between = ptx.splitlines()[lines_with(ptx, ACQUIRE)[0] : lines_with(ptx, PROXY)[0]]
    assert any(re.search(BARRIER, line) for line in between)


def test_the_last_program_publishes_what_all_have_stored():
    """Back: stores, barrier, a count of device scope, and only then flags of system scope."""
    ptx = kernel(Tile(), back=True).ptx
    stores, counted, releases = (lines_with(ptx, p) for p in (PAYLOAD, COUNTED, RELEASE))
    assert stores[-1] < counted[0] < releases[0] and len(counted) == len(releases) == 1
    lines = ptx.splitlines()
    for first, last in ((stores[-1], counted[0]), (counted[0], releases[0])):
        assert any(re.search(BARRIER, line) for line in lines[first:last])
    types = {"flags_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64"}
    types |= dict.fromkeys(("half_flags", "rank", "tag", "timeout_ns"), "i32")
    waits = compiled(arrival_kernel, 90, types, {"WORLD": 4}, num_warps=1).ptx
    assert re.search(ACQUIRE, waits)


@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "compiled for", "sm_90")
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("tokens", [256, 4096])
@pytest.mark.parametrize("model", SIZES)
def test_what_it_is_compiled_to(model: str, tokens: int, columns: bool, ranks: int, back: bool):
    """One block for each SM at least; wgmma fed by TMA; 16 bytes to the peers; nothing spills.

    But some addresses, on the way back between 2 ranks.
    """
    experts, hidden, ffn = SIZES[model]
    k, n = (ffn, hidden) if back else (hidden, 2 * ffn)
    tile = tile_of(8 * tokens, k, n, experts, combines=back)
    found = kernel(tile, back=back, ranks=ranks, columns=columns)
    assert found.spills <= (24 if back and ranks == 2 else 0)
    assert re.search(r"wgmma\.mma_async", found.ptx) and re.search(TMA, found.ptx)
    assert lines_with(found.ptx, PAYLOAD)
    narrow = [line for line in found.ptx.splitlines() if re.search(r"\bst\.global\.b16", line)]
    assert not narrow, "rows are stored element by element"
    block = Kernel(32 * tile.num_warps, found.registers, 0, found.dynamic_bytes)
    assert occupancy(block, LIMITS["sm_90"]).blocks >= 1


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("tokens", [256, 4096])
@pytest.mark.parametrize("model", SIZES)
def test_what_tokens_are_compiled_to(model: str, tokens: int, back: bool):
    """Rows are taken where they lie, 16 bytes at a time, and feed wgmma beside TMA."""
    experts, hidden, ffn = SIZES[model]
    k, n = (ffn, hidden) if back else (hidden, 2 * ffn)
    tile = tile_of(8 * tokens, k, n, experts, combines=back)
    found = kernel(tile, back=back, ranks=8, tokens=True)
    assert found.spills == 0
    assert re.search(r"wgmma\.mma_async", found.ptx) and re.search(TMA, found.ptx)
    assert back or re.search(r"cp\.async\.cg\.shared\.global .*\], 0x10,", found.ptx)
    narrow = [line for line in found.ptx.splitlines() if re.search(r"\bst\.global\.b16", line)]
    assert not narrow, "rows are stored element by element"
    block = Kernel(32 * tile.num_warps, found.registers, 0, found.dynamic_bytes)
    assert occupancy(block, LIMITS["sm_90"]).blocks >= 1


def test_sums_are_sent_16_bytes_at_a_time():
    """And behind the last of them go the flags."""
    types = {"product_ptr": "*bf16", "index_ptr": "*i32", "weights_ptr": "*fp32",
             "moves_ptr": "*i32", "rows_ptr": "*i64", "flags_ptr": "*i64",
             "state_ptr": "*i32"}  # fmt: skip
    aligned = (*types, "N", "half_bytes", "half_flags")
    types |= dict.fromkeys(
        ("N", "E", "half_bytes", "half_flags", "limit", "room", "received", "rank"), "i32"
    )  # fmt: skip
    constants = {"WORLD": 8, "PAIRS": 256, "TOP": 8, "WEIGHTED": True, "BLOCK_N": 2048}
    found = compiled(send_sums_kernel, 90, types, constants, num_warps=4, aligned=aligned)
    stores, counted, releases = (lines_with(found.ptx, p) for p in (PAYLOAD, COUNTED, RELEASE))
    assert stores[-1] < counted[0] < releases[0] and found.spills == 0
    for move in ("ld", "st"):
        assert lines_with(found.ptx, rf"\b{move}\.global.*\.v4\.b32")
    assert not lines_with(found.ptx, r"\bst\.global\.b16")


def test_rows_are_taken_and_zeroed_16_bytes_at_a_time():
    types = {"y_ptr": "*bf16", "routes_ptr": "*i32", "rows": "i32", "count": "i32", "N": "i32"}
    cleared = compiled(
        clear_kernel,
        90,
        types,
        {"BLOCK_N": 2048},
        num_warps=4,
        aligned=("y_ptr", "routes_ptr", "N"),
    )
    types = {"rows_ptr": "*i64", "state_ptr": "*i32", "routes_ptr": "*i32", "index_ptr": "*bf16",
             "weights_ptr": "*bf16", "y_ptr": "*bf16", "over_ptr": "*i64"}  # fmt: skip
    names = ("tokens", "count", "spoils", "N", "half_bytes", "limit", "room", "rank", "clear")
    aligned = (*types, "N", "half_bytes")
    types |= dict.fromkeys(names, "i32")
    constants = {"TOP": 0, "SOME": False, "BLOCK_N": 2048}
    taken = compiled(collect_kernel, 90, types, constants, num_warps=4, aligned=aligned)
    for found, moves in ((cleared, ["st"]), (taken, ["ld", "st"])):
        for move in moves:
            wide = lines_with(found.ptx, rf"\b{move}\.global\.v4\.b32")
            assert wide and not lines_with(found.ptx, rf"\b{move}\.global\.b16")
        assert found.spills == 0


def test_kernels_of_an_island_are_compiled_for_one_rank_too():
    """And what spoils results there stores two words, where another island has too many rows."""
    for back in (False, True):
        found = kernel(Tile(), back=back, ranks=1, tokens=True)
        assert found.spills == 0 and re.search(r"wgmma\.mma_async", found.ptx)
    types = {"word_ptr": "*i64", "routes_ptr": "*i32", "over_ptr": "*i64", "spoils": "i32"}
    ptx = compiled(spoil_kernel, 90, types, {"BACK": True}, num_warps=1).ptx
    stores = [re.search(r"\bst\.global\S*\.b(32|64)", line) for line in ptx.splitlines()]
    assert [found[1] for found in stores if found] == ["32", "64"]


def test_senders_are_resident_beside_a_librarys_collective():
    """All that is waited for is resident where 32 SMs are another's."""
    for ranks in (2, 4, 8, 16, 32):
        for rows, experts in ((64, 1), (65536, 1), (256, 16), (65536, 32)):
            way = sending_of(rows, experts, ranks)
            assert way.senders <= 132 - 32 and way.parts & (way.parts - 1) == 0
            assert way.parts * ranks <= 256  # flags that a block of threads polls at a time
