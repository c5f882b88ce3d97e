"""Commands as a user runs them, in this process, and a node of four GPUs that is made up."""

import contextlib
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import __main__ as benchmarks
from counterpoint.choose.known import Place
from counterpoint.cli import main

PLACE = Place(gpu="NVIDIA H200", ranks=4)  # of rank 0, as it is made here


def invoke(command: str, *arguments: str, code: int = 0, columns: int = 140) -> Result:
    """What `counterpoint command` prints; it must end with this code."""
    environment = {"COLUMNS": str(columns), "LOCAL_RANK": None}
    result = CliRunner().invoke(main.app, [command, *arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


def refused(command: str, arguments: list[str], message: str) -> None:
    """The command ends with one line that has this message."""
    result = invoke(command, *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"{command}: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def example(command: str) -> tuple[list[str], list[str]]:
    """The words of a command's first example, and the lines that it prints."""
    text = inspect.getdoc(getattr(main, command)) or ""
    words, lines = re.search(
        r"Example:.. `counterpoint (.*)`\n\n```text\n([^`]*)```", text
    ).groups()
    return shlex.split(words), lines.splitlines()


def benchmarks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`counterpoint bench` and `evaluate` run in this process, and not in one of their own."""

    def run(words: list[str], **_: Any) -> Any:
        return SimpleNamespace(returncode=benchmarks.main(words[3], words[4:]))

    monkeypatch.setattr(subprocess, "run", run)


def a_node_of_four(command: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For the command's module: the ranks of each torchrun, which does nothing."""
    started: list[int] = []

    def torchrun(ranks: int) -> int:
        started.append(ranks)
        return 0

    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(command, "torchrun", torchrun)
    return started


def as_rank_0(command: Any, measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be rank 0 of four H200, where `measure` stands for the measurement."""

    @contextlib.contextmanager
    def nccl_group() -> Iterator[tuple[Any, Any]]:
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 4)
        yield group, SimpleNamespace(type="cuda", __str__=lambda: "cuda:0")

    a_node_of_four(command, monkeypatch)
    monkeypatch.setattr(command, "under_torchrun", lambda: True)
    monkeypatch.setattr(command, "nccl_group", nccl_group)
    monkeypatch.setattr(command, "measure", measure, raising=False)
    workspace = SimpleNamespace(islands=SimpleNamespace(number=1))
    for name, stub in (("workspace_of", workspace), ("place_of", PLACE)):
        monkeypatch.setattr(command, name, lambda *_, stub=stub: stub, raising=False)
