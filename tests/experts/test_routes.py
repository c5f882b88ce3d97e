"""Blocks of rows by routes, without ranks: what copies of a plan take, and where it lies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from routed_bodies import chosen

from counterpoint.experts.routes.lists import LISTS, Blocks
from counterpoint.experts.steps_routed import boxes
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import ROUTES
from counterpoint.problem import Problem

LOCAL = 4


def firsts_of(lists: list[torch.Tensor], ranks: int) -> list[list[int]]:
    """Tokens of each rank by first expert on each rank."""
    found = torch.zeros(ranks, ranks * LOCAL, dtype=torch.int64)
    for s, experts in enumerate(lists):
        for token in experts.tolist():
            for d in {e // LOCAL for e in token}:
                found[s, min(e for e in token if e // LOCAL == d)] += 1
    return found.tolist()


@pytest.mark.parametrize("name", ["uniform", "zipf"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_a_plan_copies_a_token_once_to_each_rank(op: str, ranks: int, name: str):
    lists = [chosen(name, s, ranks, 17 + 5 * s, LOCAL) for s in range(ranks)]
    firsts, over = firsts_of(lists, ranks), [[0]] * ranks
    once = [[int((experts // LOCAL == d).any(1).sum()) for d in range(ranks)] for experts in lists]
    m = -(-sum(map(len, lists)) // (ranks * LOCAL)) * ranks * LOCAL
    p = Problem(op, m, 8, 8, ranks, experts=LOCAL, counts="routed")
    for spec in ("routed 1/1/2 ring", "routed 4 xor", "routed 3/1 ring"):
        plan = build(p, spec)
        covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for rank in range(ranks):
            blocks = Blocks((rank, ranks, 3, len(lists[rank]), ranks), firsts, over)
            operands = {ROUTES: blocks.packed(), LISTS: torch.empty(0, dtype=torch.int32)}
            places: Any = SimpleNamespace(plan=plan, rank=rank)
            moved = [0] * ranks
            for bound in bind(plan, rank).steps:
                if bound.step.kind != "copy":
                    continue
                for source, target in boxes(bound, places)(operands):
                    assert source.rank == rank and source.shape == target.shape
                    moved[target.rank] += source.shape[0]
                    for box in (source, target):
                        covered.setdefault((box.buffer, box.rank), []).append((box.r0, box.r1))
            dispatches = op == "all_to_all_matmul"
            assert moved == (once[rank] if dispatches else [row[rank] for row in once])
        for (buffer, rank), rows in covered.items():  # each row of both sides once
            rows.sort()
            ends = [0, *(stop for _, stop in rows)]
            assert [start for start, _ in rows] == ends[:-1], (buffer, rank)
            row, column = sum(once[rank]), sum(line[rank] for line in once)
            assert ends[-1] == (row if buffer in ("sent", "back") else column)
