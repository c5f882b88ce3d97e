"""What ranks send each other comes back as it was, and nothing that they receive is executed."""

import pickle
from pathlib import Path
from typing import Any

import pytest

import counterpoint
from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.group import messages
from counterpoint.group.messages import decode, encode

VALUES: list[Any] = [
    None, True, 0, -(2**62), 1.5, float("inf"), 'a ["tuple"] of text', b"", b"\0\1", [], [1, [2]],
    (), (1, ("a", None)), {"op": "x", "of": {1: (2.0, b"\xff")}}, ["tuple", 1], ("list", "dict"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value: Any):
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


def test_an_error_comes_back_with_all_that_it_says():
    error = decode(encode(PeerTimeoutError("rank 1 did not come", rank=1, step="open")))
    assert type(error) is PeerTimeoutError and str(error) == "rank 1 did not come"
    assert (error.rank, error.step) == (1, "open")
    error = decode(encode(InputError("op", "x", want="good", got="bad")))
    assert type(error) is InputError and str(error) == "op: x must be good, got bad"


class Planted:
    """What a pickle of it runs."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was executed",)


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(Planted()), b"", b"{", b"[]", b'["error", "SystemExit", "", {}]',
        b'["error", "Planted", "", {}]', b'["bytes", 1]', b'["none of ours"]', b'{"op": 1}',
        b'["dict", 1]',
        b"[" * 100_000, b'["list"' + b", 1" * messages.MAX_BYTES,
    ],
    ids=range(12),
)  # fmt: skip
def test_what_is_no_message_is_refused(message: bytes):
    with pytest.raises(ValueError, match=r"no message|Expecting|Invalid|bytes, of at most|codec"):
        decode(message)


def test_other_values_are_no_message():
    with pytest.raises(TypeError, match="a message of Planted"):
        encode({"op": Planted()})


def test_pickles_come_only_from_processes_that_this_one_started():
    """And from files of none: the store, the board and kept files are read by JSON."""
    home = Path(counterpoint.__file__).parent
    users = {str(path.relative_to(home)) for path in home.rglob("*.py")
             if "pickle.load" in path.read_text()}  # fmt: skip
    assert users <= {"group/ranks.py"}
    assert issubclass(PeerTimeoutError, CounterpointError)
