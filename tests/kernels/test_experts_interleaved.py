"""Experts behind and before an all-to-all: all orders, uneven counts, planted faults, few slots."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from memories import GUARD, guarded, left, memories, site_of
from planted import is_last_relaxed, post_relaxed, post_too_few, same_epoch
from rankpool import RankPool

from counterpoint.kernels import all_to_all_matmul as dispatch
from counterpoint.kernels import matmul_all_to_all as combine
from counterpoint.kernels import peer
from counterpoint.ops.fused_experts import COMBINE, DISPATCH
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.runtime.launch import Grid

SETTINGS = {"block_m": 16, "block_n": 16, "block_k": 16, "stages": 1, "num_warps": 4, "group_m": 2,
            "senders": 2, "parts": 2, "words": 64}  # fmt: skip
N, K = 24, 32
LIMIT = 96
FAULTS = {
    "relaxed": ("post", post_relaxed), "few": ("post", post_too_few),
    "epoch": ("next_epoch", same_epoch), "uncounted": ("is_last", is_last_relaxed),
}  # fmt: skip


def plan_of(op: str, ranks: int, local: int, m: int) -> Plan:
    problem = Problem(op, m, N, K, ranks, "float16", experts=local, counts="device")
    return build(problem, "fused")


def action_of(memory: Any, op: str, ranks: int, local: int, m: int, **settings: int) -> Any:
    """One kernel of `op` as a step of a plan runs it, of small tiles."""
    from counterpoint.ops import fused_experts

    prepare = fused_experts.combine if op == COMBINE else fused_experts.dispatch
    return prepare(site_of(memory, plan_of(op, ranks, local, m), **(SETTINGS | settings)))


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


def integers(*shape: int) -> torch.Tensor:
    """Products of these are exact in every dtype."""
    return torch.randint(-4, 5, shape).half()


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


def rooms_of(limit: int, op: str) -> list[torch.Tensor]:
    """Where a rank's results go, full of NaN, between guards: y, and there the rows that come."""
    widths = (N,) if op == COMBINE else (N, K)
    return [guarded(limit * width, torch.nan, torch.float16) for width in widths]


def operands(rooms: list[torch.Tensor], limit: int, clear: bool, **given: torch.Tensor) -> Any:
    """Those of a call, its results between guards."""
    results = [room[GUARD:-GUARD].view(limit, -1) for room in rooms]
    found = given | dict(zip(("y", "rows"), results, strict=False))
    return found | ({"clear": results[0]} if clear else {})


def tail_is(tail: torch.Tensor, clear: bool) -> bool:
    """Whether rows that are none are zero, or else as they were."""
    return bool((tail == 0).all() if clear else tail.isnan().all())


