"""What the operators of experts refuse, on all ranks alike, and in which words."""

from typing import Any

import pytest
import torch
from expert_bodies import by_torch, whole
from on_ranks import on_ranks
from refusals import Refusal, wrongly_refused

import counterpoint as cp

COUNTS = [[1, 0, 2, 3], [2, 2, 0, 1]]  # of two ranks with two experts each
K, N = 4, 3


def changed(source: int, expert: int, by: int) -> list[list[int]]:
    table = [list(row) for row in COUNTS]
    table[source][expert] += by
    return table


def given_to(rank: int, *, back: bool = False) -> dict[str, Any]:
    given = whole(COUNTS, K, N, torch.float32, back=back)
    return {"x": given.xs[rank], "w": given.ws[rank], "counts": torch.tensor(COUNTS)}


@on_ranks(2)
def test_arguments(rank: int, ranks: int) -> list[str]:
    """The same wrong arguments on all ranks, to both operators."""
    found: list[str] = []
    for op, back in ((cp.all_to_all_matmul, False), (cp.matmul_all_to_all, True)):
        base = given_to(rank, back=back)
        x, w, table = base.values()
        count = "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got "
        cases: list[Refusal] = [
            ({"x": x[0]}, "x must be [rows, K] of 2 dims, got 1-D"),
            ({"x": x.double()}, "x must be bf16, fp16 or fp32, got torch.float64"),
            ({"x": [1]}, "x must be a Tensor, got list"),
            ({"w": w[0]}, "w must be [E_local, K, N] of 3 dims, got 2-D"),
            ({"w": w.transpose(1, 2)},
             "w must be [E_local, K=4, N], got (2, 3, 4); pass w.transpose(1, 2)"),
            ({"w": w.bfloat16()}, "w must be torch.float32 as x, got torch.bfloat16"),
            ({"w": w[:1]}, "counts must be int32 or int64 [2, 2], rows of each rank for each "
             "expert, got torch.int64 [2, 4]; w has 1 experts on each of 2 ranks"),
            ({"w": torch.randn(2, K, 2 * N)[:, :, ::2]},
             "w must be with a unit stride in K or N, got strides (24, 6, 2); pass w.contiguous()"),
            ({"counts": table.float()}, f"{count}torch.float32 [2, 4]"),
            ({"counts": table[:1]}, "got torch.int64 [1, 4]"),
            ({"counts": [[1, 2], [3, 4, 5, 6]]}, "got 2 rows of [2, 4]"),
            ({"counts": [[1.5] * 4] * 2}, "got [[1.5, 1.5"), ({"counts": 3}, "got 3"),
            ({"counts": changed(0, 1, -1)}, "counts must be >= 0, got -1"),
            ({"max_rows": 1}, "max_rows must be >= 6, what rank "),
            ({"max_rows": -1}, "max_rows must be >= 0, got -1"),
            ({"max_rows": "all"}, "max_rows must be a count, got 'all'"),
            ({"plan": "fast"}, "plan must be auto or one of serial, fused, grouped, got 'fast'"),
            ({"plan": 1}, "plan must be a family's name or a Plan, got int"),
        ]  # fmt: skip
        found += wrongly_refused(op, base, cases)
        op(**base)  # nothing is in the way of a right call
    return found


