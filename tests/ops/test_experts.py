"""all_to_all_matmul and matmul_all_to_all: each row where the layouts say, on CPU ranks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from expert_bodies import by_expert, by_owner, integers, multiplied, summed, tables, whole
from rank_bodies import world
from rankpool import RankPool

import counterpoint as cp
from counterpoint.ops import experts

K, N = 5, 7


def wrong_rows(rank: int, ranks: int, local: int, plan: str, dtype: torch.dtype) -> list[str]:
    found: list[str] = []
    for name, counts in tables(ranks, local).items():
        for stored in ("kn", "nk"):
            given = whole(counts, K, N, dtype, stored=stored)
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
            given = whole(counts, K, N, dtype, back=True, stored=stored)
            exact = given.double()
            wants = by_owner(multiplied(exact.xs, exact.ws, counts), counts)
            y = cp.matmul_all_to_all(given.xs[rank], given.ws[rank], counts=table, plan=plan)
            if not torch.equal(y, wants[rank].to(dtype)):
                found.append(f"returned of {name} {stored}")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", experts.PLANS)
@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3)])
def test_each_row_and_its_product(
    pool: RankPool, ranks: int, local: int, plan: str, dtype: torch.dtype
):
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


def wrong_where_device_known(rank: int, ranks: int, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(experts, "host_known", lambda _: False)
    found: list[str] = []
    for name, counts in tables(ranks, 2).items():
        table, given = torch.tensor(counts), whole(counts, K, N, torch.float32)
        exact = given.double()
        rows = by_expert(exact.xs, counts)
        want = multiplied(rows, exact.ws, counts)[rank].float()
        room = 3 + max(len(r) for r in rows)
        x = torch.cat((given.xs[rank], torch.full((2, K), float("nan"))))
        y, kept = cp.all_to_all_matmul(
            x, given.ws[rank], counts=table, max_rows=room, return_rows=True
        )
        r = len(want)
        same = torch.equal(y[:r], want) and torch.equal(kept[:r], rows[rank].float())
        if not same or y.shape != (room, N) or kept.shape != (room, K):
            found.append(f"out: {name}")
        # what was not written is NaN here
        if not y[r:].isnan().all():
            found.append(f"out, rows beyond: {name}")
        w = given.ws[rank].transpose(1, 2)
        ws = [v.transpose(1, 2) for v in exact.ws]
        wants = by_owner(multiplied(multiplied(rows, exact.ws, counts), ws, counts), counts)
        back = cp.matmul_all_to_all(y, w, counts=table, max_rows=len(x) + 5)
        t = len(given.xs[rank])
        if not torch.equal(back[:t], wants[rank].float()) or len(back) != len(x) + 5:
            found.append(f"back: {name}")
    return found


def device_known(rank: int, ranks: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        return wrong_where_device_known(rank, ranks, patch)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_beyond_the_sum_of_a_device_known_table(pool: RankPool, ranks: int):
    assert pool.run(device_known, ranks) == [[]] * ranks


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


def test_who_is_asked_and_what_is_read_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """The ranks at the first call alone, a device-known table then alone; values at each call."""
    asked, read, code = list[list[str]](), list[bool](), dict[Any, Any]()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    workspace = SimpleNamespace(rank=0, code=code, check=lambda: None, remember=code.__setitem__)
    monkeypatch.setattr(experts, "workspace_of", lambda *_: workspace)

    def agree(op: str, here: dict[str, str], _: Any, refused: Exception | None) -> None:
        asked.append([fact for name, fact in here.items() if name[:7] in ("counts[", "rows_of")])
        if refused:
            raise refused

    monkeypatch.setattr(experts.agreement, "agree", agree)

    def call(counts: list[list[int]], host: bool, rows: int = 8, **alike: str) -> Any:
        def cpu() -> torch.Tensor:
            read.append(host)
            return torch.tensor(counts)

        size = sum(counts[0])
        x: Any = SimpleNamespace(
            is_cuda=True, shape=(size, K), dtype=torch.float32, device=torch.device("cuda", 0)
        )
        table: Any = SimpleNamespace(dtype=torch.int64, cpu=cpu)
        w = torch.randn(1, K, N)
        given = experts.Exchange("op", x, w, table, rows, True, host, "auto")
        ready: Any = object()
        return experts.prepare(given, cast(Any, None), "", lambda _: ready, alike=alike)

    first = call([[1, 2], [3, 4]], host=False)
    assert (asked, read) == ([["[1, 2]", "[3, 4]"]], [False])
    assert call([[2, 2], [0, 0]], host=False) is first
    assert len(asked) == len(read) == 1
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")
    assert call([[2, 2], [0, 0]], host=False) is first
    assert len(asked) == len(read) == 2
    monkeypatch.delenv("COUNTERPOINT_CHECK")
    # where the host knows, that is another call, and each table is looked at
    second = call([[1, 2], [3, 4]], host=True)
    assert second is not first and len(asked) == 3
    assert call([[2, 2], [0, 0]], host=True) is second and len(asked) == 3
    with pytest.raises(cp.InputError, match="counts must be >= 0, got -2"):
        call([[2, -2], [0, 0]], host=True)
    with pytest.raises(cp.InputError, match="max_rows must be >= 9 on rank 0, as counts says"):
        call([[3, 2], [6, 0]], host=True)
    assert len(asked) == 3
    # sizes that must be equal are compared when they are new
    for size in (5, 5, 6, 5):
        again = call([[1, 2], [3, 4]], host=False, rows=size, rows_of_x=str(size))
        assert again is first
    assert [facts[2:] for facts in asked[3:]] == [["5"], ["6"]]


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
