"""The protocol of matmul_all_reduce with all programs of all ranks in turn, in seeded orders."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from rankpool import RankPool

from counterpoint.kernels import matmul_all_reduce as kernels
from counterpoint.runtime.launch_fused import Fused, Launch, turn_bytes

SEEDS = range(6)
CALLS = 3
SHAPE = (3, 32, 16)


@triton.jit
def post_relaxed(flag_ptrs, epoch, mask=None):
    """`post` with its fault planted: what stands before it is not published."""
    tl.atomic_xchg(flag_ptrs, epoch, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def same_epoch(epoch):
    """`next_epoch` that does not count: words and flags of the call before look like this one's."""
    return tl.where(epoch == 0, 1, epoch)


@triton.jit
def post_too_few(flag_ptrs, epoch, mask=None):
    """`post` that leaves out its last flag."""
    last = tl.max(flag_ptrs.to(tl.int64), 0)
    tl.atomic_xchg(flag_ptrs, epoch, mask=mask & (flag_ptrs.to(tl.int64) < last), sem="release",
                   scope="sys")  # fmt: skip


FAULTS = {
    "relaxed": ("post", post_relaxed), "few": ("post", post_too_few),
    "epoch": ("next_epoch", same_epoch),
}  # fmt: skip


def memories(ranks: int, num_bytes: int) -> list[Any]:
    """What each rank's launch needs, in one process: the ranks' memory is a tensor each."""

    def shared() -> tuple[list[torch.Tensor], Any]:
        each = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(ranks)]
        return each, SimpleNamespace(bases=torch.tensor([t.data_ptr() for t in each]))

    kept = [shared() for _ in range(3)]
    return [
        SimpleNamespace(
            words=kept[0][1], tiles=kept[1][1], flags=kept[2][1], kept=kept,
            state=torch.zeros(3, dtype=torch.int32), fault=torch.zeros(1, dtype=torch.int64),
            workspace=SimpleNamespace(group=SimpleNamespace(size=lambda: ranks), rank=rank,
                                      timeout_s=1e6),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def errors_of(
    rank: int, world: int, ranks: int, shots: int, by: str, seeds: range, fault: str
) -> list[str]:
    """What went wrong for each seed: a deadlock, or a call whose sum is off; "" if nothing."""
    from interleave import DeadlockError, Interleaved

    (m, n, k), way = SHAPE, Fused(shots, by, 16, 16, 1, 4)  # type: ignore[arg-type]
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            name, planted = FAULTS[fault]
            patch.setattr(kernels, name, planted)
        for seed in seeds:
            torch.manual_seed(seed)
            each = memories(ranks, max(1 << 12, 2 * turn_bytes(way, m, n, ranks, 4)))
            xs = torch.randn(CALLS, ranks, m, k)
            ws = torch.randn(CALLS, ranks, k, n)
            ys = torch.full((CALLS, ranks, m, n), torch.nan)

            def run(r: int, each: Any = each, xs: Any = xs, ws: Any = ws, ys: Any = ys) -> None:
                for call in range(CALLS):
                    launch = Launch(way, each[r], 0, xs[call, r], ws[call, r], None)
                    launch(xs[call, r], ws[call, r], None, ys[call, r])

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            want = (xs.double() @ ws.double()).sum(1, keepdim=True)
            off = ((ys - want).abs().amax((1, 2, 3)) > 1e-4) | ys.isnan().any((1, 2, 3))  # type: ignore[call-overload]
            found.append(f"calls {off.nonzero().flatten().tolist()} are off" if off.any() else "")
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("shots", "by"), [(1, "words"), (2, "words"), (2, "flags")])
def test_every_order_gives_the_sum(pool: RankPool, shots: int, by: str, ranks: int):
    """Three calls without a meeting between them: no order of programs and stores mixes them up."""
    assert pool.run(errors_of, 1, ranks, shots, by, SEEDS, "", group=False) == [[""] * len(SEEDS)]


@pytest.mark.parametrize(
    ("fault", "by", "text"),
    [
        ("relaxed", "flags", "are off"), ("few", "flags", "deadlock: nobody can go on"),
        ("epoch", "words", "are off"), ("epoch", "flags", "are off"),
    ],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, fault: str, by: str, text: str):
    (found,) = pool.run(errors_of, 1, 2, 2, by, SEEDS, fault, group=False)
    assert any(text in problem for problem in found), found
    if fault == "few":
        assert all("wait:" in problem and "rank 0, program" in problem for problem in found)
