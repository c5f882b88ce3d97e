"""Which is launched first, an exchange or the matmul that becomes ready with it."""

from dataclasses import replace

import pytest

import counterpoint as cp
from counterpoint.model.estimate import SIDE_STARTS
from counterpoint.plan.bind import bind
from counterpoint.plan.launches import HELD_BACK_S, held_back
from counterpoint.timeline import Span


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


def test_on_islands_of_several_ranks_the_first_matmul_begins_with_an_exchange():
    """That waits for the opening barrier alone; of rows of another island a later signal tells."""
    assert launched("all_gather_matmul", 4, 2) == [
        "give_1_0", "matmul_own+", "matmul_near", "give_1_1", "matmul_far_1_0", "matmul_far_1_1",
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


def spans_of(p: cp.Problem, spec: str) -> dict[str, Span]:
    machine = cp.preset("h200-8")
    machine = replace(machine, nic=replace(machine.link, bytes_per_s=60e9))
    timeline = cp.estimate(cp.build(p, spec), machine)
    return {span.label: span for span in timeline.spans if span.rank == 0}


def test_a_kernel_that_becomes_ready_beside_a_matmul_starts_when_that_ends():
    """The sum inside an island is not held back for; so what is sent behind it is late, too."""
    p = cp.Problem("matmul_reduce_scatter", 32768, 8192, 8192, 8, islands=2)
    spans = spans_of(p, "islands chunks=2")
    first, second = spans["matmul_far_1_0"], spans["matmul_far_1_1"]
    assert first.end_s == pytest.approx(second.start_s)
    assert spans["push_1_0_1"].end_s < second.end_s == pytest.approx(spans["sum_1_0"].start_s)
    assert spans["send_1_0"].start_s > second.end_s


def test_an_exchange_has_its_sms_before_the_matmul_that_is_held_back():
    p = cp.Problem("matmul_reduce_scatter", 32768, 8192, 8192, 2, islands=2)
    spans = spans_of(p, "islands chunks=2")
    assert spans["send_1_0"].start_s == pytest.approx(spans["matmul_far_1_0"].end_s)
    # the next one finds a matmul that has begun long ago
    own, late = spans["matmul_own"], spans["send_1_1"]
    assert own.start_s < spans["send_1_0"].end_s < own.end_s == pytest.approx(late.start_s)


def test_the_barrier_that_opens_a_call_is_passed_before_a_matmul_that_is_held_back():
    p = cp.Problem("all_gather_matmul", 32768, 8192, 8192, 8, islands=2)
    spans = spans_of(p, "islands chunks=2")
    first, own = spans["give_1_0"], spans["matmul_own"]
    assert own.start_s < spans["open"].end_s == pytest.approx(first.start_s)
    assert first.start_s < own.start_s + HELD_BACK_S
    # the next one becomes ready beside it
    assert first.end_s < own.end_s == pytest.approx(spans["give_1_1"].start_s)


def test_without_exchanges_nothing_is_held_back():
    program = bind(cp.build(cp.Problem("all_gather_matmul", 64, 64, 32, 4), "shard_p2p"), 0)
    assert not any(held_back(program, i) for i in range(len(program.steps)))
