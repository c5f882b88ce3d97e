"""What the operators of experts refuse, on all ranks alike, and in which words."""

from typing import Any

import pytest
import torch
from expert_bodies import by_torch, whole
from rankpool import RankPool

import counterpoint as cp

COUNTS = [[1, 0, 2, 3], [2, 2, 0, 1]]  # of two ranks with two experts each
K, N = 4, 3


def texts_of(op: Any, base: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    texts: list[str] = []
    for case in cases:
        try:
            op(**base | case)
            texts.append("accepted")
        except cp.InputError as error:
            texts.append(str(error))
    op(**base)  # nothing is in the way of a right call
    return texts


def changed(source: int, expert: int, by: int) -> list[list[int]]:
    table = [list(row) for row in COUNTS]
    table[source][expert] += by
    return table


def of_one_rank(rank: int, ranks: int) -> list[str]:
    """What only rank 1 does otherwise: both say the same."""
    given = whole(COUNTS, K, N, torch.float32)
    x, w = given.xs[rank], given.ws[rank]
    base: dict[str, Any] = {"x": x, "w": w, "counts": COUNTS}
    cases: list[dict[str, Any]] = [
        {"x": x[1:]}, {"counts": changed(0, 0, 1)}, {"counts": changed(1, 2, 1)},
        {"w": torch.randn(2, K, N + 1)}, {"plan": "serial"}, {"x": x.bfloat16(), "w": w.bfloat16()},
    ]  # fmt: skip
    texts = texts_of(cp.all_to_all_matmul, base, cases if rank else [{}] * len(cases))
    for op in (cp.all_to_all_matmul, cp.matmul_all_to_all):
        try:
            op(x, w, counts=COUNTS)
            texts.append("accepted")
        except cp.InputError as error:
            texts.append(str(error))
    return texts


def test_ranks_that_differ(pool: RankPool):
    wants = [
        "x must be [5, K] on rank 1, the sum of counts[1], got (4, 4)",
        "counts[0] must be equal on all ranks, [1, 0, 2, 3] as on rank 0, got [2, 0, 2, 3] on "
        "rank 1", "counts[1] must be equal on all ranks", "w.shape must be equal on all ranks",
        "plan must be equal on all ranks, auto as on rank 0, got serial on rank 1",
        "x.dtype must be equal on all ranks", "accepted",
        "x must be [5, K] on rank 0, the sum of what counts has for experts of rank 0, got (6, 4)",
    ]  # fmt: skip
    first, second = pool.run(of_one_rank, 2)
    for text, want in zip(first, wants, strict=True):
        assert want in text, (text, want)
    # rank 0 is right in what is wrong on rank 1, and yet hears of it
    assert [text for text in first if text != "accepted"] == [t for t in second if t != "accepted"]


def of_device_known(rank: int, ranks: int) -> list[str]:
    with by_torch("device"):
        given = whole(COUNTS, K, N, torch.float32)
        x = given.xs[rank]
        cases: list[dict[str, Any]] = [
            {"max_rows": None}, {"max_rows": 5}, {"x": x[rank:]}, {"counts": changed(0, 1, -1)},
        ]  # fmt: skip
        base: dict[str, Any] = {"x": x, "w": given.ws[rank], "counts": torch.tensor(COUNTS)}
        base |= {"max_rows": 6}
        return texts_of(cp.all_to_all_matmul, base, [
            case | {"counts": torch.tensor(case["counts"])} if "counts" in case else case
            for case in cases
        ])  # fmt: skip


def test_a_device_known_table(pool: RankPool):
    for texts in pool.run(of_device_known, 2):
        assert texts == [
            "all_to_all_matmul: max_rows must be given with counts on a GPU, got None; rows that "
            "a rank may get at most; its memory is that large",
            "all_to_all_matmul: max_rows must be >= 6 on rank 1, as counts says, got 5",
            "all_to_all_matmul: x must be [5, K] or more on rank 1, the sum of counts[1], got "
            "(4, 4)",
            "all_to_all_matmul: counts must be >= 0, got -1",
        ]


def test_no_group():
    with pytest.raises(cp.InputError, match="group must be an initialised process group"):
        cp.all_to_all_matmul(torch.ones(1, 1), torch.ones(1, 1, 1), counts=[[1]])
