"""Kernels whose flags publish rows, with all programs of all ranks in turn, in seeded orders."""

from typing import Any

import pytest
import torch
from embedding_cases import expected, problem_of, random_bags
from memories import GUARD, guarded, left, memories, places_of, site_of
from rankpool import RankPool
from turns import Scene, all_right, plant, shown

from counterpoint.embedding import kernel_lookups, launch_lookups
from counterpoint.embedding import plan_embedding_bag_all_to_all as plans
from counterpoint.experts.fused import kernel_combine, kernel_dispatch
from counterpoint.experts.fused import launch as fused_experts
from counterpoint.experts.fused.launch import COMBINE, DISPATCH
from counterpoint.experts.routes.on_device import Found, Sizes, found_by
from counterpoint.kernels import peer
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.run import launch
from counterpoint.run.launch import Grid, Site

STUCK = "deadlock: nobody can go on"

DIMS = ((16, 20), (16,), (), (8,))
# bags of each rank, call after call: of one size, and of sizes that differ
BATCHES = {
    "same": ((3, 5, 2, 4),) * 4, "mixed": ((1, 2, 1, 3), (6, 1, 4, 2), (1, 1, 0, 2), (2, 7, 3, 1)),
}  # fmt: skip
HALF = 1 << 9  # of 16 bytes


def bags_scene(
    patch: pytest.MonkeyPatch, seed: int, fault: str, ranks: int, programs: int, sizes: str,
    own: bool,
) -> Scene:  # fmt: skip
    """Calls of embedding bags.

    With `own`, peers write to memory of two turns and what is read is what lies there right behind
    a call; else it is copied out.
    """
    patch.setattr(launch, "INTERPRETED_BLOCKS", programs)
    patch.setattr(plans, "POOLING", (("else", "256x2x4"),))
    plant(patch, fault, kernel_lookups)
    each = memories(ranks, 1 << 14)
    problems = [problem_of(DIMS[:ranks], b[:ranks], out=own) for b in BATCHES[sizes]]
    calls = [
        [random_bags(d, p.m, seed=100 * seed + 10 * i + r, longest=3)
         for r, d in enumerate(p.tables)] for i, p in enumerate(problems)
    ]  # fmt: skip
    outs = [guarded(1 << 12, torch.nan) for _ in range(ranks)]
    bases = torch.tensor([out[GUARD:].data_ptr() for out in outs])
    ys = [[guarded(p.rows[r] * p.n, torch.nan) for r in range(ranks)] for p in problems]

    def run(r: int) -> None:
        for i, (p, bags) in enumerate(zip(problems, calls, strict=True)):
            plan, b = build(p, "fused"), bags[r]
            if fault == "half":  # as large as the call, not as the memory
                each[r].turns.half_bytes = plan.num_bytes("turns") // 2
            turn = 0 if fault == "turn" else i % 2
            into = (bases, HALF, turn) if own else None
            y = ys[i][r][GUARD:-GUARD]
            site = Site(bind(plan, r).steps[0], places_of(each[r], plan), 0)
            given: Any = launch_lookups.Bags(
                b.tables, b.indices, b.offsets, None, True, False, {}, into
            )
            launch_lookups.prepare(site)({"bags": given, "y": y})
            if own:
                start = GUARD + turn * HALF * 4
                y.copy_(outs[r][start : start + y.numel()])

    def off() -> list[Any]:
        return [
            (i, r) for i, p in enumerate(problems) for r in range(ranks)
            if not torch.allclose(
                ys[i][r][GUARD:-GUARD].view(-1, p.n).double(),
                expected(calls[i], p, r, mean=False), atol=1e-5, rtol=0,
            )
        ]  # fmt: skip

    return Scene(each, run, off, [*outs, *(room for y in ys for room in y)])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("own", [False, True], ids=["copied", "own"])
@pytest.mark.parametrize("sizes", BATCHES)
@pytest.mark.parametrize(("ranks", "programs"), [(2, 3), (3, 2), (4, 1)])
def test_every_order_gives_the_rows(
    pool: RankPool, ranks: int, programs: int, sizes: str, own: bool, seed: int
):
    all_right(pool, bags_scene, seed, ranks, programs, sizes, own)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("fault", "own"),
    [("is_last_relaxed", False), ("is_last_always", False), ("same_epoch", False), ("half", False),
     ("turn", True)],
)  # fmt: skip
def test_planted_faults_of_bags_show(pool: RankPool, fault: str, own: bool):
    """A flag before the rows, a program that speaks for others, turns that are not taken."""
    shown(pool, bags_scene, fault, "", 2, 2, "mixed" if fault == "half" else "same", own)


