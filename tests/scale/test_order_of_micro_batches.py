"""The order of a pipeline's stages, and how long it takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.scale.pipeline import Stage, order, simulate

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
SECONDS = st.floats(0.1, 10)


def stage(parts: int = 1, *, apart: bool = False) -> Stage:
    ones = (1.0,) * parts
    return Stage(ones, ones, ones if apart else ())


@given(SIZES, st.booleans())
def test_a_stage_does_everything_once_and_forwards_first(sizes: tuple[int, int, int], apart: bool):
    stages, parts, rounds = sizes
    batches = stages * rounds
    kinds = 3 if apart else 2
    for i in range(stages):
        events = list(order(i, [stage(parts, apart=apart)] * stages, batches))
        assert len(events) == len(set(events)) == kinds * parts * batches
        at = {event: i for i, event in enumerate(events)}
        for event in events:
            if event.kind == "backward":
                assert at[event] > at[event._replace(kind="forward")]
            if event.kind == "weight gradients":
                assert at[event] > at[event._replace(kind="backward")]


@given(SIZES, SECONDS, SECONDS)
def test_equal_stages_take_what_the_closed_form_says(
    sizes: tuple[int, int, int], forward_s: float, backward_s: float
):
    """(M + (P - 1) / V) (f + b), f and b of all parts of a stage."""
    stages, parts, rounds = sizes
    batches = stages * rounds
    each = Stage((forward_s / parts,) * parts, (backward_s / parts,) * parts)
    want = (batches + (stages - 1) / parts) * (forward_s + backward_s)
    assert simulate([each] * stages, batches, 0.0).seconds == pytest.approx(want)


@given(st.integers(1, 8), st.integers(0, 24), SECONDS, SECONDS, st.floats(0, 1))
def test_zero_bubble_has_the_bubble_of_its_paper(
    stages: int, more: int, forward_s: float, backward_s: float, share: float
):
    """(P - 1) (F + B - W), where 1F1B has (P - 1) (F + B + W): while W is neither above F nor B."""
    batches, weights_s = stages + more, share * min(forward_s, backward_s)
    apart = Stage((forward_s,), (backward_s,), (weights_s,))
    want_s = batches * apart.busy_s + (stages - 1) * (forward_s + backward_s - weights_s)
    assert simulate([apart] * stages, batches, 0.0).seconds == pytest.approx(want_s)


@given(st.integers(1, 8), st.integers(1, 24), SECONDS, SECONDS, SECONDS, st.floats(0, 1))
def test_zero_bubble_is_never_slower(
    stages: int, batches: int, forward_s: float, backward_s: float, weights_s: float, send_s: float
):
    """Whatever the times, and with sends between stages."""
    apart = Stage((forward_s,), (backward_s,), (weights_s,))
    whole = Stage((forward_s,), (backward_s + weights_s,))
    one, other = (simulate([each] * stages, batches, send_s).seconds for each in (apart, whole))
    assert one <= other * (1 + 1e-9)


@given(st.integers(1, 8), st.integers(1, 24))
def test_zero_bubble_holds_as_many_activations_as_1f1b_at_most(stages: int, batches: int):
    """From its forward to the gradients of its weights, a micro-batch's are held."""
    most = 0
    for i in range(stages):
        held = 0
        for event in order(i, [stage(apart=True)] * stages, batches):
            held += {"forward": 1, "backward": 0, "weight gradients": -1}[event.kind]
            most = max(most, held)
    assert most == min(stages, batches)


@given(SIZES, st.booleans())
def test_a_stage_does_one_thing_at_a_time_after_what_it_needs(
    sizes: tuple[int, int, int], apart: bool
):
    stages, parts, rounds = sizes
    parts = 1 if apart else parts
    ran = simulate([stage(parts, apart=apart)] * stages, stages * rounds, 0.25)
    ended: dict[tuple[str, int, int], float] = {}
    for i in range(stages):
        free_s = 0.0
        for event, start_s, end_s in ran.events(i):
            assert free_s <= start_s and end_s == start_s + 1
            free_s = ended[event.kind, event.part * stages + i, event.batch] = end_s
    for (kind, chunk, batch), end_s in ended.items():
        before = ended.get((kind, chunk + (1 if kind == "backward" else -1), batch))
        if kind != "weight gradients" and before is not None:
            assert end_s - 1 >= before + 0.25 * (stages > 1)
    assert ran.seconds == max(ended.values())


def test_a_slow_stage_and_slow_sends_are_waited_for():
    quick, slow = Stage((1.0,), (2.0,)), Stage((2.0,), (4.0,))
    # the first forward, the last backward
    assert simulate([quick, slow], 4, 0.0).seconds == 4 * 6 + 3
    assert simulate([quick, quick], 1, 0.5).seconds == 2 * 3 + 2 * 0.5


def test_too_many_events_are_refused():
    with pytest.raises(InputError, match="num_micro_batches must be such that 2 "):
        simulate([stage()] * 64, 2**20, 0.0)
    with pytest.raises(InputError, match="num_micro_batches must be such that 3 "):
        simulate([stage(apart=True)] * 64, 2**20, 0.0)
