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


@pytest.mark.parametrize(
    ("op", "ranks", "chunks", "order"),
    [
        ("all_gather_matmul", 2, 3,
         "give_1_0 own_0+ give_1_1 own_1+ far_1_0 give_1_2 own_2+ far_1_1 far_1_2"),
        ("all_gather_matmul", 4, 2,
         "give_1_0 own+ near_0 give_1_1 near_1+ far_1_0 far_1_1"),
        ("matmul_reduce_scatter", 2, 2, "far_1_0 send_1_0 far_1_1+ own_0 send_1_1 own_1+"),
        ("matmul_reduce_scatter", 4, 2,
         "far_1_0 far_1_1 send_1_0 near_0+ send_1_1 near_1+ own"),
        ("matmul_reduce_scatter", 4, 1, "far_1 near send_1 own+"),
    ],
)  # fmt: skip
def test_a_turn_begins_with_an_exchange_and_a_matmul_that_is_held_back(
    op: str, ranks: int, chunks: int, order: str
):
    """What was pushed inside an island is summed after one more matmul, and sent then."""
    assert [name.removeprefix("matmul_") for name in launched(op, ranks, chunks)] == order.split()


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize(("islands", "size"), [(2, 1), (4, 1), (2, 4), (4, 4)])
def test_most_of_the_shorter_is_hidden_whichever_is_longer(op: str, islands: int, size: int):
    """Of matmuls and exchanges, in 4 chunks, where exchanges do not wait for matmuls in vain."""
    ranks = islands * size
    p = cp.Problem(op, 2048 * ranks * (4 if size == 1 else 1), 4096, 8192, ranks, islands=islands)

    def parts_s(nic_bytes_per_s: float) -> tuple[float, float, float]:
        spans = spans_of(p, "islands chunks=4", nic_bytes_per_s).values()
        by_kind = [sum(s.end_s - s.start_s for s in spans if s.kind == kind)
                   for kind in ("matmul", "exchange")]  # fmt: skip
        return by_kind[0], by_kind[1], max(s.end_s for s in spans)

    matmuls_s, exchanges_s, _ = parts_s(10e9)
    for share in (0.5, 0.8, 1.0, 1.25, 2.0):
        both = parts_s(10e9 * exchanges_s / (share * matmuls_s))
        assert both[1] / both[0] == pytest.approx(share, rel=0.02)
        assert sum(both[:2]) - both[2] > 0.7 * min(both[:2]), share


def test_an_estimate_has_what_is_held_back():
    p = cp.Problem("all_gather_matmul", 2048, 1024, 1024, 2, islands=2)
    machine = cp.preset("h200-2")
    machine = replace(machine, nic=replace(machine.link, bytes_per_s=50e9))
    timeline = cp.estimate(cp.build(p, "islands chunks=1"), machine)
    spans = {s.label: s.end_s - s.start_s for s in timeline.spans if s.rank == 0}
    joined_s = SIDE_STARTS * machine.costs.kernel_s  # behind the last
    own_s, far_s = spans["matmul_own"], spans["matmul_far_1"]
    assert own_s - HELD_BACK_S == pytest.approx(far_s - joined_s)


def spans_of(p: cp.Problem, spec: str, nic_bytes_per_s: float = 60e9) -> dict[str, Span]:
    machine = cp.preset("h200-8")
    machine = replace(machine, nic=replace(machine.link, bytes_per_s=nic_bytes_per_s))
    timeline = cp.estimate(cp.build(p, spec), machine)
    return {span.label: span for span in timeline.spans if span.rank == 0}


def test_a_kernel_that_becomes_ready_beside_a_matmul_starts_when_that_ends():
    """An exchange as soon as that is possible: the matmul that comes next lets it go first."""
    p = cp.Problem("matmul_reduce_scatter", 32768, 8192, 8192, 2, islands=2)
    spans = spans_of(p, "islands chunks=2")
    own, late = spans["matmul_own_0"], spans["send_1_1"]
    assert spans["send_1_0"].start_s == pytest.approx(spans["matmul_far_1_0"].end_s)
    assert own.start_s < spans["send_1_0"].end_s < own.end_s == pytest.approx(late.start_s)
    assert spans["matmul_own_1"].start_s == pytest.approx(late.start_s)


def test_the_barrier_that_opens_a_call_is_passed_before_a_matmul_that_is_held_back():
    p = cp.Problem("all_gather_matmul", 32768, 8192, 8192, 8, islands=2)
    spans = spans_of(p, "islands chunks=2")
    first, own = spans["give_1_0"], spans["matmul_own"]
    assert own.start_s < spans["open"].end_s == pytest.approx(first.start_s)
    assert first.start_s < own.start_s + HELD_BACK_S


def test_without_exchanges_nothing_is_held_back():
    program = bind(cp.build(cp.Problem("all_gather_matmul", 64, 64, 32, 4), "shard_p2p"), 0)
    assert not any(held_back(program, i) for i in range(len(program.steps)))
