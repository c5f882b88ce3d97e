"""Operators of experts by plans, on CPU ranks: values, gradients, sizes that change, refusals."""

import pytest
import torch
from expert_bodies import (
    Lists,
    by_expert,
    by_owner,
    integers,
    multiplied,
    summed,
    tables,
    whole,
    wrong_products,
)
from on_ranks import on_ranks
from refusals import wrongly_refused

import counterpoint as cp

K, N = 5, 7
OPS = ("all_to_all_matmul", "matmul_all_to_all")


def even(ranks: int, local: int, count: int) -> Lists:
    return [[count] * (ranks * local) for _ in range(ranks)]


def specs(ranks: int, local: int) -> list[str]:
    """Groups of one, all in one, what the machine suggests; both ways to meet."""
    found = ["grouped", f"grouped {local}", f"grouped {'/'.join('1' * local)} ring",
             "grouped chunks=2", f"grouped {local} chunks=3"]  # fmt: skip
    return found if ranks & (ranks - 1) else [*found, f"grouped {local} xor"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "local"), [(1, 3), (2, 1), (3, 2), (4, 3)])
@on_ranks()
def test_values(rank: int, ranks: int, local: int, dtype: torch.dtype) -> list[str]:
    # the third has the sizes of the first, in memory that has grown between them
    return [
        f"{spec}, {count} rows: {text}" for spec in specs(ranks, local) for count in (2, 5, 2, 0, 1)
        for text in wrong_products(rank, even(ranks, local, count), spec, dtype, K, N)
    ]  # fmt: skip


@pytest.mark.parametrize(("ranks", "local"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2)])
@on_ranks()
def test_values_of_counts_that_differ(rank: int, ranks: int, local: int) -> list[str]:
    """Also of plans for a mesh, and for more rows than there are."""
    found: list[str] = []
    for name, counts in tables(ranks, local).items():
        for spec in ("grouped", f"grouped {'/'.join('1' * local)} chunks=3"):
            wrong = wrong_products(rank, counts, spec, torch.float32, K, N)
            found += [f"{spec}, {name}: {text}" for text in wrong]
        if len({count for row in counts for count in row}) == 1:
            continue  # a call whose counts are equal takes a plan of that
        given = {op: whole(counts, K, N, torch.float32, back=op == OPS[1]) for op in OPS}
        exact = {op: given[op].double() for op in OPS}
        rows = by_expert(exact[OPS[0]].xs, counts)
        products = {
            OPS[0]: multiplied(rows, exact[OPS[0]].ws, counts),
            OPS[1]: by_owner(multiplied(exact[OPS[1]].xs, exact[OPS[1]].ws, counts), counts),
        }
        for op, want in products.items():
            m = 256 * local * ranks
            problem = cp.Problem(op, m, N, K, ranks, "float32", experts=local, counts="host")
            plan = cp.build(problem, "grouped chunks=2", machine=f"mi300x-{ranks}")
            x, w = given[op].xs[rank], given[op].ws[rank]
            got = getattr(cp, op)(x, w, counts=counts, plan=plan)
            found += [] if torch.equal(got, want[rank].float()) else [f"{op} on a mesh, {name}"]
    return found


@pytest.mark.parametrize("uneven", [False, True])
@on_ranks(1, 2, 3)
def test_gradients(rank: int, ranks: int, uneven: bool) -> list[str]:
    """Out, multiplied and back again with sums, beside the same in one process and fp64."""
    counts, found = even(ranks, 2, 3), list[str]()
    if uneven:  # an even number of rows of each rank, for two a token
        counts = [[2 * n for n in row] for row in tables(ranks, 2)["uneven"]]
    generator = torch.Generator().manual_seed(7)
    there, back = whole(counts, K, N, torch.float32), whole(counts, N, K, torch.float32)
    exact, down = there.double(), back.double()
    hs = multiplied(by_expert(exact.xs, counts), exact.ws, counts)
    ys = by_owner(multiplied(hs, down.ws, counts), counts)
    index = [torch.randperm(len(y), generator=generator).view(-1, 2) for y in ys]
    weights = [integers(*i.shape, generator=generator, dtype=torch.float64) for i in index]
    wants = [summed(y, i, v) for y, i, v in zip(ys, index, weights, strict=True)]
    torch.autograd.backward([want.sum() for want in wants])
    x, up, low = (t.clone().requires_grad_() for t in
                  (there.xs[rank], there.ws[rank], back.ws[rank]))  # fmt: skip
    h = cp.all_to_all_matmul(x, up, counts=counts, plan="grouped 1/1")
    sums = (index[rank], weights[rank].float())
    out = cp.matmul_all_to_all(h, low, counts=counts, plan="grouped 2 chunks=2", sum_of=sums)
    out.sum().backward()
    pairs = {
        "out": (out, wants[rank]),
        "dx": (x.grad, exact.xs[rank].grad),
        "dup": (up.grad, exact.ws[rank].grad),
        "ddown": (low.grad, down.ws[rank].grad),
    }
    for name, (got, want) in pairs.items():
        assert got is not None and want is not None
        if not torch.equal(got.detach(), want.detach().float()):
            found.append(name)
    return found


@pytest.mark.parametrize("plan", ["grouped", "grouped chunks=2"])
@pytest.mark.parametrize("kind", ["even", "uneven"])
@on_ranks(3)
def test_gradients_of_rows_that_are_kept(rank: int, ranks: int, kind: str, plan: str):
    """The rows that came have a gradient of their own: it is added on the way back."""
    counts = tables(ranks, 2)[kind]
    given = whole(counts, K, N, torch.float32)
    exact = given.double()
    rows = by_expert(exact.xs, counts)
    torch.autograd.backward([r.sum() * 3 for r in rows])
    torch.autograd.backward([y.sum() for y in multiplied(
        by_expert(exact.xs, counts), exact.ws, counts)])  # fmt: skip
    x = given.xs[rank].clone().requires_grad_()
    y, kept = cp.all_to_all_matmul(x, given.ws[rank], counts=counts, plan=plan, return_rows=True)
    (y.sum() + 3 * kept.sum()).backward()
    want = exact.xs[rank].grad
    assert want is not None and x.grad is not None
    assert torch.equal(x.grad, want.float())


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
