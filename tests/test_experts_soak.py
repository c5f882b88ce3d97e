"""benchmarks/experts_soak.py: its operands are right, and a wrong row is counted."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_bodies import by_expert, by_owner, multiplied
from rank_bodies import world
from rankpool import RankPool

NAME = "experts_soak"
path = Path(__file__).parent.parent / "benchmarks" / f"{NAME}.py"
spec = importlib.util.spec_from_file_location(NAME, path)
assert spec is not None and spec.loader is not None
soak: Any = sys.modules.setdefault(NAME, importlib.util.module_from_spec(spec))
spec.loader.exec_module(soak)

OPS = ("all_to_all_matmul", "matmul_all_to_all")
CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_expected_is_what_the_tests_expect(ranks: int):
    for counts in soak.tables(ranks):
        lists = counts.tolist()
        own = counts.view(ranks, ranks, soak.LOCAL).sum((0, 2)).tolist()
        there = [torch.randn(sum(row), 8).double() for row in lists]
        back = [torch.randn(rows, 8).double() for rows in own]
        ws = [torch.randn(soak.LOCAL, 8, 3).double() for _ in range(ranks)]
        come = multiplied(by_expert(there, lists), ws, lists)
        gone = by_owner(multiplied(back, ws, lists), lists)
        for r in range(ranks):
            # one product of an expert's rows against one for each rank's: the last bit may differ
            same = torch.allclose(soak.exact(counts, there, ws, r, back=False), come[r])
            assert same and torch.allclose(soak.exact(counts, back, ws, r, back=True), gone[r])


def test_tables_differ_and_give_each_rank_a_row_to_sum():
    for ranks in (2, 4, 8):
        found = soak.tables(ranks)
        assert soak.EACH % len(found) == 0, "a graph ends within a turn of the sets"
        assert all(not torch.equal(a, b) for a, b in zip(found, found[1:], strict=False))
        assert found[soak.SUMMED].sum(1).min() > 0


def compared(rank: int, ranks: int, op: str) -> tuple[list[bool], list[bool]]:
    """Whether calls differ: as they are, and with another weight, where rows come."""
    found = soak.Soaked(op, world(), CPU)
    quiet = [bool(found.differs(i)) for i in range(2 * len(found.sets))]
    found.w[:, 3] += 1
    off = [bool(found.differs(i)) for i in range(len(found.sets))]  # all ranks call all
    return quiet, [differs for differs, each in zip(off, found.sets, strict=True) if each.rows]


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_row_is_counted(pool: RankPool, op: str):
    for quiet, off in pool.run(compared, 2, op):
        assert not any(quiet) and all(off) and off


def wrong_from_the_start(rank: int, ranks: int, op: str) -> str:
    exact = soak.exact

    def shifted(counts: torch.Tensor, *others: Any, back: bool) -> torch.Tensor:
        return exact(counts, *others, back=back).roll(1, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "exact", shifted)
        try:
            soak.Soaked(op, world(), CPU)
        except soak.CounterpointError as error:
            return str(error)
    return ""


def test_a_quiet_call_that_is_wrong_is_no_reference(pool: RankPool):
    for text in pool.run(wrong_from_the_start, 2, OPS[0]):
        assert "soak of all_to_all_matmul: a quiet call is off by" in text
