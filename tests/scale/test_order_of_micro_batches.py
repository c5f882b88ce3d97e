"""The order of a pipeline's stages, and how long it takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.scale.pipeline import Stage, makespan_s, order

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))


@given(SIZES)
def test_a_stage_does_everything_once_and_forwards_first(sizes: tuple[int, int, int]):
    stages, parts, rounds = sizes
    batches = stages * rounds
    for stage in range(stages):
        events = order(stage, stages, parts, batches)
        assert len(events) == len(set(events)) == 2 * parts * batches
        at = {event: i for i, event in enumerate(events)}
        assert all(at[e] > at[e._replace(backward=False)] for e in events if e.backward)


@given(SIZES, st.floats(0.1, 10), st.floats(0.1, 10))
def test_equal_stages_take_what_the_closed_form_says(
    sizes: tuple[int, int, int], forward_s: float, backward_s: float
):
    """(M + (P - 1) / V) (f + b), f and b of all parts of a stage."""
    stages, parts, rounds = sizes
    batches = stages * rounds
    each = Stage((forward_s / parts,) * parts, (backward_s / parts,) * parts)
    want = (batches + (stages - 1) / parts) * (forward_s + backward_s)
    assert makespan_s([each] * stages, batches, 0.0) == pytest.approx(want)


def test_a_slow_stage_and_slow_sends_are_waited_for():
    quick, slow = Stage((1.0,), (2.0,)), Stage((2.0,), (4.0,))
    assert makespan_s([quick, slow], 4, 0.0) == 4 * 6 + 3  # the first forward, the last backward
    assert makespan_s([quick, quick], 1, 0.5) == 2 * 3 + 2 * 0.5


def test_too_many_events_are_refused():
    with pytest.raises(InputError, match="num_micro_batches must be such that 2 "):
        makespan_s([Stage((1.0,), (1.0,))] * 64, 2**20, 0.0)
