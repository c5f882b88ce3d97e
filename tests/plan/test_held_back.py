"""Which is launched first, an exchange or the matmul that becomes ready with it."""

from dataclasses import replace

import pytest

import counterpoint as cp
from counterpoint.model.estimate import SIDE_STARTS
from counterpoint.plan.bind import bind
from counterpoint.plan.launches import HELD_BACK_S, held_back


def launched(op: str, ranks: int, chunks: int) -> list[str]:
    """Exchanges and matmuls of rank 0 in the order in which they are launched; "+": held back."""
    p = cp.Problem(op, 64 * ranks, 64, 32, ranks, islands=2)
    program = bind(cp.build(p, f"islands chunks={chunks}"), 0)
    return [
        bound.step.name + "+" * held_back(program, i)
        for i, bound in enumerate(program.steps)
        if bound.step.kind in ("exchange", "matmul")
    ]


def test_an_exchange_of_a_gather_is_launched_before_the_matmul_that_begins_with_it():
    """What a matmul waits for is the exchange before; the next one begins at the same time."""
    assert launched("all_gather_matmul", 2, 3) == [
        "give_1_0", "matmul_own+", "give_1_1", "matmul_far_1_0+",
        "give_1_2", "matmul_far_1_1+", "matmul_far_1_2",
    ]  # fmt: skip


def test_on_islands_of_several_ranks_no_matmul_begins_with_an_exchange():
    """The first exchange waits for a barrier; of rows of another island a later signal tells."""
    assert launched("all_gather_matmul", 4, 2) == [
        "give_1_0", "matmul_own", "matmul_near", "give_1_1", "matmul_far_1_0", "matmul_far_1_1",
    ]  # fmt: skip


def test_a_block_is_sent_before_the_next_one_is_multiplied():
    assert launched("matmul_reduce_scatter", 2, 2) == [
        "matmul_far_1_0", "send_1_0", "matmul_far_1_1+", "send_1_1", "matmul_own+",
    ]  # fmt: skip


def test_a_block_that_is_summed_inside_an_island_first_holds_nothing_back():
    assert launched("matmul_reduce_scatter", 4, 2) == [
        "matmul_far_1_0", "send_1_0", "matmul_far_1_1", "send_1_1", "matmul_near", "matmul_own",
    ]  # fmt: skip


def test_an_estimate_has_what_is_held_back():
    p = cp.Problem("all_gather_matmul", 2048, 1024, 1024, 2, islands=2)
    machine = cp.preset("h200-2")
    machine = replace(machine, nic=replace(machine.link, bytes_per_s=50e9))
    timeline = cp.estimate(cp.build(p, "islands chunks=1"), machine)
    spans = {s.label: s.end_s - s.start_s for s in timeline.spans if s.rank == 0}
    joined_s = SIDE_STARTS * machine.costs.kernel_s  # behind the last
    own_s, far_s = spans["matmul_own"], spans["matmul_far_1"]
    assert own_s - HELD_BACK_S == pytest.approx(far_s - joined_s)


def test_without_exchanges_nothing_is_held_back():
    program = bind(cp.build(cp.Problem("all_gather_matmul", 64, 64, 32, 4), "shard_p2p"), 0)
    assert not any(held_back(program, i) for i in range(len(program.steps)))
