"""The events of a trace in Chrome's format, one at a time: a file of gigabytes fits in memory."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from counterpoint.errors import InputError

CHUNK = 2**22  # characters read at a time
LONGEST = 2**26  # characters of one value other than the list of events
LONGEST_WORD = 12  # such as -Infinity, or an escape
ENDS = re.compile(r"\s*[,:\]}]")  # what follows a value
SPACE = re.compile(r"[ \t\r\n]*")
# as some profilers write them: control characters in the names of kernels
DECODE = json.JSONDecoder(strict=False).raw_decode
WANT = "a trace of torch.profiler: JSON, or that with gzip"

Event = dict[str, Any]


class _Text:
    """A file of text, read as far as it is asked for."""

    def __init__(self, file: TextIO, path: Path, read: Callable[[], None]) -> None:
        self.file, self.path, self.read = file, path, read
        self.text, self.at = "", 0

    def more(self) -> bool:
        """Read on, and forget what was taken; False at the end of the file."""
        chunk = self.file.read(CHUNK)
        self.text, self.at = self.text[self.at :] + chunk, 0
        self.read()
        return bool(chunk)

    def next(self) -> str:
        """The next character that is no space, without taking it; "" at the end."""
        while True:
            found = SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def take(self, wanted: str) -> str:
        """Take the next character, which is one of `wanted`."""
        found = self.next()
        if not found or found not in wanted:
            raise self.wrong(f"{found!r} where one of {' '.join(wanted)} stands" if found else "")
        self.at += 1
        return found

    def value(self) -> Any:
        """Take a value of any kind."""
        self.next()
        while True:
            why = ""
            try:
                found, end = DECODE(self.text, self.at)
                if ENDS.match(self.text, end):  # else a number may go on
                    self.at = end
                    return found
            except json.JSONDecodeError as error:
                left = self.text[error.pos :].strip()
                if left and not error.msg.startswith("Unterminated"):
                    why = f"no JSON: {error.msg}, {_around(error)}"
                    if len(left) > LONGEST_WORD:  # else a word may go on
                        raise self.wrong(why) from error
            except RecursionError as error:
                raise self.wrong("values within values without end") from error
            if len(self.text) - self.at > LONGEST:
                raise self.wrong("a value without end")
            if not self.more():
                raise self.wrong(why)

    def wrong(self, why: str) -> InputError:
        """What is wrong here; "": that the file ends."""
        got = why or "a file that ends in the middle of a value: it was cut, or is still written"
        return InputError("advise", "trace", want=WANT, got=f"{self.path}: {got}")


def _around(error: json.JSONDecodeError) -> str:
    return f"near {error.doc[max(0, error.pos - 10) : error.pos + 20]!r}"


def read_events(
    path: Path, keep: Callable[[Event], None], read: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Hand each event of a trace to `keep`; return what the file says beside them.

    Args:
        path: JSON of torch.profiler, or that with gzip, whatever its name.
        keep: takes one event, a dict.
        read: is told how many bytes of the file were read by now.

    Raises:
        InputError: there is no such file, or it is no such trace, or it was cut.
    """
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if is_packed else raw
            text = io.TextIOWrapper(file, encoding="utf-8", errors="replace")
            return _read(_Text(text, path, lambda: read(raw.tell())), keep)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        got = f"{path}: gzip that was cut or is damaged ({error})"
        raise InputError("advise", "trace", want=WANT, got=got) from error
    except OSError as error:
        got = f"{path}: {(error.strerror or type(error).__name__).lower()}"
        raise InputError("advise", "trace", want=WANT, got=got) from error


def _read(text: _Text, keep: Callable[[Event], None]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    first = text.next()
    if not first:
        raise text.wrong("an empty file")
    if first == "[":  # the events alone
        _read_list(text, keep)
        return facts
    has_events = False
    text.take("{")
    while text.next() != "}":
        name = text.value()
        text.take(":")
        if name == "traceEvents" and text.next() == "[":
            has_events = True
            _read_list(text, keep)
        else:
            facts[str(name)] = text.value()
        if text.take(",}") == "}":
            break
    if not has_events:
        names = ", ".join(sorted(facts)[:5]) or "nothing"
        raise text.wrong(f"JSON without a list of traceEvents, but with {names}")
    return facts


def _read_list(text: _Text, keep: Callable[[Event], None]) -> None:
    text.take("[")
    if text.next() == "]":
        text.take("]")
        return
    while True:
        event = text.value()
        if isinstance(event, dict):
            keep(event)  # pyright: ignore[reportUnknownArgumentType]
        if text.take(",]") == "]":
            return
