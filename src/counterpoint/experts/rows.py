"""Where the rows of experts lie in a call whose counts differ.

by owner    on rank s, sorted by expert, all E of them in order: counts[s, 0], counts[s, 1], ...
by expert   on rank d, sorted by local expert, then by source: counts[0, e], counts[1, e], ...
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Box
from counterpoint.plan.steps import COUNTS, Plan, Region
from counterpoint.problem import Problem
from counterpoint.schedules.peers import Chunk

DISPATCH = "all_to_all_matmul"
BY_OWNER = ("returned", "y")  # of a combine; its other buffers lie by expert


class Rows(NamedTuple):
    """Where the rows of each pair of a rank and an expert begin.

    Args:
        by_owner: [rank][expert], and where the last ends.
        by_expert: on the rank of the experts, [rank][local expert * ranks + source], likewise.
    """

    by_owner: list[list[int]]
    by_expert: list[list[int]]

    def of(self, rank: int, place: int, by_owner: bool, chunk: Chunk) -> tuple[int, int]:
        """The rows of that chunk of a pair as `rank` stores it."""
        starts = (self.by_owner if by_owner else self.by_expert)[rank]
        start, count = starts[place], starts[place + 1] - starts[place]
        i, n = chunk
        return start + count * i // n, start + count * (i + 1) // n


def rows_in(counts: Tensor) -> Rows:
    """What a table says, which the host reads."""
    table = counts.cpu().to(torch.int64)  # no copy where the host has it
    return _rows_in(table.numpy().tobytes(), *table.shape)


@lru_cache(maxsize=4)  # the steps of a call ask for the same, and those of the way back
def _rows_in(table: bytes, ranks: int, experts: int) -> Rows:
    pairs = torch.frombuffer(bytearray(table), dtype=torch.int64).view(ranks, experts)
    by_expert = pairs.view(ranks, ranks, -1).permute(1, 2, 0).reshape(ranks, -1)
    return Rows(*(F.pad(sizes.cumsum(1), (1, 0)).tolist() for sizes in (pairs, by_expert)))


def expert_of(region: Region, p: Problem) -> tuple[int, Chunk]:
    """The expert of a region's rows, and which chunk of its rows they are."""
    i, of = region.chunk
    chunks = of // p.experts
    return i // chunks, (i % chunks, chunks)


class _Side(NamedTuple):
    """What a copy reads or writes: of one pair of a rank and an expert."""

    buffer: str
    rank: int
    by_owner: bool
    place: int
    chunk: Chunk
    cols: tuple[int, int]

    def box(self, rows: Rows) -> Box:
        """That of a call."""
        first, last = rows.of(self.rank, self.place, self.by_owner, self.chunk)
        return Box(self.rank, self.buffer, 0, first, last, *self.cols)


def boxes(bound: BoundStep, places: Places) -> Callable[[Operands], list[tuple[Box, Box]]]:
    """What a copy step copies in a call, and where it goes: of one pair each, none empty."""
    plan, rank, step = places.plan, places.rank, bound.step
    pairs = [  # the table is read behind them
        (_side(source, plan, rank), _side(target, plan, rank))
        for source, target in zip(step.reads, step.writes, strict=False)
    ]

    def found(operands: Operands) -> list[tuple[Box, Box]]:
        rows = rows_in(operands[COUNTS])
        every = ((source.box(rows), target.box(rows)) for source, target in pairs)
        return [(source, target) for source, target in every if source.r0 < source.r1]

    return found


def _side(region: Region, plan: Plan, rank: int) -> _Side:
    p, buffer = plan.problem, plan.buffer(region.buffer)
    (shard,) = region.shards
    block, (expert, chunk) = plan.resolve(shard, rank), expert_of(region, p)
    by_owner = buffer.name == "x" if p.op == DISPATCH else buffer.name.startswith(BY_OWNER)
    place = block * p.experts + expert if by_owner else expert * p.ranks + block
    cols = region.cols if isinstance(region.cols, tuple) else (0, buffer.shape[1])
    return _Side(buffer.name, plan.resolve(region.at, rank), by_owner, place, chunk, cols)
