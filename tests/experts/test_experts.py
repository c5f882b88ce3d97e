"""all_to_all_matmul and matmul_all_to_all: each row where the layouts say, on CPU ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_bodies import OPS, Lists, by_expert, by_torch, multiplied, tables, whole, wrong_products
from on_ranks import on_ranks
from rank_bodies import world
from refusals import wrongly_refused

import counterpoint as cp
from counterpoint.experts import facts as experts

K, N = 5, 7
# groups of one, all in one, what the machine suggests; both ways to meet
PLANS = ("auto", "serial", "fused", "grouped", "grouped all", "grouped each ring",
         "grouped chunks=2", "grouped all chunks=3", "grouped each chunks=3", "grouped all xor",
         "of a mesh")  # fmt: skip


def even(ranks: int, local: int, count: int) -> Lists:
    return [[count] * (ranks * local) for _ in range(ranks)]


@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "forward", "bf16 fp32")
@pytest.mark.drawn(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("ranks", "local"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (4, 3)]
)
@on_ranks()
def test_each_row_and_its_product(rank: int, ranks: int, local: int, plan: str) -> list[str]:
    given = tables(ranks, local)
    spec: Any = plan.replace("all", str(local)).replace("each", "/".join("1" * local))
    if ranks == 3:  # what is for powers of 2 is left to the library, and to rings
        spec = spec.replace("fused", "auto").removesuffix(" xor")
    if plan == "of a mesh":  # and for more rows than there are; equal counts take another plan
        machine = f"mi300x-{ranks}" if ranks > 1 else None
        spec = {
            op: cp.build(
                cp.Problem(op, 256 * local * ranks, N, K, ranks, "float32", experts=local,
                           counts="host"),
                "grouped chunks=2", machine=machine)
            for op in OPS
        }  # fmt: skip
        given = {name: counts for name, counts in given.items() if len(set(sum(counts, []))) > 1}
    # the sizes of the first are those of the third too, in memory that has grown between them
    sizes = () if plan == "of a mesh" else (2, 5, 2, 0, 1)
    cases = [(f"{n} of each, turn {i}", even(ranks, local, n), torch.bfloat16)
             for i, n in enumerate(sizes)]  # fmt: skip
    dtype = torch.bfloat16 if plan in ("serial", "fused") else torch.float32
    cases += [(name, counts, dtype) for name, counts in given.items()]
    k, n = (8, 16) if plan == "fused" else (K, N)
    with by_torch():
        return [f"{name}: {text}" for name, counts, dtype in cases
                for text in wrong_products(rank, counts, spec, dtype, k, n)]  # fmt: skip


@on_ranks(2)
def test_nothing_is_kept_by_the_values_of_a_table(rank: int, ranks: int):
    """How many calls a workspace remembers after tables that are all different."""
    from counterpoint.group.workspace import workspace_of

    generator, good = torch.Generator().manual_seed(0), True
    for _ in range(20):
        counts = torch.randint(9, (ranks, 2 * ranks), generator=generator).tolist()
        given = whole(counts, K, N, torch.float32)
        y = cp.all_to_all_matmul(given.xs[rank], given.ws[rank], counts=counts)
        exact = given.double()
        want = multiplied(by_expert(exact.xs, counts), exact.ws, counts)[rank]
        good &= torch.equal(y, want.float())
    assert good and len(workspace_of(world(), torch.device("cpu")).code) == 1


@pytest.mark.parametrize("op", OPS)
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


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> list[str]:
    counts, found = even(ranks, 3, 2), list[str]()
    sizes = "plan must be a spec whose sizes add up to 3; {} do not, got {}"
    for op, back in ((cp.all_to_all_matmul, False), (cp.matmul_all_to_all, True)):
        for table, plan, want in (
            (counts, "grouped 2/2", sizes.format("'2/2'", "'grouped 2/2'")),
            (counts, "grouped 3 pull",
             "plan must be a spec of words that grouped knows; 'pull' is none, "
             "got 'grouped 3 pull'"),
            (counts, "graded",
             "plan must be auto or one of serial, fused, grouped, islands, routed, got 'graded'; "
             "did you mean 'grouped'?"),
            (even(ranks, 3, 0), "grouped 4", sizes.format("'4'", "'grouped 4'")),
        ):  # fmt: skip
            # rows as each table says: nothing but the plan is wrong
            given = whole(table, K, N, torch.float32, back=back)
            base = {"x": given.xs[rank], "w": given.ws[rank], "counts": table}
            found += wrongly_refused(op, base, [({"plan": plan}, want)], exact=True)
    return found


@on_ranks(2)
def test_what_one_rank_asks_for_is_run_by_all(rank: int, ranks: int):
    """A loss that uses kept rows on one rank alone: all ranks run the same; and inference mode."""
    counts, found = even(ranks, 2, 3), []
    for plan in ("serial", "grouped"):
        given = whole(counts, K, N, torch.float32)
        x, w = (t[rank].clone().requires_grad_() for t in (given.xs, given.ws))
        y, rows = cp.all_to_all_matmul(x, w, counts=counts, plan=plan, return_rows=True)
        (y.sum() + (rows.square().sum() if rank == 0 else 0)).backward()
        found.append((x.grad, w.grad))
    same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    with torch.inference_mode():
        for back in (False, True):
            given = whole(counts, K, N, torch.float32, back=back)
            op = cp.matmul_all_to_all if back else cp.all_to_all_matmul
            results = [op(given.xs[rank], given.ws[rank], counts=counts, plan=plan)
                       for plan in ("serial", "grouped")]  # fmt: skip
            same.append(torch.equal(*results))
    assert same == [True] * 4
