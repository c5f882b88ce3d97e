"""Device functions by themselves: a barrier in every order, and compiled."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from planted import post_relaxed
from rankpool import RankPool
from ttgir import all_stop_alike

from counterpoint.kernels import peer
from counterpoint.kernels.peer import barrier, next_epoch, peer_ptr, put
from counterpoint.testing.ptx import ACQUIRE, BARRIER, CAPABILITIES, RELEASE, compiled, in_order

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


def off(rank: int, world: int, ranks: int, seeds: range, fault: bool) -> list[int]:
    """For each seed, how many of four calls are off."""
    from counterpoint.testing.interleave import Interleaved

    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(peer, "post", post_relaxed)
        for seed in seeds:
            torch.manual_seed(seed)
            memory = [torch.zeros(2 * ranks * (WIDTH + 1)) for _ in range(ranks)]
            bases = torch.tensor([m.data_ptr() for m in memory])
            xs, ys = torch.randn(4, ranks, WIDTH), torch.full((4, ranks, ranks, WIDTH), torch.nan)
            words = torch.zeros(ranks, 8, dtype=torch.int32)

            def run(r: int, bases: Any = bases, xs: Any = xs, ys: Any = ys, words: Any = words):
                for x, y in zip(xs, ys, strict=True):
                    exchange_kernel[(1,)](
                        x[r], y[r], bases, words[r], words[r, 2:], r, ranks, WIDTH
                    )  # type: ignore[reportArgumentType]

            Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            found.append(sum(not torch.equal(y[r], x) for x, y in zip(xs, ys, strict=True)
                             for r in range(ranks)))  # fmt: skip
            assert not words[:, 1:].any()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_behind_a_barrier_all_is_seen(pool: RankPool, ranks: int):
    assert pool.run(off, 1, ranks, range(6), False, group=False) == [[0] * 6]
    (found,) = pool.run(off, 1, ranks, range(6), True, group=False)
    assert any(found), "a barrier that publishes nothing does not show"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_barrier_releases_and_acquires(capability: int):
    types = {"source_ptr": "*fp32", "target_ptr": "*fp32", "bases_ptr": "*i64",
             "epoch_ptr": "*i32", "stop_ptr": "*i32", "rank": "i32"}  # fmt: skip
    found = compiled(exchange_kernel, capability, types, {"WORLD": 4, "WIDTH": WIDTH}, num_warps=1,
                     aligned=("source_ptr", "target_ptr", "bases_ptr"))  # fmt: skip
    stores = found.ptx.partition("release")[0] + "release"  # those before the release
    assert in_order(stores, r"\bst\.global", BARRIER, "release")
    assert in_order(found.ptx, RELEASE, ACQUIRE, r"\.cg\.") and not found.spills
    assert all_stop_alike(found.ttgir) == 1