SETTINGS = {"block_m": 16, "block_n": 16, "block_k": 16, "stages": 1, "num_warps": 4, "group_m": 2,
            "senders": 2, "parts": 2, "words": 64}  # fmt: skip
N, K, TOP, TOKENS = 24, 32, 2, 10
LIMIT = 96
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Found]]


def memory_of(ranks: int, limit: int = LIMIT) -> list[Any]:
    return memories(ranks, 2 * 2 * (limit + 1) * K + 4096)


def action_of(
    memory: Any, op: str, ranks: int, local: int, m: int, *, top: int = 0, **settings: int
) -> Any:
    """One kernel of `op` as a step of a plan runs it, of small tiles.

    Args:
        top: experts of a token, where rows go by routes.
    """
    facts = {"counts": "device_routed", "top_k": top} if top else {"counts": "device"}
    problem = Problem(op, m, N, K, ranks, "float16", experts=local, **facts)  # type: ignore[arg-type]
    prepare = fused_experts.combine if op == COMBINE else fused_experts.dispatch
    return prepare(site_of(memory, build(problem, "fused"), **(SETTINGS | settings)))


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


def filled(rows: torch.Tensor, limit: int = LIMIT) -> torch.Tensor:
    """Rows, and behind them NaN."""
    x = torch.full((limit, K), torch.nan, dtype=torch.float16)
    x[: len(rows)] = rows
    return x


def rooms_of(limit: int, op: str, rows: int = 0) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Where a rank's results go, full of NaN, between guards: y, and there the rows that come."""
    sizes = [(rows or limit, N)] if op == COMBINE else [(limit, N), (limit, K)]
    rooms = [guarded(a * b, torch.nan, torch.float16) for a, b in sizes]
    results = [room[GUARD:-GUARD].view(size) for room, size in zip(rooms, sizes, strict=True)]
    return rooms, dict(zip(("y", "rows"), results, strict=False))


def tail_is(tail: torch.Tensor, clear: bool) -> bool:
    """Whether rows that are none are zero, or else as they were."""
    return bool((tail == 0).all() if clear else tail.isnan().all())


def by_counts(seed: int, ranks: int, experts: int, op: str) -> tuple[Any, Any, Any]:
    """Operands of each rank's call, where its results go, and what these must be."""
    counts, local = table(seed, ranks, experts), experts // ranks
    ws, xs = integers(experts, K, N), [integers(LIMIT, K) for _ in range(ranks)]
    arrive, there, came = by_hand(xs, ws, counts)
    made = [rooms_of(LIMIT, op) for _ in range(ranks)]
    operands = [
        {"x": filled(arrive[r]) if op == COMBINE else xs[r], "w": ws[r * local : (r + 1) * local],
         "counts": counts, **results, **({"clear": results["y"]} if seed % 2 else {})}
        for r, (_, results) in enumerate(made)
    ]  # fmt: skip
    wants = [[came[r]] if op == COMBINE else [there[r], arrive[r]] for r in range(ranks)]
    return operands, [rooms for rooms, _ in made], wants


