"""Files that a command is given: looked at before it does anything else, torch or not."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from counterpoint.errors import InputError
from counterpoint.lazy import need
from counterpoint.measure.canvas import SUFFIXES as PICTURES

WORDS: dict[type[OSError], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "a folder",
    NotADirectoryError: "a path through a file",
    PermissionError: "no permission",
}


def why(error: OSError) -> str:
    """Why a file cannot be read or written, in a few words."""
    return WORDS.get(type(error)) or (error.strerror or type(error).__name__).lower()


def text_of(command: str, option: str, path: Path, want: str) -> str:
    """What is in a file.

    Args:
        want: what it must be, for the error.

    Raises:
        InputError: it cannot be read, is empty, or is no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(command, option, want=want, got=f"{path}: {why(error)}") from error
    except UnicodeDecodeError as error:
        raise InputError(command, option, want=want, got=f"{path}: no text") from error
    if not text.strip():
        raise InputError(command, option, want=want, got=f"{path}: an empty file")
    return text


def check_written(
    command: str, option: str, path: Path | None, suffixes: Sequence[str], what: str = "a file name"
) -> None:
    """Refuse a file that cannot be written where it is to be; None is none.

    Args:
        suffixes: its name ends in one of them.
        what: the file, for the error.

    Raises:
        InputError: of another suffix, in a folder that is not there, or not to be written.
        UnsupportedError: it is a picture, and matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix not in suffixes:
        want = f"{what} that ends in {', '.join(suffixes)}"
        raise InputError(command, option, want=want, got=str(path))
    if path.is_dir():
        raise InputError(command, option, want="a file", got=f"{path}: a folder")
    _check_place(command, option, path)
    if path.suffix in PICTURES:
        need("matplotlib")


def check_made(command: str, option: str, folder: Path) -> None:
    """Refuse a folder that is not there and cannot be made, or cannot be written to.

    Raises:
        InputError: it is a file, in a folder that is not there, or not to be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(command, option, want="a folder", got=f"{folder}: a file")
    _check_place(command, option, folder)


def _check_place(command: str, option: str, path: Path) -> None:
    """Refuse what is in no folder, and what permissions keep from being written."""
    folder = path.parent
    if not folder.is_dir():
        got = f"{folder}: {'a file' if folder.exists() else 'no such folder'}"
        fix = "" if folder.exists() else f"`mkdir -p {shlex.quote(str(folder))}` makes it"
        raise InputError(command, option, want="in a folder that is there", got=got, fix=fix)
    if not os.access(path if path.exists() else folder, os.W_OK):
        want = "where this user may write"
        raise InputError(command, option, want=want, got=f"{path}: no permission")
