"""all_to_all_matmul and matmul_all_to_all: each row where the layouts say, on CPU ranks."""

import pytest
import torch
import torch.distributed as dist
from expert_bodies import (
    by_expert,
    by_owner,
    by_torch,
    integers,
    multiplied,
    summed,
    tables,
    whole,
)
from rank_bodies import world
from rankpool import RankPool

import counterpoint as cp
from counterpoint.ops import experts

K, N = 5, 7


def wrong_rows(rank: int, ranks: int, local: int, plan: str, dtype: torch.dtype) -> list[str]:
    with by_torch():
        return rows_that_are_off(rank, ranks, local, plan, dtype)


def rows_that_are_off(
    rank: int, ranks: int, local: int, plan: str, dtype: torch.dtype
) -> list[str]:
    found: list[str] = []
    k, n = (8, 16) if plan == "fused" else (K, N)
    for name, counts in tables(ranks, local).items():
        for stored in ("kn", "nk"):
            given = whole(counts, k, n, dtype, stored=stored)
            exact = given.double()
            rows = by_expert(exact.xs, counts)
            wants = multiplied(rows, exact.ws, counts)
            table = torch.tensor(counts, dtype=torch.int32 if local == 1 else torch.int64)
            y, kept = cp.all_to_all_matmul(
                given.xs[rank], given.ws[rank], counts=table, plan=plan, return_rows=True
            )
            alone = cp.all_to_all_matmul(given.xs[rank], given.ws[rank], counts=counts, plan=plan)
            if not (torch.equal(y, wants[rank].to(dtype)) and torch.equal(y, alone)):
                found.append(f"y of {name} {stored}")
            if not torch.equal(kept, rows[rank].to(dtype)):
                found.append(f"rows of {name} {stored}")
            given = whole(counts, k, n, dtype, back=True, stored=stored)
            exact = given.double()
            wants = by_owner(multiplied(exact.xs, exact.ws, counts), counts)
            y = cp.matmul_all_to_all(given.xs[rank], given.ws[rank], counts=table, plan=plan)
            if not torch.equal(y, wants[rank].to(dtype)):
                found.append(f"returned of {name} {stored}")
    return found


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [("auto", torch.float32), ("serial", torch.bfloat16), ("fused", torch.bfloat16)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3)])
def test_each_row_and_its_product(
    pool: RankPool, ranks: int, local: int, plan: str, dtype: torch.dtype
):
    ranks += plan == "fused" and ranks == 3  # the kernel takes powers of 2
    assert pool.run(wrong_rows, ranks, local, plan, dtype) == [[]] * ranks


def wrong_sums(rank: int, ranks: int) -> list[str]:
    """The sum over a token's rows: any rows, more than once, and none."""
    found: list[str] = []
    generator = torch.Generator().manual_seed(rank)
    for name, counts in tables(ranks, 2).items():
        for dtype in (torch.float32, torch.bfloat16):
            given = whole(counts, K, N, dtype, back=True)
            exact = given.double()
            back = by_owner(multiplied(exact.xs, exact.ws, counts), counts)[rank]
            t = len(back)
            for shape in [(4, 3), (4, 1), (0, 3), (4, 0)]:
                shape = shape if t else (0, shape[1])
                index = torch.randint(max(t, 1), shape, generator=generator)
                weights = integers(*shape, generator=generator, dtype=torch.float32) / 8
                out = cp.matmul_all_to_all(
                    given.xs[rank], given.ws[rank], counts=counts, sum_of=(index.int(), weights)
                )
                # each row is rounded for the way
                want = summed(back.to(dtype).double(), index, weights.double()).to(dtype)
                if not torch.equal(out, want):
                    found.append(f"{name} {dtype} {shape}")
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_sum_over_a_tokens_rows(pool: RankPool, ranks: int):
    assert pool.run(wrong_sums, ranks) == [[]] * ranks


def wrong_where_device_known(rank: int, ranks: int, plan: str, k: int, n: int) -> list[str]:
    dtype = torch.bfloat16 if plan == "fused" else torch.float32
    found: list[str] = []
    for name, counts in tables(ranks, 2).items():
        table, given = torch.tensor(counts), whole(counts, k, n, dtype)
        exact = given.double()
        rows = by_expert(exact.xs, counts)
        want = multiplied(rows, exact.ws, counts)[rank].to(dtype)
        room = 3 + max(len(r) for r in rows)
        # one kernel wants equally many rows of all ranks, of x too
        more = 2 + (max(map(sum, counts)) - len(given.xs[rank])) * (plan == "fused")
        x = torch.cat((given.xs[rank], torch.full((more, k), float("nan"), dtype=dtype)))
        y, kept = cp.all_to_all_matmul(
            x, given.ws[rank], counts=table, max_rows=room, return_rows=True, plan=plan
        )
        r = len(want)
        same = torch.equal(y[:r], want) and torch.equal(kept[:r], rows[rank].to(dtype))
        if not same or y.shape != (room, n) or kept.shape != (room, k):
            found.append(f"out: {name}")
        # what was not written is NaN here
        if not y[r:].isnan().all():
            found.append(f"out, rows beyond: {name}")
        w = given.ws[rank].transpose(1, 2)
        ws = [v.transpose(1, 2) for v in exact.ws]
        hs = [h.to(dtype).double() for h in multiplied(rows, exact.ws, counts)]
        wants = by_owner(multiplied(hs, ws, counts), counts)
        back = cp.matmul_all_to_all(y, w, counts=table, max_rows=len(x) + 5, plan=plan)
        t = len(given.xs[rank])
        if not torch.equal(back[:t], wants[rank].to(dtype)) or len(back) != len(x) + 5:
            found.append(f"back: {name}")
    return found


