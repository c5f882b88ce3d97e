"""Which test reaches which line of src: `pytest -p reached --reached FILE`, for `mutants.py`.

coverage traces pytest, the ranks of its pool and whatever tests start. It costs some time, most of
it in tests of plans.
"""

import json
import os
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import coverage
import pytest

PACKAGE = "/src/counterpoint/"
FOLDER = "COUNTERPOINT_REACHED"  # where data of all processes lie
MOST_TESTS = 200  # of a line, the quickest
CONFIG = """[run]
branch = true
source_pkgs = counterpoint
parallel = true
data_file = {folder}/data
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit
disable_warnings = no-data-collected,module-not-imported,module-not-measured,already-imported
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reached", type=Path, help="write here which tests reach which lines")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="reached-")
    rc = Path(folder) / "coveragerc"
    rc.write_text(CONFIG.format(folder=folder))
    # what coverage looks for at the start of each Python
    os.environ |= {"COVERAGE_PROCESS_START": str(rc), FOLDER: folder}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    switch, start_s = following(), time.perf_counter()
    switch(item.nodeid)
    try:
        return (yield)
    finally:
        switch("")
        with (Path(os.environ[FOLDER]) / "times").open("a") as file:
            file.write(json.dumps([item.nodeid, round(time.perf_counter() - start_s, 3)]) + "\n")


def following() -> Callable[[str], None]:
    """Says to coverage whose lines follow, if it traces this process."""
    current = coverage.Coverage.current()
    return current.switch_context if current is not None else lambda test: None


def of_a_rank() -> Callable[[str], None]:
    """The same for a process that is forked from one that coverage traces."""
    if (current := coverage.Coverage.current()) is not None:
        current.stop()
    mine = coverage.Coverage(
        config_file=os.environ["COVERAGE_PROCESS_START"], data_suffix=True, context=""
    )
    mine.start()
    return mine.switch_context


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--reached")
    if file is not None and not hasattr(session.config, "workerinput"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(table_of(Path(os.environ[FOLDER]))))


def table_of(folder: Path) -> Mapping[str, object]:
    """Tests with their seconds, those of each line by number, and the share of branches taken."""
    times: dict[str, float] = dict(map(json.loads, (folder / "times").read_text().splitlines()))
    tests = sorted(times, key=times.__getitem__)
    number = {test: i for i, test in enumerate(tests)}
    lines: defaultdict[str, set[int]] = defaultdict(set)
    arcs: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for path, test, start, end in arcs_in(folder):
        short = path.partition(PACKAGE)[2]
        arcs[path].add((start, end))
        test = test.rpartition("|")[2].removesuffix(" (call)")
        if test in number and end > 0:
            lines[f"{short}:{end}"].add(number[test])
    return {
        "seconds": {test: times[test] for test in tests},
        "lines": {line: sorted(each)[:MOST_TESTS] for line, each in lines.items()},
        "branches": branches(folder, arcs),
    }


def arcs_in(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """What all processes have gone through: file, test, line and next line."""
    query = """select file.path, context.context, arc.fromno, arc.tono from arc
               join file on file.id = arc.file_id join context on context.id = arc.context_id"""
    for name in folder.glob("data.*"):
        with closing(sqlite3.connect(name)) as data:
            try:
                yield from data.execute(query)
            except sqlite3.DatabaseError:
                continue  # of a process that was killed while it wrote


def branches(folder: Path, arcs: Mapping[str, set[tuple[int, int]]]) -> Mapping[str, int]:
    """Branches of src, and those that some test took."""
    root = next(iter(arcs)).partition(PACKAGE)[0]
    here: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for path, each in arcs.items():
        here[root + PACKAGE + path.partition(PACKAGE)[2]] |= each
    data = coverage.CoverageData(str(folder / "whole"))
    data.add_arcs({path: list(each) for path, each in here.items() if Path(path).exists()})
    data.write()
    whole = coverage.Coverage(data_file=str(folder / "whole"), branch=True, config_file=False)
    whole.load()
    whole.json_report(outfile=str(folder / "report.json"))
    totals = json.loads((folder / "report.json").read_text())["totals"]
    return {"taken": totals["covered_branches"], "all": totals["num_branches"]}
