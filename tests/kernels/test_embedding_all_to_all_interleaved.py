"""The protocol of embedding_all_to_all with all programs of all ranks in turn, in seeded orders."""

from typing import Any

import pytest
import torch
from embedding_cases import expected, problem_of, random_bags
from memories import GUARD, guarded, left, memories, places_of
from planted import is_last_always, is_last_relaxed, same_epoch
from rankpool import RankPool

from counterpoint.kernels import embedding_all_to_all as kernels
from counterpoint.ops.embedding_kernels import Bags, prepare
from counterpoint.plan import embedding_bag_all_to_all as plans
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.runtime import launch
from counterpoint.runtime.launch import Site

DIMS = ((16, 20), (16,), (), (8,))
# bags of each rank, call after call: of one size, and of sizes that differ
SAME, MIXED = ((3, 5, 2, 4),) * 4, ((1, 2, 1, 3), (6, 1, 4, 2), (1, 1, 0, 2), (2, 7, 3, 1))


FAULTS = {
    "relaxed": ("is_last", is_last_relaxed),
    "early": ("is_last", is_last_always), "epoch": ("next_epoch", same_epoch),
}  # fmt: skip


def errors_of(
    rank: int, world: int, ranks: int, programs: int, batches: tuple[tuple[int, ...], ...],
    own: bool, seeds: range, fault: str,
) -> list[str]:  # fmt: skip
    """What went wrong for each seed: a deadlock, or outputs that are off; "" if nothing.

    With `own`, peers write to memory of two turns and what is read is what lies there right behind
    a call; else it is copied out.
    """
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED_BLOCKS", programs)
        patch.setattr(plans, "POOLING", (("else", "256x2x4"),))
        if fault in FAULTS:
            patch.setattr(kernels, *FAULTS[fault])
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            each = memories(ranks, 1 << 14)
            problems = [problem_of(DIMS[:ranks], b[:ranks], out=own) for b in batches]
            calls = [
                [random_bags(d, p.m, seed=100 * seed + 10 * i + r, longest=3)
                 for r, d in enumerate(p.tables)] for i, p in enumerate(problems)
            ]  # fmt: skip
            outs = [guarded(1 << 12, torch.nan) for _ in range(ranks)]
            bases = torch.tensor([out[GUARD:].data_ptr() for out in outs])
            half = 1 << 9  # of 16 bytes
            ys = [[guarded(p.rows[r] * p.n, torch.nan) for r in range(ranks)]
                  for p in problems]  # fmt: skip

            def run(
                r: int, each: Any = each, problems: Any = problems, calls: Any = calls,
                outs: Any = outs, bases: Any = bases, half: int = half, ys: Any = ys,
            ) -> None:  # fmt: skip
                for i, (p, bags) in enumerate(zip(problems, calls, strict=True)):
                    plan, b = build(p, "fused"), bags[r]
                    if fault == "half":  # as large as the call, not as the memory
                        each[r].turns.half_bytes = plan.num_bytes("turns") // 2
                    turn = 0 if fault == "turn" else i % 2
                    into = (bases, half, turn) if own else None
                    y = ys[i][r][GUARD:-GUARD]
                    site = Site(bind(plan, r).steps[0], places_of(each[r], plan), 0)
                    given: Any = Bags(b.tables, b.indices, b.offsets, None, True, False, {}, into)
                    prepare(site)({"bags": given, "y": y})
                    if own:
                        start = GUARD + turn * half * 4
                        y.copy_(outs[r][start : start + y.numel()])

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off = [
                (i, r) for i, p in enumerate(problems) for r in range(ranks)
                if not torch.allclose(
                    ys[i][r][GUARD:-GUARD].view(-1, p.n).double(),
                    expected(calls[i], p, r, mean=False), atol=1e-5, rtol=0,
                )
            ]  # fmt: skip
            wrong = f"calls {off} are off" if off else ""
            if not fault:
                wrong = wrong or left(each[0], [*outs, *(room for y in ys for room in y)])
            found.append(wrong)
    return found


@pytest.mark.parametrize("own", [False, True], ids=["copied", "own"])
@pytest.mark.parametrize("batches", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize(("ranks", "programs"), [(2, 3), (3, 2), (4, 1)])
def test_every_order_gives_the_rows(
    pool: RankPool, ranks: int, programs: int, batches: Any, own: bool
):
    """No order of programs and stores mixes up calls, of whatever sizes."""
    seeds = range(2 if ranks > 2 else 3)
    arguments = (ranks, programs, batches, own, seeds, "")
    assert pool.run(errors_of, 1, *arguments, group=False) == [[""] * len(seeds)]


@pytest.mark.parametrize(
    ("fault", "own"),
    [("relaxed", False), ("early", False), ("epoch", False), ("half", False), ("turn", True)],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, fault: str, own: bool):
    """A flag before the rows, a program that speaks for others, turns that are not taken."""
    batches = MIXED if fault == "half" else SAME
    arguments = (2, 2, batches, own, range(40), fault)
    (found,) = pool.run(errors_of, 1, *arguments, group=False)
    assert any(found)