@on_ranks(2)
def test_ranks_that_differ(rank: int, ranks: int) -> list[str]:
    """What only rank 1 does otherwise: rank 0 is right, and yet hears of it."""
    base = given_to(rank) | {"counts": COUNTS}
    x, w, _ = base.values()
    cases: list[Refusal] = [
        ({"x": x[1:]}, "x must be [5, K] on rank 1, the sum of counts[1], got (4, 4)"),
        ({"counts": changed(0, 0, 1)}, "counts[0] must be equal on all ranks, [1, 0, 2, 3] as on "
         "rank 0, got [2, 0, 2, 3] on rank 1"),
        ({"counts": changed(1, 2, 1)}, "counts[1] must be equal on all ranks"),
        ({"w": torch.randn(2, K, N + 1)}, "w.shape must be equal on all ranks"),
        ({"plan": "serial"}, "plan must be equal on all ranks, auto as on rank 0, got serial on"),
        ({"x": x.bfloat16(), "w": w.bfloat16()}, "x.dtype must be equal on all ranks"),
    ]  # fmt: skip
    here = [(given if rank else {}, want) for given, want in cases]
    found = wrongly_refused(cp.all_to_all_matmul, base, here)
    cp.all_to_all_matmul(**base)
    want = "x must be [5, K] on rank 0, the sum of what counts has for experts of rank 0, got (6, 4"
    return found + wrongly_refused(cp.matmul_all_to_all, base, [({}, want)])


@on_ranks(2)
def test_a_device_known_table(rank: int, ranks: int) -> list[str]:
    base = given_to(rank) | {"max_rows": 6}
    cases: list[Refusal] = [
        ({"max_rows": None}, "max_rows must be given with counts on a GPU, got None; rows that a "
         "rank may get at most; its memory is that large"),
        ({"max_rows": 5}, "max_rows must be >= 6 on rank 1, as counts says, got 5"),
        ({"x": base["x"][rank:]},
         "x must be [5, K] or more on rank 1, the sum of counts[1], got (4, 4)"),
        ({"counts": torch.tensor(changed(0, 1, -1))}, "counts must be >= 0, got -1"),
    ]  # fmt: skip
    with by_torch("device"):
        found = wrongly_refused(cp.all_to_all_matmul, base, cases, exact=True)
        cp.all_to_all_matmul(**base)
    return found


@on_ranks(2)
def test_what_is_summed(rank: int, ranks: int) -> list[str]:
    rows, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    what = "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k]"
    cases: list[tuple[Any, str]] = [
        (rows, f"{what}, got Tensor"), ((rows,), f"{what}, got tuple"),
        ((rows, 1.0), f"{what}, got no Tensors"),
        ((rows.float(), weights), f"{what}, got torch.float32 [3, 2] and torch.float32 [3, 2]"),
        ((rows, weights.long()), f"{what}, got torch.int64 [3, 2] and torch.int64 [3, 2]"),
        ((rows, weights[:2]), f"{what}, got torch.int64 [3, 2] and torch.float32 [2, 2]"),
        ((rows[0], weights[0]), f"{what}, got torch.int64 [2] and torch.float32 [2]"),
        ((rows + (6 if rank == 0 else 0), weights), "sum_of must be of rows 0 to 5, got 6 to 6"),
        ((rows - 1, weights), "sum_of must be of rows 0 to 5, got -1 to -1"),
    ]  # fmt: skip
    base = given_to(rank, back=True) | {"sum_of": (rows, weights)}
    given = [({"sum_of": sum_of}, want) for sum_of, want in cases]
    found = wrongly_refused(cp.matmul_all_to_all, base, given, exact=True)
    cp.matmul_all_to_all(**base)
    return found


@on_ranks(2)
def test_counts_to_exchange(rank: int, ranks: int) -> list[str]:
    own = torch.zeros(4, dtype=torch.int64)
    cases: list[Refusal] = [
        ({"counts": [1, 2]}, "counts must be a Tensor, got list"),
        ({"counts": own.float()}, "counts must be int32 or int64 [E], got torch.float32 [4]"),
        ({"counts": own.view(2, 2)}, "counts must be int32 or int64 [E], got torch.int64 [2, 2]"),
        ({"counts": own[:3]}, "counts must be [E], E a multiple of the 2 ranks, got [3]"),
    ]
    return wrongly_refused(cp.exchange_counts, {}, cases, exact=True)


def test_no_group():
    with pytest.raises(cp.InputError, match="group must be an initialised process group"):
        cp.all_to_all_matmul(torch.ones(1, 1), torch.ones(1, 1, 1), counts=[[1]])
