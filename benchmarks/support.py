"""docs/support.md: what tests show of each operator, from committed rows of tests that passed.

    make support

A test declares its cells, `@pytest.mark.shows(operators, what, values)`: words, and of `what` parts
between commas. As a pytest plugin (`-p benchmarks.support --rows FILE`) this file adds a row for
each such test of which nothing has failed. Rows of GPUs come from `make gpu`."""

import ast
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import RESULTS, Row, rows_of
from counterpoint.measure.record import append, environment

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
    "matmul_all_reduce_rms_norm", "matmul_all_reduce_layer_norm", "all_reduce_rms_norm",
    "all_reduce_layer_norm", "all_to_all_matmul", "matmul_all_to_all", "exchange_routes",
    "embedding_bag_all_to_all", "all_gather_attention",
)  # fmt: skip
WAYS = {"torch.compile": "compiled", "CUDA graph": "captured"}
GPUS = {"sm_80": "A100", "sm_90": "H100, H200", "sm_100": "B200"}
NONE = "not tested"
Shows = list[list[str]]


def declared(root: Path = ROOT) -> dict[str, Shows]:
    """Test -> what its marks say, of all files, also of those that are not collected here."""
    found: dict[str, Shows] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
                    name = f"{path.relative_to(root)}::{node.name}"  # type: ignore[union-attr]
                    found[name].append([ast.literal_eval(each) for each in mark.args])
    return dict(found)


def cells(rows: Iterable[Row]) -> dict[tuple[str, str], set[str]]:
    """(operator, what) -> values that rows show."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        for ops, what, values in row["shows"]:
            for key in product(ops.split(), what.split(", ")):
                found[key].update(values.split())
    return found


def committed(folder: Path = RESULTS) -> list[Row]:
    """Rows of all places."""
    return [row for path in sorted(folder.glob("support-*.jsonl")) for row in rows_of(path)]


def on_gpus(row: Row) -> bool:
    """Whether the ranks of a test had GPUs."""
    return row["test"].startswith("tests/gpu/")


def matrix(rows: list[Row], ways: Mapping[str, str]) -> str:
    """A line for each operator, and what the rows are of."""
    from benchmarks.tables import grid

    found, lines = cells(rows), list[list[str]]()

    def cell(op: str, what: str) -> str:
        values = found.get((op, what), set())
        return ", ".join(sorted(values, key=lambda v: (len(v), v))) or NONE

    def both(op: str, way: str) -> str:
        some = {each: cell(op, f"{way} {each}") for each in ("forward", "backward")}
        if set(some.values()) == {NONE}:
            return NONE
        return "; ".join(f"{each}: {said}" for each, said in some.items())

    for op in OPERATORS:
        plain = [cell(op, what) for what in ("forward", "backward")]
        lines.append([f"`{op}`", *plain, *(both(op, way) for way in ways.values())])
        if "CUDA graph" not in ways:
            lines[-1].append(cell(op, "double backward"))
    head = ["operator", "forward", "backward", *ways]
    head += [] if "CUDA graph" in ways else ["double backward"]
    return f"{grid(head, lines)}\n\n{source(rows)}"


def source(rows: list[Row]) -> str:
    """Where tests ran."""
    places = {f"{row['ranks']}x {row['gpu']}, " if on_gpus(row) else "" for row in rows}
    facts = {f"torch {r['torch']}, commit {r['commit']} ({r['date']})" for r in rows}
    return f"{len(rows)} tests: {''.join(sorted(places))}{'; '.join(sorted(facts))}."


def architectures(rows: list[Row]) -> str:
    """Which kernels ran on which GPU, and for which they were only compiled."""
    from benchmarks.tables import grid

    ran = {(row["arch"], op) for row in rows if on_gpus(row) for op, _ in cells([row])}
    compiled = cells(row for row in rows if not on_gpus(row))

    def cell(op: str, arch: str) -> str:
        if (arch, op) in ran:
            return "ran"
        return "compiled only" if arch in compiled.get((op, "compiled for"), ()) else NONE

    head = ["operator", *(f"{arch} ({gpus})" for arch, gpus in GPUS.items())]
    return grid(head, [[f"`{op}`", *(cell(op, arch) for arch in GPUS)] for op in OPERATORS])


def sections(rows: list[Row]) -> dict[str, str]:
    """Marker of docs/support.md -> its text."""
    cpu, gpu = ([r for r in rows if on_gpus(r) == there] for there in (False, True))
    return {"support-gpu": matrix(gpu, WAYS),
            "support-cpu": matrix(cpu, {"torch.compile": WAYS["torch.compile"]}),
            "support-architectures": architectures(rows)}  # fmt: skip


class Recorder:
    """Which tests have passed, with all their parameters."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed, self.failed = path, set[str](), set[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Parameters that were skipped count as nothing."""
        name = report.nodeid.partition("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)

    def pytest_sessionfinish(self) -> None:
        """Add a row for each."""
        shows, facts = declared(), environment()
        facts = {k: facts[k] for k in ("date", "commit", "torch", "gpu", "driver") if k in facts}
        if "WORLD_SIZE" in os.environ and "gpu" in facts:
            import torch

            facts["arch"] = "sm_{}{}".format(*torch.cuda.get_device_capability())
            facts["ranks"] = int(os.environ["WORLD_SIZE"])
        good = sorted((self.passed - self.failed) & shows.keys())
        append(self.path, [{"test": name, "shows": shows[name]} | facts for name in good])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where rows go."""
    parser.addoption("--rows", required=True)


def pytest_configure(config: pytest.Config) -> None:
    """One process writes: no worker of xdist, and the first rank of torchrun."""
    if not hasattr(config, "workerinput") and os.environ.get("RANK", "0") == "0":
        config.pluginmanager.register(Recorder(Path(str(config.getoption("--rows")))))
