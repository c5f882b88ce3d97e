"""all_gather_matmul in one kernel: all orders of its programs, ranks that share memory, its PTX."""

import re
import warnings
from typing import Any

import pytest
import torch
from late import GIVES_UP, TIMEOUT_S, looks_of
from memories import GUARD, guarded, left, memories
from planted import post_relaxed, post_too_few, same_epoch
from ptx import ACQUIRE, CAPABILITIES, PAYLOAD, RELEASE, Compiled, compiled, lines_with, wrong_order
from rank_bodies import world
from rankpool import RankPool

from counterpoint.kernels import all_gather_matmul as kernels
from counterpoint.resources.limits import LIMITS
from counterpoint.resources.occupancy import Kernel, occupancy
from counterpoint.runtime.compute import all_gather
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.launch_gather import (
    Gathered,
    constants_of,
    gather_way,
    launch_of,
    reserve,
    where,
)
from counterpoint.runtime.workspace import workspace_of

WAY = Gathered(16, 16, 1, 4, slices=2)
# (m of each rank, n, k), without a meeting between calls: of one size, and of sizes that differ
SAME = ((2, 32, 16),) * 4
MIXED = ((1, 16, 16), (4, 48, 16), (2, 16, 32), (4, 48, 16), (1, 32, 16))
FAULTS = {"relaxed": ("post", post_relaxed), "few": ("post", post_too_few),
          "epoch": ("next_epoch", same_epoch)}  # fmt: skip


def errors_of(
    rank: int, world: int, ranks: int, seeds: range, fault: str,
    shapes: tuple[tuple[int, int, int], ...],
) -> list[str]:  # fmt: skip
    """What went wrong for each seed: a deadlock, or calls whose product is off; "" if nothing."""
    from interleave import DeadlockError, Interleaved

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            patch.setattr(kernels, *FAULTS[fault])
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            torch.manual_seed(seed)
            each = memories(ranks, 2 * 4 * ranks * max(m * k for m, _, k in shapes) + 4096)
            calls = [
                (torch.randn(ranks, m, k), torch.randn(ranks, k, n),
                 [guarded(ranks * m * n, torch.nan) for _ in range(ranks)]) for m, n, k in shapes
            ]  # fmt: skip

            def run(r: int, each: Any = each, calls: Any = calls) -> None:
                for x, w, rooms in calls:
                    if fault == "halves":  # a half as large as the call, not as the memory
                        each[r].tiles.half_bytes = 4 * x.numel()
                    y = rooms[r][GUARD:-GUARD].view(-1, w.shape[2])
                    launch = launch_of(WAY, each[r], where(each[r]), 0, x[r], w[r], None)
                    launch(x[r], w[r], None, y)

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off = [
                (i, r) for i, (x, w, rooms) in enumerate(calls) for r, room in enumerate(rooms)
                if not torch.allclose(
                    room[GUARD:-GUARD].view(-1, w.shape[2]), x.flatten(0, 1) @ w[r], atol=1e-4
                )
            ]  # fmt: skip
            wrong = f"calls {off} are off" if off else ""
            found.append(wrong or left(each[0], [room for *_, rooms in calls for room in rooms]))
    return found


@pytest.mark.parametrize("shapes", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_order_gives_the_product(
    pool: RankPool, ranks: int, shapes: tuple[tuple[int, int, int], ...]
):
    """No order of programs and stores mixes up calls, of whatever sizes."""
    seeds = range(1 if ranks == 4 else 4)
    run = pool.run(errors_of, 1, ranks, seeds, "", shapes, group=False)
    assert run == [[""] * len(seeds)]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("relaxed", "are off"), ("few", "deadlock: nobody can go on"), ("epoch", "are off"),
     ("halves", "are off")],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, fault: str, text: str):
    shapes = MIXED if fault == "halves" else SAME
    arguments = (2, range(30), fault, shapes)
    (found,) = pool.run(errors_of, 1, *arguments, group=False)
    assert any(text in problem for problem in found), found


def wrong_products(rank: int, ranks: int, epoch: int) -> list[str]:
    """Calls of several sizes on one memory, three times: errors beyond twice torch's."""
    memory = FusedMemory(workspace_of(world(), torch.device("cpu")))
    memory.state[0] = epoch
    found: list[str] = []
    for (m, n, k), dtype, biased, transposed in [
        ((1, 64, 64), torch.float16, False, True),
        ((3, 56, 40), torch.float32, True, False),  # nothing divides
        ((5, 16, 24), torch.float16, True, True),
    ]:
        reserve(WAY, memory, ranks * m, k, dtype.itemsize)
        for call in range(3):
            x = torch.randn(m, k).to(dtype)
            w = torch.randn(n, k).to(dtype).t() if transposed else torch.randn(k, n).to(dtype)
            bias = torch.randn(n).to(dtype) if biased else None
            y = torch.full((ranks * m, n), torch.nan, dtype=dtype)
            with warnings.catch_warnings():
                # the interpreter's own: it takes the bound of a loop from an array of one element
                warnings.simplefilter("ignore", DeprecationWarning)
                launch = launch_of(WAY, memory, where(memory), 0, x, w, bias)
                launch.programs = min(launch.programs, 4)  # fewer than tiles, two that send
                launch(x, w, bias, y)
            full = torch.empty(ranks * m, k, dtype=dtype)
            all_gather(full, x)
            want, plain = full.double() @ w.double(), full @ w
            if bias is not None:
                want, plain = want + bias, plain + bias
            error, least = ((t.double() - want).norm() / want.norm() for t in (y, plain))
            if not error <= 2 * least + 1e-7:
                found.append(f"{m},{n},{k} {dtype} call {call}: {error:.1e}, torch's {least:.1e}")
    assert not memory.fault.any() and memory.state.tolist()[1:] == [0, 0]
    return found