def errors_of(
    rank: int, world: int, ranks: int, experts: int, seeds: range, fault: str, op: str
) -> list[str]:
    """What went wrong for each seed: a deadlock, or calls whose product is off; "" if nothing."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            patch.setattr(combine if op == COMBINE else dispatch, *FAULTS[fault])
            patch.setattr(peer, *FAULTS[fault])
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            torch.manual_seed(seed)
            each = memories(ranks, 2 * 2 * (LIMIT + 1) * K + 4096)
            calls: list[Any] = []
            for call in range(3):
                counts = table(3 * seed + call, ranks, experts)
                ws, xs = integers(experts, K, N), [integers(LIMIT, K) for _ in range(ranks)]
                rooms = [rooms_of(LIMIT, op) for _ in range(ranks)]
                calls.append((counts, ws, xs, rooms, (seed + call) % 2 == 1))
            local = experts // ranks
            actions = [action_of(memory, op, ranks, local, LIMIT) for memory in each]

            def run(r: int, actions: Any = actions, calls: Any = calls, local: int = local) -> None:
                for counts, ws, xs, rooms, clear in calls:
                    arrive, _, _ = by_hand(xs, ws, counts)
                    x = xs[r]
                    if op == COMBINE:
                        x = torch.full((LIMIT, K), torch.nan, dtype=torch.float16)
                        x[: len(arrive[r])] = arrive[r]
                    own = ws[r * local : (r + 1) * local]
                    actions[r](operands(rooms[r], LIMIT, clear, x=x, w=own, counts=counts))

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
                    wants = [came[r]] if op == COMBINE else [there[r], arrive[r]]
                    for room, want in zip(own, wants, strict=True):
                        y = room[GUARD:-GUARD].view(LIMIT, -1)
                        if not torch.equal(y[: len(want)], want):
                            off.append((i, r))
                        if not tail_is(y[len(want) :], clear):
                            off.append((i, r, "rows that are none"))
            wrong = f"calls {off} are off" if off else ""
            wrong = wrong or ("over" if any(m.over.any() for m in each) else "")
            all_rooms = [room for *_, rooms, _ in calls for own in rooms for room in own]
            found.append(wrong or left(each[0], all_rooms))
    return found


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 2), (2, 6), (4, 8)])
def test_every_order_gives_the_product(pool: RankPool, ranks: int, experts: int, op: str):
    seeds = range(1 if ranks == 4 else 3)
    run = pool.run(errors_of, 1, ranks, experts, seeds, "", op, group=False, timeout_s=200)
    assert run == [[""] * len(seeds)]


STUCK = "deadlock: nobody can go on"


@pytest.mark.parametrize(
    ("fault", "text", "op"),
    [("relaxed", "are off", DISPATCH), ("uncounted", "are off", COMBINE), ("few", STUCK, DISPATCH),
     ("few", STUCK, COMBINE), ("epoch", "are off", DISPATCH), ("epoch", "are off", COMBINE)],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, fault: str, text: str, op: str):
    arguments = (2, 4, range(30), fault, op)
    (found,) = pool.run(errors_of, 1, *arguments, group=False, timeout_s=200)
    assert any(text in problem for problem in found), found


def edges(rank: int, world: int, op: str, clear: bool) -> list[str]:
    """What is wrong where all rows that there is room for are none, and where none are."""
    from counterpoint.testing.interleave import Interleaved

    limit, found = 16, []
    for own in ([0, 0], [3, 13], [15, 0]):
        (memory,) = memories(1, 2 * 2 * (limit + 1) * K + 4096)
        rooms, action = rooms_of(limit, op), action_of(memory, op, 1, 2, limit)
        x, w, counts = integers(20, K), integers(2, K, N), torch.tensor([own])
        given = operands(rooms, limit, clear, x=x, w=w, counts=counts)
        Interleaved(0).run([lambda: action(given)])  # noqa: B023
        rows = sum(own)
        wants = [torch.cat([each @ m for each, m in zip(x[: sum(own)].split(own), w, strict=True)])]
        wants += [] if op == COMBINE else [x]
        for want, y in zip(wants, (given["y"], given.get("rows")), strict=False):
            if not torch.equal(y[:rows], want[:rows]):
                found.append(f"{own}: rows are off")
            if not tail_is(y[rows:], clear):
                found.append(f"{own}: rows that are none are off")
        if memory.over.any():
            found.append(f"{own}: dropped rows")
        found += filter(None, [left(memory, rooms)])
    return found


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_rows_that_are_none_are_zeroed_or_left(pool: RankPool, op: str, clear: bool):
    assert pool.run(edges, 1, op, clear, group=False, timeout_s=100) == [[]]


def beyond(rank: int, world: int, op: str) -> list[Any]:
    """Of each rank what is said, and whether all of its rows are NaN: too many are for rank 1."""
    from counterpoint.testing.interleave import Interleaved

    limit, ranks, experts = 16, 2, 4
    counts = torch.tensor([[1, 2, 5, 6], [3, 1, 5, 4]])
    if op == COMBINE:  # from rank 1
        counts = torch.tensor([[1, 2, 3, 1], [5, 6, 5, 4]])
    each = memories(ranks, 2 * 2 * (limit + 1) * K + 4096)
    actions = [action_of(memory, op, ranks, 2, limit) for memory in each]
    rooms = [rooms_of(limit, op) for _ in each]
    for own in rooms:
        for room in own:
            room[GUARD:-GUARD] = 0
    xs, ws = [integers(2 * limit, K) for _ in each], integers(experts, K, N)
    given = [operands(rooms[r], limit, False, x=xs[r], w=ws[2 * r : 2 * r + 2], counts=counts)
             for r in range(ranks)]  # fmt: skip
    Interleaved(0).run([lambda r=r: actions[r](given[r]) for r in range(ranks)])
    owners = counts.view(ranks, ranks, 2).sum(2)
    come = owners.sum(1 if op == COMBINE else 0).clamp(max=limit).tolist()
    return [
        (
            int(memory.over),
            all(own[name][:n].isnan().all() for name in ("y", "rows") if name in own),
        )
        for memory, own, n in zip(each, given, come, strict=True)
    ]


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_counts_that_do_not_fit_spoil_all_results_on_all_ranks(pool: RankPool, op: str):
    said = 1 << 33 | 4 << 8 | 1 + (op == COMBINE)  # rank 1, 4 rows too many
    assert pool.run(beyond, 1, op, group=False, timeout_s=60) == [[(said, True)] * 2]


def named_beyond(rank: int, world: int) -> list[Any]:
    """Sums of rows of which one is none, though there is room for it: (what is said, are right)."""
    from counterpoint.testing.interleave import Interleaved

    (memory,) = memories(1, 2 * 2 * 17 * N + 4096)
    action = action_of(memory, COMBINE, 1, 2, 16)
    found: list[Any] = []
    x, w, counts = integers(16, K), integers(2, K, N), torch.tensor([[3, 4]])
    for last in (6, 7):
        given = {
            "x": x, "w": w, "counts": counts, "index": torch.tensor([[0, last]]),
            "weights": torch.ones(1, 2), "y": x.new_empty(16, 0),
            "sums": torch.full((1, N), 0.5, dtype=torch.float16),
        }  # fmt: skip
        memory.over.zero_()
        Interleaved(0).run([lambda: action(given)])  # noqa: B023
        sums, want = given["sums"], x[:1] @ w[0] + x[last : last + 1] @ w[1]
        right = torch.equal(sums, want) if last < 7 else bool(sums.isnan().all())
        found.append((int(memory.over), right))
    return found


def test_a_row_that_is_none_is_said_and_spoils_the_sum(pool: RankPool):
    assert pool.run(named_beyond, 1, group=False, timeout_s=60) == [[(0, True), (3, True)]]


SLOTS = 4  # of a GPU
RESERVED = 2  # of them, that another group's collective takes


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


def turned(rank: int, world: int, op: str, senders: int, seeds: range) -> list[str]:
    """Two groups of the same two ranks, whose kernels each rank launches in another order.

    Args:
        op: of the first group; "": another collective, which takes the whole GPU.
    """
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    found: list[str] = []
    for seed in seeds:
        torch.manual_seed(seed)
        each, meetings = memories(2, 2 * 2 * (LIMIT + 1) * K + 4096), torch.zeros(2, 16).int()
        counts, ws = table(seed, 2, 4), integers(4, K, N)
        xs = [integers(LIMIT, K) for _ in range(2)]
        arrive, there, came = by_hand(xs, ws, counts)
        givens: list[Any] = []
        for r in range(2):
            x = arrive[r] if op == COMBINE else xs[r]
            x = torch.cat((x, x.new_zeros(LIMIT - len(x), K)))
            y = x.new_empty(LIMIT, N)
            givens.append({"x": x, "w": ws[2 * r : 2 * r + 2], "counts": counts, "y": y})

        def ours(r: int, each: Any = each, givens: Any = givens, meetings: Any = meetings) -> None:
            if not op:
                meet_kernel[(SLOTS,)](meetings[0], r, 2)
                return
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("counterpoint.runtime.launch.INTERPRETED_BLOCKS", SLOTS)
                action = action_of(each[r], op, 2, 2, LIMIT, senders=senders)
            action(givens[r])

        def theirs(r: int, meetings: Any = meetings) -> None:
            meet_kernel[(RESERVED if op else SLOTS,)](meetings[1], r, 2)

        bodies = [lambda: ours(0), lambda: theirs(0), lambda: theirs(1), lambda: ours(1)]
        try:
            Interleaved(seed, slots=SLOTS).run(bodies, gpus=(0, 0, 1, 1))
        except DeadlockError:
            found.append("deadlock")
            continue
        wants = came if op == COMBINE else there
        same = (torch.equal(g["y"][: len(t)], t) for g, t in zip(givens, wants, strict=True))
        found.append("" if not op or all(same) else "off")
    return found


@pytest.mark.parametrize(("op", "senders"), [(DISPATCH, 2), (DISPATCH, 4), (COMBINE, 2)])
def test_two_groups_in_turned_order(pool: RankPool, op: str, senders: int):
    """Our kernels take all SMs, and yet no rank waits for what another group keeps from running.

    Also where fewer senders fit beside the other group's collective than there are.
    """
    seeds = range(4)
    run = pool.run(turned, 1, op, senders, seeds, group=False, timeout_s=200)
    assert run == [[""] * len(seeds)]


def test_a_deadlock_of_two_groups_would_show(pool: RankPool):
    run = pool.run(turned, 1, "", 0, range(2), group=False, timeout_s=60)
    assert run == [["deadlock"] * 2]


@pytest.mark.parametrize("resident", [1, 2, 3, 40, 132])
def test_a_gpu_with_few_sms(resident: int):
    """All programs that are resident, and never fewer than the senders and one that multiplies."""
    assert Grid(None, 16, reserve=False).programs(resident) == max(resident, 17)
    assert Grid(None, reserve=False).programs(resident) == resident
