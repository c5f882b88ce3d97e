"""Gradients of own bags go to the ranks whose tables they are of, by slices of tables.

A slice is sent while the next one is packed; what is summed of it runs while others are under way.
What a rank keeps for itself is copied beside, and not sent. Autograd gets the gradients of all
tables together, when the last slice is summed; a fused optimizer updates those of each slice then.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.choose.slices import slices_of
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.embedding.plan_slices import tables_by_slice
from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import Workspace, workspace_of
from counterpoint.ops.auto import knowledge_of
from counterpoint.problem import Problem


class Sent(NamedTuple):
    """What is known of an exchange of gradients.

    Args:
        dims: of each rank how many tables, and their columns.
        batch: bags of each rank.
    """

    dims: Sequence[int]
    batch: Sequence[int]
    rank: int
    group_name: str


class Slice(NamedTuple):
    """Gradients of the columns of some own tables, of the global batch.

    Args:
        tables: which.
        dy: [bags of all ranks, their columns], without gaps.
        wait: has the current stream wait for it.
    """

    tables: range
    dy: Tensor
    wait: Callable[[], object]


def at_once() -> None:
    """Wait for a tensor that is there."""


def in_one(dy: Tensor, tables: Sequence[object]) -> tuple[Slice, ...]:
    """What is there: [bags of all ranks, columns of all own tables]."""
    return (Slice(range(len(tables)), dy, at_once),)


def problem_from(dims: Sequence[int], batch: Sequence[int], dtype: torch.dtype) -> Problem:
    """The problem of flat dims: of each rank how many tables, and their columns; made once."""
    return _problem_from(tuple(dims), tuple(batch), dtype)


@lru_cache(maxsize=256)
def _problem_from(dims: tuple[int, ...], batch: tuple[int, ...], dtype: torch.dtype) -> Problem:
    each: list[tuple[int, ...]] = []
    start = 0
    while start < len(dims):
        stop = start + 1 + dims[start]
        each.append(dims[start + 1 : stop])
        start = stop
    return Problem(OP, sum(batch), dtype=dtype, rows=batch, tables=tuple(each))  # type: ignore[arg-type]


def decide_slices(problem: Problem, workspace: Workspace) -> None:
    """Choose how many slices such backwards have, by all ranks' indices of the first forward.

    Later ones take as many, whatever they pool: a rank that decided anew would decide alone.
    """
    machine = knowledge_of(workspace).machine
    # as `problem_from` knows it
    key = OP, replace(problem, indices=(), out=False, islands=1)
    if machine is not None and key not in workspace.agreed:
        workspace.agreed[key] = slices_of(problem, machine).number


def exchange(dy: Tensor, sent: Sent) -> list[Slice]:
    """Begin to send: slices in the order in which they come.

    Args:
        dy: [own bags, columns of all tables of all ranks].
    """
    group = group_of(sent.group_name)
    # of this process, and not of that whose compiled graph this may be
    p, rank = problem_from(sent.dims, sent.batch, dy.dtype), group.rank()
    if p.ranks == 1:
        return [*in_one(dy.contiguous(), p.tables[0])]
    workspace = workspace_of(group, dy.device)
    cut = [tables_by_slice(dims, workspace.agreed.get((OP, p), 1)) for dims in p.tables]
    firsts = [list(accumulate(dims, initial=start))
              for dims, start in zip(p.tables, p.column_starts, strict=False)]  # fmt: skip
    with workspace.board.whole():
        workspace.board.note_op(f"{OP} backward")
        awaited = Awaited(OP, "take part in the exchange of gradients", "backward")
        calls = library_of(workspace, awaited)
        found: list[Slice] = []
        kept: list[tuple[Tensor, Tensor]] = []
        for slices in zip(*cut, strict=True):
            parts = [dy[:, each[some.start] : each[some.stop]]
                     for each, some in zip(firsts, slices, strict=True)]  # fmt: skip
            got = dy.new_empty(p.m, parts[rank].shape[1])
            blocks = list(got.split(p.rows))
            kept.append((blocks[rank], parts[rank]))
            blocks[rank], parts[rank] = got[:0], got[:0]
            wait = calls.begin_all_to_all(blocks, [part.contiguous() for part in parts])
            found.append(Slice(slices[rank], got, wait))
        for block, part in kept:
            block.copy_(part)
    return found
