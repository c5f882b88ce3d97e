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


def given_to(rank: int) -> dict[str, Any]:
    given = whole(COUNTS, K, N, torch.float32)
    return {"x": given.xs[rank], "w": given.ws[rank], "counts": torch.tensor(COUNTS)}


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


def test_no_group():
    with pytest.raises(cp.InputError, match="group must be an initialised process group"):
        cp.all_to_all_matmul(torch.ones(1, 1), torch.ones(1, 1, 1), counts=[[1]])
