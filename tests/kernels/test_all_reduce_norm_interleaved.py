"""An all-reduce and a norm in one kernel, with all programs of all ranks in turn, in any order."""

from typing import Any

import pytest
import torch
from memories import GUARD, guarded, left, memories, places_of
from planted import same_epoch, take_and_leave
from rankpool import RankPool

from counterpoint.kernels import all_reduce_norm as kernels
from counterpoint.ops.fused_norm import prepare
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.runtime.launch import Site

SHOTS = ("one_shot", "two_shot")
# rows and columns of calls without a meeting between them; more rows than programs
SAME = ((3, 24),) * 4
MIXED = ((1, 8), (5, 40), (2, 8), (5, 40), (1, 24))
FAULTS = {"epoch": ("next_epoch", same_epoch), "leave": ("take_words", take_and_leave)}


def plan_of(shots: str, m: int, n: int, ranks: int) -> Plan:
    problem = Problem("all_reduce_norm", m, n, ranks=ranks, dtype="float16", residual=True, eps=1.0)
    return build(problem, f"fused {shots} warps=4")


def errors_of(
    rank: int, world: int, ranks: int, shots: str, seeds: range, fault: str,
    shapes: tuple[tuple[int, int], ...],
) -> list[str]:  # fmt: skip
    """What went wrong for each seed: a deadlock, or calls that are off; "" if nothing."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    plans = [plan_of(shots, *shape, ranks) for shape in shapes]
    num_bytes = max(plan.num_bytes("words") for plan in plans) + 4096
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            patch.setattr(kernels, *FAULTS[fault])
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            torch.manual_seed(seed)
            each = memories(ranks, num_bytes)
            calls: list[Any] = [
                (plan, torch.randn(ranks, m, n).half(), torch.randn(m, n).half(),
                 [[guarded(m * n, torch.nan, torch.float16) for _ in "yh"] for _ in range(ranks)])
                for plan, (m, n) in zip(plans, shapes, strict=True)
            ]  # fmt: skip

            def run(r: int, each: Any = each, calls: Any = calls) -> None:
                for plan, x, residual, rooms in calls:
                    if fault == "halves":  # a half as large as the call, not as the memory
                        each[r].words.half_bytes = plan.num_bytes("words") // 2
                    y, h = (room[GUARD:-GUARD].view(x.shape[1:]) for room in rooms[r])
                    operands = {"x": x[r], "residual": residual, "y": y, "h": h,
                                "weight": torch.ones(x.shape[2]).half()}  # fmt: skip
                    prepare(Site(bind(plan, r).steps[0], places_of(each[r], plan), 0))(operands)

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off: list[tuple[int, int]] = []
            for i, (_, x, residual, rooms) in enumerate(calls):
                want = x.float().sum(0).half() + residual
                norm = torch.nn.functional.rms_norm(want.double(), (x.shape[2],), eps=1.0)
                for r, (y, h) in enumerate(rooms):
                    y, h = (room[GUARD:-GUARD].view(want.shape) for room in (y, h))
                    if not torch.equal(h, want) or not bool(((y - norm).abs() < 2e-3).all()):
                        off.append((i, r))
            wrong = f"calls {off} are off" if off else ""
            if not fault:
                every = [room for *_, rooms in calls for pair in rooms for room in pair]
                wrong = wrong or left(each[0], every)
            found.append(wrong)
    return found


@pytest.mark.parametrize("shapes", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shots", SHOTS)
def test_every_order_gives_the_result(
    pool: RankPool, shots: str, ranks: int, shapes: tuple[tuple[int, int], ...]
):
    """No order of programs and stores mixes up calls, of whatever sizes."""
    seeds = range(1 if ranks == 4 else 4)
    run = pool.run(errors_of, 1, ranks, shots, seeds, "", shapes, group=False)
    assert run == [[""] * len(seeds)]


@pytest.mark.parametrize(
    ("fault", "shots", "shapes"),
    [("epoch", "one_shot", SAME), ("leave", "one_shot", SAME), ("leave", "two_shot", SAME),
     ("halves", "two_shot", MIXED)],
)  # fmt: skip
def test_planted_faults_show(
    pool: RankPool, fault: str, shots: str, shapes: tuple[tuple[int, int], ...]
):
    """Words that nobody empties; an epoch that does not count; halves as large as a call."""
    (found,) = pool.run(errors_of, 1, 2, shots, range(30), fault, shapes, group=False)
    assert any(found)