@pytest.mark.parametrize(("ranks", "epoch"), [(1, 0), (2, -2), (2, 2**31 - 2), (4, 0)])
def test_ranks_that_share_memory(pool: RankPool, ranks: int, epoch: int):
    assert pool.run(wrong_products, ranks, epoch) == [[]] * ranks


def late_by_a_call(rank: int, ranks: int) -> list[int]:
    """Rank 1 comes after rank 0 has given up: that one says so, in time, and waits no more."""
    workspace = workspace_of(world(), torch.device("cpu"))
    workspace.timeout_s = TIMEOUT_S
    memory = FusedMemory(workspace)
    reserve(WAY, memory, 2 * ranks, 16, 4)
    x, w, y = torch.randn(2, 16), torch.randn(16, 32), torch.full((4, 32), torch.nan)
    launch = launch_of(WAY, memory, where(memory), 6, x, w, None)
    looks = looks_of(rank, lambda: launch(x, w, None, y))
    fault = int(memory.fault[0])
    return [fault & 0xFFFFFFFF, fault >> 32, looks]


def test_a_rank_that_is_late_is_named(pool: RankPool):
    first, second = pool.run(late_by_a_call, 2)
    assert first == [7, 0b10, GIVES_UP + 1]  # its second tile does not wait
    assert second == [0, 0, 1 + 1]  # what rank 0 had sent before it gave up was there


def kernel(capability: int, way: Gathered, m: int, ranks: int, *, columns: bool = True) -> Compiled:
    """As a launch on contiguous tensors whose sizes tiles divide would compile it."""
    types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), "*bf16")
    types |= {"rows_ptr": "*i64", "flags_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64"}
    one, other = ("stride_wk", "stride_wn") if columns else ("stride_wn", "stride_wk")
    types |= dict.fromkeys(("m", "N", "K", "part", other, "half_bytes", "half_flags", "rank", "tag",
                            "timeout_ns"), "i32")  # fmt: skip
    x, w = torch.empty(m, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    constants = constants_of(way, ranks, x, w.t() if columns else w, None) | {one: 1}
    return compiled(
        kernels.all_gather_matmul_kernel, capability, types, constants,
        num_warps=way.num_warps, num_stages=way.stages,
        aligned=tuple(n for n in types if n not in ("m", "rank", "tag", "timeout_ns")),
    )  # fmt: skip


BEFORE = r"\A"  # what is stored stands in a loop of its own, in another block than the release
LOAD = r"\bcp\.async\.c[ag]\.shared"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_flags_publish_what_stands_before_them(capability: int):
    """A barrier before the release, behind the stores' loop; acquire < barrier < loads of rows."""
    ptx = kernel(capability, Gathered(stages=4), 16, 4).ptx
    stores, releases, acquires, loads = (
        lines_with(ptx, pattern) for pattern in (PAYLOAD, RELEASE, ACQUIRE, LOAD)
    )
    assert stores[0] < acquires[0] and releases[-1] < acquires[0]
    assert acquires[-1] < loads[0], "rows are read, and w brought to shared memory, after the wait"
    assert not wrong_order(ptx, payload=BEFORE)
    for fault in (re.sub(r".*\bbar\.sync.*\n", "", ptx), ptx.replace("sys.release", "gpu.release"),
                  ptx.replace("sys.acquire", "gpu.acquire")):  # fmt: skip
        assert wrong_order(fault, payload=BEFORE)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("n", [1280, 4096, 7168])
@pytest.mark.parametrize(("m", "ranks"), [(8, 2), (32, 2), (16, 4), (8, 8), (2, 32)])
def test_what_it_is_compiled_to(m: int, ranks: int, n: int, columns: bool):
    """16 bytes at a time to the peers and from w; nothing spills, all programs are resident."""
    way = gather_way(m * ranks, n, 8192, ranks, 2, 132)
    found = kernel(90, way, m, ranks, columns=columns)
    assert re.search(r"\bst\.global\S*v4\.b32", found.ptx) and not found.spills
    if way.block_n * 2 >= 16 * 2:  # bytes of a row of the tile
        assert re.search(
            r"cp\.async\.cg\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*0x10", found.ptx
        )
    block = Kernel(32 * way.num_warps, found.registers, 0, found.dynamic_bytes)
    assert occupancy(block, LIMITS["sm_90"]).blocks * (132 - 32) >= n // way.block_n + way.slices
