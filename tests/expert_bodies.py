"""What the tests of experts share: tables, operands of all ranks, and the operators in one process.

Every rank makes the whole problem from a seed. Small integers: products and sums are then exact in
fp32 and fp64, so results are compared bit by bit. The reference is differentiable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rank_bodies import by_reference
from torch import Tensor

import counterpoint as cp
from counterpoint.experts import check as experts_check
from counterpoint.experts.fused import plan_fused

Lists = list[list[int]]


def tables(ranks: int, local: int) -> dict[str, Lists]:
    """Counts [ranks, E] of all kinds, by what is special about them."""
    experts, generator = ranks * local, torch.Generator().manual_seed(100 * ranks + local)

    def draw(high: int) -> Tensor:
        return torch.randint(high, (ranks, experts), generator=generator)

    uneven, no_expert, no_source, no_rank, one = (draw(6) for _ in range(5))
    no_expert[:, -1] = 0
    no_source[-1] = 0
    no_rank[:, :local] = 0
    no_rank[0] = 0
    one[:] = 0
    one[-1, 0] = 7
    found = {
        "uneven": uneven, "even": torch.full_like(uneven, 2), "sparse": draw(2),
        "an expert without rows": no_expert, "a rank that sends nothing": no_source,
        "a rank that gets and sends nothing": no_rank, "one pair": one,
        "nothing": torch.zeros_like(uneven),
    }  # fmt: skip
    return {name: table.tolist() for name, table in found.items()}


@contextmanager
def by_torch(known: str = "host") -> Iterator[None]:
    """CPU ranks as a user has them: torch stands for kernels, which tests/kernels interprets.

    Args:
        known: where counts are: all are taken for such that only a "device" knows, or none is.
    """
    with by_reference(), pytest.MonkeyPatch.context() as patch:
        if known == "device":
            patch.setattr(experts_check, "host_known", on_no_host)
            patch.setattr(experts_check, "host_known_at_once", on_no_host)
        yield


@contextmanager
def small_kernels() -> Iterator[None]:
    """Kernels of experts of small tiles and few senders: each has several of all there is."""
    tile, sending = plan_fused.Tile(16, 16, 16, 1, 4, 2), plan_fused.Sending(2, 2, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_fused, "tile_of", Mock(return_value=tile))
        patch.setattr(plan_fused, "sending_of", Mock(return_value=sending))
        yield


def on_no_host(counts: Tensor) -> bool:
    return False


@dataclass
class Whole:
    """The tensors of all ranks: tokens' rows by owner, weights [E_local, K, N] of each."""

    counts: Lists
    xs: list[Tensor]
    ws: list[Tensor]
    back: bool = False  # xs are by expert

    def double(self) -> "Whole":
        """A copy in fp64 that asks for gradients."""
        xs, ws = ([t.double().detach().requires_grad_() for t in ts] for ts in (self.xs, self.ws))
        return Whole(self.counts, xs, ws, self.back)


def integers(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def whole(
    counts: Lists, k: int, n: int, dtype: torch.dtype, *, back: bool = False, stored: str = "kn"
) -> Whole:
    """Operands; `back`: x is by expert, as the second operator takes it."""
    ranks = len(counts)
    local, generator = len(counts[0]) // ranks, torch.Generator().manual_seed(5)
    rows = [sum(row) for row in counts]
    if back:
        rows = [
            sum(row[e] for row in counts for e in range(d * local, (d + 1) * local))
            for d in range(ranks)
        ]
    xs = [integers(t, k, generator=generator, dtype=dtype) for t in rows]
    shape = (local, k, n) if stored == "kn" else (local, n, k)
    ws = [integers(*shape, generator=generator, dtype=dtype) for _ in range(ranks)]
    ws = ws if stored == "kn" else [w.transpose(1, 2) for w in ws]
    return Whole(counts, xs, ws, back)


def by_expert(xs: list[Tensor], counts: Lists) -> list[Tensor]:
    """Rows of each owner, sorted by expert, as each rank of experts has them."""
    local = len(counts[0]) // len(counts)
    blocks = [x.split(row) for x, row in zip(xs, counts, strict=True)]
    return [
        torch.cat([blocks[s][d * local + e] for e in range(local) for s in range(len(counts))])
        for d in range(len(counts))
    ]


def by_owner(ys: list[Tensor], counts: Lists) -> list[Tensor]:
    """The inverse of `by_expert`."""
    ranks, local = len(counts), len(counts[0]) // len(counts)
    blocks = [
        y.split([counts[s][d * local + e] for e in range(local) for s in range(ranks)])
        for d, y in enumerate(ys)
    ]
    return [
        torch.cat([blocks[d][e * ranks + s] for d in range(ranks) for e in range(local)])
        for s in range(ranks)
    ]


def multiplied(rows: list[Tensor], ws: list[Tensor], counts: Lists) -> list[Tensor]:
    """Each rank's rows by expert, times their experts' weights."""
    local, products = len(counts[0]) // len(counts), list[Tensor]()
    for d, (x, w) in enumerate(zip(rows, ws, strict=True)):
        sizes = [sum(row[d * local + e] for row in counts) for e in range(local)]
        products.append(torch.cat([p @ w[e] for e, p in enumerate(x.split(sizes))]))
    return products


def summed(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, :, None] * y[index]).sum(1)


OPS = ("all_to_all_matmul", "matmul_all_to_all")


