"""Experts behind and before an all-to-all: all orders, uneven counts, planted faults."""

from typing import Any

import pytest
import torch
from counterpoint.plan.expert_tiles import Tile
from memories import GUARD, guarded, left, memories
from planted import is_last_relaxed, post_relaxed, post_too_few, same_epoch
from rankpool import RankPool

from counterpoint.kernels import all_to_all_matmul as dispatch
from counterpoint.kernels import matmul_all_to_all as combine
from counterpoint.kernels import peer
from counterpoint.runtime.launch_experts import AllToAllMatmul, MatmulAllToAll, Sending

TILE = Tile(16, 16, 16, 1, 4, 2)
N, K = 24, 32
LIMIT = 96
FAULTS = {
    "relaxed": ("post", post_relaxed), "few": ("post", post_too_few),
    "epoch": ("next_epoch", same_epoch), "uncounted": ("is_last", is_last_relaxed),
}  # fmt: skip


def table(seed: int, ranks: int, experts: int) -> torch.Tensor:
    """Rows from each rank to each expert: uneven, with ranks and experts that have none."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 12, (ranks, experts), generator=draw, dtype=torch.int32)
    counts[torch.rand(ranks, experts, generator=draw) < 0.3] = 0
    if seed % 3 == 1:
        counts[-1] = 0  # a rank without rows of its own
    if seed % 3 == 2:
        counts[:, : experts // ranks] = 0  # and one whose experts have none
    return counts


def by_hand(
    xs: list[torch.Tensor], ws: torch.Tensor, counts: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Of each rank: what its experts get, their product, and the product of its own rows."""
    ranks, experts = counts.shape
    parts = [x[: int(c.sum())].split(c.tolist()) for x, c in zip(xs, counts, strict=True)]
    rows = [torch.cat([part[e] for part in parts]) for e in range(experts)]
    owners = [range(r, r + experts // ranks) for r in range(0, experts, experts // ranks)]
    arrive = [torch.cat([rows[e] for e in own]) for own in owners]
    there = [torch.cat([rows[e] @ ws[e] for e in own]) for own in owners]
    back = [torch.cat([x @ w for x, w in zip(part, ws, strict=True)]) for part in parts]
    return arrive, there, back


def rooms_of(limit: int, back: bool) -> list[torch.Tensor]:
    """Where a rank's results go, full of NaN, between guards: y, and there the rows that come."""
    return [guarded(limit * width, torch.nan) for width in ((N,) if back else (N, K))]


def between(room: torch.Tensor, limit: int) -> torch.Tensor:
    """[limit, N or K]: what lies between the guards."""
    return room[GUARD:-GUARD].view(limit, -1)


def tail_is(tail: torch.Tensor, clear: bool) -> bool:
    """Whether rows that are none are zero, or else as they were."""
    return bool((tail == 0).all() if clear else tail.isnan().all())


def errors_of(
    rank: int, world: int, ranks: int, experts: int, seeds: range, fault: str, back: bool
) -> list[str]:
    """What went wrong for each seed: a deadlock, or calls whose product is off; "" if nothing."""
    from interleave import DeadlockError, Interleaved

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            patch.setattr(combine if back else dispatch, *FAULTS[fault])
            patch.setattr(peer, *FAULTS[fault])
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            torch.manual_seed(seed)
            each = memories(ranks, 2 * 4 * (LIMIT + 1) * K + 4096)
            calls: list[Any] = []
            for call in range(3):
                counts = table(3 * seed + call, ranks, experts)
                ws = torch.randn(experts, K, N)
                xs = [torch.randn(LIMIT, K) for _ in range(ranks)]
                rooms = [rooms_of(LIMIT, back) for _ in range(ranks)]
                calls.append((counts, ws, xs, rooms, (seed + call) % 2 == 1))

            def run(r: int, each: Any = each, calls: Any = calls) -> None:
                if back:
                    op: Any = MatmulAllToAll(each[r], 0, experts, LIMIT, K, N, torch.float32,
                                             TILE)  # fmt: skip
                else:
                    op = AllToAllMatmul(each[r], 0, experts, LIMIT, K, N, torch.float32, TILE,
                                        Sending(2, 2, 64))  # fmt: skip
                op.sms = 2
                local = experts // ranks
                for counts, ws, xs, rooms, clear in calls:
                    arrive, _, _ = by_hand(xs, ws, counts)
                    x = xs[r]
                    if back:
                        x = torch.full((LIMIT, K), torch.nan)
                        x[: len(arrive[r])] = arrive[r]
                    own = ws[r * local : (r + 1) * local]
                    results = (between(room, LIMIT) for room in rooms[r])
                    op(x, own, counts, LIMIT, *results, clear=clear)

            try:
                Interleaved(seed, landing=0.4 if seed % 2 else 0.05).run(
                    [lambda r=r: run(r) for r in range(ranks)]
                )
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off: list[Any] = []
            for i, (counts, ws, xs, rooms, clear) in enumerate(calls):
                arrive, there, came = by_hand(xs, ws, counts)
                for r, own in enumerate(rooms):
                    for room, want in zip(own, [came[r]] if back else [there[r], arrive[r]],
                                          strict=True):  # fmt: skip
                        y = between(room, LIMIT)
                        if not torch.allclose(y[: len(want)], want, atol=1e-4):
                            off.append((i, r))
                        if not tail_is(y[len(want) :], clear):
                            off.append((i, r, "rows that are none"))
            wrong = f"calls {off} are off" if off else ""
            wrong = wrong or ("over" if any(m.over.any() for m in each) else "")
            all_rooms = [room for *_, rooms, _ in calls for own in rooms for room in own]
            found.append(wrong or left(each[0], all_rooms))
    return found


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 2), (2, 6), (4, 8)])
def test_every_order_gives_the_product(pool: RankPool, ranks: int, experts: int, back: bool):
    seeds = range(1 if ranks == 4 else 3)
    run = pool.run(errors_of, 1, ranks, experts, seeds, "", back, group=False)
    assert run == [[""] * len(seeds)]


