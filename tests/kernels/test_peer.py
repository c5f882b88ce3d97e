"""Device functions by themselves: a barrier in every order, and compiled."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_code import code, generations
from rankpool import RankPool
from ttgir import all_stop_alike
from turns import Scene, all_right, plant, shown

from counterpoint.kernels import peer
from counterpoint.kernels.peer import barrier, next_epoch, peer_ptr, put
from counterpoint.testing.ptx import ACQUIRE, BARRIER, RELEASE, in_order

WIDTH = 32


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(
    source_ptr, target_ptr, bases_ptr, epoch_ptr, stop_ptr, rank,
    WORLD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """target[r] = what rank r has, [WORLD, WIDTH]; the halves, then the flags of both."""
    epoch = next_epoch(tl.load(epoch_ptr))
    ranks, cols = tl.arange(0, WORLD)[:, None], tl.arange(0, WIDTH)[None, :]
    half = (epoch & 1) * (4 * WORLD * WIDTH)
    to = peer_ptr(bases_ptr, tl.arange(0, WORLD), half, tl.float32)[:, None]
    put(to + (rank * WIDTH + cols), tl.broadcast_to(tl.load(source_ptr + cols), (WORLD, WIDTH)))
    flags = 8 * WORLD * WIDTH + (epoch & 1) * 4 * WORLD
    late = barrier(bases_ptr, flags.to(tl.int64), rank, epoch, stop_ptr, 1 << 60, WORLD)
    place = ranks * WIDTH + cols
    at = peer_ptr(bases_ptr, rank, half, tl.float32) + place
    tl.store(target_ptr + place, tl.load(at, cache_modifier=".cg"))
    tl.store(stop_ptr + 1, tl.sum(late.to(tl.int32)))
    tl.store(epoch_ptr, epoch)


def calls_scene(patch: pytest.MonkeyPatch, seed: int, fault: str, ranks: int) -> Scene:
    """Four calls."""
    plant(patch, fault, peer)
    memory = [torch.zeros(2 * ranks * (WIDTH + 1)) for _ in range(ranks)]
    bases = torch.tensor([m.data_ptr() for m in memory])
    xs, ys = torch.randn(4, ranks, WIDTH), torch.full((4, ranks, ranks, WIDTH), torch.nan)
    words = torch.zeros(ranks, 8, dtype=torch.int32)

    def run(r: int) -> None:
        launch: Any = exchange_kernel
        for x, y in zip(xs, ys, strict=True):
            launch[(1,)](x[r], y[r], bases, words[r], words[r, 2:], r, ranks, WIDTH)

    def off() -> list[Any]:
        wrong = [(i, r) for i in range(4) for r in range(ranks) if not torch.equal(ys[i][r], xs[i])]
        return wrong or (["a wait gave up"] if words[:, 1:].any() else [])

    return Scene([None] * ranks, run, off, memory)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_behind_a_barrier_all_is_seen(pool: RankPool, ranks: int, seed: int):
    all_right(pool, calls_scene, seed, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_barrier_that_publishes_nothing_shows(pool: RankPool, ranks: int):
    shown(pool, calls_scene, "post_relaxed", "are off", ranks, seeds=6)


@pytest.mark.parametrize("capability", generations(1))
def test_a_barrier_releases_and_acquires(capability: int):
    found = code(exchange_kernel, capability, dtype="fp32", pointers={"i32": "epoch stop"},
                 plain="epoch stop", num_warps=1, WORLD=4, WIDTH=WIDTH)  # fmt: skip
    stores = found.ptx.partition("release")[0] + "release"  # those before the release
    assert in_order(stores, r"\bst\.global", BARRIER, "release")
    assert in_order(found.ptx, RELEASE, ACQUIRE, r"\.cg\.") and not found.spills
    assert all_stop_alike(found.ttgir) == 1
