"""Pages of docs/ as scripts: the Python blocks of a page, in a row, run under torchrun's names."""

import os
import re
import runpy
import socket
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from rankpool import RankPool

DOCS = Path(__file__).parent.parent / "docs"
FIRST_LINE = r"# run on (\d) ranks: torchrun --standalone --nproc-per-node=\1 \w+\.py\n"


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in a language; "" is none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def run_page(
    page: Path, pool: RankPool, folder: Path, names: Sequence[str] = ()
) -> list[tuple[str, list[Any]]]:
    """What the script printed, and what these names are at its end, on each rank."""
    code = blocks(page, "python")
    script = folder / "script.py"
    script.write_text("\n\n".join(code))
    on_ranks = re.match(FIRST_LINE, code[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = int(on_ranks[1]) if on_ranks else 1
    return pool.run(_run, ranks, str(script), port, list(names), group=False)


def _run(rank: int, ranks: int, script: str, port: int, names: list[str]) -> tuple[str, list[Any]]:
    started = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    printed = StringIO()
    with mock.patch.dict(os.environ, started), redirect_stdout(printed), chdir(Path(script).parent):
        found = runpy.run_path(script, run_name="__main__")
    return printed.getvalue(), [found[name] for name in names]