STUCK = "deadlock: nobody can go on"


@pytest.mark.parametrize(
    ("fault", "text", "back"),
    [("relaxed", "are off", False), ("uncounted", "are off", True), ("few", STUCK, False),
     ("few", STUCK, True), ("epoch", "are off", False), ("epoch", "are off", True)],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, fault: str, text: str, back: bool):
    arguments = (2, 4, range(30), fault, back)
    (found,) = pool.run(errors_of, 1, *arguments, group=False)
    assert any(text in problem for problem in found), found


def edges(rank: int, world: int, back: bool, clear: bool) -> list[str]:
    """What is wrong where all rows that there is room for are none, where none are, and beyond."""
    from interleave import Interleaved

    limit, found = 16, []
    for own in ([0, 0], [3, 13], [15, 0], [10, 10]):
        (memory,) = memories(1, 2 * 4 * (limit + 1) * K + 4096)
        sizes = (memory, 0, 2, limit, K, N, torch.float32, TILE)
        op: Any = MatmulAllToAll(*sizes) if back else AllToAllMatmul(*sizes, Sending(2, 2, 64))
        op.sms, rooms = 2, rooms_of(limit, back)
        x, w, counts = torch.randn(20, K), torch.randn(2, K, N), torch.tensor([own])
        results = [between(room, limit) for room in rooms]
        Interleaved(0).run([lambda: op(x, w, counts, 20, *results, clear=clear)])  # noqa: B023
        rows = min(sum(own), limit)
        wants = [torch.cat([each @ m for each, m in zip(x[: sum(own)].split(own), w, strict=True)])]
        wants += [] if back else [x]
        for want, y in zip(wants, results, strict=True):
            if not torch.allclose(y[:rows], want[:rows], atol=1e-4):
                found.append(f"{own}: rows are off")
            if not tail_is(y[rows:], clear):
                found.append(f"{own}: rows that are none are off")
        if bool(memory.over.any()) != (sum(own) > limit):
            found.append(f"{own}: dropped rows")
        found += filter(None, [left(memory, rooms)])
    return found


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_rows_that_are_none_are_zeroed_or_left(pool: RankPool, back: bool, clear: bool):
    assert pool.run(edges, 1, back, clear, group=False) == [[]]


def named_beyond(rank: int, world: int) -> list[Any]:
    """Sums of rows of which one is none, though there is room for it: (what is said, the sums)."""
    from interleave import Interleaved

    (memory,) = memories(1, 2 * 4 * 17 * N + 4096)
    op: Any = MatmulAllToAll(memory, 0, 2, 16, K, N, torch.float32, TILE)
    op.sms = 2
    found: list[Any] = []
    x, w, counts = torch.randn(16, K), torch.randn(2, K, N), torch.tensor([[3, 4]])
    for last in (6, 7):
        index = torch.tensor([[0, last]])
        out, weights = torch.full((1, N), torch.nan), torch.ones(1, 2)
        memory.over.zero_()
        sums = index, weights, out
        Interleaved(0).run([lambda: op(x, w, counts, 16, None, sums=sums)])  # noqa: B023
        want = x[:1] @ w[0] + (x[last : last + 1] @ w[1] if last < 7 else 0)
        found.append((int(memory.over), torch.allclose(out, want, atol=1e-4)))
    return found


def test_a_row_that_is_none_is_said_and_left_out(pool: RankPool):
    assert pool.run(named_beyond, 1, group=False) == [[(0, True), (3, True)]]
