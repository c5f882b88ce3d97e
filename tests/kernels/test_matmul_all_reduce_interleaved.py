"""The protocol of matmul_all_reduce with all programs of all ranks in turn, in seeded orders."""

from typing import Any

import pytest
import torch
from counterpoint.runtime.launch_fused import Fused, call_bytes, launch_of, where
from memories import GUARD, guarded, left, memories
from planted import same_epoch, take_and_leave
from rankpool import RankPool

from counterpoint.kernels import matmul_all_reduce as kernels

SEEDS = range(6)
SHOTS = (1, 2, 0)  # 0: scattered
# calls without a meeting between them: of one size, and of sizes that differ
SAME = ((3, 32, 16),) * 4
MIXED = ((1, 16, 16), (4, 48, 16), (2, 16, 16), (4, 48, 16), (1, 32, 16))


FAULTS = {"epoch": ("next_epoch", same_epoch), "leave": ("take_words", take_and_leave)}


def results(rooms: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    """What lies between the guards, for each rank."""
    return [room[GUARD:-GUARD].view(-1, n) for room in rooms]


def errors_of(
    rank: int, world: int, ranks: int, shots: int, seeds: range, fault: str,
    shapes: tuple[tuple[int, int, int], ...],
) -> list[str]:  # fmt: skip
    """What went wrong for each seed: a deadlock, or calls whose sum is off; "" if nothing."""
    from interleave import DeadlockError, Interleaved

    scatter = not shots  # then m is of each owner
    way = Fused(shots or 1, 16, 16, 1, 4, scatter)  # type: ignore[arg-type]
    num_bytes = 2 * ranks * max(call_bytes(way, m, n, ranks, 4) for m, n, _ in shapes) + 4096
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            name, planted = FAULTS[fault]
            patch.setattr(kernels, name, planted)
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            torch.manual_seed(seed)
            each = memories(ranks, num_bytes)
            calls = [
                (torch.randn(ranks, m * (ranks if scatter else 1), k), torch.randn(ranks, k, n),
                 [guarded(m * n, torch.nan) for _ in range(ranks)]) for m, n, k in shapes
            ]  # fmt: skip

            def run(r: int, each: Any = each, calls: Any = calls) -> None:
                for x, w, rooms in calls:
                    y = results(rooms, w.shape[2])
                    if fault == "halves":  # a half as large as the call, not as the memory
                        each[r].words.half_bytes = call_bytes(way, *y[r].shape, ranks, 4)
                    launch = launch_of(way, each[r], where(each[r]), 0, x[r], w[r], None)
                    launch(x[r], w[r], None, y[r])

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            wants = [(x.double() @ w.double()).sum(0) for x, w, _ in calls]
            if scatter:
                wants = [want.view(ranks, -1, want.shape[1]) for want in wants]
            got = [torch.stack(results(rooms, w.shape[2])) for _, w, rooms in calls]
            off = [
                i for i, (y, want) in enumerate(zip(got, wants, strict=True))
                if not bool(((y - want).abs() < 1e-4).all())
            ]  # fmt: skip
            wrong = f"calls {off} are off" if off else ""
            if not fault:
                wrong = wrong or left(each[0], [room for *_, rooms in calls for room in rooms])
            found.append(wrong)
    return found


@pytest.mark.parametrize("shapes", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shots", SHOTS)
def test_every_order_gives_the_sum(
    pool: RankPool, shots: int, ranks: int, shapes: tuple[tuple[int, int, int], ...]
):
    """No order of programs and stores mixes up calls, of whatever sizes."""
    seeds = range(1 if ranks == 4 else 4)
    run = pool.run(errors_of, 1, ranks, shots, seeds, "", shapes, group=False, timeout_s=60)
    assert run == [[""] * len(seeds)]


def test_a_half_that_follows_the_call_shows(pool: RankPool):
    """What a small call has not yet read, a larger one of a faster peer would overwrite."""
    arguments = (2, 2, range(30), "halves", MIXED)
    (found,) = pool.run(errors_of, 1, *arguments, group=False, timeout_s=60)
    assert any(found)


@pytest.mark.parametrize(
    ("fault", "shots", "text"),
    [("epoch", 1, "deadlock: nobody can go on"), ("leave", 1, "are off"), ("leave", 2, "are off")],
)
def test_planted_faults_show(pool: RankPool, fault: str, shots: int, text: str):
    """Two shots need no second half: who has the sums knows that the peers have taken its tiles."""
    (found,) = pool.run(errors_of, 1, 2, shots, SEEDS, fault, SAME, group=False)
    assert any(text in problem for problem in found), found
    if fault == "epoch":  # a word that another one overwrote never comes
        (shown,) = (problem for problem in found if problem)
        assert "take_words:" in shown and "rank 0, program" in shown
