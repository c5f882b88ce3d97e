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


def of_arguments(rank: int, ranks: int) -> list[list[str]]:
    """The same wrong arguments on all ranks, to both operators."""
    results: list[list[str]] = []
    for op, back in ((cp.all_to_all_matmul, False), (cp.matmul_all_to_all, True)):
        given = whole(COUNTS, K, N, torch.float32, back=back)
        x, w = given.xs[rank], given.ws[rank]
        table = torch.tensor(COUNTS)
        cases: list[dict[str, Any]] = [
            {"x": x[0]}, {"x": x.double()}, {"x": [1]}, {"w": w[0]}, {"w": w.transpose(1, 2)},
            {"w": w.bfloat16()}, {"w": w[:1]}, {"w": torch.randn(2, K, 2 * N)[:, :, ::2]},
            {"counts": table.float()}, {"counts": table[:1]}, {"counts": [[1, 2], [3, 4, 5, 6]]},
            {"counts": [[1.5] * 4] * 2}, {"counts": 3}, {"counts": changed(0, 1, -1)},
            {"max_rows": 1}, {"max_rows": -1}, {"max_rows": "all"}, {"plan": "fast"}, {"plan": 1},
        ]  # fmt: skip
        results.append(texts_of(op, {"x": x, "w": w, "counts": table}, cases))
    return results


def test_arguments(pool: RankPool):
    wants = [
        "x must be [rows, K] of 2 dims, got 1-D", "x must be bf16, fp16 or fp32, got torch.float64",
        "x must be a Tensor, got list", "w must be [E_local, K, N] of 3 dims, got 2-D",
        "w must be [E_local, K=4, N], got (2, 3, 4); pass w.transpose(1, 2)",
        "w must be torch.float32 as x, got torch.bfloat16",
        "counts must be int32 or int64 [2, 2], rows of each rank for each expert, got torch.int64 "
        "[2, 4]; w has 1 experts on each of 2 ranks",
        "w must be with a unit stride in K or N, got strides (24, 6, 2); pass w.contiguous()",
        "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got "
        "torch.float32 [2, 4]", "got torch.int64 [1, 4]", "got 2 rows of [2, 4]",
        "got [[1.5, 1.5", "got 3", "counts must be >= 0, got -1",
        "max_rows must be >= 6, what rank ", "max_rows must be >= 0, got -1",
        "max_rows must be a count, got 'all'",
        "plan must be auto or one of serial, fused, grouped, got 'fast'",
        "plan must be a family's name or a Plan, got int",
    ]  # fmt: skip
    for both in pool.run(of_arguments, 2):
        for op, texts in zip(("all_to_all_matmul", "matmul_all_to_all"), both, strict=True):
            for text, want in zip(texts, wants, strict=True):
                assert text.startswith(f"{op}: ") and want in text, (text, want)


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


def of_sums(rank: int, ranks: int) -> list[str]:
    given = whole(COUNTS, K, N, torch.float32, back=True)
    rows, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    base: dict[str, Any] = {"x": given.xs[rank], "w": given.ws[rank], "counts": COUNTS}
    cases: list[Any] = [
        rows, (rows,), (rows, 1.0), (rows.float(), weights), (rows, weights.long()),
        (rows, weights[:2]), (rows[0], weights[0]), (rows + (6 if rank == 0 else 0), weights),
        (rows - 1, weights),
    ]  # fmt: skip
    return texts_of(
        cp.matmul_all_to_all, base | {"sum_of": (rows, weights)}, [{"sum_of": c} for c in cases]
    )


def test_what_is_summed(pool: RankPool):
    what = "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k]"
    wants = [
        f"{what}, got Tensor", f"{what}, got tuple", f"{what}, got no Tensors",
        f"{what}, got torch.float32 [3, 2] and torch.float32 [3, 2]",
        f"{what}, got torch.int64 [3, 2] and torch.int64 [3, 2]",
        f"{what}, got torch.int64 [3, 2] and torch.float32 [2, 2]",
        f"{what}, got torch.int64 [2] and torch.float32 [2]",
        "sum_of must be of rows 0 to 5, got 6 to 6", "sum_of must be of rows 0 to 5, got -1 to -1",
    ]  # fmt: skip
    for texts in pool.run(of_sums, 2):
        assert texts == [f"matmul_all_to_all: {want}" for want in wants]


def of_exchanges(rank: int, ranks: int) -> list[str]:
    own = torch.zeros(4, dtype=torch.int64)
    cases: list[Any] = [[1, 2], own.float(), own.view(2, 2), own[:3]]
    base = {"counts": own}
    return texts_of(cp.exchange_counts, base, [{"counts": c} for c in cases])


def test_counts_to_exchange(pool: RankPool):
    for texts in pool.run(of_exchanges, 2):
        assert texts == [
            "exchange_counts: counts must be a Tensor, got list",
            "exchange_counts: counts must be int32 or int64 [E], got torch.float32 [4]",
            "exchange_counts: counts must be int32 or int64 [E], got torch.int64 [2, 2]",
            "exchange_counts: counts must be [E], E a multiple of the 2 ranks, got [3]",
        ]


def test_no_group():
    with pytest.raises(cp.InputError, match="group must be an initialised process group"):
        cp.all_to_all_matmul(torch.ones(1, 1), torch.ones(1, 1, 1), counts=[[1]])