def drawn(seed: int, ranks: int, experts: int) -> torch.Tensor:
    """Experts of all tokens; of some seeds all are of few experts, or of one rank."""
    draw = torch.Generator().manual_seed(seed)
    few = (experts, 3, experts // ranks)[seed % 3]
    return torch.rand(ranks * TOKENS, few, generator=draw).argsort(1)[:, :TOP].contiguous()


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
        rows = xs[entries_of(own, ids, len(found)) // TOP]
        mine = zip(rows.split(sizes), ws[r * local : (r + 1) * local], strict=True)
        wants.append([torch.cat([a @ w for a, w in mine]), rows])
    return wants


def entries_of(own: Found, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """Token * TOP + place of each row by expert."""
    every = Sizes(TOKENS, TOP, ranks, len(own.weights)).lists(own.lists).entries.long()
    return every[every < ids.numel()]


def by_routes(
    ids: torch.Tensor, ranks: int, experts: int, op: str, limit: int = LIMIT
) -> tuple[Any, Any, Any]:
    """As `by_counts`; weights are small powers of two, so that sums are exact."""
    weights = 2.0 ** (torch.arange(ids.numel()).view(ids.shape) % 3)
    sizes, local = Sizes(TOKENS, TOP, ranks, limit), experts // ranks
    found = [found_by(r, sizes, ids, weights, experts) for r in range(ranks)]
    ws = integers(experts, K, N)
    xs = integers(len(ids), TOP, K) if op == COMBINE else integers(len(ids), K)
    operands, rooms = list[dict[str, Any]](), list[list[torch.Tensor]]()
    for r, own in enumerate(found):
        room, results = rooms_of(limit, op, TOKENS)
        given = {"w": ws[r * local : (r + 1) * local], "counts": own.counts, "routes": own.firsts}
        given |= {"lists": own.lists, "x": xs[r * TOKENS : (r + 1) * TOKENS], **results}
        if op == COMBINE:
            rows = xs.flatten(0, 1)[entries_of(own, ids, ranks)]
            given |= {"x": filled(rows, limit), "weights": own.weights}
        operands.append(given)
        rooms.append(room)
    return operands, rooms, lambda: wanted(op, xs, ws, ids, found)


def routed(memory: Any, op: str, ranks: int, experts: int, limit: int = LIMIT) -> Any:
    m = -(-max(limit, TOKENS * TOP) // experts) * experts
    return action_of(memory, op, ranks, experts // ranks, m, top=TOP)


def experts_scene(
    patch: pytest.MonkeyPatch, seed: int, fault: str, ranks: int, experts: int, op: str,
    routes: bool,
) -> Scene:  # fmt: skip
    """Three calls of experts, by counts or by routes."""
    plant(patch, fault, kernel_combine if op == COMBINE else kernel_dispatch, peer)
    each = memory_of(ranks)
    if routes:
        lists = [drawn(3 * seed + i, ranks, experts) for i in range(3)]
        calls = [by_routes(ids, ranks, experts, op) for ids in lists]
        actions = [routed(memory, op, ranks, experts) for memory in each]
    else:
        calls = [by_counts(3 * seed + i, ranks, experts, op) for i in range(3)]
        actions = [action_of(memory, op, ranks, experts // ranks, LIMIT) for memory in each]

    def run(r: int) -> None:
        for operands, *_ in calls:
            actions[r](operands[r])

    def off() -> list[Any]:
        return [
            (i, r, name)
            for i, (operands, _, wants) in enumerate(calls)
            for r, own in enumerate(wants() if routes else wants)
            for name, want in zip(("y", "rows"), own, strict=False)
            if not torch.equal(operands[r][name][: len(want)], want)
            # all rows beyond are zeroed with y, or none
            or not tail_is(operands[r][name][len(want) :], "clear" in operands[r])
        ]

    rooms = [room for _, rooms, _ in calls for own in rooms for room in own]
    return Scene(each, run, off, rooms, 0.4 if seed % 2 else 0.05)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ranks", "experts", "routes"),
    [(2, 2, False), (2, 6, False), (4, 8, False), (2, 6, True), (4, 8, True)],
)
def test_every_order_gives_the_product(
    pool: RankPool, ranks: int, experts: int, routes: bool, seed: int, op: str
):
    all_right(pool, experts_scene, seed, ranks, experts, op, routes)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("experts", "routes"), [(4, False), (6, True)], ids=["counts", "routes"])
@pytest.mark.parametrize(
    ("fault", "text", "op"),
    [("post_relaxed", "are off", DISPATCH), ("is_last_relaxed", "are off", COMBINE),
     ("post_too_few", STUCK, DISPATCH), ("post_too_few", STUCK, COMBINE),
     ("same_epoch", "are off", DISPATCH), ("same_epoch", "are off", COMBINE)],
)  # fmt: skip
def test_planted_faults_of_experts_show(
    pool: RankPool, fault: str, text: str, op: str, experts: int, routes: bool
):
    shown(pool, experts_scene, fault, text, 2, experts, op, routes, seeds=30)


def edges(rank: int, world: int, op: str, clear: bool) -> list[str]:
    """What is wrong where all rows that there is room for are none, and where none are."""
    from counterpoint.testing.interleave import Interleaved

    limit, found = 16, []
    for own in ([0, 0], [3, 13], [15, 0]):
        (memory,) = memory_of(1, limit)
        rooms, results = rooms_of(limit, op)
        action = action_of(memory, op, 1, 2, limit)
        x, w, counts = integers(20, K), integers(2, K, N), torch.tensor([own])
        given = {"x": x, "w": w, "counts": counts, **results}
        given |= {"clear": results["y"]} if clear else {}
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


def beyond(rank: int, world: int, op: str, routes: bool) -> list[Any]:
    """Of each rank what is said, whether all of its results are NaN, and that guards are whole.

    Too many rows are for rank 1, or by routes for rank 0; or they come from it.
    """
    from counterpoint.testing.interleave import Interleaved

    ranks, experts = 2, 4
    limit = 2 * TOKENS * TOP - 11 if routes else 16
    each = memory_of(ranks, LIMIT if routes else limit)
    if routes:
        operands, rooms, _ = by_routes(drawn(2, ranks, experts), ranks, experts, op, limit)
        actions = [routed(memory, op, ranks, experts, limit) for memory in each]
        full = [limit, 0] if op == DISPATCH else [TOKENS] * 2
    else:
        counts = torch.tensor([[1, 2, 5, 6], [3, 1, 5, 4]])
        if op == COMBINE:
            counts = torch.tensor([[1, 2, 3, 1], [5, 6, 5, 4]])
        actions = [action_of(memory, op, ranks, 2, limit) for memory in each]
        made = [rooms_of(limit, op) for _ in each]
        rooms, ws = [room for room, _ in made], integers(experts, K, N)
        operands = [
            {"x": integers(2 * limit, K), "w": ws[2 * r : 2 * r + 2], "counts": counts, **results}
            for r, (_, results) in enumerate(made)
        ]
        sums = counts.view(ranks, ranks, 2).sum(2).sum(1 if op == COMBINE else 0)
        full = sums.clamp(max=limit).tolist()
    every = [room for own in rooms for room in own]
    for room in every:
        room[GUARD:-GUARD] = 0
    Interleaved(0).run([lambda r=r: actions[r](operands[r]) for r in range(ranks)])
    whole = left(each[0], every)
    return [
        (int(memory.over), all(own[x][:n].isnan().all() for x in ("y", "rows") if x in own), whole)
        for memory, own, n in zip(each, operands, full, strict=True)
    ]


@pytest.mark.parametrize(
    ("routes", "spoilt"), [(False, 1 << 33 | 4 << 8), (True, 1 << 32 | 11 << 8)]
)
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_too_many_rows_spoil_all_results_on_all_ranks(
    pool: RankPool, op: str, routes: bool, spoilt: int
):
    """Rank 1 has room for 4 rows fewer; by routes rank 0 for 11."""
    run = pool.run(beyond, 1, op, routes, group=False, timeout_s=60)
    assert run == [[(spoilt | 1 + (op == COMBINE), True, "")] * 2]


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


def arrived(rank: int, world: int, op: str, named: str) -> tuple[list[int], list[int]]:
    """Rows that were stored in each rank's memory, by all ranks; and those of the rule."""
    from counterpoint.testing.interleave import Interleaved

    ranks, experts, columns = 8, 16, N if op == COMBINE else K
    draw, limit = torch.Generator().manual_seed(7), ranks * TOKENS * TOP
    share = torch.ones(experts) if named == "uniform" else 1 / torch.arange(1, experts + 1)
    ids = torch.multinomial(share.expand(ranks * TOKENS, -1), TOP, generator=draw)
    each = memories(ranks, 4 * K * N * 8)  # halves are whole rows
    memory = [room[GUARD:-GUARD].view(torch.int16) for room in each[0].kept["turns"]]
    for room in memory:
        room.fill_(-23131)  # no small integer
    operands, *_ = by_routes(ids, ranks, experts, op, limit)
    actions = [routed(one, op, ranks, experts, limit) for one in each]
    Interleaved(0).run([lambda r=r: actions[r](operands[r]) for r in range(ranks)])
    found = [int((room.view(-1, columns) != -23131).any(1).sum()) for room in memory]
    once = torch.stack([(ids // (experts // ranks) == d).any(1) for d in range(ranks)])
    once = once.view(ranks, ranks, TOKENS).sum(2)  # of tokens of the second to the first
    assert once.sum() < ids.numel(), "some tokens have two experts on a rank"
    return found, once.sum(0 if op == COMBINE else 1).tolist()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("named", ["uniform", "zipf"])
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_a_token_goes_to_each_of_eight_ranks_once(pool: RankPool, op: str, named: str):
    """DeepEP's rule: to each rank that has some of its experts; and as many rows come back."""
    ((found, once),) = pool.run(arrived, 1, op, named, group=False, timeout_s=120)
    assert found == once


@pytest.mark.parametrize("resident", [1, 2, 3, 40, 132])
def test_a_gpu_with_few_sms(resident: int):
    """All programs that are resident, and never fewer than the senders and one that multiplies."""
    assert Grid(None, 16, reserve=False).programs(resident) == max(resident, 17)
    assert Grid(None, reserve=False).programs(resident) == resident
