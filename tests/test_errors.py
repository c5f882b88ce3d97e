import pickle

import pytest

from counterpoint.errors import (
    CounterpointError,
    InputError,
    PeerTimeoutError,
    PlanError,
    UnsupportedError,
)


def test_input_error_has_the_one_form():
    error = InputError("all_reduce", "x", want="contiguous", got="strides (1, 8)")
    assert str(error) == "all_reduce: x must be contiguous, got strides (1, 8)"

    error = InputError("allocate", "num_bytes", want=">= 1", got=0, fix="skip the call")
    assert str(error) == "allocate: num_bytes must be >= 1, got 0; skip the call"


def test_plan_error_names_plan_and_step():
    assert str(PlanError("pull_2", "cycle")) == "plan pull_2: cycle"
    assert str(PlanError("pull_2", "cycle", step="mm.1")) == "plan pull_2, step mm.1: cycle"


@pytest.mark.parametrize("kind", [InputError, PlanError])
def test_errors_of_the_caller_are_value_errors(kind: type[CounterpointError]):
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        InputError("op", "x", want="a", got="b"),
        PlanError("p", "cycle", step="s"),
        UnsupportedError("no GPU"),
        PeerTimeoutError("rank 2 is late", rank=2, step="wait.3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_a_process_boundary(error: CounterpointError):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
