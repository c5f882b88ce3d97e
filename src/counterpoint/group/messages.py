"""What ranks say to each other, as JSON: nothing that a rank receives is executed.

Keys of a process group's store can be guessed, and whoever reaches the store may write to them.
"""

import base64
import json
from typing import Any, cast

from counterpoint import errors
from counterpoint.errors import CounterpointError

MAX_BYTES = 1 << 24  # of one message; more is none of this library
MAX_RAW_BYTES = 1 << 30  # of one that is bytes alone: a CPU rank's tensor
RAW = b"\0"  # before those; no JSON begins so

_ERRORS = {
    name: kind for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CounterpointError)
}  # fmt: skip


def encode(value: object) -> bytes:
    """Return a message that says `value`.

    Args:
        value: None, bool, int, float, str, bytes, a CounterpointError, or a list, a tuple or a
            dict of those.
    """
    if isinstance(value, bytes):
        return RAW + value
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def decode(message: bytes) -> Any:
    """Return the value of a message; a named tuple comes back as a plain one.

    Raises:
        ValueError: it is no message.
    """
    raw = message.startswith(RAW)
    if len(message) > (most := MAX_RAW_BYTES if raw else MAX_BYTES):
        raise ValueError(f"a message of {len(message)} bytes, of at most {most}")
    if raw:
        return message[1:]
    try:
        return _plain(json.loads(message))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no message of this library: {error!r}") from error


def _tagged(value: Any) -> Any:
    """Return `value` as JSON has it: what JSON does not tell apart has its kind before it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return ["bytes", base64.b64encode(value).decode()]
        case list():
            return ["list", *map(_tagged, cast(list[object], value))]
        case tuple():
            return ["tuple", *map(_tagged, cast(tuple[object, ...], value))]
        case dict():
            items = cast(dict[object, object], value).items()
            return ["dict", *([_tagged(key), _tagged(each)] for key, each in items)]
        case CounterpointError():
            facts = {name: _tagged(each) for name, each in vars(value).items()}
            return ["error", type(value).__name__, str(value), facts]
        case _:
            raise TypeError(f"a message of {type(value).__name__}")


def _plain(value: Any) -> Any:
    """Return what `_tagged` was given."""
    if isinstance(value, dict):
        raise ValueError(f"no message of this library: {str(value)[:80]}")
    if not isinstance(value, list):
        return value
    match cast(list[Any], value):
        case ["bytes", str(text)]:
            return base64.b64decode(text)
        case ["list", *rest]:
            return [_plain(each) for each in rest]
        case ["tuple", *rest]:
            return tuple(_plain(each) for each in rest)
        case ["dict", *rest]:
            return {_plain(key): _plain(each) for key, each in rest}
        case ["error", str(name), str(text), dict() as facts] if name in _ERRORS:
            error = _ERRORS[name].__new__(_ERRORS[name], text)
            vars(error).update({key: _plain(each) for key, each in facts.items()})  # pyright: ignore
            return error
        case _:
            raise ValueError(f"no message of this library: {str(value)[:80]}")