def device_known(rank: int, ranks: int, plan: str) -> list[str]:
    with by_torch("device"):
        sizes = (8, 16) if plan == "fused" else (K, N)
        return wrong_where_device_known(rank, ranks, plan, *sizes)


@pytest.mark.parametrize("plan", ["auto", "fused"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_beyond_the_sum_of_a_device_known_table(pool: RankPool, ranks: int, plan: str):
    assert pool.run(device_known, ranks, plan) == [[]] * ranks


def many_tables(rank: int, ranks: int) -> tuple[int, bool]:
    """How many calls a workspace remembers after tables that are all different."""
    from counterpoint.runtime.workspace import workspace_of

    generator, good = torch.Generator().manual_seed(0), True
    for _ in range(20):
        counts = torch.randint(9, (ranks, 2 * ranks), generator=generator).tolist()
        given = whole(counts, K, N, torch.float32)
        y = cp.all_to_all_matmul(given.xs[rank], given.ws[rank], counts=counts)
        exact = given.double()
        want = multiplied(by_expert(exact.xs, counts), exact.ws, counts)[rank]
        good &= torch.equal(y, want.float())
    return len(workspace_of(world(), torch.device("cpu")).code), good


def test_nothing_is_kept_by_the_values_of_a_table(pool: RankPool):
    assert pool.run(many_tables, 2) == [(1, True)] * 2


@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_the_facts_of_a_call(op: str):
    """Equal counts are exact; of others plans are for a few sizes, whatever the tables."""

    def seen(table: torch.Tensor, rows: int, room: int | None, rank: int = 0, known: str = "host"):
        x, w = torch.empty(rows, 8).half(), torch.empty(table.shape[1] // len(table), 8, 8)
        return experts.seen(op, x, w, table, room, "auto", rank, len(table), known == "host")

    equal = torch.full((2, 4), 3)
    assert seen(equal, 12, None)[::2] == ((0, 12, 0, 0), 12)
    assert seen(equal, 12, None).good and not seen(equal, 11, None).good
    assert not seen(equal, 12, 13).good and not seen(equal - 4, 0, None).good
    generator, sizes = torch.Generator().manual_seed(0), set[int]()
    for _ in range(50):
        counts = torch.randint(90, 110, (4, 12), generator=generator)
        sent, come = counts.sum(1), counts.view(4, 4, 3).sum((0, 2))
        has, gets = (sent, come) if op == "all_to_all_matmul" else (come, sent)
        for rank in range(4):
            facts, _, room, good = seen(counts, int(has[rank]), None, rank)
            assert facts.kind == 1 and good and room == gets[rank]
            assert facts.m % 12 == 0 and facts.m >= max(int(sent.max()), int(come.max()))
            sizes.add(facts.m)
    assert len(sizes) <= 2 and max(sizes) < 1.3 * 12 * 110
    facts, _, room, good = seen(counts, 900, 2000, 1, "device")
    assert (facts.kind, facts.has, facts.room, room, good) == (2, 900, 2000, 2000, True)
    assert facts.m >= 2000 and facts.m % 12 == 0
    # of three ranks one kernel takes nothing: the host reads the table
    facts, _, room, good = seen(counts[:3, :9], 1500, 2000, 1, "device")
    assert (facts.kind, facts.has, facts.room, room, good) == (1, 0, 0, 2000, True)


def exchanged(rank: int, ranks: int) -> list[bool]:
    results: list[bool] = []
    for dtype in (torch.int32, torch.int64):
        own = torch.arange(2 * ranks, dtype=dtype) + 100 * rank
        table = cp.exchange_counts(own)
        want = torch.stack([torch.arange(2 * ranks) + 100 * r for r in range(ranks)])
        results += [table.dtype == dtype, torch.equal(table.long(), want)]
    return results


@pytest.mark.parametrize("ranks", [1, 3])
def test_counts_are_gathered(pool: RankPool, ranks: int):
    assert pool.run(exchanged, ranks) == [[True] * 4] * ranks


def in_a_subgroup(rank: int, ranks: int) -> bool:
    group = dist.new_group([2, 1])
    if rank == 0:
        return True
    counts = tables(2, 2)["uneven"]
    me = dist.get_rank(group)
    given = whole(counts, K, N, torch.float32)
    y = cp.all_to_all_matmul(given.xs[me], given.ws[me], counts=counts, group=group)
    exact = given.double()
    want = multiplied(by_expert(exact.xs, counts), exact.ws, counts)[me]
    return torch.equal(y, want.float())


def test_a_group_of_some_ranks(pool: RankPool):
    assert pool.run(in_a_subgroup, 3) == [True] * 3
