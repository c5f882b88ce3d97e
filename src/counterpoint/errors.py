"""What can go wrong, as one tree.

CounterpointError
├── InputError(ValueError)    an argument is wrong; nothing was launched
├── PlanError(ValueError)     a plan is wrong; nothing was launched
├── UnsupportedError          the call is right, but not on this hardware or build
└── PeerTimeoutError          a peer did not answer in time; its group is unusable

CounterpointWarning(UserWarning)  something was ignored; the message says what, and why
"""

from typing import Any

MAX_GOT = 400  # characters of what was passed


class CounterpointError(Exception):
    """Base class: `except CounterpointError` catches everything this library raises itself."""

    # without it, unpickling calls __init__ with the finished message and fails: an error
    # that crosses a process boundary would then arrive as a TypeError
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[CounterpointError], args: tuple[object, ...]) -> CounterpointError:
    return kind.__new__(kind, *args)


class InputError(CounterpointError, ValueError):
    """An argument is wrong. Raised before any launch, from facts equal on all ranks.

    Args:
        op: the function that was called.
        arg: the argument, as its caller writes it.
        want: what it must be.
        got: what it is.
        fix: what to do about it, if that is not plain from `want`.
    """

    def __init__(self, op: str, arg: str, *, want: str, got: object, fix: str = "") -> None:
        hint = f"; {fix}" if fix else ""
        text = str(got)
        text = text if len(text) <= MAX_GOT else f"{text[: MAX_GOT - 3]}..."
        super().__init__(f"{op}: {arg} must be {want}, got {text}{hint}")


class PlanError(CounterpointError, ValueError):
    """A plan is wrong: it cannot be bound, would deadlock, or computes something else.

    Args:
        plan: name of the plan.
        problem: what is wrong with it.
        step: name of the step at fault, if it is one step's.
    """

    def __init__(self, plan: str, problem: str, *, step: str = "") -> None:
        place = f", step {step}" if step else ""
        super().__init__(f"plan {plan}{place}: {problem}")


class UnsupportedError(CounterpointError):
    """The call is right, but this host, GPU, driver or PyTorch build cannot run it."""


class PeerTimeoutError(CounterpointError):
    """A peer did not answer in time. The group is unusable from here on.

    Args:
        message: names the rank and the step.
        rank: the rank that does not move, None if it is not known.
        step: the step that was waited for.
    """

    def __init__(self, message: str, *, rank: int | None = None, step: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step


class CounterpointWarning(UserWarning):
    """Something was ignored, such as a damaged file; the call goes on without it."""
