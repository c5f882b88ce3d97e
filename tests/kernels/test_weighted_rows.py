"""Rows times weights over the rows that there are: interpreted against fp64, compiled; by torch."""

import pytest
import torch
from rankpool import RankPool
from torch import Tensor

from counterpoint.kernels.weighted_rows import weighted_rows_kernel
from counterpoint.ops import weighted_rows
from counterpoint.testing.ptx import CAPABILITIES, compiled, lines_with

ROOM = 12
UNTOUCHED = 7.0
# counts of all ranks, this rank, N
CASES: dict[str, tuple[list[list[int]] | None, int, int]] = {
    "all rows": (None, 0, 20),
    "uneven": ([[1, 4, 2, 0], [3, 0, 1, 2]], 0, 20),
    "experts without rows": ([[5, 4, 0, 3, 9, 9], [3, 0, 0, 2, 9, 9], [0, 0, 0, 3, 0, 0]], 1, 33),
    "no rows": ([[4, 4, 0], [3, 1, 0], [2, 2, 0]], 2, 20),
    "wide": ([[0, 0, 6, 0], [0, 0, 1, 0]], 1, 2500),
    "more than there is room for": ([[9, 9], [9, 9]], 1, 8),
    "one column": ([[2, 1], [3, 1]], 0, 1),
}


def drawn(
    name: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int, int]:  # fmt: skip
    """rows, weights, other, counts, rank, and how many rows there are; what is beyond is NaN."""
    table, rank, n = CASES[name]
    rows, other = (torch.randn(ROOM, n).to(dtype) for _ in range(2))
    weights, count = torch.randn(ROOM), ROOM
    if table is None:
        return rows, weights, other, None, rank, count
    counts = torch.tensor(table)
    count = min(ROOM, int(counts.view(len(table), len(table), -1)[:, rank].sum()))
    for t in (rows, weights, other):
        t[count:] = torch.nan
    return rows, weights, other, counts, rank, count


def near(got: Tensor, want: Tensor, terms: Tensor) -> bool:
    """To the rounding of one result, and in fp32 of what it is the sum of."""
    kind = torch.finfo(got.dtype)
    bound = kind.eps * (want.abs() + kind.smallest_normal) + 1e-6 * terms
    return bool(((got.double() - want).abs() <= bound).all())


def wrong_in(name: str, got: tuple[Tensor, Tensor], given: tuple[Tensor, ...], count: int) -> bool:
    (y, dots), (rows, weights, other) = got, (t[:count].double() for t in given)
    products = rows * other
    good = near(y[:count], rows * weights[:, None], torch.zeros(()))
    good = good and near(dots[:count], products.sum(1), products.abs().sum(1))
    return not (good and not y[count:].any() and not dots[count:].any())


def wrong(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for dtype in (torch.float32, torch.float16):
        for name in CASES:
            rows, weights, other, counts, at, count = drawn(name, dtype)
            for table in (counts, None if counts is None else counts.int()):
                y, alone = (torch.full_like(rows, UNTOUCHED) for _ in range(2))
                dots = torch.full_like(weights, UNTOUCHED)
                weighted_rows.into(y, dots, rows, weights, other, table, at)
                if wrong_in(name, (y, dots), (rows, weights, other), count):
                    found.append(f"{name} {dtype}")
                weighted_rows.into(alone, dots[:0], rows, weights, None, table, at)
                if not torch.equal(alone[:count], y[:count]):
                    found.append(f"{name} {dtype}: rows alone")
                if not (alone[count:] == UNTOUCHED).all():
                    found.append(f"{name} {dtype}: rows beyond are written")
    return found


def test_the_kernel_computes_the_rows_that_there_are(pool: RankPool):
    assert pool.run(wrong, 1, group=False) == [[]]


def wrong_by_torch(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, (table, at, _) in CASES.items():
            if at or (table and len(table) > 1):
                continue  # of the one rank that there is
            rows, weights, other, counts, _, count = drawn(name, dtype)
            got = torch.ops.counterpoint.weighted_rows(rows, weights, other, counts, GROUP)
            if wrong_in(name, got, (rows, weights, other), count):
                found.append(f"{name} {dtype}")
    rows, weights = torch.randn(5, 3), torch.randn(5)
    for more in ((None, None), (rows, torch.tensor([[2, 1]]))):
        torch.library.opcheck(torch.ops.counterpoint.weighted_rows, (rows, weights, *more, GROUP))
    rows[3:], weights[3:] = torch.nan, torch.nan
    got = torch.ops.counterpoint.weighted_rows(rows, weights, rows, torch.tensor([[2, 1]]), GROUP)
    if wrong_in("", got, (rows, weights, rows), 3):
        found.append("rows of one rank")
    return found


GROUP = "0"  # the first group that a process makes


def test_torch_computes_the_same(pool: RankPool):
    assert pool.run(wrong_by_torch, 1) == [[]]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_are_moved_16_bytes_at_a_time(capability: int):
    block = weighted_rows.BLOCK_N
    constants = {"WORLD": 4, "EXPERTS": 64, "DOTS": True, "BLOCK_N": block}
    floats = ("weights_ptr", "dots_ptr")
    types = {
        name: "*i64" if name == "counts_ptr" else "*fp32" if name in floats
        else "*bf16" if name.endswith("ptr") else "i32"
        for name in weighted_rows_kernel.arg_names if name not in constants
    }  # fmt: skip
    aligned = tuple(name for name in types if name.endswith("ptr") or name == "N")
    found = compiled(
        weighted_rows_kernel, capability, types, constants, aligned=aligned,
        **weighted_rows.OPTIONS,
    )  # fmt: skip
    assert len(lines_with(found.ptx, r"ld\.global\.v4\.b32")) == 2
    assert len(lines_with(found.ptx, r"st\.global\.v4\.b32")) == 1 and not found.spills
