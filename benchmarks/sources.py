"""What rows were made from: a digest of the files of the library that their run had imported.

Every row carries it as "source". The files that it is of stand once in SOURCES beside the rows, so
that the tree can be asked for its own digest of them.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import counterpoint
from benchmarks.rows import RESULTS, Row, rows_of

HOUSE = Path(counterpoint.__file__).parent
SOURCES = "sources.jsonl"


def imported() -> list[str]:
    """The files of the library that this process has imported, from its folder on.

    Without those that predict whole steps: some runs print what they say, and no arm calls them.
    """
    found = (getattr(module, "__file__", None) for name, module in [*sys.modules.items()]
             if name.partition(".")[0] == counterpoint.__name__
             and not name.startswith(f"{counterpoint.__name__}.scale"))  # fmt: skip
    return sorted(Path(file).relative_to(HOUSE).as_posix() for file in found if file)


def digest_of(files: Iterable[str], house: Path = HOUSE) -> str:
    """Of files, by their paths and what is in them; one that is gone counts as another."""
    every = hashlib.sha256()
    for file in sorted(files):
        path = house / file
        text = path.read_bytes() if path.is_file() else b""
        every.update(f"{file} {hashlib.sha256(text).hexdigest()}\n".encode())
    return every.hexdigest()[:16]


def keep(folder: Path) -> None:
    """Write the files of this process's digest beside rows, once."""
    files = imported()
    if digest_of(files) not in _known(folder):
        with (folder / SOURCES).open("a") as file:
            file.write(json.dumps({"source": digest_of(files), "files": files}) + "\n")


def _known(folder: Path) -> dict[str, list[str]]:
    path = folder / SOURCES
    rows = rows_of(path) if path.is_file() else []
    return {row["source"]: row["files"] for row in rows}


@cache
def _current(source: str, folder: Path) -> bool:
    return digest_of(_known(folder).get(source, [])) == source


def is_current(row: Row, folder: Path = RESULTS) -> bool:
    """Whether the files that a row was made from are those of the tree; False if it says none."""
    return bool(row.get("source")) and _current(row["source"], folder)
