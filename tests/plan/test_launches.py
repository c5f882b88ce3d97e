"""Which is launched first, an exchange or the matmul that becomes ready with it."""

import pytest

import counterpoint as cp
from counterpoint.plan.bind import bind
from counterpoint.plan.launches import held_back


def launched(op: str, ranks: int, chunks: int) -> list[str]:
    """Exchanges and matmuls of rank 0 in the order in which they are launched; "+": held back."""
    p = cp.Problem(op, 64 * ranks, 64, 32, ranks, islands=2)
    program = bind(cp.build(p, f"islands chunks={chunks}"), 0)
    return [
        bound.step.name + "+" * held_back(program, i)
        for i, bound in enumerate(program.steps)
        if bound.step.kind in ("exchange", "matmul")
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exchange_of_a_gather_is_launched_before_the_matmul_that_begins_with_it(ranks: int):
    """What a matmul waits for is the exchange before; the next one begins at the same time."""
    near = ["matmul_near"] if ranks > 2 else []
    assert launched("all_gather_matmul", ranks, 3) == [
        "give_1_0", "matmul_own+", *near, "give_1_1", "matmul_far_1_0+",
        "give_1_2", "matmul_far_1_1+", "matmul_far_1_2",
    ]  # fmt: skip


def test_a_block_is_sent_before_the_next_one_is_multiplied():
    assert launched("matmul_reduce_scatter", 2, 2) == [
        "matmul_far_1_0", "send_1_0", "matmul_far_1_1+", "send_1_1", "matmul_own+",
    ]  # fmt: skip


def test_without_exchanges_nothing_is_held_back():
    program = bind(cp.build(cp.Problem("all_gather_matmul", 64, 64, 32, 4), "shard_p2p"), 0)
    assert not any(held_back(program, i) for i in range(len(program.steps)))
