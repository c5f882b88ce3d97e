"""Tables of what calls refuse: arguments, and beside them the text of the error."""

from collections.abc import Callable, Iterable
from typing import Any

from counterpoint.errors import InputError

Refusal = tuple[dict[str, Any], str]


def wrongly_refused(
    call: Callable[..., object], base: dict[str, Any], cases: Iterable[Refusal], *,
    name: str = "", exact: bool = False,
) -> list[str]:  # fmt: skip
    """Which of the cases are accepted, or refused in other words.

    Args:
        base: arguments that are right; those of a case replace some.
        cases: with a part of the text behind "name: "; `exact`: with all of it.
        name: that the error starts with; the function's unless given.
    """
    name, found = name or call.__name__, list[str]()
    for given, want in cases:
        try:
            call(**base | given)
            text = "accepted"
        except InputError as error:
            text = str(error)
        start, _, rest = text.partition(": ")
        if start != name or not (rest == want if exact else want in rest):
            found.append(f"{given}: got\n{text}, not\n{name}: {want}")
    return found
