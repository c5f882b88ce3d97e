"""What the tests of experts share: tables, operands of all ranks, and the operators in one process.

Every rank makes the whole problem from a seed. Small integers: products and sums are then exact in
fp32 and fp64, so results are compared bit by bit. The reference is differentiable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
from rank_bodies import by_reference
from torch import Tensor

import counterpoint as cp
from counterpoint.ops import experts_check
from counterpoint.plan import fused_experts

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
    tile, sending = fused_experts.Tile(16, 16, 16, 1, 4, 2), fused_experts.Sending(2, 2, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_experts, "tile_of", Mock(return_value=tile))
        patch.setattr(fused_experts, "sending_of", Mock(return_value=sending))
        yield


def on_no_host(counts: Tensor) -> bool:
    return False


@dataclass
class Whole:
    """The tensors of all ranks: tokens' rows by owner, weights [E_local, K, N] of each."""

    counts: Lists
    xs: list[Tensor]
    ws: list[Tensor]

    @property
    def local(self) -> int:
        return len(self.counts[0]) // len(self.counts)

    def double(self) -> "Whole":
        """A copy in fp64 that asks for gradients."""
        xs, ws = ([t.double().detach().requires_grad_() for t in ts] for ts in (self.xs, self.ws))
        return Whole(self.counts, xs, ws)


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
    return Whole(counts, xs, ws if stored == "kn" else [w.transpose(1, 2) for w in ws])


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


def wrong_products(
    rank: int, counts: Lists, plan: str, dtype: torch.dtype, k: int, n: int
) -> list[str]:
    """Which results of both operators are not those of one process, with either layout of w."""
    found: list[str] = []
    local = len(counts[0]) // len(counts)
    table = torch.tensor(counts, dtype=torch.int32 if local == 1 else torch.int64)
    for stored in ("kn", "nk"):
        given = whole(counts, k, n, dtype, stored=stored)
        x, w, exact = given.xs[rank], given.ws[rank], given.double()
        rows = by_expert(exact.xs, counts)
        want = multiplied(rows, exact.ws, counts)[rank].to(dtype)
        y, kept = cp.all_to_all_matmul(x, w, counts=table, plan=plan, return_rows=True)
        alone = cp.all_to_all_matmul(x, w, counts=counts, plan=plan)
        given = whole(counts, k, n, dtype, back=True, stored=stored)
        exact = given.double()
        back = by_owner(multiplied(exact.xs, exact.ws, counts), counts)[rank].to(dtype)
        returned = cp.matmul_all_to_all(given.xs[rank], given.ws[rank], counts=table, plan=plan)
        pairs = {"y": (y, want), "y alone": (alone, want), "rows": (kept, rows[rank].to(dtype)),
                 "returned": (returned, back)}  # fmt: skip
        found += [f"{name} {stored}" for name, pair in pairs.items() if not torch.equal(*pair)]
    return found
