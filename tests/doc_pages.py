"""Pages of docs/ as scripts: the Python blocks of a page, in a row, as ranks of torchrun."""

import logging
import os
import re
import runpy
import socket
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:  # ranks of torchrun have no pool
    from rankpool import RankPool

DOCS = Path(__file__).parent.parent / "docs"
FIRST_LINE = r"# run on (\d) ranks: torchrun .*--nproc-per-node=\1 \w+\.py\n"


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in a language; "" is none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def script(page: Path) -> str:
    """The Python of a page."""
    return "\n\n".join(blocks(page, "python"))


def run_page(
    page: Path, pool: "RankPool", folder: Path, names: Sequence[str] = ()
) -> list[tuple[str, list[Any]]]:
    """What the script printed, and what these names are at its end, on each rank."""
    code, path = script(page), folder / "script.py"
    path.write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_ranks = re.match(FIRST_LINE, code)
    ranks = int(on_ranks[1]) if on_ranks else 1
    return pool.run(_run, ranks, str(path), port, list(names), group=False)


def _run(rank: int, ranks: int, path: str, port: int, names: list[str]) -> tuple[str, list[Any]]:
    started = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    printed = StringIO()
    quiet = mock.patch.object(logging.root, "handlers", [])  # a page may configure it
    with (
        mock.patch.dict(os.environ, started), quiet, redirect_stdout(printed),
        chdir(Path(path).parent),
    ):  # fmt: skip
        found = runpy.run_path(path, run_name="__main__")
    return printed.getvalue(), [found[name] for name in names]
