"""Two kernels that wait for peers, launched in turned order on GPUs of few SMs.

Each rank launches ours and another group's collective, which ever of the two first. Ours has to end
with the programs that it then has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from embedding_cases import expected, problem_of, random_bags
from memories import GUARD, guarded, memories, places_of
from rankpool import RankPool
from test_flags_interleaved import COMBINE, DISPATCH, K, N, action_of, by_hand, integers, table
from turns import plant

from counterpoint.embedding import kernel_lookups, launch_lookups
from counterpoint.embedding import plan_embedding_bag_all_to_all as plans
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.run import launch
from counterpoint.run.launch import Site

DIMS, BATCH = ((16,), (8,)), (5, 4)
LIMIT = 96


class Ours(NamedTuple):
    """A kernel of ours on two ranks.

    Args:
        run: of a rank.
        right: whether its results are.
        slots: blocks that are on a GPU at once.
        taken: of them, by the other group's collective.
    """

    run: Callable[[int], None]
    right: Callable[[], bool]
    slots: int
    taken: int


@triton.jit
def meet_kernel(flags_ptr, rank, WORLD: tl.constexpr):
    """As a library's collective: each program waits for the same one of all ranks."""
    program = tl.program_id(0)
    ranks = tl.arange(0, WORLD)
    for to in tl.static_range(WORLD):
        tl.atomic_xchg(flags_ptr + (program * WORLD + to) * WORLD + rank, 1, sem="release")
    own = flags_ptr + (program * WORLD + rank) * WORLD + ranks
    while tl.sum(tl.atomic_add(own, 0, sem="acquire")) < WORLD:
        pass


def experts(patch: pytest.MonkeyPatch, seed: int, op: str, senders: int) -> Ours:
    patch.setattr(launch, "INTERPRETED_BLOCKS", 4)
    each = memories(2, 2 * 2 * (LIMIT + 1) * K + 4096)
    counts, ws = table(seed, 2, 4), integers(4, K, N)
    xs = [integers(LIMIT, K) for _ in range(2)]
    arrive, there, came = by_hand(xs, ws, counts)
    givens: list[Any] = []
    for r in range(2):
        x = arrive[r] if op == COMBINE else xs[r]
        x = torch.cat((x, x.new_zeros(LIMIT - len(x), K)))
        y = x.new_empty(LIMIT, N)
        givens.append({"x": x, "w": ws[2 * r : 2 * r + 2], "counts": counts, "y": y})
    actions = [action_of(memory, op, 2, 2, LIMIT, senders=senders) for memory in each]

    def right() -> bool:
        wants = came if op == COMBINE else there
        return all(torch.equal(g["y"][: len(t)], t) for g, t in zip(givens, wants, strict=True))

    return Ours(lambda r: actions[r](givens[r]), right, 4, 2)


def bags(patch: pytest.MonkeyPatch, seed: int, fault: str) -> Ours:
    """It reserves no SMs, and has more programs than fit beside the collective."""
    patch.setattr(launch, "INTERPRETED_BLOCKS", 6)
    patch.setattr(plans, "POOLING", (("else", "64x2x4"),))
    plant(patch, fault, kernel_lookups)
    plan = build(problem_of(DIMS, BATCH), "fused")
    p, each = plan.problem, memories(2, 1 << 14)
    every = [random_bags(d, p.m, seed=seed + r, longest=3) for r, d in enumerate(p.tables)]
    ys = [guarded(p.rows[r] * p.n, torch.nan) for r in range(2)]

    def run(r: int) -> None:
        site, b = Site(bind(plan, r).steps[0], places_of(each[r], plan), 0), every[r]
        given: Any = launch_lookups.Bags(
            b.tables, b.indices, b.offsets, None, True, False, {}, None
        )
        launch_lookups.prepare(site)({"bags": given, "y": ys[r][GUARD:-GUARD]})

    def right() -> bool:
        wants = (expected(every, p, r, mean=False) for r in range(2))
        got = (y[GUARD:-GUARD].view(-1, p.n).double() for y in ys)
        return all(torch.allclose(y, t, atol=1e-5) for y, t in zip(got, wants, strict=True))

    return Ours(run, right, 3, 2)


def collective(patch: pytest.MonkeyPatch, seed: int) -> Ours:
    """Another library's, which takes the whole GPU."""
    flags = torch.zeros(16, dtype=torch.int32)
    return Ours(lambda r: meet_kernel[(4,)](flags, r, 2), lambda: True, 4, 4)


def turned(rank: int, world: int, made: Callable[..., Ours], seeds: range, *more: Any) -> list[str]:
    """For each seed a deadlock, or results that are off; "" if nothing."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    found: list[str] = []
    for seed in seeds:
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            ours, flags = made(patch, seed, *more), torch.zeros(16, dtype=torch.int32)

            def theirs(r: int, ours: Ours = ours, flags: torch.Tensor = flags) -> None:
                meet_kernel[(ours.taken,)](flags, r, 2)

            bodies = [lambda: ours.run(0), lambda: theirs(0), lambda: theirs(1),  # noqa: B023
                      lambda: ours.run(1)]  # noqa: B023  # fmt: skip
            try:
                Interleaved(seed, slots=ours.slots).run(bodies, gpus=(0, 0, 1, 1))
            except DeadlockError:
                found.append("deadlock")
            else:
                found.append("" if ours.right() else "off")
    return found


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("made", "given"),
    [(experts, (DISPATCH, 2)), (experts, (DISPATCH, 4)), (experts, (COMBINE, 2)), (bags, ("",))],
)  # fmt: skip
def test_both_end_whichever_is_launched_first(pool: RankPool, made: Any, given: Any, seed: int):
    """Our kernels take all SMs, and yet no rank waits for what another group keeps from running.

    Also where fewer senders fit beside the other group's collective than there are.
    """
    seeds = range(seed, seed + 1)
    assert pool.run(turned, 1, made, seeds, *given, group=False, timeout_s=200) == [[""]]


def test_a_deadlock_of_two_groups_would_show(pool: RankPool):
    run = pool.run(turned, 1, collective, range(2), group=False, timeout_s=60)
    assert run == [["deadlock"] * 2]


def test_a_kernel_whose_programs_all_wait_would_not_end(pool: RankPool):
    """Of such a grid, more programs than there is room for hang: what a reserve is for."""
    given = range(3), "is_last_when_all_are_there"
    (found,) = pool.run(turned, 1, bags, *given, group=False, timeout_s=120)
    assert "deadlock" in found
