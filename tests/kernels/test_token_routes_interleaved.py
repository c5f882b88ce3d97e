"""Tokens to experts and back, by routes that the device knows: all orders, faults, overflow."""

from typing import Any

import pytest
import torch
from memories import GUARD, guarded, left, memories, site_of
from rankpool import RankPool
from test_experts_interleaved import FAULTS, SETTINGS, integers

from counterpoint.kernels import all_to_all_matmul as dispatch
from counterpoint.kernels import matmul_all_to_all as combine
from counterpoint.kernels import peer
from counterpoint.ops import fused_experts
from counterpoint.ops.fused_experts import COMBINE, DISPATCH
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.runtime.device_routes import Found, Sizes, found_by

N, K, TOP, TOKENS = 24, 32, 2, 10
LIMIT = 96
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Found]]


def drawn(seed: int, ranks: int, experts: int) -> torch.Tensor:
    """Experts of all tokens; of some seeds all are of few experts, or of one rank."""
    draw = torch.Generator().manual_seed(seed)
    few = (experts, 3, experts // ranks)[seed % 3]
    return torch.rand(ranks * TOKENS, few, generator=draw).argsort(1)[:, :TOP].contiguous()


def routes_of(ids: torch.Tensor, ranks: int, experts: int, limit: int) -> list[Found]:
    """Of each rank; weights are small powers of two, so that sums are exact."""
    weights = 2.0 ** (torch.arange(ids.numel()).view(ids.shape) % 3)
    sizes = Sizes(TOKENS, TOP, ranks, limit)
    return [found_by(r, sizes, ids, weights, experts) for r in range(ranks)]


def wanted(
    op: str, xs: torch.Tensor, ws: torch.Tensor, ids: torch.Tensor, found: list[Found]
) -> list[list[torch.Tensor]]:
    """What each rank has to have: rows by expert and their products, or its tokens' sums.

    Args:
        xs: of all tokens, or for a combine of all entries: a row of a token for each expert.
    """
    local, wants = len(ws) // len(found), list[list[torch.Tensor]]()
    if op == COMBINE:
        weights = 2.0 ** (torch.arange(ids.numel()).view(ids.shape) % 3)
        each = torch.einsum("tjk,tjkn->tjn", xs.double(), ws.double()[ids])
        sums = (each * weights[..., None]).sum(1).half()
        return [[part] for part in sums.chunk(len(found))]
    for r, own in enumerate(found):
        sizes = own.counts[:, r * local : (r + 1) * local].sum(0).tolist()
        entries = entries_of(own, ids, len(found))
        rows = xs[entries // TOP]
        mine = zip(rows.split(sizes), ws[r * local : (r + 1) * local], strict=True)
        wants.append([torch.cat([a @ w for a, w in mine]), rows])
    return wants


def entries_of(own: Found, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """Token * TOP + place of each row by expert."""
    every = Sizes(TOKENS, TOP, ranks, len(own.weights)).lists(own.lists).entries.long()
    return every[every < ids.numel()]


def calls_of(
    ids: torch.Tensor, ranks: int, experts: int, op: str, limit: int
) -> tuple[list[dict[str, Any]], list[list[torch.Tensor]], Given]:
    """Operands of each rank's call, where its results go, and what they are of."""
    ws = integers(experts, K, N)
    found, local = routes_of(ids, ranks, experts, limit), experts // ranks
    xs = integers(len(ids), TOP, K) if op == COMBINE else integers(len(ids), K)
    operands, rooms = list[dict[str, Any]](), list[list[torch.Tensor]]()
    for r, own in enumerate(found):
        sizes = [(TOKENS, N)] if op == COMBINE else [(limit, N), (limit, K)]
        room = [guarded(a * b, torch.nan, torch.float16) for a, b in sizes]
        results = [t[GUARD:-GUARD].view(size) for t, size in zip(room, sizes, strict=True)]
        given = {"w": ws[r * local : (r + 1) * local], "counts": own.counts, "routes": own.firsts}
        given |= {"lists": own.lists, **dict(zip(("y", "rows"), results, strict=False))}
        given["x"] = xs[r * TOKENS : (r + 1) * TOKENS]
        if op == COMBINE:
            x = torch.full((limit, K), torch.nan, dtype=torch.float16)
            rows = xs.flatten(0, 1)[entries_of(own, ids, ranks)]
            x[: len(rows)] = rows
            given |= {"x": x, "weights": own.weights}
        operands.append(given)
        rooms.append(room)
    return operands, rooms, (xs, ws, ids, found)


def actions_of(each: list[Any], op: str, ranks: int, experts: int, limit: int) -> list[Any]:
    """One call of each rank, of small tiles."""
    m = -(-max(limit, TOKENS * TOP) // experts) * experts
    problem = Problem(op, m, N, K, ranks, "float16", experts=experts // ranks,
                      counts="device_routed", top_k=TOP)  # fmt: skip
    prepare = fused_experts.combine if op == COMBINE else fused_experts.dispatch
    return [prepare(site_of(memory, build(problem, "fused"), **SETTINGS)) for memory in each]


def errors_of(
    rank: int, world: int, ranks: int, experts: int, seeds: range, fault: str, op: str
) -> list[str]:
    """What went wrong for each seed: a deadlock, or calls whose results are off; "" if nothing."""
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
            lists = [drawn(3 * seed + i, ranks, experts) for i in range(3)]
            calls = [calls_of(ids, ranks, experts, op, LIMIT) for ids in lists]
            actions = actions_of(each, op, ranks, experts, LIMIT)

            def run(r: int, actions: Any = actions, calls: Any = calls) -> None:
                for operands, *_ in calls:
                    actions[r](operands[r])

            try:
                Interleaved(seed, landing=0.4 if seed % 2 else 0.05).run(
                    [lambda r=r: run(r) for r in range(ranks)]
                )
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off = [
                (i, r, name)
                for i, (operands, _, given) in enumerate(calls)
                for r, own in enumerate(wanted(op, *given))
                for name, want in zip(("y", "rows"), own, strict=False)
                if not torch.equal(operands[r][name][: len(want)], want)
                or not operands[r][name][len(want) :].isnan().all()
            ]
            wrong = f"calls {off} are off" if off else ""
            wrong = wrong or ("over" if any(m.over.any() for m in each) else "")
            rooms = [room for _, rooms, _ in calls for own in rooms for room in own]
            found.append(wrong or left(each[0], rooms))
    return found


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 6), (4, 8)])
def test_every_order_gives_the_product(pool: RankPool, ranks: int, experts: int, op: str):
    seeds = range(1 if ranks == 4 else 3)
    run = pool.run(errors_of, 1, ranks, experts, seeds, "", op, group=False, timeout_s=200)
    assert run == [[""] * len(seeds)]


@pytest.mark.parametrize(
    ("fault", "text", "op"),
    [("relaxed", "are off", DISPATCH), ("uncounted", "are off", COMBINE),
     ("few", "deadlock: nobody can go on", DISPATCH), ("epoch", "are off", DISPATCH),
     ("epoch", "are off", COMBINE)],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, fault: str, text: str, op: str):
    arguments = (2, 6, range(30), fault, op)
    (found,) = pool.run(errors_of, 1, *arguments, group=False, timeout_s=200)
    assert any(text in problem for problem in found), found


def beyond(rank: int, world: int, op: str) -> list[Any]:
    """Of each rank what is said, and whether all of its results are NaN; and guards are whole."""
    from counterpoint.testing.interleave import Interleaved

    ranks, experts, limit = 2, 4, 2 * TOKENS * TOP - 11
    each = memories(ranks, 2 * 2 * (LIMIT + 1) * K + 4096)
    operands, rooms, _ = calls_of(drawn(2, ranks, experts), ranks, experts, op, limit)
    for own in rooms:
        for room in own:
            room[GUARD:-GUARD] = 0
    actions = actions_of(each, op, ranks, experts, limit)
    Interleaved(0).run([lambda r=r: actions[r](operands[r]) for r in range(ranks)])
    full = [limit if op == DISPATCH else TOKENS, 0 if op == DISPATCH else TOKENS]
    nan = [
        all(own[name][:n].isnan().all() for name in ("y", "rows") if name in own)
        for own, n in zip(operands, full, strict=True)
    ]
    whole = left(each[0], [room for own in rooms for room in own])
    return [(int(memory.over), bad, whole) for memory, bad in zip(each, nan, strict=True)]


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_too_many_rows_spoil_all_results_on_all_ranks(pool: RankPool, op: str):
    """All tokens go to rank 0, which has room for 11 rows fewer."""
    said = 1 << 32 | 11 << 8 | 1 + (op == COMBINE)
    assert pool.run(beyond, 1, op, group=False, timeout_s=60) == [[(said, True, "")] * 2]


def arrived(rank: int, world: int, op: str, named: str) -> tuple[list[int], list[int]]:
    """Rows that were stored in each rank's memory, by all ranks; and those of the rule."""
    from counterpoint.testing.interleave import Interleaved

    ranks, experts, columns = 8, 16, N if op == COMBINE else K
    draw = torch.Generator().manual_seed(7)
    share = torch.ones(experts) if named == "uniform" else 1 / torch.arange(1, experts + 1)
    ids = torch.multinomial(share.expand(ranks * TOKENS, -1), TOP, generator=draw)
    each = memories(ranks, 4 * K * N * 8)  # halves are whole rows
    memory = [room[GUARD:-GUARD].view(torch.int16) for room in each[0].kept["turns"]]
    for room in memory:
        room.fill_(-23131)  # no small integer
    operands, *_ = calls_of(ids, ranks, experts, op, ranks * TOKENS * TOP)
    actions = actions_of(each, op, ranks, experts, ranks * TOKENS * TOP)
    Interleaved(0).run([lambda r=r: actions[r](operands[r]) for r in range(ranks)])
    found = [int((room.view(-1, columns) != -23131).any(1).sum()) for room in memory]
    once = torch.stack([(ids // (experts // ranks) == d).any(1) for d in range(ranks)])
    once = once.view(ranks, ranks, TOKENS).sum(2)  # of tokens of the second to the first
    assert once.sum() < ids.numel(), "some tokens have two experts on a rank"
    return found, once.sum(0 if op == COMBINE else 1).tolist()


@pytest.mark.parametrize("named", ["uniform", "zipf"])
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_a_token_goes_to_each_of_eight_ranks_once(pool: RankPool, op: str, named: str):
    """DeepEP's rule: to each rank that has some of its experts; and as many rows come back."""
    ((found, once),) = pool.run(arrived, 1, op, named, group=False, timeout_s=120)
    assert found == once
