"""How long all tests will take here: said before they run, from a second of work on each core."""

import os
import subprocess
import sys

import pytest

# what `make test` and `make test-all` take, in loops of WORK; see `python -m expected`
LOOPS = {"make test": 1_000_000, "make test-all": 3_000_000}
WORK = """
import json, time
table = {str(i): [i, i / 7] for i in range(500)}
loops, end_s = 0, time.monotonic() + 1
while time.monotonic() < end_s:
    json.loads(json.dumps(table))
    loops += 1
print(loops)
"""


def loops_per_s(cores: int) -> float:
    """Loops of WORK that this machine does in a second, beside whatever else it does."""
    command = [sys.executable, "-c", WORK]
    each = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    return sum(int(process.communicate()[0]) for process in each)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Where all tests are run: a part of them is another matter."""
    if config.getoption("keyword") or config.args != config.getini("testpaths"):
        return None
    name = "make test-all" if config.getoption("--all-cases") else "make test"
    cores = len(os.sched_getaffinity(0))
    minutes = LOOPS[name] / loops_per_s(cores) / 60
    return f"{name}: about {minutes:.0f} minutes, by what {cores} cores do in a second"