def wrong_products(
    rank: int, counts: Lists, plan: Any, dtype: torch.dtype, k: int, n: int
) -> list[str]:
    """Which results of both operators are not those of one process, with either layout of w.

    Args:
        plan: for both, or a dict of them by operator.
    """
    found: list[str] = []
    out, back = (plan[op] if isinstance(plan, dict) else plan for op in OPS)
    local = len(counts[0]) // len(counts)
    table = torch.tensor(counts, dtype=torch.int32 if local == 1 else torch.int64)
    for stored in ("kn", "nk"):
        given = whole(counts, k, n, dtype, stored=stored)
        x, w, exact = given.xs[rank], given.ws[rank], given.double()
        rows = by_expert(exact.xs, counts)
        want = multiplied(rows, exact.ws, counts)[rank].to(dtype)
        y, kept = cp.all_to_all_matmul(x, w, counts=table, plan=out, return_rows=True)
        alone = cp.all_to_all_matmul(x, w, counts=counts, plan=out)
        given = whole(counts, k, n, dtype, back=True, stored=stored)
        exact = given.double()
        wanted = by_owner(multiplied(exact.xs, exact.ws, counts), counts)[rank].to(dtype)
        returned = cp.matmul_all_to_all(given.xs[rank], given.ws[rank], counts=table, plan=back)
        pairs = {"y": (y, want), "y alone": (alone, want), "rows": (kept, rows[rank].to(dtype)),
                 "returned": (returned, wanted)}  # fmt: skip
        found += [f"{name} {stored}" for name, pair in pairs.items() if not torch.equal(*pair)]
    return found


def filled(x: Tensor, rows: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf with the numbers of x, and NaN after them up to `rows` rows."""
    x = x.detach().to(dtype)
    if rows is not None:
        x = torch.cat((x, x.new_full((rows - len(x), x.shape[1]), float("nan"))))
    return x.clone().requires_grad_()


def some_sums(
    rows: int, tokens: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of each token, any of them and some more than once, and their weights."""
    shape = (tokens[0] if rows else 0, tokens[1])
    weights = integers(*shape, generator=generator, dtype=torch.float64) / 8
    index = torch.randint(max(rows, 1), shape, generator=generator)
    return index, weights.requires_grad_()


def wrong_gradients(
    rank: int, given: Whole, plan: str, device: bool, also: bool, tokens: tuple[int, int]
) -> list[str]:
    """Which results and gradients of an operator are not those of one process in fp64.

    Args:
        given: for matmul_all_to_all, if it is `back`.
        device: alone knows the counts. Then x and the result have more rows: what is there of x
            is not read, of the result not written, and of gradients 0.
        also: rows that came are used; or rows are summed, [tokens, of each], and weights have
            gradients.
    """
    exact, counts, dtype, op = given.double(), given.counts, given.xs[0].dtype, OPS[given.back]
    rows = exact.xs if given.back else by_expert(exact.xs, counts)
    results = multiplied(rows, exact.ws, counts)
    results = by_owner(results, counts) if given.back else results
    lengths, generator = [len(y) for y in results], torch.Generator().manual_seed(9)
    sums = [some_sums(length, tokens, generator) for length in lengths]
    summing, keeping = also and given.back, also and not given.back
    more: dict[str, Any] = {} if given.back else {"return_rows": True}
    if summing:
        results = [summed(y, *each) for y, each in zip(results, sums, strict=True)]
        index, weights = sums[rank]
        more = {"sum_of": (index.int() if rank else index, filled(weights, None))}
    arriving = [integers(*y.shape, generator=generator, dtype=torch.float64) for y in results]
    losses = [(y * dy).sum() for y, dy in zip(results, arriving, strict=True)]
    if keeping:
        losses += [3 * r.square().sum() / 2 for r in rows]
    torch.autograd.backward(losses)

    room = 3 + max(lengths) if device else None
    # one kernel wants equally many rows of all ranks
    longest = max(map(len, given.xs)) if plan == "fused" else len(given.xs[rank])
    x = filled(given.xs[rank], 2 + longest if device else None, dtype)
    w = given.ws[rank].detach().requires_grad_()
    more |= {"counts": torch.tensor(counts), "max_rows": room, "plan": plan}
    got = getattr(cp, op)(x, w, **more)
    with torch.no_grad():
        alone = getattr(cp, op)(x, w, **more)
    y, kept = (got, None) if given.back else got
    # what arrives beyond the sum of the table is not read
    dy = filled(arriving[rank], None if summing else room, dtype).detach()
    pairs, found = {"y": (y, results[rank])}, list[str]()
    if differs(y.detach(), alone if given.back else alone[0], None, 0):
        found.append("y without gradients")
    if kept is None:
        y.backward(dy)
    else:
        # what lies beyond them is not said
        pairs["rows"] = kept[: len(rows[rank])], rows[rank]
        found += [] if len(kept) == len(y) else ["rows of another number"]
        both = (y, kept) if keeping else (y,)
        torch.autograd.backward(both, (dy, 3 * kept.detach())[: len(both)])
    for name, pair in pairs.items():
        lines = room if name == "y" and not summing else None
        found += [name] if differs(*pair, lines, float("nan")) else []
    pairs = {"dw": (w.grad, exact.ws[rank].grad)}
    found += ["dx"] if differs(x.grad, exact.xs[rank].grad, len(x), 0.0) else []
    if summing:
        pairs["dweights"] = more["sum_of"][1].grad, sums[rank][1].grad
    found += [name for name, pair in pairs.items() if differs(*pair, None, 0.0)]
    return [f"{op} {name}, also {also}" for name in found]


def differs(got: Tensor | None, want: Tensor | None, rows: int | None, beyond: float) -> bool:
    """Not to the bit, or not `rows` rows, if so many are to be, with `beyond` in the last ones."""
    assert got is not None and want is not None
    want = want.detach().to(got.dtype)
    if rows is not None:
        want = torch.cat((want, want.new_full((rows - len(want), *want.shape[1:]), beyond)))
    if got.shape != want.shape:
        return True
    return not bool(((got == want) | (got.isnan() & want.isnan())).all())
