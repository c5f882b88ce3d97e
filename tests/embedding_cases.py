"""Random tables, bags and batches of every rank, and what embedding bags of them are in fp64."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from counterpoint.problem import Problem

OP = "embedding_bag_all_to_all"


@dataclass
class Bags:
    """One rank's arguments of one call."""

    tables: list[Tensor]
    indices: Tensor
    offsets: Tensor  # with the last one
    weights: Tensor | None

    def to(self, device: torch.device) -> "Bags":
        weights = None if self.weights is None else self.weights.to(device)
        tables = [t.to(device) for t in self.tables]
        return Bags(tables, self.indices.to(device), self.offsets.to(device), weights)


def random_bags(
    dims: tuple[int, ...], num_bags: int, *, dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64, weighted: bool = False, rows: int = 17, longest: int = 6,
    seed: int = 0,
) -> Bags:  # fmt: skip
    """Tables of `rows` and more, bags of 0 to `longest` indices; every fourth one is empty."""
    draw = torch.Generator().manual_seed(seed)
    tables = [torch.randn(rows + i, d, generator=draw).to(dtype) for i, d in enumerate(dims)]
    counts = torch.randint(0, longest + 1, (len(dims), num_bags), generator=draw)
    counts[torch.rand(counts.shape, generator=draw) < 0.25] = 0
    each = [
        torch.randint(0, len(t), (int(c.sum()),), generator=draw)
        for t, c in zip(tables, counts, strict=True)
    ]
    indices = torch.cat([torch.empty(0, dtype=torch.int64), *each]).to(index)
    offsets = torch.tensor([0, *accumulate(counts.flatten().tolist())]).to(index)
    weights = torch.randn(len(indices), generator=draw).to(dtype) if weighted else None
    return Bags(tables, indices, offsets, weights)


def pooled(bags: Bags, num_bags: int, *, mean: bool) -> Tensor:
    """[num_bags, columns of these tables]: torch's embedding bags, in fp64."""
    parts = [torch.empty(num_bags, 0, dtype=torch.float64)]
    for t, table in enumerate(bags.tables):
        offsets = bags.offsets[t * num_bags : (t + 1) * num_bags + 1].long()
        some = slice(int(offsets[0]), int(offsets[-1]))
        parts.append(
            torch.nn.functional.embedding_bag(
                bags.indices[some].long(), table.double(), offsets - offsets[0],
                mode="mean" if mean else "sum", include_last_offset=True,
                per_sample_weights=None if bags.weights is None else bags.weights[some].double(),
            )
        )  # fmt: skip
    return torch.cat(parts, 1)


def expected(everyone: list[Bags], p: Problem, rank: int, *, mean: bool) -> Tensor:
    """What `rank` gets of all ranks' bags, in fp64."""
    start, stop = p.row_starts[rank : rank + 2]
    parts = [pooled(b, p.m, mean=mean)[start:stop] for b in everyone]
    return torch.cat(parts, 1)


def problem_of(dims: Any, batch: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Problem:
    """Of tables with those columns on each rank, and so many bags of each."""
    return Problem(OP, sum(batch), dtype=dtype, rows=batch, tables=dims, **more)  # type: ignore[arg-type]
