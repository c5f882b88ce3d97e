"""`counterpoint bench` and `evaluate`: what a checkout has, run as it stands; said where there is
none."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import counterpoint
from counterpoint.cli import main
from counterpoint.cli.shared import checkout

COMMANDS = ("bench", "evaluate")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and their environment, which end with 3."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str]) -> Any:
        found.append((command, env))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", run)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_are_passed_on_and_so_is_the_exit_code(
    command: str, started: list[tuple[list[str], dict[str, str]]]
):
    given = ["decode", "--short", "--cases", "405B", "-h"]
    assert CliRunner().invoke(main.app, [command, *given]).exit_code == 3
    ((words, environment),) = started
    assert words[1:] == ["-m", "benchmarks", command, *given]
    root = Path(counterpoint.__file__).parents[2]
    assert environment["PYTHONPATH"].split(":")[:2] == [str(root / "src"), str(root)]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_checkout_it_says_so(
    command: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "lib" / "site-packages" / "counterpoint"
    package.mkdir(parents=True)
    monkeypatch.setattr(checkout.counterpoint, "__file__", str(package / "__init__.py"))
    result = CliRunner().invoke(main.app, [command])
    assert (result.exit_code, result.stdout, started) == (2, "", [])
    assert result.stderr.startswith(
        f"{command}: this installation must be a checkout of counterpoint"
    )
