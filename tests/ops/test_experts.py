"""all_to_all_matmul and matmul_all_to_all: each row where the layouts say, on CPU ranks."""

from types import SimpleNamespace
from typing import Any

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
    wrong_products,
)
from on_ranks import on_ranks
from rank_bodies import world

import counterpoint as cp
from counterpoint.ops import experts

K, N = 5, 7


@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "forward", "bf16 fp32")
@pytest.mark.parametrize("plan", ["auto", "serial", "fused"])
@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 2), (4, 3)])
@on_ranks()
def test_each_row_and_its_product(rank: int, ranks: int, local: int, plan: str) -> list[str]:
    if plan == "fused" and ranks == 3:  # the kernel takes powers of 2
        return []
    dtype = torch.float32 if plan == "auto" else torch.bfloat16
    sizes = (8, 16) if plan == "fused" else (K, N)
    with by_torch():
        return [
            f"{name}: {text}" for name, counts in tables(ranks, local).items()
            for text in wrong_products(rank, counts, plan, dtype, *sizes)
        ]  # fmt: skip


@on_ranks(1, 3)
def test_the_sum_over_a_tokens_rows(rank: int, ranks: int) -> list[str]:
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


@pytest.mark.parametrize("plan", ["auto", "fused", "grouped chunks=2"])
@on_ranks(1, 2, 4)
def test_rows_beyond_the_sum_of_a_device_known_table(rank: int, ranks: int, plan: str) -> list[str]:
    with by_torch("device"):
        sizes = (8, 16) if plan == "fused" else (K, N)
        return wrong_where_device_known(rank, ranks, plan, *sizes)


@on_ranks(2)
def test_nothing_is_kept_by_the_values_of_a_table(rank: int, ranks: int):
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
    assert good and len(workspace_of(world(), torch.device("cpu")).code) == 1


@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_the_facts_of_a_call(op: str):
    """Equal counts are exact; of others plans are for a few sizes, whatever the tables."""

    def seen(table: torch.Tensor, rows: int, room: int | None, rank: int = 0, known: str = "host"):
        x, w = torch.empty(rows, 8).half(), torch.empty(table.shape[1] // len(table), 8, 8)
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: len(table))
        return experts.seen(op, x, w, table, room, "auto", group, known == "host")

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


@on_ranks(1, 3)
def test_counts_are_gathered(rank: int, ranks: int):
    results: list[bool] = []
    for dtype in (torch.int32, torch.int64):
        own = torch.arange(2 * ranks, dtype=dtype) + 100 * rank
        table = cp.exchange_counts(own)
        want = torch.stack([torch.arange(2 * ranks) + 100 * r for r in range(ranks)])
        results += [table.dtype == dtype, torch.equal(table.long(), want)]
    assert results == [True] * 4


@on_ranks(3)
def test_a_group_of_some_ranks(rank: int, ranks: int):
    group = dist.new_group([2, 1])
    if rank == 0:
        return
    counts = tables(2, 2)["uneven"]
    me = dist.get_rank(group)
    given = whole(counts, K, N, torch.float32)
    y = cp.all_to_all_matmul(given.xs[me], given.ws[me], counts=counts, group=group)
    exact = given.double()
    want = multiplied(by_expert(exact.xs, counts), exact.ws, counts)[me]
    assert torch.equal(y, want.float())
