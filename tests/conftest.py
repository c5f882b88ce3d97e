"""Fixtures of all tests. Imports no torch: tests of the pure half stay quick."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from loud_skips import NOT_TESTED

if TYPE_CHECKING:
    from rankpool import RankPool

pytest_plugins = ["drawing"]

# a shell that starts a command behind its back lets it ignore Ctrl-C; tests send it to processes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# else Inductor tries what vectors this CPU has in each process and for each cache: five seconds
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# the same examples in each run, however slow the machine is
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("repeatable")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this machine cannot test, also where reasons of skips are not listed."""
    skipped: list[pytest.TestReport] = terminalreporter.stats.get("skipped", [])
    reasons = {str(each.longrepr[2]) for each in skipped if isinstance(each.longrepr, tuple)}
    for reason in sorted(each.removeprefix("Skipped: ") for each in reasons):
        if reason.startswith(NOT_TESTED):
            terminalreporter.write_line(reason, yellow=True, bold=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Warm rank processes; `pool.run(body, world_size)` runs a module-level `body` on each."""
    from rankpool import RankPool

    # the ranks have no GPU: their Triton kernels run under the interpreter; none is ever too late
    with RankPool(
        max_ranks=8, env={"TRITON_INTERPRET": "1", "COUNTERPOINT_TIMEOUT_S": "600"}
    ) as ranks:
        yield ranks
