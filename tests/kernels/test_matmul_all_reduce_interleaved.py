"""The protocol of matmul_all_reduce with all programs of all ranks in turn, in seeded orders."""

from typing import Any

import pytest
import torch
from memories import GUARD, guarded, left, memories, places_of
from planted import same_epoch, take_and_leave
from rankpool import RankPool

from counterpoint.kernels import matmul_all_reduce as kernels
from counterpoint.ops.fused_sum import prepare
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.runtime.launch import Site

SEEDS = range(6)
SHOTS = ("one_shot", "two_shot", "scatter")
Shapes = tuple[tuple[int, int, int], ...]
# M (of each owner where it scatters), N, K of calls without a meeting between them
SAME: Shapes = ((3, 32, 16),) * 4
MIXED: Shapes = ((1, 16, 16), (4, 48, 16), (2, 16, 16), (4, 48, 16), (1, 32, 16))

FAULTS = {"epoch": ("next_epoch", same_epoch), "leave": ("take_words", take_and_leave)}


def plan_of(shots: str, m: int, n: int, k: int, ranks: int) -> Plan:
    scatters = shots == "scatter"
    op, rows = ("matmul_reduce_scatter", m * ranks) if scatters else ("matmul_all_reduce", m)
    problem = Problem(op, rows, n, k, ranks, "float16" if scatters else "float32")
    return build(problem, f"fused {shots} 16x16x1 warps=4")


def results(rooms: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    """What lies between the guards, for each rank."""
    return [room[GUARD:-GUARD].view(-1, n) for room in rooms]


def errors_of(
    rank: int, world: int, ranks: int, shots: str, seeds: range, fault: str, shapes: Shapes
) -> list[str]:
    """What went wrong for each seed: a deadlock, or calls whose sum is off; "" if nothing."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    plans = [plan_of(shots, *shape, ranks) for shape in shapes]
    num_bytes = max(plan.num_bytes("words") for plan in plans) + 4096
    dtype = getattr(torch, plans[0].problem.dtype)
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
                (plan, torch.randn(ranks, plan.problem.m, k).to(dtype),
                 torch.randn(ranks, k, n).to(dtype),
                 [guarded(m * n, torch.nan, dtype) for _ in range(ranks)])
                for plan, (m, n, k) in zip(plans, shapes, strict=True)
            ]  # fmt: skip

            def run(r: int, each: Any = each, calls: Any = calls) -> None:
                for plan, x, w, rooms in calls:
                    if fault == "halves":  # a half as large as the call, not as the memory
                        each[r].words.half_bytes = plan.num_bytes("words") // 2
                    site = Site(bind(plan, r).steps[0], places_of(each[r], plan), 0)
                    prepare(site)({"x": x[r], "w": w[r], "y": results(rooms, w.shape[2])[r]})

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            wants = [(x.double() @ w.double()).sum(0) for _, x, w, _ in calls]
            got = [torch.cat(results(rooms[: ranks if shots == "scatter" else 1], w.shape[2]))
                   for _, _, w, rooms in calls]  # fmt: skip
            same = [torch.equal(y, z) for _, _, w, rooms in calls
                    for y, *others in [results(rooms, w.shape[2])] for z in others]  # fmt: skip
            bound = 1e-4 if dtype == torch.float32 else 0.1
            off = [
                i for i, (y, want) in enumerate(zip(got, wants, strict=True))
                if not bool(((y - want).abs() < bound).all())
            ]  # fmt: skip
            wrong = f"calls {off} are off" if off else ""
            if not (fault or wrong or shots == "scatter" or all(same)):
                wrong = "ranks hold other bits"
            if not fault:
                wrong = wrong or left(each[0], [room for *_, rooms in calls for room in rooms])
            found.append(wrong)
    return found


@pytest.mark.parametrize("shapes", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shots", SHOTS)
def test_every_order_gives_the_sum(pool: RankPool, shots: str, ranks: int, shapes: Shapes):
    """No order of programs and stores mixes up calls, of whatever sizes."""
    seeds = range(1 if ranks == 4 else 4)
    run = pool.run(errors_of, 1, ranks, shots, seeds, "", shapes, group=False)
    assert run == [[""] * len(seeds)]


@pytest.mark.parametrize(
    ("fault", "shots", "shapes", "text"),
    [
        ("epoch", "one_shot", SAME, "deadlock: nobody can go on"),
        ("leave", "one_shot", SAME, "are off"),
        ("leave", "two_shot", SAME, "are off"),
        # what a small call has not yet read, a larger one of a faster peer would overwrite
        ("halves", "two_shot", MIXED, ""),
    ],
)
def test_planted_faults_show(pool: RankPool, fault: str, shots: str, shapes: Shapes, text: str):
    """Two shots need no second half: who has the sums knows that the peers have taken its tiles."""
    seeds = SEEDS if text else range(30)
    (found,) = pool.run(errors_of, 1, 2, shots, seeds, fault, shapes, group=False)
    assert any(problem and text in problem for problem in found), found
    if fault == "epoch":  # a word that another one overwrote never comes
        (shown,) = (problem for problem in found if problem)
        assert "take_words:" in shown and "rank 0, program" in shown
